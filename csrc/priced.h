// The passes of a choice with their prices: the twin of planning/priced.py.
#pragma once

#include <algorithm>

#include "typical.h"

namespace augtree {

constexpr Pair kNothing{0, 0};

// Passes of one kind: a fused one, a spine's chunks, or waves.
struct Group {
    std::vector<PassPrice> prices;
    Demand demand{};            // of all of them: together, or of waves in turn
    i64 time = 0, longest = 0;  // of all of them and of the longest, whatever the pair, at the least
    i64 bare = 0;               // time without the traffic that shows
    bool hidden = true;         // none shows

    void clear() {
        prices.clear();
        copied_.reset();
        demand = {};
        time = longest = bare = 0;
        hidden = true;
    }

    void finish(bool in_turn) {
        for (std::size_t i = 0; i < prices.size(); ++i) {
            const Demand one = prices[i].demand();
            demand = i == 0 ? one : in_turn ? demand.in_turn(one) : demand.together(one);
            const i64 least = prices[i].least_time();
            time += least;
            longest = std::max(longest, prices[i].least_slot(least));
            const i64 shown = prices[i].shown();
            bare += least - shown;
            hidden = hidden && !shown;
        }
    }

    // What copies to the host leave worth keeping of passes that rest there.
    Pair best_copied(i64 layers) const {
        if (!copied_) {
            Copied copied{layers};
            for (const PassPrice& price : prices) copied.add(price.copied());
            copied_ = copied.best();
        }
        return *copied_;
    }

private:
    mutable std::optional<Pair> copied_;
};

enum Part { kFused, kSpine, kWaves };

// How a pass of a choice moves what.
inline PassSpec spec_of(const Choice& choice, Part part) {
    PassSpec p;
    // A spine's keys are gathered where its waves send queries.
    p.primitive = static_cast<int>(part != kWaves && choice.primitive == MOVE_Q ? i64{GATHER_KV} : choice.primitive);
    p.pieces = choice.pieces;
    p.node_ranks = choice.node_ranks;
    p.keep = choice.keep;
    p.prefetch = choice.prefetch && part == kWaves;
    p.offload = choice.offload && part == kSpine;
    return p;
}

// The (first row, end) of the chunks that some inner nodes' rows are cut into.
inline std::vector<std::pair<i64, i64>> chunks_of(i64 rows, i64 chunks) {
    chunks = std::max<i64>(1, std::min(chunks, rows));
    std::vector<std::pair<i64, i64>> found;
    for (i64 i = 0; i < chunks; ++i) found.push_back({rows * i / chunks, rows * (i + 1) / chunks});
    return found;
}

inline i64 rows_of(const Forest& f, const Nodes& nodes) {
    i64 rows = 0;
    for (int node : nodes) rows += f.rows[node];
    return rows;
}

// An offer of prefill and waves without its choice: with these pairs of the spine's passes and of the waves.
struct Terms {
    i64 cost, time, slot, peak;
    Pair own, wave;
};

// One or two of a choice.
struct Offers {
    Terms made[2];
    int count = 0;
    const Terms* begin() const { return made; }
    const Terms* end() const { return made + count; }
};

inline Offer offer_of(const Jobs& jobs, const Choice& choice, const Terms& terms) {
    Offer made{terms.cost, terms.time, terms.slot, terms.peak, choice};
    const Pair own = jobs.said(terms.own), wave = jobs.said(terms.wave);
    made.choice.keep_layers = own.whole;
    made.choice.keep_attention = own.attention;
    made.choice.wave_layers = wave.whole;
    made.choice.wave_attention = wave.attention;
    return made;
}

// What a fused pass offers with the recompute pair that fits.
inline Offer fused_offer(const Jobs& jobs, const Choice& choice, const PassPrice& price) {
    const Pair pair = jobs.pair(price.demand(), jobs.options.room).value_or(kNothing);
    Choice made = choice;
    made.keep_layers = jobs.said(pair).whole;
    made.keep_attention = jobs.said(pair).attention;
    const auto [forward, backward] = price.time(pair);
    const i64 time = forward + backward;
    return jobs.offer(time, price.slot(pair, time), price.peak(pair), made);
}

// What a phased choice offers.
class Phased {
public:
    Phased(const Jobs& jobs, const Choice& choice, const Group& spine, const Group& waves)
        : jobs_(jobs), choice_(choice), spine_(spine), waves_(waves) {}

    // What no pair makes less.
    i64 least_cost() const {
        return jobs_.cost(spine_.time + waves_.time, std::max(spine_.longest, waves_.longest));
    }

    // What no way to move the same rows, and no more chunks of them, make less either.
    i64 bare_cost() const { return jobs_.cost(spine_.bare + waves_.bare, 0); }

    // Whether the prompt's passes ask for more memory while they run than the waves ever do: if not, more and smaller
    // ones cannot make a pair fit, or a plan leaner.
    bool spine_is_heavy() const {
        const Demand& turn = waves_.demand;
        return spine_.demand.work_again > std::min(turn.peak(kNothing), turn.peak({turn.layers, 0}));
    }

    // Whether traffic shows: otherwise further ways to move the same rows only cost more. Queries have one way.
    bool shows_traffic() const { return !(spine_.hidden && (choice_.primitive == MOVE_Q || waves_.hidden)); }

    // With the pairs that fit: either part takes what it can before the other. Where it is known that no cost as
    // high as `least_cost` matters, that stands for the cost.
    Offers offers(bool cost_matters) const {
        const Demand &kept = spine_.demand, &turn = waves_.demand;
        const i64 room = jobs_.options.room;
        if (jobs_.options.whole != -1) {
            const Pair same = jobs_.pair(kept, room).value_or(kNothing);
            return {{terms(same, same, cost_matters)}, 1};
        }
        const Pair wave = turn.fit(room - kept.kept(kNothing)).value_or(kNothing);
        const Pair first = spine_pair(kept.beside(turn.peak(kNothing)));
        const Pair rest = spine_pair(kept.beside(turn.peak(wave)));
        const Pair last = turn.fit(room - kept.kept(first)).value_or(kNothing);
        const Terms one = terms(rest, wave, cost_matters);
        return {{one, rest == first && wave == last ? one : terms(first, last, cost_matters)}, 2};
    }

private:
    // What fits, or, where it rests in host memory, what copies there leave worth keeping.
    Pair spine_pair(const Demand& kept) const {
        const i64 room = jobs_.options.room;
        if (spine_.prices.front().offloads()) {
            const Pair copied = spine_.best_copied(kept.layers);
            if (kept.peak(copied) <= room) return copied;
        }
        return kept.fit(room).value_or(kNothing);
    }

    Terms terms(Pair own, Pair wave, bool cost_matters) const {
        if (!cost_matters) return {least_cost(), 0, 0, peak(own, wave), own, wave};
        i64 time = 0, longest = 0;
        for (const auto& [group, pair] : {std::pair(&spine_, own), std::pair(&waves_, wave)}) {
            for (const PassPrice& price : group->prices) {
                const auto [forward, backward] = price.time(pair);
                time += forward + backward;
                longest = std::max(longest, price.slot(pair, forward + backward));
            }
        }
        return {jobs_.cost(time, longest), time, longest, peak(own, wave), own, wave};
    }

    i64 peak(Pair own, Pair wave) const {
        const std::size_t ranks = spine_.prices.front().lines.size();
        i64 peak = 0, few[2] = {0, 0};
        std::vector<i64> many(ranks > 2 ? ranks : 0, 0);
        i64* alive = ranks > 2 ? many.data() : few;
        for (const PassPrice& price : spine_.prices) {
            for (std::size_t i = 0; i < ranks; ++i) {
                const Line& x = price.lines[i];
                alive[i] += price.kept(x, own);
                peak = std::max(peak, alive[i] + price.work(x, own));
            }
        }
        for (const PassPrice& price : waves_.prices) {
            for (std::size_t i = 0; i < price.lines.size(); ++i) {
                // One rank stands for all of an even spine, two may for a wave.
                const Line& x = price.lines[i];
                peak = std::max(peak, alive[std::min(i, ranks - 1)] + price.kept(x, wave) + price.work(x, wave));
            }
        }
        return peak;
    }

    const Jobs& jobs_;
    const Choice& choice_;
    const Group& spine_;
    const Group& waves_;
};

}  // namespace augtree
