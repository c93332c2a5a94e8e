// Rows on ranks: twins of planning/{placement,assign,lanes,recipe}.py.
#include <algorithm>
#include <numeric>
#include <set>

#include "pricing.h"

namespace augtree {

i64 Forest::area(int node, i64 lo, i64 hi) const {
    const i64 first = starts[node] + lo + 1, last = starts[node] + hi;
    return (first + last) * (hi - lo) / 2;
}

namespace {

constexpr std::size_t kExactItems = 10;

std::vector<int> by_weight(const std::vector<i64>& weights) {
    std::vector<int> order(weights.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return weights[a] > weights[b]; });
    return order;
}

}  // namespace

std::vector<int> longest_first(const std::vector<i64>& weights, const std::vector<i64>& loads) {
    LeastLoaded bins(loads);
    std::vector<int> where(weights.size(), 0);
    for (int item : by_weight(weights)) where[item] = bins.add(weights[item]);
    return where;
}

LeastLoaded::LeastLoaded(std::vector<i64> loads) : loads_(std::move(loads)), heap_(loads_.size()) {
    std::iota(heap_.begin(), heap_.end(), 0);
    for (std::size_t at = heap_.size() / 2; at-- > 0;) sift(at);
}

int LeastLoaded::add(i64 weight) {
    const int bin = heap_.front();
    loads_[bin] += weight;
    sift(0);
    return bin;
}

void LeastLoaded::sift(std::size_t at) {
    const int moved = heap_[at];
    while (2 * at + 1 < heap_.size()) {
        std::size_t child = 2 * at + 1;
        if (child + 1 < heap_.size() && before(heap_[child + 1], heap_[child])) ++child;
        if (!before(heap_[child], moved)) break;
        heap_[at] = heap_[child];
        at = child;
    }
    heap_[at] = moved;
}

namespace {

// Branch and bound: see assign.exact.
class Exact {
public:
    Exact(const std::vector<i64>& weights, const std::vector<i64>& loads)
        : weights_(weights), order_(by_weight(weights)), current_(loads), where_(weights.size(), 0) {
        best = longest_first(weights, loads);
        std::vector<i64> filled = loads;
        for (std::size_t i = 0; i < weights.size(); ++i) filled[best[i]] += weights[i];
        limit_ = *std::max_element(filled.begin(), filled.end());
        const i64 total = std::accumulate(loads.begin(), loads.end(), i64{0}) +
                          std::accumulate(weights.begin(), weights.end(), i64{0});
        const i64 bins = static_cast<i64>(loads.size());
        floor_ = std::max(*std::max_element(loads.begin(), loads.end()), (total + bins - 1) / bins);
        descend(0);
    }
    std::vector<int> best;

private:
    void descend(std::size_t depth) {
        if (limit_ <= floor_) return;
        if (depth == order_.size()) {
            best = where_;
            limit_ = *std::max_element(current_.begin(), current_.end());
            return;
        }
        const int item = order_[depth];
        std::vector<i64> tried;
        for (std::size_t bin = 0; bin < current_.size(); ++bin) {
            const bool known = std::find(tried.begin(), tried.end(), current_[bin]) != tried.end();
            if (known || current_[bin] + weights_[item] >= limit_) continue;
            tried.push_back(current_[bin]);
            where_[item] = static_cast<int>(bin);
            current_[bin] += weights_[item];
            descend(depth + 1);
            current_[bin] -= weights_[item];
        }
    }

    const std::vector<i64>& weights_;
    std::vector<int> order_;
    std::vector<i64> current_;
    std::vector<int> where_;
    i64 limit_ = 0, floor_ = 0;
};

}  // namespace

std::vector<i64> level(const std::vector<i64>& loads, i64 amount) {
    std::vector<int> order(loads.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return loads[a] < loads[b]; });
    std::vector<i64> rises(loads.size(), 0), shares(loads.size(), 0);  // rises: of the first i + 1 together
    i64 left = amount, height = loads.empty() ? 0 : loads[order[0]];
    for (std::size_t count = 1; count <= order.size() && left; ++count) {
        const bool top = count == order.size();
        const i64 ceiling = top ? 0 : loads[order[count]];
        const i64 even = left / static_cast<i64>(count);
        const i64 rise = top ? even : std::min(ceiling - height, even);
        rises[count - 1] = rise;
        left -= rise * static_cast<i64>(count);
        height += rise;
        if (!top && height < ceiling) break;
    }
    i64 share = 0;
    for (std::size_t i = order.size(); i-- > 0;) {
        share += rises[i];
        shares[order[i]] = share + (static_cast<i64>(i) < left);
    }
    return shares;
}

namespace {

using Pieces = std::vector<std::vector<Span>>;

void zigzag(int node, i64 lo, i64 hi, const std::vector<i64>& shares, int first_rank, Pieces& into) {
    const int ranks = static_cast<int>(shares.size());
    i64 total = 0, seen = 0, edge = lo;
    for (i64 share : shares) total += 2 * share;
    for (int chunk = 0; chunk < 2 * ranks; ++chunk) {
        const int rank = std::min(chunk, 2 * ranks - 1 - chunk);
        seen += shares[rank];
        const i64 end = lo + static_cast<i64>(static_cast<i128>(hi - lo) * seen / total);
        if (end > edge) into[first_rank + rank].push_back({node, edge, end});
        edge = end;
    }
}

void join(Placement& held) {
    for (auto& spans : held) {
        std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) {
            return a.node != b.node ? a.node < b.node : a.lo < b.lo;
        });
        std::size_t kept = 0;
        for (std::size_t i = 0; i < spans.size(); ++i) {
            if (kept && spans[kept - 1].node == spans[i].node && spans[kept - 1].hi == spans[i].lo) {
                spans[kept - 1].hi = spans[i].hi;
            } else {
                spans[kept++] = spans[i];
            }
        }
        spans.resize(kept);
    }
}

i64 cost(const Forest& f, const Span& s, i64 unit) { return f.area(s.node, s.lo, s.hi) + unit * (s.hi - s.lo); }

// Places leaves as lanes.place does, on top of what is there.
class Placer {
public:
    Placer(const Forest& f, const Lanes& r, i64 unit)
        : f_(f), r_(r), unit_(unit), held_(r.width), even_(r.width, 1), loads_(r.width, 0) {}

    Placement run() {
        for (int node : r_.inner) add(node, even_, 0);
        std::vector<int> narrow, spread;
        deal(narrow, spread);
        whole(narrow);
        for (int node : spread) {
            std::vector<i64> shares = even_;
            if (!narrow.empty()) {
                shares = level(loads_, cost(f_, {node, 0, f_.rows[node]}, unit_));
                if (std::all_of(shares.begin(), shares.end(), [](i64 x) { return x == 0; })) shares = even_;
            }
            add(node, shares, 0);
        }
        join(held_);
        return std::move(held_);
    }

private:
    void deal(std::vector<int>& narrow, std::vector<int>& spread) const {
        std::vector<int> order = r_.leaves;
        std::sort(order.begin(), order.end(), [&](int a, int b) {
            return f_.rows[a] != f_.rows[b] ? f_.rows[a] > f_.rows[b] : a < b;
        });
        const std::size_t wide = r_.lane_degree < r_.width ? static_cast<std::size_t>(r_.wide) : order.size();
        const std::size_t cut = std::min(wide, order.size());
        spread.assign(order.begin(), order.begin() + cut);
        narrow.assign(order.begin() + cut, order.end());
    }

    void whole(const std::vector<int>& narrow) {
        std::vector<i64> weights, lanes;
        for (int node : narrow) weights.push_back(cost(f_, {node, 0, f_.rows[node]}, unit_));
        for (i64 lo = 0; lo < r_.width; lo += r_.lane_degree) {
            lanes.push_back(std::accumulate(loads_.begin() + lo, loads_.begin() + lo + r_.lane_degree, i64{0}));
        }
        const std::vector<int> where = assign(weights, lanes);
        const std::vector<i64> even(r_.lane_degree, 1);
        for (std::size_t i = 0; i < narrow.size(); ++i) {
            add(narrow[i], even, static_cast<int>(where[i] * r_.lane_degree));
        }
    }

    void add(int node, const std::vector<i64>& shares, int first_rank) {
        std::vector<std::size_t> before(held_.size());
        for (std::size_t rank = 0; rank < held_.size(); ++rank) before[rank] = held_[rank].size();
        zigzag(node, 0, f_.rows[node], shares, first_rank, held_);
        for (std::size_t rank = 0; rank < held_.size(); ++rank) {
            for (std::size_t i = before[rank]; i < held_[rank].size(); ++i) {
                loads_[rank] += cost(f_, held_[rank][i], unit_);
            }
        }
    }

    const Forest& f_;
    const Lanes& r_;
    i64 unit_;
    Placement held_;
    std::vector<i64> even_, loads_;
};

}  // namespace

std::vector<int> assign(const std::vector<i64>& weights, const std::vector<i64>& loads) {
    i64 leaves = 1;
    for (std::size_t i = 0; i < std::min<std::size_t>(weights.size(), 8) && leaves <= 4096; ++i) {
        leaves *= static_cast<i64>(loads.size());
    }
    if (weights.size() <= kExactItems && leaves <= 4096) return Exact(weights, loads).best;
    return longest_first(weights, loads);
}

Placement place(const Forest& f, const Lanes& r, i64 unit) {
    if (r.hi < 0) return Placer(f, r, unit).run();
    Placement held(r.width);
    const std::vector<i64> even(r.width, 1);
    i64 start = 0;
    for (int node : r.inner) {
        const i64 first = std::max<i64>(r.lo - start, 0), last = std::min(r.hi - start, f.rows[node]);
        if (first < last) zigzag(node, first, last, even, 0, held);
        start += f.rows[node];
    }
    join(held);
    return held;
}

}  // namespace augtree
