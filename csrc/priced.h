// The passes of a choice with their prices: the twin of planning/priced.py.
#pragma once

#include <algorithm>
#include <array>
#include <deque>
#include <forward_list>
#include <map>

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

    void finish(bool in_turn) {
        for (std::size_t i = 0; i < prices.size(); ++i) {
            const Demand one = prices[i].demand();
            demand = i == 0 ? one : in_turn ? demand.in_turn(one) : demand.together(one);
            const i64 least = prices[i].least_time();
            time += least;
            longest = std::max(longest, prices[i].least_slot(least));
            bare += prices[i].bare_time();
            hidden = hidden && prices[i].hidden();
        }
    }
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

// One or two offers of a choice.
struct Offers {
    Offer made[2];
    int count = 0;
    Offer* begin() { return made; }
    Offer* end() { return made + count; }
    const Offer* begin() const { return made; }
    const Offer* end() const { return made + count; }
};

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
            return {{offer(same, same, cost_matters)}, 1};
        }
        const Pair wave = turn.fit(room - kept.kept(kNothing)).value_or(kNothing);
        const Pair first = spine_pair(kept.beside(turn.peak(kNothing)));
        const Pair rest = spine_pair(kept.beside(turn.peak(wave)));
        const Pair last = turn.fit(room - kept.kept(first)).value_or(kNothing);
        return {{offer(rest, wave, cost_matters), offer(first, last, cost_matters)}, 2};
    }

private:
    // What fits, or, where it rests in host memory, what copies there leave worth keeping.
    Pair spine_pair(const Demand& kept) const {
        const i64 room = jobs_.options.room;
        if (spine_.prices.front().offloads()) {
            Copied copied{kept.layers};
            for (const PassPrice& price : spine_.prices) copied.add(price.copied());
            const Pair best = copied.best();
            if (kept.peak(best) <= room) return best;
        }
        return kept.fit(room).value_or(kNothing);
    }

    Offer offer(Pair own, Pair wave, bool cost_matters) const {
        Choice made = choice_;
        made.keep_layers = jobs_.said(own).whole;
        made.keep_attention = jobs_.said(own).attention;
        made.wave_layers = jobs_.said(wave).whole;
        made.wave_attention = jobs_.said(wave).attention;
        if (!cost_matters) return {least_cost(), 0, 0, peak(own, wave), made};
        i64 time = 0, longest = 0;
        for (const auto& [group, pair] : {std::pair(&spine_, own), std::pair(&waves_, wave)}) {
            for (const PassPrice& price : group->prices) {
                const auto [forward, backward] = price.time(pair);
                time += forward + backward;
                longest = std::max(longest, price.slot(pair, forward + backward));
            }
        }
        return jobs_.offer(time, longest, peak(own, wave), made);
    }

    i64 peak(Pair own, Pair wave) const {
        const std::size_t ranks = spine_.prices.front().lines.size();
        i64 peak = 0, one = 0;
        std::vector<i64> several(ranks > 1 ? ranks : 0, 0);
        i64* alive = ranks > 1 ? several.data() : &one;
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

// The passes of one job's choices by its heaviest ranks, each kind priced once.
class Estimates {
public:
    Estimates(const Jobs& jobs, const Nodes& inner, const Nodes& leaves, i64 width)
        : jobs_(jobs), inner_(inner), leaves_(leaves), width_(width), inner_rows_(rows_of(jobs.forest, inner)),
          block_(jobs.forest, jobs.constants, leaves, width, jobs.options.unit) {
        for (int node : inner) spans_.push_back({node, 0, jobs.forest.rows[node]});
    }

    TypicalRows fused(i64 lane_degree, i64 wide) {
        if (leaves_.empty()) return block_.spine(spans_, {});
        return block_.with_leaves(spans_, nullptr, lane_degree, std::min(wide, leaf_count()), {});
    }

    PassPrice price(const TypicalRows& rows, const PassSpec& p, bool provides) const {
        const TypicalLoads loads = rows.loads(p);
        return {jobs_.constants, loads.ranks, static_cast<std::size_t>(loads.count), loads.stages, p, provides};
    }

    const Group& spine(const Choice& choice) {
        const PassSpec p = spec_of(choice, kSpine);
        Group& group = groups_[{kSpine, choice.chunks, 1, 0, p.primitive, p.pieces, moves(p)}];
        if (group.prices.empty()) {
            const std::vector<TypicalRows>& chunks = chunk_rows(choice.chunks);
            group.prices.reserve(chunks.size());
            for (const TypicalRows& rows : chunks) group.prices.push_back(price(rows, p, true));
            group.finish(false);
        }
        return group;
    }

    const Group& waves(const Choice& choice) {
        const PassSpec p = spec_of(choice, kWaves);
        Group& group = groups_[{kWaves, choice.waves, choice.lane_degree, choice.wide, p.primitive, p.pieces,
                                moves(p) + 16 * choice.chunks}];
        if (group.prices.empty()) {
            const std::vector<TypicalRows>& waves = wave_rows(choice);
            group.prices.reserve(waves.size());
            for (const TypicalRows& rows : waves) group.prices.push_back(price(rows, p, false));
            group.finish(true);
        }
        return group;
    }

private:
    using Key = std::array<i64, 7>;

    // A few values by key; they stay where they are.
    template <class Value>
    class Known {
    public:
        Value& operator[](const Key& key) {
            for (auto& [known, value] : held_) {
                i64 differs = 0;
                for (std::size_t i = 0; i < key.size(); ++i) differs |= known[i] ^ key[i];
                if (!differs) return value;
            }
            return held_.emplace_front(key, Value{}).second;
        }

    private:
        std::forward_list<std::pair<Key, Value>> held_;
    };

    static i64 moves(const PassSpec& p) {
        return (p.node_ranks ? 8 : 0) + 4 * p.keep + 2 * p.prefetch + p.offload;
    }
    i64 leaf_count() const { return static_cast<i64>(leaves_.size()); }

    const std::vector<TypicalRows>& chunk_rows(i64 chunks) {
        std::vector<TypicalRows>& found = rows_[{kSpine, chunks}];
        if (!found.empty()) return found;
        const auto runs = chunks_of(inner_rows_, chunks);
        found.reserve(runs.size());
        for (const auto& [lo, hi] : runs) {
            std::vector<Span> spans;
            i64 start = 0;
            for (const Span& s : spans_) {
                const i64 first = std::max<i64>(lo - start, 0), last = std::min(hi - start, s.hi);
                if (first < last) spans.push_back({s.node, first, last});
                start += s.hi;
            }
            found.push_back(block_.spine(spans, {lo, 0, static_cast<i64>(found.size())}));
        }
        return found;
    }

    const std::vector<TypicalRows>& wave_rows(const Choice& choice) {
        std::vector<TypicalRows>& found =
            rows_[{kWaves, choice.waves, choice.lane_degree, choice.wide, choice.chunks}];
        if (!found.empty()) return found;
        const std::vector<Wave>& waves = dealt(choice.waves);
        const State state{inner_rows_, static_cast<i64>(inner_.size()),
                          static_cast<i64>(chunks_of(inner_rows_, choice.chunks).size())};
        found.reserve(waves.size());
        for (const auto& [count, taken] : waves) {
            found.push_back(block_.with_leaves({}, &taken, choice.lane_degree, std::min(choice.wide, count),
                                               state));
        }
        return found;
    }

    struct Wave {
        i64 count;
        std::vector<char> taken;  // [leaf by rows]
    };

    const std::vector<Wave>& dealt(i64 waves) {
        for (const auto& [number, known] : dealt_) {
            if (number == waves) return known;
        }
        std::vector<int> wave_of(jobs_.forest.rows.size());
        const std::vector<Nodes> parts = jobs_.waves_of(leaves_, waves);
        for (std::size_t i = 0; i < parts.size(); ++i) {
            for (int node : parts[i]) wave_of[node] = static_cast<int>(i);
        }
        std::vector<Wave> made(parts.size());
        for (std::size_t i = 0; i < parts.size(); ++i) {
            made[i] = {static_cast<i64>(parts[i].size()), std::vector<char>(leaves_.size(), 0)};
        }
        const Nodes& order = block_.by_rows();
        for (std::size_t i = 0; i < order.size(); ++i) made[wave_of[order[i]]].taken[i] = 1;
        dealt_.push_back({waves, std::move(made)});
        return dealt_.back().second;
    }

    const Jobs& jobs_;
    const Nodes& inner_;
    const Nodes& leaves_;
    i64 width_, inner_rows_;
    std::vector<Span> spans_;
    TypicalBlock block_;
    Known<std::vector<TypicalRows>> rows_;  // by how they lie
    Known<Group> groups_;                   // and by how they move, too
    std::vector<std::pair<i64, std::vector<Wave>>> dealt_;
};

// The choices of one job counted rank by rank. Rows that lie alike are placed and looked at once.
class Counted {
public:
    Counted(const Jobs& jobs, const Nodes& inner, const Nodes& leaves) : jobs_(jobs), inner_(inner), leaves_(leaves) {}

    Offers offers(const Choice& choice) {
        if (!choice.phased || inner_.empty() || leaves_.empty()) {
            return {{fused_offer(jobs_, choice, priced(fused(choice).front(), choice, kFused))}, 1};
        }
        Group spine, waves;
        for (Pass& pass : chunks(choice)) spine.prices.push_back(priced(pass, choice, kSpine));
        for (Pass& pass : this->waves(choice)) waves.prices.push_back(priced(pass, choice, kWaves));
        spine.finish(false);
        waves.finish(true);
        return Phased(jobs_, choice, spine, waves).offers(true);
    }

private:
    struct Pass {
        Placement placement;
        std::optional<PassRows> rows;
    };
    using Passes = std::deque<Pass>;  // rows keep on pointing at placements
    using Key = std::array<i64, 6>;

    Passes& fused(const Choice& choice) {
        Passes& found = known_[{kFused, choice.degree, choice.lane_degree, choice.wide}];
        if (found.empty()) add(found, lanes(choice, inner_, leaves_), {});
        return found;
    }

    Passes& chunks(const Choice& choice) {
        Passes& found = known_[{kSpine, choice.degree, choice.chunks}];
        if (!found.empty()) return found;
        std::vector<const Placement*> before;
        for (const auto& [lo, hi] : chunks_of(rows_of(jobs_.forest, inner_), choice.chunks)) {
            add(found, {inner_, {}, choice.degree, 1, 0, lo, hi}, before);
            before.push_back(&found.back().placement);
        }
        return found;
    }

    Passes& waves(const Choice& choice) {
        std::vector<const Placement*> prompt;
        for (const Pass& pass : chunks(choice)) prompt.push_back(&pass.placement);
        Passes& found =
            known_[{kWaves, choice.degree, choice.lane_degree, choice.wide, choice.waves, choice.chunks}];
        if (!found.empty()) return found;
        for (const Nodes& wave : jobs_.waves_of(leaves_, choice.waves)) add(found, lanes(choice, {}, wave), prompt);
        return found;
    }

    void add(Passes& into, const Lanes& lay, const std::vector<const Placement*>& reads) {
        Pass& pass = into.emplace_back();
        pass.placement = place(jobs_.forest, lay, jobs_.options.unit);
        pass.rows.emplace(jobs_.forest, jobs_.constants, pass.placement, reads, 0);
    }

    static Lanes lanes(const Choice& choice, const Nodes& inner, const Nodes& leaves) {
        return {inner, leaves, choice.degree, choice.lane_degree,
                std::min(choice.wide, static_cast<i64>(leaves.size()))};
    }

    PassPrice priced(Pass& pass, const Choice& choice, Part part) const {
        const PassSpec p = spec_of(choice, part);
        const Loads loads = pass.rows->loads(p);
        return {jobs_.constants, loads.ranks.data(), loads.ranks.size(), loads.stages, p, part == kSpine};
    }

    const Jobs& jobs_;
    const Nodes& inner_;
    const Nodes& leaves_;
    std::map<Key, Passes> known_;
};

}  // namespace augtree
