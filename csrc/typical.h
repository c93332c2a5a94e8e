// A block's heaviest ranks in closed forms: the twin of planning/typical.py.
#pragma once

#include "loads.h"

namespace augtree {

// Sums over the parts of nodes that lie on one rank.
struct RankSums {
    i64 rows, scored, pairs, early, leaves_early, diagonal, triangle;
    i64 below;                     // rows with something above them
    i64 cuts, cut_rows;            // parts of nodes cut over the block, and their rows
    i64 lane_cuts, lane_cut_rows;  // the same of nodes cut over a lane
    i64 parts, shared, in_lane;
    i64 reach;                     // pairs of its rows and of what is above them
    i64 under, above;              // the same of ancestors alone, without a node's own earlier rows: RankLoad's
    void add(const RankSums& o);
};

struct TypicalLoads {
    RankLoad ranks[2];
    int count = 0;
    i64 stages = 0;
};

class TypicalBlock;

// Leaves by rows, the longest first, and their places by cost.
struct LeafOrder {
    Nodes by_rows;
    std::vector<i64> costs;      // [leaf by rows]
    std::vector<int> cost_rank;  // [leaf by rows] its place by cost; empty: the same order
    void start(const Forest& f, i64 unit, const Nodes& leaves);
};

// Some leaves of a block: a wave, or all of them.
struct LeafSet {
    std::vector<int> members;        // numbers of leaves by rows, the longest first
    i64 rows = 0, reach = 0;         // of all of them, and their pairs with what is above them
    void clear() {
        members.clear();
        rows = reach = 0;
    }
    void add(const Forest& f, int node, int leaf) {
        members.push_back(leaf);
        rows += f.rows[node];
        reach += f.rows[node] * f.starts[node];
    }
};

// How a block's keys land, whatever rows they belong to; see loads.cpp.
struct Landing {
    bool crosses;
    i64 landings, cut, lane_cut, lane_landings;  // tiles of a node cut over the block, over a lane
};

// What earlier passes keep on the block: rows, and how many passes.
struct State {
    i64 rows = 0, passes = 0;
};

// The heaviest ranks of a lay: the fullest lane's, and one that takes most of the cut leaves.
class TypicalRows {
public:
    explicit TypicalRows(const TypicalBlock& block);
    // Into what was made for other rows, or for none: clearing it all each time would take long.
    void loads(const PassSpec& p, const Landing& landing, TypicalLoads& into) const;
    Landing landing(const PassSpec& p) const;
    // What is kept before it.
    void resume(const State& state) {
        state_rows_ = state.rows;
        states_ = state.passes;
    }

private:
    friend class TypicalBlock;
    RankSums& add_rank(const RankSums& sums) { return ranks_[count_++] = sums; }
    void load(const RankSums& sums, const PassSpec& p, const Landing& landing, RankLoad& x) const;
    void traffic(const RankSums& sums, const PassSpec& p, bool crosses, RankLoad& x) const;
    void visits(const RankSums& sums, RankLoad& x) const;

    i64 width_, mates_, machine_nodes_;
    i64 lane_degree_ = 1, state_rows_ = 0, states_ = 0;
    i64 whole_ = 0;  // nodes above its leaves
    i64 leaf_rows_ = 0, leaf_reach_ = 0;
    RankSums ranks_[2];
    int count_ = 0;
};

// Lays of some leaves on a block. It is used for one block after the other, and keeps its memory.
class TypicalBlock {
public:
    TypicalBlock(const Forest& f, const Constants& c) : f_(f), c_(c) {}
    void start(const LeafOrder& leaves, i64 width);
    // What some inner nodes, or some of their rows, give to each rank.
    RankSums inner_sums(const std::vector<Span>& inner) const;
    // Inner nodes alone.
    TypicalRows& spine(const RankSums& inner, const State& state, std::vector<TypicalRows>& into) const;
    // Inner nodes and leaves; `nodes` are above these.
    TypicalRows& with_leaves(const RankSums& inner, const LeafSet& part, i64 lane_degree, i64 wide,
                             i64 nodes, std::vector<TypicalRows>& into);

private:
    friend class TypicalRows;
    struct Shares {
        i64 fullest, most;
    };
    RankSums sums_of(const Span& s, i64 ranks, bool inner, i64 share, i64 shares) const;
    const std::vector<RankSums>& even_parts(i64 ranks);
    void deal(const LeafSet& part, std::size_t cut, i64 lanes);
    Shares level_lanes(i64 lanes, i64 amount) const;

    const Forest& f_;
    const Constants& c_;
    i64 width_ = 1, mates_ = 1, machine_nodes_ = 1;
    const LeafOrder* leaves_ = nullptr;
    std::vector<RankSums> cut_, dealt_;    // [leaf by rows] its part where it is cut over the block, over a lane
    // Of the lay that is being made: what is dealt, the costliest first, its lanes, and what they have.
    std::vector<int> dealing_, where_;
    LeastLoaded lanes_;
    std::vector<i64> loads_;               // the lowest first; those of no lane that is empty
    int fullest_ = 0, emptiest_ = 0;
};

}  // namespace augtree
