// The cheapest way to play a job: the twin of planning/jobs.py.
#include <algorithm>
#include <numeric>

#include "choices.h"

namespace augtree {

namespace {

i64 cost_of(const std::vector<Job>& jobs) {
    i64 cost = 0;
    for (const Job& job : jobs) cost = std::max(cost, job.offer.cost);
    return cost;
}

}  // namespace

std::optional<Offer> Jobs::estimate(const Nodes& nodes, i64 width) { return Search(*this, nodes, width).best; }

std::optional<Offer> Jobs::best(const Nodes& nodes, i64 width) {
    std::optional<Offer> best;
    for (const Choice& choice : Search(*this, nodes, width).worth_settling()) {
        const Offer offer = settle(nodes, choice);
        if (offer.peak <= options.room) {
            if (!best || offer.cost < best->cost) best = offer;
        } else if (!leanest || offer.peak < leanest->peak) {
            leanest = offer;
        }
    }
    return best;
}

Offer Jobs::settle(const Nodes& nodes, const Choice& choice) {
    Nodes inner, leaves;
    split_inner(nodes, inner, leaves);
    const std::vector<Offer> offers = Priced(*this, inner, leaves, choice, nullptr).offers();
    return *std::min_element(offers.begin(), offers.end(), [&](const Offer& a, const Offer& b) {
        const bool fat = a.peak > options.room, fatter = b.peak > options.room;
        return fat != fatter ? fat < fatter : a.cost < b.cost;
    });
}

void Jobs::split_inner(const Nodes& nodes, Nodes& inner, Nodes& leaves) {
    for (int node : nodes) {
        if (forest.parents[node] >= 0) mark_[forest.parents[node]] = 1;
    }
    for (int node : nodes) (mark_[node] ? inner : leaves).push_back(node);
    for (int node : nodes) {
        if (forest.parents[node] >= 0) mark_[forest.parents[node]] = 0;
    }
}

Offer Jobs::offer(const std::vector<std::pair<i64, i64>>& times, i64 peak, const Choice& choice) const {
    i64 time = 0, slot = 0;
    for (const auto& [forward, backward] : times) {
        time += forward + backward;
        slot = std::max(slot, forward + backward);
    }
    return {time + slot * (constants.stages - 1) * options.slot_weight / 16, time, slot, peak, choice};
}

i64 Jobs::ideal(const Nodes& nodes, i64 ranks) const {
    const Constants& c = constants;
    i64 rows = 0, pairs = 0;
    for (int node : nodes) {
        rows += forest.rows[node];
        pairs += forest.area(node, 0, forest.rows[node]);
    }
    const i64 linear = (c.linear.ns(rows) + c.beside.ns(rows)) * (100 + c.gemm_pct);
    const i64 attention = c.attention.ns(pairs) * (100 + c.attention_pct);
    return c.layers * (linear / 100 + attention / 100) / (ranks * c.stages);
}

i64 Jobs::floor(const Nodes& nodes, i64 ranks) const {
    const Constants& c = constants;
    return ideal(nodes, ranks) + (c.layers + c.stages - 1) / c.stages * 3 * c.layer_ns + 2 * c.pass_ns;
}

std::optional<Pair> Jobs::pair(const Demand& d, i64 room) const {
    if (options.whole == -1) return d.fit(room);
    if (options.whole == -2) return Pair{constants.layers - constants.recomputed, constants.attention_kept};
    return Pair{std::min(options.whole, constants.layers),
                std::min(options.attention, constants.layers - options.whole)};
}

std::vector<Nodes> Jobs::waves_of(const Nodes& leaves, i64 waves) const {
    waves = std::min(waves, static_cast<i64>(leaves.size()));
    if (waves == 1) return {leaves};
    std::vector<i64> weights;
    for (int node : leaves) weights.push_back(row_cost(node));
    const std::vector<int> where = assign(weights, std::vector<i64>(waves, 0));
    std::vector<Nodes> dealt(waves);
    for (std::size_t i = 0; i < leaves.size(); ++i) dealt[where[i]].push_back(leaves[i]);
    dealt.erase(std::remove_if(dealt.begin(), dealt.end(), [](const Nodes& n) { return n.empty(); }), dealt.end());
    return dealt;
}

std::vector<Nodes> Jobs::copies_of(const Nodes& nodes, i64 copies) {
    Nodes inner, leaves;
    split_inner(nodes, inner, leaves);
    copies = std::min(copies, static_cast<i64>(leaves.size()));
    if (copies < 2) return {nodes};
    std::vector<Nodes> parts = waves_of(leaves, copies);
    for (Nodes& part : parts) {
        Nodes chain;
        for (int leaf : part) {
            chain.push_back(leaf);
            chain.insert(chain.end(), forest.ancestors[leaf].begin(), forest.ancestors[leaf].end());
        }
        std::sort(chain.begin(), chain.end());
        chain.erase(std::unique(chain.begin(), chain.end()), chain.end());
        part = std::move(chain);
    }
    return parts;
}

const std::optional<std::vector<Job>>& Jobs::tree_jobs(int first, int end, i64 width) {
    auto [at, fresh] = trees_.try_emplace({first, end, width});
    if (fresh) {
        Nodes nodes(end - first);
        std::iota(nodes.begin(), nodes.end(), first);
        at->second = with_copies(nodes, width);
    }
    return at->second;
}

std::vector<std::vector<i64>> Jobs::table(
    const std::vector<std::pair<int, int>>& trees, const std::vector<i64>& widths, i64 enough) {
    std::vector<std::vector<i64>> rows;
    for (const auto& [first, end] : trees) {
        std::vector<i64> costs;
        for (i64 width : widths) {
            const auto& jobs = tree_jobs(first, end, width);
            costs.push_back(jobs ? cost_of(*jobs) : -1);
            if (jobs && costs.back() < enough) break;
        }
        rows.push_back(std::move(costs));
    }
    return rows;
}

std::optional<std::vector<Job>> Jobs::with_copies(const Nodes& nodes, i64 width) {
    std::optional<std::vector<Job>> best;
    if (options.copies < 2) {
        if (const auto whole = estimate(nodes, width)) best = std::vector<Job>{{nodes, 0, *whole}};
    }
    Nodes inner, leaves;
    split_inner(nodes, inner, leaves);
    std::vector<i64> counts;
    if (options.copies > 1 && width % options.copies == 0) counts.push_back(options.copies);
    const i64 most = std::min(width, static_cast<i64>(leaves.size()));
    for (i64 copies = 2; !options.copies && !inner.empty() && copies <= most; copies *= 2) {
        if (width % copies == 0) counts.push_back(copies);
    }
    for (i64 copies : counts) {
        const std::vector<Nodes> parts = copies_of(nodes, copies);
        i64 least = 0;
        for (const Nodes& part : parts) least = std::max(least, floor(part, width / copies));
        if (best && least >= cost_of(*best)) continue;
        std::vector<Job> jobs;
        for (std::size_t i = 0; i < parts.size(); ++i) {
            const auto offer = estimate(parts[i], width / copies);
            if (!offer) break;
            jobs.push_back({parts[i], static_cast<i64>(i) * (width / copies), *offer});
        }
        if (jobs.size() == parts.size() && (!best || cost_of(jobs) < cost_of(*best))) best = jobs;
    }
    return best;
}

}  // namespace augtree
