// A block's heaviest ranks in closed forms: the twin of planning/typical.py.
//
// What a rank does follows from sums over its parts of nodes, whatever travels how. They are made once a lay;
// leaves are ordered, and their parts of either kind made, once a block.
#include "typical.h"

#include <algorithm>
#include <numeric>

namespace augtree {

namespace {

i64 ceil_share(i64 value, i64 share, i64 shares) {
    if (share == 1) return (value + shares - 1) / shares;
    return static_cast<i64>((static_cast<i128>(value) * share + shares - 1) / shares);
}

template <class Values>
int first_max(const Values& v) {
    return static_cast<int>(std::max_element(v.begin(), v.end()) - v.begin());
}

}  // namespace

void RankSums::add(const RankSums& o) {
    rows += o.rows;
    scored += o.scored;
    pairs += o.pairs;
    early += o.early;
    leaves_early += o.leaves_early;
    diagonal += o.diagonal;
    triangle += o.triangle;
    below += o.below;
    cuts += o.cuts;
    cut_rows += o.cut_rows;
    lane_cuts += o.lane_cuts;
    lane_cut_rows += o.lane_cut_rows;
    parts += o.parts;
    shared += o.shared;
    in_lane += o.in_lane;
    reach += o.reach;
}

TypicalBlock::TypicalBlock(const Forest& f, const Constants& c, const Nodes& leaves, i64 width, i64 unit)
    : f_(f), c_(c), leaves_(leaves), width_(width), unit_(unit), mates_(std::min(width, c.node_ranks)),
      machine_nodes_((width + c.node_ranks - 1) / c.node_ranks) {}

RankSums TypicalBlock::part(const Span& s, i64 ranks, bool inner, i64 share, i64 shares) const {
    RankSums x;
    const i64 start = f_.starts[s.node] + s.lo, of = s.hi - s.lo, rows = ceil_share(of, share, shares);
    x.rows = rows;
    x.scored = std::min(f_.scored[s.node] * (ranks > 1 ? 2 : 1), rows);
    x.pairs = ceil_share(f_.area(s.node, s.lo, s.hi), share, shares);
    x.triangle = rows * (rows + 1) / 2;
    x.early = rows * (start / width_) + (inner ? x.triangle : 0);
    x.leaves_early = inner ? 0 : x.triangle;
    x.diagonal = rows * std::min(rows, c_.tile_rows) / 2;
    x.below = start ? rows : 0;
    x.cuts = ranks > 1 && ranks == width_;
    x.cut_rows = x.cuts ? rows : 0;
    x.lane_cuts = ranks > 1 && ranks < width_;
    x.lane_cut_rows = x.lane_cuts ? rows : 0;
    x.parts = 1;
    x.shared = ranks == width_ && width_ > 1 ? of : 0;
    x.in_lane = 1 < ranks && ranks < width_ ? of - rows : 0;
    x.reach = rows * start;
    return x;
}

// Leaves by rows, and by cost for dealing; what each gives to a rank where it is cut over the block, or dealt to
// one lane.
void TypicalBlock::order_leaves() {
    if (ordered_) return;
    ordered_ = true;
    const std::size_t n = leaves_.size();
    by_rows_ = leaves_;
    std::sort(by_rows_.begin(), by_rows_.end(),
              [&](int a, int b) { return f_.rows[a] != f_.rows[b] ? f_.rows[a] > f_.rows[b] : a < b; });
    costs_.resize(n);
    for (std::size_t i = 0; i < n; ++i) {
        const int node = by_rows_[i];
        costs_[i] = f_.area(node, 0, f_.rows[node]) + unit_ * f_.rows[node];
    }
    by_cost_.resize(n);
    std::iota(by_cost_.begin(), by_cost_.end(), 0);
    if (!std::is_sorted(costs_.begin(), costs_.end(), std::greater<i64>())) {
        std::stable_sort(by_cost_.begin(), by_cost_.end(), [&](int a, int b) { return costs_[a] > costs_[b]; });
    }
}

const std::vector<RankSums>& TypicalBlock::even_parts(i64 ranks) {
    std::vector<RankSums>& parts = ranks == width_ ? cut_ : dealt_;  // lanes of a block have one size
    if (parts.empty()) {
        parts.reserve(by_rows_.size());
        for (int node : by_rows_) parts.push_back(part({node, 0, f_.rows[node]}, ranks, false, 1, ranks));
    }
    return parts;
}

RankSums TypicalBlock::inner_sums(const std::vector<Span>& inner) const {
    RankSums sums;
    for (const Span& s : inner) sums.add(part(s, width_, true, 1, width_));
    return sums;
}

TypicalRows::TypicalRows(const TypicalBlock& block)
    : width_(block.width_), mates_(block.mates_), machine_nodes_(block.machine_nodes_) {}

TypicalRows TypicalBlock::spine(const std::vector<Span>& inner, const State& state) const {
    TypicalRows found(*this);
    found.state_rows_ = state.rows;
    found.states_ = state.passes;
    found.add_rank(inner_sums(inner));
    return found;
}

TypicalRows TypicalBlock::with_leaves(
    const std::vector<Span>& inner, const std::vector<char>* taken, i64 lane_degree, i64 wide,
    const State& state) {
    TypicalRows found(*this);
    found.lane_degree_ = lane_degree;
    found.state_rows_ = state.rows;
    found.states_ = state.passes;
    found.whole_ = static_cast<i64>(inner.size()) + state.nodes;
    order_leaves();
    const RankSums above = inner_sums(inner);
    const std::size_t n = by_rows_.size();
    std::vector<int>& mine = mine_;
    mine.clear();
    for (std::size_t i = 0; i < n; ++i) {
        if (taken && !(*taken)[i]) continue;
        mine.push_back(static_cast<int>(i));
        const int node = by_rows_[i];
        found.leaf_rows_ += f_.rows[node];
        found.leaf_reach_ += f_.rows[node] * f_.starts[node];
    }
    if (lane_degree == width_) {
        RankSums all = above;
        const std::vector<RankSums>& parts = even_parts(width_);
        for (int i : mine) all.add(parts[i]);
        found.add_rank(all);
        return found;
    }
    const std::size_t cut = std::min(static_cast<std::size_t>(wide), mine.size());
    i64 amount = 0;
    for (std::size_t k = 0; k < cut; ++k) amount += costs_[mine[k]];
    // Of those that are dealt, the costliest first, to the lane with the least.
    const int first_dealt = cut < mine.size() ? mine[cut] : static_cast<int>(n);
    LeastLoaded lanes(std::vector<i64>(width_ / lane_degree, 0));
    where_.assign(n, -1);
    for (int i : by_cost_) {
        if (i >= first_dealt && (!taken || (*taken)[i])) where_[i] = lanes.add(costs_[i]);
    }
    const std::vector<i64>& loads = lanes.loads();
    const std::vector<i64> shares = cut ? level(loads, amount) : std::vector<i64>(loads.size(), 0);
    const std::vector<RankSums>& whole = even_parts(lane_degree);
    const int fullest = first_max(loads), most = first_max(shares);
    for (int lane : {fullest, most}) {
        RankSums sums = above;
        for (std::size_t k = 0; k < cut && shares[lane]; ++k) {
            const int node = by_rows_[mine[k]];
            sums.add(part({node, 0, f_.rows[node]}, width_, false, shares[lane], amount * lane_degree));
        }
        for (std::size_t k = cut; k < mine.size(); ++k) {
            if (where_[mine[k]] == lane) sums.add(whole[mine[k]]);
        }
        found.add_rank(sums);
        if (fullest == most) break;
    }
    return found;
}

bool TypicalRows::crosses(const PassSpec& p) const {
    return p.node_ranks && machine_nodes_ > 1 && p.primitive == GATHER_KV;
}

i64 TypicalRows::landings_of(const PassSpec& p) const {
    const i64 last = width_ - (machine_nodes_ - 1) * mates_;
    return landings(p, width_, mates_, last, machine_nodes_, crosses(p));
}

RankLoad TypicalRows::load(const RankSums& sums, const PassSpec& p) const {
    const i64 landings = landings_of(p), cut = cut_tiles(landings, width_, crosses(p) || (states_ && !leaf_rows_));
    RankLoad x;
    x.rows = sums.rows;
    x.scored = sums.scored;
    x.cut_rows = sums.cut_rows;
    x.lane_cut_rows = sums.lane_cut_rows;
    x.pairs = sums.pairs;
    x.early = sums.early + (p.primitive == MOVE_Q ? 0 : sums.leaves_early);
    x.diagonal = sums.diagonal;
    x.triangle = sums.triangle;
    const i64 shared = std::min<i64>(whole_, 2);
    x.tiles = sums.parts + std::max(shared, states_) + shared * landings + sums.cuts * cut +
              sums.lane_cuts * cut_tiles(landings, lane_degree_, false);
    x.merged = x.rows + std::max(sums.below, x.rows * states_) + sums.below * landings + sums.cut_rows * landings +
               sums.lane_cut_rows * std::min(landings, lane_degree_ - 1);
    traffic(sums, p, x);
    if (p.primitive == MOVE_Q) visits(sums, x);
    return x;
}

void TypicalRows::traffic(const RankSums& sums, const PassSpec& p, RankLoad& x) const {
    const i64 d = width_, m = mates_;
    i64 shared = sums.shared;
    if (p.primitive != MOVE_Q && d > 1) shared += state_rows_;
    i64 far = shared * (d - m) / d, near = shared * (m - 1) / d;
    x.messages = shared ? d - 1 : sums.in_lane ? lane_degree_ - 1 : 0;
    if (crosses(p) && shared) {
        const i64 once = shared * (machine_nodes_ - 1) / d;
        near += far - once;
        far = once;
        x.messages = 2 * (m - 1) + machine_nodes_ - 1;
    }
    x.kv_in = x.kv_out = near + sums.in_lane + far;
    x.kv_far_in = x.kv_far_out = far;
}

void TypicalRows::visits(const RankSums& sums, RankLoad& x) const {
    const i64 d = width_, m = mates_;
    const i64 come = std::max<i64>(leaf_reach_ - sums.reach, 0) / d, go = sums.reach * (d - 1) / d;
    const i64 away = x.rows * (d - 1), here = std::max<i64>(leaf_rows_ - x.rows, 0);
    x.pairs = std::max<i64>(x.pairs + come - go, 0);
    x.visiting = come;
    x.tiles += states_;
    x.merged += away + here;
    x.q_in = here;
    x.q_out = away;
    x.q_far_in = here * (d - m) / (d - 1);
    x.q_far_out = x.rows * (d - m);
    x.messages = 2 * (d - 1);
}

TypicalLoads TypicalRows::loads(const PassSpec& p) const {
    TypicalLoads found;
    bool moves = false;
    for (int i = 0; i < count_; ++i) {
        found.ranks[i] = load(ranks_[i], p);
        moves = moves || found.ranks[i].messages;
    }
    found.count = count_;
    if (width_ > 1 && moves) found.stages = p.primitive == MOVE_Q ? 2 : landings_of(p);
    return found;
}

}  // namespace augtree
