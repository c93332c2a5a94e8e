// Prices of passes and jobs: the twin of planning/{lanes,assign,recipe,loads,cost,jobs}.py, on 64-bit integers.
//
// Every function stands for the Python function of the same name and computes the same integers; Python bounds
// what comes in, so that nothing overflows. Products of two such integers are taken in 128 bits.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <tuple>
#include <vector>

namespace augtree {

using i64 = std::int64_t;
using i128 = __int128;

struct Span {
    int node;
    i64 lo, hi;
};
using Placement = std::vector<std::vector<Span>>;  // [rank] -> spans, by node, then by row

enum Primitive { GATHER_KV, MOVE_KV, MOVE_Q, RING, LOCAL };

struct Rate {
    i64 multiplier, shift;
    i64 ns(i64 count) const { return static_cast<i64>(static_cast<i128>(count) * multiplier >> shift); }
};

// What prices are made of; the order is that of `constants` in planning/fast.py.
struct Constants {
    i64 layers, stages, recomputed, attention_kept, logit_rows;
    i64 saved, input, attended, kv, kv_grad, query, result, result_grad, query_grad, logit, hidden;
    i64 node_ranks, half_rows, tile_ns, tile_rows, query_rows, attention_pct, gemm_pct;
    i64 stage_ns, layer_ns, pass_ns, message_ns, overlap, has_host;
    Rate linear, vocabulary, beside, merging, attention, link, nic, host;
};

struct Forest {
    std::vector<int> parents;
    std::vector<i64> rows, scored, starts;
    std::vector<std::vector<int>> ancestors;
    std::vector<char> inner;  // has a child in the forest
    i64 area(int node, i64 lo, i64 hi) const;
};

struct PassSpec {
    int primitive = GATHER_KV;
    i64 pieces = 1, node_ranks = 0;
    bool keep = true, prefetch = false, offload = false;
};

struct RankLoad {
    i64 rows = 0, scored = 0, pairs = 0, visiting = 0, early = 0;
    i64 diagonal = 0, triangle = 0;              // masked pairs and all pairs of its causal tiles
    i64 tiles = 0, tiles_a_source = 0, merged = 0, merged_a_source = 0;
    i64 kv_in = 0, kv_out = 0, kv_far_in = 0, kv_far_out = 0, q_in = 0, q_out = 0, q_far_in = 0, q_far_out = 0;
    i64 messages = 0;
};

struct Loads {
    std::vector<RankLoad> ranks;
    i64 sources = 0, stages = 0;
};

struct Pair {
    i64 whole, attention;
};

struct Demand {
    i64 layers, fixed, whole, attention, work, work_again, saved, saved_attention;
    i64 kept(Pair p) const { return fixed + p.whole * whole + p.attention * attention; }
    i64 peak(Pair p) const { return kept(p) + (p.whole == layers ? work : work_again); }
    Demand together(const Demand& o) const;
    Demand in_turn(const Demand& o) const;
    Demand beside(i64 bytes) const;
    std::optional<Pair> fit(i64 room) const;
};

struct Line {
    i64 forward, backward, exposed, again, again_rest, vocabulary, vocabulary_back;
    i64 fixed, whole, attention, state, state_whole, work, work_again;
};

class PassPrice {
public:
    PassPrice(const Constants& c, const Loads& loads, const PassSpec& p, bool provides);
    std::pair<i64, i64> time(Pair pair) const;
    bool hidden() const;
    i64 kept(const Line& x, Pair pair) const;
    i64 work(const Line& x, Pair pair) const { return pair.whole == c_.layers ? x.work : x.work_again; }
    i64 peak(Pair pair) const;
    Demand demand() const;
    std::vector<Line> lines;

private:
    i64 resting(const Line& x, Pair pair) const;
    const Constants& c_;
    bool offloads_;
};

// Rows on ranks.
struct Lanes {
    std::vector<int> inner, leaves;
    i64 width = 1, lane_degree = 1, wide = 0;
    i64 lo = 0, hi = -1;
};
Placement place(const Forest& f, const Lanes& r, i64 unit);
std::vector<int> assign(const std::vector<i64>& weights, const std::vector<i64>& loads);
std::vector<int> longest_first(const std::vector<i64>& weights, const std::vector<i64>& loads);
std::vector<i64> level(const std::vector<i64>& loads, i64 amount);

// Loads of a pass; `start` is the pool rank that its block begins with.
class PassRows {
public:
    PassRows(const Forest& f, const Constants& c, Placement placement, std::vector<const Placement*> states, i64 start);
    Loads loads(const PassSpec& p);

private:
    struct Keys;
    void index();
    void basic();
    void gather(std::vector<RankLoad>& out, bool with_states);
    void handed_on(std::vector<RankLoad>& out);
    void ring(std::vector<RankLoad>& out);
    void move_q(std::vector<RankLoad>& out);
    std::uint64_t* viewers(const Span& s, std::uint64_t* into) const;

    const Forest& f_;
    const Constants& c_;
    Placement placement_;
    std::vector<const Placement*> states_;
    int world_, words_, nodes_ = 0, machine_nodes_ = 0;
    std::vector<int> node_of_;                      // [rank] machine node
    std::vector<std::vector<std::uint64_t>> mates_;  // [machine node] ranks
    std::vector<int> local_;                        // forest node -> index, -1
    std::vector<std::vector<std::pair<int, i64>>> own_;   // [rank] (index, rows)
    std::vector<std::vector<std::pair<int, i64>>> last_;  // [rank] (index, how far down), cut nodes only
    std::vector<std::vector<i64>> before_last_;     // [rank] rows of each of them before its last span
    std::vector<std::vector<int>> whole_;           // [rank] indices seen whole
    std::vector<int> forest_node_;                  // index -> forest node
    std::vector<std::vector<std::uint64_t>> seen_whole_;              // [index] ranks
    std::vector<std::vector<i64>> ends_;                              // [index] how far down the others see
    std::vector<std::vector<std::uint64_t>> below_;                   // [index] suffix masks
    std::vector<RankLoad> basic_;
    std::optional<std::vector<RankLoad>> direct_;
};

// A block's heaviest ranks in closed forms: the twin of planning/typical.py.
struct Lay {
    std::vector<Span> inner;
    std::vector<int> leaves;
    i64 width = 1, lane_degree = 1, wide = 0, state_rows = 0, state_nodes = 0;
};

class TypicalRows {
public:
    TypicalRows(const Forest& f, const Constants& c, Lay lay, i64 unit);
    Loads loads(const PassSpec& p) const;

private:
    struct Part {
        i64 rows, pairs, scored, start, ranks, of;
        bool inner;
    };
    using Parts = std::vector<Part>;
    Part cut(const Span& s, i64 ranks, bool inner, i64 share, i64 shares) const;
    std::vector<Parts> leaves() const;
    RankLoad load(const Parts& parts, const PassSpec& p) const;
    void traffic(const Parts& parts, const PassSpec& p, RankLoad& x) const;
    void visits(const Parts& parts, RankLoad& x) const;
    bool crosses(const PassSpec& p) const;

    const Forest& f_;
    const Constants& c_;
    Lay lay_;
    i64 unit_, mates_, machine_nodes_;
    std::vector<Parts> ranks_;
};

struct Options {
    i64 least, lane_degree, fused, phased, gather, move_q, lean, hops, prefetch, offload, copies, whole, attention;
    i64 room, slot_weight, unit;
    std::vector<i64> pieces, chunks, waves;
};

struct Choice {
    i64 degree = 1, phased = 0, chunks = 1, waves = 1, primitive = GATHER_KV, pieces = 1, node_ranks = 0, prefetch = 0;
    i64 lane_degree = 1, wide = 0, keep = 1, keep_layers = -1, keep_attention = 0, wave_layers = -1;
    i64 wave_attention = 0, offload = 0;
    auto fields() const {
        return std::tie(degree, phased, chunks, waves, primitive, pieces, node_ranks, prefetch, lane_degree, wide, keep,
                        keep_layers, keep_attention, wave_layers, wave_attention, offload);
    }
};

struct Offer {
    i64 cost, time, slot, peak;
    Choice choice;
};

struct Job {
    std::vector<int> nodes;
    i64 offset;
    Offer offer;
};

using Nodes = std::vector<int>;

class Jobs {
public:
    Jobs(Forest f, Constants c, Options o) : forest(std::move(f)), constants(c), options(std::move(o)), mark_(forest.rows.size(), 0) {}
    std::optional<Offer> estimate(const Nodes& nodes, i64 width);
    std::optional<Offer> best(const Nodes& nodes, i64 width);
    Offer settle(const Nodes& nodes, const Choice& choice);
    std::optional<std::vector<Job>> with_copies(const Nodes& nodes, i64 width);
    // The same for nodes first..end, remembered.
    const std::optional<std::vector<Job>>& tree_jobs(int first, int end, i64 width);
    std::vector<std::vector<i64>> table(
        const std::vector<std::pair<int, int>>& trees, const std::vector<i64>& widths, i64 enough);

    void split_inner(const Nodes& nodes, Nodes& inner, Nodes& leaves);
    i64 row_cost(int node) const { return forest.area(node, 0, forest.rows[node]) + options.unit * forest.rows[node]; }
    std::vector<Nodes> waves_of(const Nodes& leaves, i64 waves) const;
    std::optional<Pair> pair(const Demand& d, i64 room) const;
    Pair said(Pair p) const { return options.whole == -2 ? Pair{-1, 0} : p; }
    Offer offer(const std::vector<std::pair<i64, i64>>& times, i64 peak, const Choice& choice) const;
    i64 ideal(const Nodes& nodes, i64 ranks) const;
    i64 floor(const Nodes& nodes, i64 ranks) const;

    const Forest forest;
    const Constants constants;
    const Options options;
    std::optional<Offer> leanest;

private:
    std::vector<Nodes> copies_of(const Nodes& nodes, i64 copies);
    std::vector<char> mark_;
    std::map<std::tuple<int, int, i64>, std::optional<std::vector<Job>>> trees_;
};

}  // namespace augtree
