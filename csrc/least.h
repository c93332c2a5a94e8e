// What prefill and waves take at the least, before any of them is priced.
#pragma once

#include <algorithm>

#include "priced.h"

namespace augtree {

// No chunks and waves of some nodes take less on a block, whatever they keep and however they move it, ns; without
// a pipeline.
//
// Every rank of a block has its even share of the inner nodes. Of the leaves, the fullest lane has at least an even
// share of their cost in pairs. What a rank's leaves take is a sum over them, so it takes no less for its cost than
// the leaf that takes the least for its own. Where queries travel, the pairs with the prompt are even, and leaves
// bring what else they take. There are at least two passes.
class LeastPhased {
public:
    LeastPhased(const Jobs& jobs, i64 width) : jobs_(jobs), c_(jobs.constants), width_(width) {}

    i64 ns(const Nodes& inner, const Nodes& leaves) const {
        const i64 once = 3 * c_.layer_ns + linear(c_.linear.ns(c_.half_rows));
        const i64 passes = 2 * (c_.layers * once + 2 * c_.pass_ns);
        // A nanosecond may be lost wherever a part is rounded, in each direction.
        const i64 parts = static_cast<i64>(inner.size() + leaves.size()) + 8;
        const i64 lost = c_.layers * parts * 8 * (300 + c_.gemm_pct + c_.attention_pct) / 100;
        return passes + of_inner(inner) + of_leaves(leaves) - lost;
    }

private:
    // Forward and backward.
    i64 linear(i64 forward) const { return forward + forward * c_.gemm_pct / 100; }
    i64 attention(i64 pairs) const {
        const i64 forward = c_.attention.ns(pairs);
        return forward + forward * c_.attention_pct / 100;
    }
    i64 rows(i64 count) const { return linear(c_.linear.ns(count) + c_.beside.ns(count)); }

    i64 of_inner(const Nodes& inner) const {
        i64 count = 0, pairs = 0;
        for (int node : inner) {
            count += jobs_.forest.rows[node];
            pairs += jobs_.forest.area(node, 0, jobs_.forest.rows[node]);
        }
        return c_.layers * (rows(count / width_) + attention(pairs / width_));
    }

    i64 of_leaves(const Nodes& leaves) const {
        const Forest& f = jobs_.forest;
        i64 cost = 0, reach = 0;
        for (int leaf : leaves) {
            cost += jobs_.row_cost(leaf);
            reach += f.rows[leaf] * f.starts[leaf];
        }
        const i64 share = std::max<i64>(cost / width_ - 1, 0);  // lanes are levelled but for a pair
        i64 staying = INT64_MAX, travelling = INT64_MAX;
        for (int leaf : leaves) {
            const i64 own = jobs_.row_cost(leaf), pairs = f.area(leaf, 0, f.rows[leaf]);
            if (own <= 0) continue;
            const i64 seen = f.rows[leaf] * f.starts[leaf];
            const i64 rest = c_.layers * rows(f.rows[leaf]) + 3 * c_.vocabulary.ns(f.scored[leaf]);
            const auto of_share = [&](i64 ns) { return static_cast<i64>(static_cast<i128>(ns) * share / own); };
            staying = std::min(staying, of_share(rest + c_.layers * attention(pairs)));
            travelling = std::min(travelling, of_share(rest + c_.layers * attention(pairs - seen)));
        }
        if (staying == INT64_MAX) return 0;
        return std::min(staying, travelling + c_.layers * attention(reach / width_));
    }

    const Jobs& jobs_;
    const Constants& c_;
    i64 width_;
};

}  // namespace augtree
