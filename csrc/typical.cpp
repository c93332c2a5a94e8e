// A block's heaviest ranks in closed forms: the twin of planning/typical.py.
#include <algorithm>
#include <numeric>

#include "pricing.h"

namespace augtree {

namespace {

i64 ceil_share(i64 value, i64 share, i64 shares) {
    return static_cast<i64>((static_cast<i128>(value) * share + shares - 1) / shares);
}

}  // namespace

TypicalRows::TypicalRows(const Forest& f, const Constants& c, Lay lay, i64 unit)
    : f_(f), c_(c), lay_(std::move(lay)), unit_(unit), mates_(std::min(lay_.width, c.node_ranks)),
      machine_nodes_((lay_.width + c.node_ranks - 1) / c.node_ranks) {
    Parts inner;
    for (const Span& span : lay_.inner) inner.push_back(cut(span, lay_.width, true, 1, lay_.width));
    for (const Parts& mine : leaves()) {
        ranks_.push_back(inner);
        ranks_.back().insert(ranks_.back().end(), mine.begin(), mine.end());
    }
}

TypicalRows::Part TypicalRows::cut(const Span& s, i64 ranks, bool inner, i64 share, i64 shares) const {
    const i64 rows = ceil_share(s.hi - s.lo, share, shares);
    const i64 scored = std::min(f_.scored[s.node] * (ranks > 1 ? 2 : 1), rows);
    return {rows, ceil_share(f_.area(s.node, s.lo, s.hi), share, shares), scored, f_.starts[s.node] + s.lo, ranks,
            s.hi - s.lo, inner};
}

std::vector<TypicalRows::Parts> TypicalRows::leaves() const {
    const i64 d = lay_.width, lane_degree = lay_.lane_degree;
    const auto span = [&](int node) { return Span{node, 0, f_.rows[node]}; };
    if (lane_degree == d) {
        Parts all;
        for (int node : lay_.leaves) all.push_back(cut(span(node), d, false, 1, d));
        return {all};
    }
    std::vector<int> order = lay_.leaves;
    std::sort(order.begin(), order.end(),
              [&](int a, int b) { return f_.rows[a] != f_.rows[b] ? f_.rows[a] > f_.rows[b] : a < b; });
    const std::size_t wide = std::min(static_cast<std::size_t>(lay_.wide), order.size());
    const std::vector<int> spread(order.begin(), order.begin() + wide), narrow(order.begin() + wide, order.end());
    std::vector<i64> costs, lanes(d / lane_degree, 0);
    i64 amount = 0;
    for (int node : narrow) costs.push_back(f_.area(node, 0, f_.rows[node]) + unit_ * f_.rows[node]);
    for (int node : spread) amount += f_.area(node, 0, f_.rows[node]) + unit_ * f_.rows[node];
    const std::vector<int> where = longest_first(costs, lanes);
    for (std::size_t i = 0; i < narrow.size(); ++i) lanes[where[i]] += costs[i];
    const std::vector<i64> shares = level(lanes, amount);
    const auto first_max = [](const std::vector<i64>& v) {
        return static_cast<int>(std::max_element(v.begin(), v.end()) - v.begin());
    };
    std::vector<int> chosen{first_max(lanes)};
    if (first_max(shares) != chosen[0]) chosen.push_back(first_max(shares));
    std::vector<Parts> found;
    for (int lane : chosen) {
        Parts mine;
        if (shares[lane]) {
            for (int node : spread) mine.push_back(cut(span(node), d, false, shares[lane], amount * lane_degree));
        }
        for (std::size_t i = 0; i < narrow.size(); ++i) {
            if (where[i] == lane) mine.push_back(cut(span(narrow[i]), lane_degree, false, 1, lane_degree));
        }
        found.push_back(std::move(mine));
    }
    return found;
}

bool TypicalRows::crosses(const PassSpec& p) const {
    return p.node_ranks && machine_nodes_ > 1 && p.primitive == GATHER_KV;
}

RankLoad TypicalRows::load(const Parts& parts, const PassSpec& p) const {
    const i64 d = lay_.width;
    i64 sources = std::min(p.pieces, d - 1);
    if (p.primitive == MOVE_KV) sources = d - 1;
    if (p.primitive == MOVE_Q) sources = 1;
    const bool leaves = !lay_.leaves.empty();
    const i64 whole = (leaves ? static_cast<i64>(lay_.inner.size()) : 0) + lay_.state_nodes;
    RankLoad x;
    i64 cuts = 0, cut_rows = 0, below = 0;
    for (const Part& part : parts) {
        x.rows += part.rows;
        x.scored += part.scored;
        x.pairs += part.pairs;
        x.early += part.rows * (part.start / d);
        if (part.inner) x.early += part.rows * (part.rows + 1) / 2;
        x.diagonal += part.rows * std::min(part.rows, c_.tile_rows) / 2;
        x.triangle += part.rows * (part.rows + 1) / 2;
        if (part.start) below += part.rows;
        if (part.ranks > 1 && (!part.inner || !leaves)) {
            cuts += 1;
            cut_rows += part.rows;
        }
    }
    x.tiles = static_cast<i64>(parts.size()) + std::min<i64>(whole, 2) * (sources + 1) + cuts * sources;
    x.merged = x.rows + below * (sources + 1) + cut_rows * sources;
    traffic(parts, p, x);
    if (p.primitive == MOVE_Q) visits(parts, x);
    return x;
}

void TypicalRows::traffic(const Parts& parts, const PassSpec& p, RankLoad& x) const {
    const i64 d = lay_.width, m = mates_;
    i64 shared = 0, in_lane = 0;
    for (const Part& part : parts) {
        if (part.ranks == d && d > 1) shared += part.of;
        if (1 < part.ranks && part.ranks < d) in_lane += part.of - part.rows;
    }
    if (p.primitive != MOVE_Q && d > 1) shared += lay_.state_rows;
    i64 far = shared * (d - m) / d, near = shared * (m - 1) / d;
    x.messages = shared ? d - 1 : in_lane ? lay_.lane_degree - 1 : 0;
    if (crosses(p) && shared) {
        const i64 once = shared * (machine_nodes_ - 1) / d;
        near += far - once;
        far = once;
        x.messages = 2 * (m - 1) + machine_nodes_ - 1;
    }
    x.kv_in = x.kv_out = near + in_lane + far;
    x.kv_far_in = x.kv_far_out = far;
}

void TypicalRows::visits(const Parts& parts, RankLoad& x) const {
    const i64 d = lay_.width, m = mates_;
    i64 total = 0, seen = 0, mine = 0;
    for (int node : lay_.leaves) {
        total += f_.rows[node];
        seen += f_.rows[node] * f_.starts[node];
    }
    for (const Part& part : parts) mine += part.rows * part.start;
    const i64 come = std::max<i64>(seen - mine, 0) / d, go = mine * (d - 1) / d;
    const i64 away = x.rows * (d - 1), here = std::max<i64>(total - x.rows, 0);
    x.pairs = std::max<i64>(x.pairs + come - go, 0);
    x.visiting = come;
    x.tiles += 1;
    x.merged += away + here;
    x.q_in = here;
    x.q_out = away;
    x.q_far_in = here * (d - m) / (d - 1);
    x.q_far_out = x.rows * (d - m);
    x.messages = 2 * (d - 1);
}

Loads TypicalRows::loads(const PassSpec& p) const {
    Loads found;
    bool moves = false;
    for (const Parts& parts : ranks_) {
        found.ranks.push_back(load(parts, p));
        moves = moves || found.ranks.back().messages;
    }
    const i64 remote = lay_.width - 1;
    if (remote && moves) {
        if (p.primitive == MOVE_Q) {
            found.stages = 2;
        } else {
            found.stages = p.primitive == MOVE_KV ? remote : std::min(p.pieces, remote) + crosses(p);
        }
    }
    return found;
}

}  // namespace augtree
