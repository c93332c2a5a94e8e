// Trees in parts with a prompt copy each: the twin of candidates.copies_of and jobs.Jobs._copies.
#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "placing.h"

namespace augtree {

namespace {

// The subtrees of a job, and how they are dealt to parts: see candidates.copies_of.
struct Subtrees {
    const Jobs& jobs;
    std::map<int, i64> own, whole;  // [node] its own cost, that of its subtree
    std::map<int, Nodes> below;     // [node] children in the job
    Nodes tops;                     // roots of the subtrees at first

    Subtrees(const Jobs& j, const Nodes& nodes) : jobs(j) {
        for (int node : nodes) own[node] = whole[node] = j.row_cost(node);
        for (auto node = nodes.rbegin(); node != nodes.rend(); ++node) {
            const int parent = j.forest.parents[*node];
            if (!own.count(parent)) continue;
            below[parent].push_back(*node);
            whole[parent] += whole[*node];
        }
        for (int node : nodes) {
            if (own.count(j.forest.parents[node])) continue;
            const Nodes& children = below[node];
            tops.insert(tops.end(), children.begin(), children.end());
            if (children.empty()) tops.push_back(node);
        }
        std::sort(tops.begin(), tops.end());
    }

    Nodes cut(i64 parts) {
        i64 share = 0;
        for (int top : tops) share += whole[top];
        share /= parts;
        Nodes units, left = tops;
        while (!left.empty()) {
            const int unit = left.back();
            left.pop_back();
            if (!below[unit].empty() && whole[unit] > share) {
                left.insert(left.end(), below[unit].begin(), below[unit].end());
            } else {
                units.push_back(unit);
            }
        }
        while (static_cast<i64>(units.size()) < parts) {
            const auto largest = std::max_element(units.begin(), units.end(), [&](int a, int b) {
                const bool x = !below[a].empty(), y = !below[b].empty();
                return x != y ? x < y : whole[a] != whole[b] ? whole[a] < whole[b] : a > b;
            });
            const int unit = *largest;
            units.erase(largest);
            units.insert(units.end(), below[unit].begin(), below[unit].end());
        }
        std::sort(units.begin(), units.end());
        return units;
    }

    std::vector<int> with_nodes_above(const Nodes& units, const std::vector<i64>& weights, i64 parts) const {
        std::vector<int> order(units.size()), where(units.size(), 0);
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return weights[a] > weights[b]; });
        std::vector<i64> loads(parts, 0);
        std::vector<std::set<int>> held(parts);
        for (int item : order) {
            const std::vector<int>& above = jobs.forest.ancestors[units[item]];
            i64 least = 0;
            for (i64 part = 0; part < parts; ++part) {
                i64 cost = loads[part];
                for (int node : above) {
                    const auto known = own.find(node);
                    if (known != own.end() && !held[part].count(node)) cost += known->second;
                }
                if (part == 0 || cost < least) {
                    least = cost;
                    where[item] = static_cast<int>(part);
                }
            }
            loads[where[item]] = least + weights[item];
            held[where[item]].insert(above.begin(), above.end());
        }
        return where;
    }
};

}  // namespace

// Leaves with all nodes above them.
std::vector<Nodes> Jobs::with_chains(std::vector<Nodes> parts) const {
    for (Nodes& part : parts) {
        for (std::size_t i = 0, leaves = part.size(); i < leaves; ++i) {
            const std::vector<int>& above = forest.ancestors[part[i]];
            part.insert(part.end(), above.begin(), above.end());
        }
        std::sort(part.begin(), part.end());
        part.erase(std::unique(part.begin(), part.end()), part.end());
    }
    return parts;
}

std::vector<Nodes> Jobs::copies_of(const Nodes& nodes, i64 copies) {
    Nodes inner, leaves;
    split_inner(nodes, inner, leaves);
    copies = std::min(copies, static_cast<i64>(leaves.size()));
    if (copies < 2) return {nodes};
    const bool deep = std::any_of(inner.begin(), inner.end(), [&](int node) {
        return std::binary_search(nodes.begin(), nodes.end(), forest.parents[node]);
    });
    if (!deep) return with_chains(waves_of(leaves, copies));  // the same, faster: nothing is cut
    Subtrees t(*this, nodes);
    const Nodes units = t.cut(copies);
    std::vector<i64> weights;
    for (int unit : units) weights.push_back(t.whole[unit]);
    const std::vector<int> where =
        units == t.tops ? assign(weights, std::vector<i64>(copies, 0)) : t.with_nodes_above(units, weights, copies);
    std::map<int, int> part;
    for (std::size_t i = 0; i < units.size(); ++i) part[units[i]] = where[i];
    std::vector<std::set<int>> parts(copies);
    for (int node : nodes) {
        const auto above = part.find(forest.parents[node]);
        if (above != part.end()) part.try_emplace(node, above->second);
        const auto found = part.find(node);
        if (found == part.end()) continue;
        parts[found->second].insert(node);
        parts[found->second].insert(forest.ancestors[node].begin(), forest.ancestors[node].end());
    }
    std::vector<Nodes> held;
    for (const std::set<int>& p : parts) {
        if (!p.empty()) held.emplace_back(p.begin(), p.end());
    }
    return held;
}

std::vector<i64> Jobs::copies(const Nodes& nodes, i64 width) {
    Nodes inner, leaves;
    split_inner(nodes, inner, leaves);
    const i64 limit = options.limit ? options.limit : width;
    std::vector<i64> counts, found;
    if (options.copies > 1) counts.push_back(options.copies);
    const i64 most = std::min(width, static_cast<i64>(leaves.size()));
    for (i64 copies = 2; !options.copies && !inner.empty() && copies <= most; ++copies) {
        if (width % copies == 0) counts.push_back(copies);
    }
    for (i64 copies : counts) {
        const i64 ranks = width / copies;
        if (width % copies == 0 && options.least <= ranks && ranks <= limit) found.push_back(copies);
    }
    return found;
}

}  // namespace augtree
