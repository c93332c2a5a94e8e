// A block's heaviest ranks in closed forms: the twin of planning/typical.py.
#pragma once

#include "pricing.h"

namespace augtree {

// Sums over the parts of nodes that lie on one rank.
struct RankSums {
    i64 rows = 0, scored = 0, pairs = 0, early = 0, leaves_early = 0, diagonal = 0, triangle = 0;
    i64 below = 0;               // rows with something above them
    i64 cuts = 0, cut_rows = 0;            // parts of nodes cut over the block, and their rows
    i64 lane_cuts = 0, lane_cut_rows = 0;  // the same of nodes cut over a lane
    i64 parts = 0, shared = 0, in_lane = 0;
    i64 reach = 0;               // pairs of its rows and of what is above them
    void add(const RankSums& o);
};

struct TypicalLoads {
    RankLoad ranks[2];
    int count = 0;
    i64 stages = 0;
};

class TypicalBlock;

// What earlier passes keep on the block: rows, nodes, and how many passes.
struct State {
    i64 rows = 0, nodes = 0, passes = 0;
};

// The heaviest ranks of a lay: the fullest lane's, and one that takes most of the cut leaves.
class TypicalRows {
public:
    TypicalLoads loads(const PassSpec& p) const;

private:
    friend class TypicalBlock;
    explicit TypicalRows(const TypicalBlock& block);
    void add_rank(const RankSums& sums) { ranks_[count_++] = sums; }
    RankLoad load(const RankSums& sums, const PassSpec& p) const;
    void traffic(const RankSums& sums, const PassSpec& p, RankLoad& x) const;
    void visits(const RankSums& sums, RankLoad& x) const;
    bool crosses(const PassSpec& p) const;
    i64 landings_of(const PassSpec& p) const;

    i64 width_, mates_, machine_nodes_;
    i64 lane_degree_ = 1, state_rows_ = 0, states_ = 0;
    i64 whole_ = 0;  // nodes above its leaves
    i64 leaf_rows_ = 0, leaf_reach_ = 0;
    RankSums ranks_[2];
    int count_ = 0;
};

// Lays of some leaves on a block.
class TypicalBlock {
public:
    TypicalBlock(const Forest& f, const Constants& c, const Nodes& leaves, i64 width, i64 unit);
    // Inner nodes, or some of their rows, alone.
    TypicalRows spine(const std::vector<Span>& inner, const State& state) const;
    // Inner nodes and leaves; `taken` [leaf by rows] says which leaves, none that all are.
    TypicalRows with_leaves(const std::vector<Span>& inner, const std::vector<char>* taken, i64 lane_degree, i64 wide,
                            const State& state);
    // Leaves by rows, the longest first.
    const Nodes& by_rows() {
        order_leaves();
        return by_rows_;
    }

private:
    friend class TypicalRows;
    RankSums part(const Span& s, i64 ranks, bool inner, i64 share, i64 shares) const;
    RankSums inner_sums(const std::vector<Span>& inner) const;
    const std::vector<RankSums>& even_parts(i64 ranks);
    void order_leaves();

    const Forest& f_;
    const Constants& c_;
    const Nodes& leaves_;
    i64 width_, unit_, mates_, machine_nodes_;
    bool ordered_ = false;
    Nodes by_rows_;
    std::vector<i64> costs_;               // [leaf by rows]
    std::vector<int> by_cost_;             // numbers of leaves by rows, the costliest first
    std::vector<RankSums> cut_, dealt_;    // [leaf by rows] its part where it is cut over the block, over a lane
    std::vector<int> mine_, where_;
};

}  // namespace augtree
