// The cheapest way to play a job: the twin of planning/jobs.py.
#include <algorithm>
#include <numeric>

#include "choices.h"
#include "counted.h"

namespace augtree {

namespace {

constexpr i64 kSkipped = -2;  // as offers.SKIPPED

i64 cost_of(const std::vector<Job>& jobs) {
    i64 cost = 0;
    for (const Job& job : jobs) cost = std::max(cost, job.offer.cost);
    return cost;
}

}  // namespace

std::optional<Offer> Jobs::estimate(const Nodes& nodes, i64 width, i64 below) {
    return Search(*this, nodes, width, Search::kCheapest, below).best;
}

Estimates& Jobs::estimates() {
    if (!estimates_) estimates_ = std::make_shared<Estimates>(*this);
    return *estimates_;
}

std::optional<Offer> Jobs::best(const Nodes& nodes, i64 width) {
    std::optional<Offer> best;
    Nodes inner, leaves;
    split_inner(nodes, inner, leaves);
    Counted counted(*this, inner, leaves);
    for (const Choice& choice : Search(*this, nodes, width, Search::kEvery).worth_settling()) {
        const Offer offer = cheapest(counted.offers(choice));
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
    return cheapest(Counted(*this, inner, leaves).offers(choice));
}

// Of a choice's offers: one that fits, if any.
Offer Jobs::cheapest(const std::vector<Offer>& offers) const {
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

std::vector<int> Jobs::wave_of(const Nodes& leaves, i64 waves) const {
    waves = std::min(waves, static_cast<i64>(leaves.size()));
    if (waves == 1) return std::vector<int>(leaves.size(), 0);
    std::vector<i64> weights;
    weights.reserve(leaves.size());
    for (int node : leaves) weights.push_back(row_cost(node));
    std::vector<int> where = assign(weights, std::vector<i64>(waves, 0)), number(waves, 0);
    for (int wave : where) number[wave] = 1;
    int count = 0;
    for (int& n : number) n = n ? count++ : 0;  // leaves without rows may leave waves empty
    for (int& wave : where) wave = number[wave];
    return where;
}

std::vector<Nodes> Jobs::waves_of(const Nodes& leaves, i64 waves) const {
    const std::vector<int> where = wave_of(leaves, waves);
    std::vector<Nodes> dealt(where.empty() ? 0 : *std::max_element(where.begin(), where.end()) + 1);
    for (std::size_t i = 0; i < leaves.size(); ++i) dealt[where[i]].push_back(leaves[i]);
    return dealt;
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
    const std::vector<std::pair<int, int>>& trees, const std::vector<i64>& widths, i64 enough, bool many) {
    std::vector<std::vector<i64>> rows;
    for (const auto& [first, end] : trees) {
        std::vector<i64> costs;
        const auto price = [&](std::size_t at) {
            const auto& jobs = tree_jobs(first, end, widths[at]);
            return costs[at] = jobs ? cost_of(*jobs) : -1;
        };
        std::size_t from = 0;
        if (many) {
            Nodes nodes(end - first);
            std::iota(nodes.begin(), nodes.end(), first);
            while (from + 1 < widths.size() && floor(nodes, widths[from + 1]) >= enough) ++from;
        }
        i64 least = INT64_MAX;
        costs.assign(from, kSkipped);
        for (std::size_t at = from; at < widths.size(); ++at) {
            costs.push_back(0);
            const i64 cost = price(at);
            if (cost >= 0) least = std::min(least, cost * widths[at]);
            if (0 <= cost && cost < enough) break;
        }
        for (std::size_t at = from; at-- > 0;) {
            const i64 cost = price(at);
            if (least != INT64_MAX && (cost < 0 || 10 * cost * widths[at] > 11 * least)) break;
            if (cost >= 0) least = std::min(least, cost * widths[at]);
        }
        rows.push_back(std::move(costs));
    }
    return rows;
}

// Parts of a tree beside each other, where all of them cost less than `below`. The one that costs most at the least
// comes first: it is the likeliest to rule the others out.
std::optional<std::vector<Job>> Jobs::in_parts(const std::vector<Nodes>& parts, i64 width, i64 below) {
    std::vector<std::pair<i64, std::size_t>> order;
    for (std::size_t i = 0; i < parts.size(); ++i) order.push_back({-floor(parts[i], width), i});
    std::sort(order.begin(), order.end());
    if (-order[0].first >= below) return std::nullopt;
    std::vector<std::optional<Offer>> offers(parts.size());
    for (std::size_t k = 0; k < order.size(); ++k) {
        const std::size_t i = order[k].second, before = order[k ? k - 1 : 0].second;
        const bool again = k && order[k].first == order[k - 1].first && alike(parts[i], parts[before]);
        offers[i] = again ? offers[before] : estimate(parts[i], width, below);
        if (!offers[i] || offers[i]->cost >= below) return std::nullopt;
    }
    std::vector<Job> jobs;
    jobs.reserve(parts.size());
    for (std::size_t i = 0; i < parts.size(); ++i) jobs.push_back({parts[i], static_cast<i64>(i) * width, *offers[i]});
    return jobs;
}

// Whether two jobs' nodes, one by one, have the same rows below the same parents: then they cost the same.
bool Jobs::alike(const Nodes& a, const Nodes& b) const {
    if (a.size() != b.size()) return false;
    const auto above = [&](const Nodes& nodes, std::size_t i) {
        const int parent = forest.parents[nodes[i]];
        const auto at = std::lower_bound(nodes.begin(), nodes.end(), parent);
        return at != nodes.end() && *at == parent ? at - nodes.begin() : -1;
    };
    for (std::size_t i = 0; i < a.size(); ++i) {
        const int x = a[i], y = b[i];
        if (forest.rows[x] != forest.rows[y] || forest.scored[x] != forest.scored[y] ||
            forest.starts[x] != forest.starts[y] || above(a, i) != above(b, i)) {
            return false;
        }
    }
    return true;
}

// Remembered for the nodes of late: they come up once for each width.
const std::vector<Nodes>& Jobs::parts_of(const Nodes& nodes, i64 copies) {
    if (nodes != cut_) {
        cut_ = nodes;
        parts_.clear();
    }
    const auto [at, fresh] = parts_.try_emplace(copies);
    if (fresh) at->second = copies_of(nodes, copies);
    return at->second;
}

std::optional<std::vector<Job>> Jobs::with_copies(const Nodes& nodes, i64 width) {
    std::optional<std::vector<Job>> best;
    if (options.copies < 2 && !(options.limit && options.limit < width)) {
        if (const auto whole = estimate(nodes, width)) best = std::vector<Job>{{nodes, 0, *whole}};
    }
    for (i64 copies : copies(nodes, width)) {
        auto jobs = in_parts(parts_of(nodes, copies), width / copies, best ? cost_of(*best) : INT64_MAX);
        if (jobs) best = std::move(jobs);
    }
    return best;
}

}  // namespace augtree
