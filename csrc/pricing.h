// Prices of passes and jobs: the twin of planning/{lanes,assign,recipe,loads,cost,jobs}.py, on 64-bit integers.
//
// Every function stands for the Python function of the same name and computes the same integers; Python bounds
// what comes in, so that nothing overflows. Products of two such integers are taken in 128 bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <memory_resource>
#include <optional>
#include <tuple>
#include <vector>

namespace augtree {

using i64 = std::int64_t;
using Nodes = std::vector<int>;
using i128 = __int128;
using Memory = std::pmr::memory_resource;
template <class T>
using Vec = std::pmr::vector<T>;

struct Span {
    int node;
    i64 lo, hi;
};

enum Primitive { GATHER_KV, MOVE_KV, MOVE_Q, RING, LOCAL };

struct Rate {
    i64 multiplier, shift;
    i64 whole = 0;           // of the multiplier, shifted
    std::uint64_t rest = 0;  // what that leaves out, in 1/2^64: the upper half of a product is its share

    void prepare() {
        if (shift > 63) return;
        whole = multiplier >> shift;
        rest = shift ? static_cast<std::uint64_t>(multiplier) << (64 - shift) : 0;
    }
    // count * multiplier >> shift
    i64 ns(i64 count) const {
        if (shift > 63) return static_cast<i64>(static_cast<i128>(count) * multiplier >> shift);
        return count * whole + static_cast<i64>(static_cast<i128>(count) * rest >> 64);
    }
};

// What prices are made of; the order is that of `constants` in planning/fast.py.
struct Constants {
    i64 layers, stages, recomputed, attention_kept, logit_rows;
    i64 saved, input, attended, kv, kv_grad, query, result, result_grad, query_grad, logit, hidden;
    i64 node_ranks, half_rows, tile_ns, tile_rows, query_rows, attention_pct, gemm_pct;
    i64 stage_ns, layer_ns, pass_ns, message_ns, overlap, has_host;
    Rate linear, vocabulary, beside, merging, attention, link, nic, host;
    i64 stage_layers;  // the most layers of a pipeline's stage
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
    i64 leaves_early = 0;                        // early, too, unless queries travel
    i64 below = 0, above = 0;                    // rows with ancestors, their pairs with these
    i64 states = 0;                              // earlier passes of which it holds keys
    bool resumed = false;                        // some of its own nodes'
    i64 tiles = 0, tiles_a_landing = 0, merged = 0, merged_a_landing = 0;
    i64 cuts = 0, cut_rows = 0, lane_cuts = 0, lane_cut_rows = 0, lane = 1;  // nodes cut over all ranks, or `lane`
    i64 kv_in = 0, kv_out = 0, kv_far_in = 0, kv_far_out = 0, q_in = 0, q_out = 0, q_far_in = 0, q_far_out = 0;
    i64 messages = 0;
};

struct Pair {
    i64 whole, attention;
    bool operator==(const Pair& o) const { return whole == o.whole && attention == o.attention; }
};

struct Demand {
    i64 layers, fixed, whole, attention, work, work_again, saved, saved_attention;
    i64 kept(Pair p) const { return fixed + p.whole * whole + p.attention * attention; }
    i64 peak(Pair p) const { return kept(p) + (p.whole == layers ? work : work_again); }
    Demand together(const Demand& o) const;
    Demand in_turn(const Demand& o) const;
    Demand beside(i64 bytes) const;
    std::optional<Pair> fit(i64 room) const;
    std::optional<Pair> fit_evenly(i64 most, i64 left) const;
};

// What passes compute whose memory is copied to the host and back, and these copies.
struct Copied {
    // Copies are chosen as if each took a share more: see planning/demand.py.
    static constexpr i64 kHostSpare = 16;
    i64 layers, forward = 0, backward = 0, saved = 0, saved_attention = 0, fixed = 0, whole = 0, attention = 0;
    void add(const Copied& o);
    Pair best() const;
};

struct Line {
    i64 forward, backward, exposed, again, again_rest, vocabulary, vocabulary_back;
    i64 fixed, whole, attention, state, state_whole, work, work_again;
};

// What each rank takes and needs; the few of a typical block without memory of their own.
class Lines {
public:
    Lines(std::size_t count, Memory* memory) : count_(count), many_(count > kFew ? count : 0, memory) {}
    Line* begin() { return count_ > kFew ? many_.data() : few_; }
    Line* end() { return begin() + count_; }
    const Line* begin() const { return count_ > kFew ? many_.data() : few_; }
    const Line* end() const { return begin() + count_; }
    std::size_t size() const { return count_; }
    const Line& operator[](std::size_t i) const { return begin()[i]; }

private:
    static constexpr std::size_t kFew = 2;
    std::size_t count_;
    Line few_[kFew];
    Vec<Line> many_;
};

class PassPrice {
public:
    PassPrice(const Constants& c, const RankLoad* ranks, std::size_t count, i64 stages, const PassSpec& p,
              bool provides, Memory* memory = std::pmr::get_default_resource());
    std::pair<i64, i64> time(Pair pair, bool vocabulary = true) const;
    // Forward and backward without the vocabulary.
    i64 slot(Pair pair) const;
    // What filling and draining a pipeline waits for; `time`: forward and backward of the pair.
    i64 slot(Pair pair, i64 time) const { return c_->stages == 1 ? time : slot(pair); }
    // With nothing recomputed, and nothing waiting for the host: no pair takes less.
    i64 least_time(bool vocabulary = true) const;
    i64 least_slot(i64 time) const { return c_->stages == 1 ? time : least_time(false); }
    // The traffic that nothing hides.
    i64 shown() const;
    i64 kept(const Line& x, Pair pair) const {
        return (offloads_ ? 0 : resting(x, pair)) + x.state - pair.whole * x.state_whole;
    }
    i64 work(const Line& x, Pair pair) const { return pair.whole == c_->layers ? x.work : x.work_again; }
    i64 peak(Pair pair) const;
    Demand demand() const;
    bool offloads() const { return offloads_; }
    Copied copied() const;
    Lines lines;

private:
    i64 resting(const Line& x, Pair pair) const { return x.fixed + pair.whole * x.whole + pair.attention * x.attention; }
    const Constants* c_;
    bool offloads_;
};

struct Options {
    i64 least, limit, lane_degree, fused, phased, gather, move_q, lean, hops, prefetch, offload, copies;
    i64 whole, attention, room, slot_weight, unit;
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

class Estimates;  // see estimates.h

struct Job {
    std::vector<int> nodes;
    i64 offset;
    Offer offer;
};

class Jobs {
public:
    Jobs(Forest f, Constants c, Options o) : forest(std::move(f)), constants(c), options(std::move(o)), mark_(forest.rows.size(), 0) {}
    Jobs(const Jobs&) = delete;
    // The cheapest; or, where it costs `below` or more, perhaps none.
    std::optional<Offer> estimate(const Nodes& nodes, i64 width, i64 below = INT64_MAX);
    std::optional<Offer> best(const Nodes& nodes, i64 width);
    Offer settle(const Nodes& nodes, const Choice& choice);
    std::optional<std::vector<Job>> with_copies(const Nodes& nodes, i64 width);
    // The same for nodes first..end, remembered.
    const std::optional<std::vector<Job>>& tree_jobs(int first, int end, i64 width);
    std::vector<std::vector<i64>> table(
        const std::vector<std::pair<int, int>>& trees, const std::vector<i64>& widths, i64 enough, bool many);

    void split_inner(const Nodes& nodes, Nodes& inner, Nodes& leaves);
    i64 row_cost(int node) const { return forest.area(node, 0, forest.rows[node]) + options.unit * forest.rows[node]; }
    // [leaf] its wave; no wave is empty.
    std::vector<int> wave_of(const Nodes& leaves, i64 waves) const;
    std::vector<Nodes> waves_of(const Nodes& leaves, i64 waves) const;
    std::optional<Pair> pair(const Demand& d, i64 room) const;
    Pair said(Pair p) const { return options.whole == -2 ? Pair{-1, 0} : p; }
    // What passes cost that take `time` together and `slot` the longest.
    i64 cost(i64 time, i64 slot) const {
        return constants.stages == 1 ? time : time + slot * (constants.stages - 1) * options.slot_weight / 16;
    }
    Offer offer(i64 time, i64 slot, i64 peak, const Choice& choice) const {
        return {cost(time, slot), time, slot, peak, choice};
    }
    Estimates& estimates();
    i64 ideal(const Nodes& nodes, i64 ranks) const;
    i64 floor(const Nodes& nodes, i64 ranks) const;

    const Forest forest;
    const Constants constants;
    const Options options;
    std::optional<Offer> leanest;
    // For one job's passes at a time: most of the time would go to taking and giving back memory.
    static constexpr std::size_t kScratch = 1 << 20;
    // Kept for all of a thread: given back to the system, its pages would be cleared again for every forest.
    static std::byte* scratch() {
        thread_local const std::unique_ptr<std::byte[]> held{new std::byte[kScratch]};
        return held.get();
    }

private:
    std::vector<Nodes> copies_of(const Nodes& nodes, i64 copies);
    std::vector<i64> copies(const Nodes& nodes, i64 width);
    std::vector<Nodes> with_chains(std::vector<Nodes> parts) const;
    const std::vector<Nodes>& parts_of(const Nodes& nodes, i64 copies);
    std::optional<std::vector<Job>> in_parts(const std::vector<Nodes>& parts, i64 width, i64 below);
    bool alike(const Nodes& a, const Nodes& b) const;
    Offer cheapest(const std::vector<Offer>& offers) const;
    std::vector<char> mark_;
    Nodes cut_;                                   // what `parts_` are of
    std::map<i64, std::vector<Nodes>> parts_;     // by number of copies
    std::shared_ptr<Estimates> estimates_;  // of one job at a time
    std::map<std::tuple<int, int, i64>, std::optional<std::vector<Job>>> trees_;
};

}  // namespace augtree
