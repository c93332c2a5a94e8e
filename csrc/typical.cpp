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
    i64 product;  // dividing 128 bits takes many times as long
    if (!__builtin_mul_overflow(value, share, &product) && product <= INT64_MAX - shares) {
        return (product + shares - 1) / shares;
    }
    return static_cast<i64>((static_cast<i128>(value) * share + shares - 1) / shares);
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
    under += o.under;
    above += o.above;
}

RankSums TypicalBlock::sums_of(const Span& s, i64 ranks, bool inner, i64 share, i64 shares) const {
    RankSums x{};
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
    x.under = f_.starts[s.node] ? rows : 0;
    x.above = rows * f_.starts[s.node];
    return x;
}

void LeafOrder::start(const Forest& f, i64 unit, const Nodes& leaves) {
    by_rows = leaves;
    std::sort(by_rows.begin(), by_rows.end(),
              [&](int a, int b) { return f.rows[a] != f.rows[b] ? f.rows[a] > f.rows[b] : a < b; });
    costs.clear();
    for (int node : by_rows) costs.push_back(f.area(node, 0, f.rows[node]) + unit * f.rows[node]);
    cost_rank.clear();
    if (std::is_sorted(costs.begin(), costs.end(), std::greater<i64>())) return;
    std::vector<int> by_cost(costs.size());
    std::iota(by_cost.begin(), by_cost.end(), 0);
    std::stable_sort(by_cost.begin(), by_cost.end(), [&](int a, int b) { return costs[a] > costs[b]; });
    cost_rank.resize(costs.size());
    for (std::size_t i = 0; i < by_cost.size(); ++i) cost_rank[by_cost[i]] = static_cast<int>(i);
}

void TypicalBlock::start(const LeafOrder& leaves, i64 width) {
    width_ = width;
    mates_ = std::min(width, c_.node_ranks);
    machine_nodes_ = (width + c_.node_ranks - 1) / c_.node_ranks;
    leaves_ = &leaves;
    cut_.clear();
    dealt_.clear();
}

// What each leaf gives to a rank where it is cut over the block, or dealt to one lane.
const std::vector<RankSums>& TypicalBlock::even_parts(i64 ranks) {
    std::vector<RankSums>& parts = ranks == width_ ? cut_ : dealt_;  // lanes of a block have one size
    if (parts.empty()) {
        parts.reserve(leaves_->by_rows.size());
        for (int node : leaves_->by_rows) parts.push_back(sums_of({node, 0, f_.rows[node]}, ranks, false, 1, ranks));
    }
    return parts;
}

RankSums TypicalBlock::inner_sums(const std::vector<Span>& inner) const {
    RankSums sums{};
    for (const Span& s : inner) sums.add(sums_of(s, width_, true, 1, width_));
    return sums;
}

TypicalRows::TypicalRows(const TypicalBlock& block)
    : width_(block.width_), mates_(block.mates_), machine_nodes_(block.machine_nodes_) {}

TypicalRows& TypicalBlock::spine(
    const RankSums& inner, const State& state, std::vector<TypicalRows>& into) const {
    TypicalRows& found = into.emplace_back(*this);
    found.resume(state);
    found.add_rank(inner);
    return found;
}

TypicalRows& TypicalBlock::with_leaves(
    const RankSums& inner, const LeafSet& part, i64 lane_degree, i64 wide, i64 nodes,
    std::vector<TypicalRows>& into) {
    TypicalRows& found = into.emplace_back(*this);
    found.lane_degree_ = lane_degree;
    found.whole_ = nodes;
    found.leaf_rows_ = part.rows;
    found.leaf_reach_ = part.reach;
    if (lane_degree == width_) {
        RankSums& sums = found.add_rank(inner);
        const std::vector<RankSums>& even = even_parts(width_);
        for (int leaf : part.members) sums.add(even[leaf]);
        return found;
    }
    const std::size_t cut = std::min(static_cast<std::size_t>(wide), part.members.size());
    const i64 lanes = width_ / lane_degree;
    i64 amount = 0;
    for (std::size_t k = 0; k < cut; ++k) amount += leaves_->costs[part.members[k]];
    deal(part, cut, lanes);
    const Shares shares = amount ? level_lanes(lanes, amount) : Shares{0, 0};
    const std::vector<RankSums>& whole = even_parts(lane_degree);
    const auto add_lane = [&](int lane, i64 share) {
        RankSums& sums = found.add_rank(inner);
        for (std::size_t k = 0; k < cut && share; ++k) {
            const int node = leaves_->by_rows[part.members[k]];
            sums.add(sums_of({node, 0, f_.rows[node]}, width_, false, share, amount * lane_degree));
        }
        for (std::size_t k = 0; k < dealing_.size(); ++k) {
            if (where_[k] == lane) sums.add(whole[dealing_[k]]);
        }
    };
    const int most = amount ? emptiest_ : 0;
    add_lane(fullest_, shares.fullest);
    if (most != fullest_) add_lane(most, shares.most);
    return found;
}

// Leaves but the first ones go to lanes, the costliest first, each to the lane with the least.
void TypicalBlock::deal(const LeafSet& part, std::size_t cut, i64 lanes) {
    dealing_.assign(part.members.begin() + static_cast<std::ptrdiff_t>(cut), part.members.end());
    const std::vector<i64>& costs = leaves_->costs;
    if (const std::vector<int>& rank = leaves_->cost_rank; !rank.empty()) {
        std::sort(dealing_.begin(), dealing_.end(), [&](int a, int b) { return rank[a] < rank[b]; });
    }
    const std::size_t count = dealing_.size();
    where_.resize(count);
    loads_.clear();
    fullest_ = emptiest_ = 0;
    if (!count) return;
    const i64 last = costs[dealing_.back()];
    if (static_cast<i64>(count) <= lanes && last > 0) {  // one each
        std::iota(where_.begin(), where_.end(), 0);
        for (std::size_t k = count; k-- > 0;) loads_.push_back(costs[dealing_[k]]);
        emptiest_ = static_cast<int>(count);
        if (emptiest_ < lanes) return;
        // None is empty: the first of those with the least.
        while (emptiest_ > 0 && costs[dealing_[emptiest_ - 1]] == last) --emptiest_;
        return;
    }
    lanes_.start(static_cast<std::size_t>(lanes));
    for (std::size_t k = 0; k < count; ++k) where_[k] = lanes_.add(costs[dealing_[k]]);
    loads_ = lanes_.loads();
    fullest_ = static_cast<int>(std::max_element(loads_.begin(), loads_.end()) - loads_.begin());
    emptiest_ = static_cast<int>(std::min_element(loads_.begin(), loads_.end()) - loads_.begin());
    std::sort(loads_.begin(), loads_.end());
}

// What an amount that levels the lanes gives to the fullest, and to the emptiest, which gets the most. The
// same as `level`, of which the other lanes' shares are not needed.
TypicalBlock::Shares TypicalBlock::level_lanes(i64 lanes, i64 amount) const {
    const i64 empty = lanes - static_cast<i64>(loads_.size());
    const auto load = [&](i64 i) { return i < empty ? 0 : loads_[i - empty]; };
    const i64 highest = load(lanes - 1);
    const auto full = std::lower_bound(loads_.begin(), loads_.end(), highest);
    const i64 fullest = highest ? empty + (full - loads_.begin()) : 0;
    Shares shares{0, 0};
    i64 left = amount, height = load(0);
    for (i64 count = std::max<i64>(empty, 1); count <= lanes && left; ++count) {
        const bool last = count == lanes;
        const i64 gap = last ? 0 : load(count) - height;
        const bool reaches = !last && static_cast<i128>(gap) * count <= left;
        const i64 rise = reaches ? gap : left / count;
        shares.most += rise;
        shares.fullest += count > fullest ? rise : 0;
        left -= rise * count;
        height += rise;
        if (!last && height < load(count)) break;
    }
    shares.most += 0 < left;
    shares.fullest += fullest < left;
    return shares;
}

Landing TypicalRows::landing(const PassSpec& p) const {
    const bool crosses = p.node_ranks && machine_nodes_ > 1 && p.primitive == GATHER_KV;
    const i64 last = width_ - (machine_nodes_ - 1) * mates_;
    const i64 found = landings(p, width_, mates_, last, machine_nodes_, crosses);
    return {crosses, found, cut_tiles(found, width_, crosses), cut_tiles(found, lane_degree_, false),
            std::min(found, lane_degree_ - 1)};
}

void TypicalRows::load(const RankSums& sums, const PassSpec& p, const Landing& landing, RankLoad& x) const {
    const i64 landings = landing.landings;
    x.rows = sums.rows;
    x.scored = sums.scored;
    x.cut_rows = sums.cut_rows;
    x.lane_cut_rows = sums.lane_cut_rows;
    x.below = sums.under;
    x.above = sums.above;
    x.pairs = sums.pairs;
    x.early = sums.early + (p.primitive == MOVE_Q ? 0 : sums.leaves_early);
    x.diagonal = sums.diagonal;
    x.triangle = sums.triangle;
    const i64 shared = std::min<i64>(whole_, 2), cut = states_ && !leaf_rows_ ? 2 * landings : landing.cut;
    x.tiles = sums.parts + std::max(shared, states_) + shared * landings + sums.cuts * cut +
              sums.lane_cuts * landing.lane_cut;
    x.merged = x.rows + std::max(sums.below, x.rows * states_) + sums.below * landings + sums.cut_rows * landings +
               sums.lane_cut_rows * landing.lane_landings;
    x.visiting = x.q_in = x.q_out = x.q_far_in = x.q_far_out = 0;
    traffic(sums, p, landing.crosses, x);
    if (p.primitive == MOVE_Q) visits(sums, x);
}

void TypicalRows::traffic(const RankSums& sums, const PassSpec& p, bool crosses, RankLoad& x) const {
    const i64 d = width_, m = mates_;
    i64 shared = sums.shared;
    if (p.primitive != MOVE_Q && d > 1) shared += state_rows_;
    i64 far = shared * (d - m) / d, near = shared * (m - 1) / d;
    x.messages = shared ? d - 1 : sums.in_lane ? lane_degree_ - 1 : 0;
    if (crosses && shared) {
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

void TypicalRows::loads(const PassSpec& p, const Landing& landing, TypicalLoads& into) const {
    bool moves = false;
    for (int i = 0; i < count_; ++i) {
        load(ranks_[i], p, landing, into.ranks[i]);
        moves = moves || into.ranks[i].messages;
    }
    into.count = count_;
    into.stages = width_ == 1 || !moves ? 0 : p.primitive == MOVE_Q ? 2 : landing.landings;
}

}  // namespace augtree
