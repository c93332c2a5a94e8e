// The passes of a choice with their prices: the twin of planning/priced.py.
#pragma once

#include <algorithm>
#include <array>
#include <map>

#include "pricing.h"

namespace augtree {

constexpr Pair kNothing{0, 0};

using Prices = std::vector<PassPrice>;
using Key = std::array<i64, 9>;

// What the choices of one search have in common: rows by how they lie, prices by how they move, too.
struct Memo {
    std::map<Key, std::vector<TypicalRows>> rows;
    std::map<Key, Prices> prices;
};

// The passes of a choice with their prices: see planning/priced.py. With a memo by the heaviest ranks, without by all.
class Priced {
public:
    Priced(Jobs& jobs, const Nodes& inner, const Nodes& leaves, const Choice& choice, Memo* memo)
        : jobs_(jobs), inner_(inner), leaves_(leaves), choice_(choice), memo_(memo),
          fused_(!choice.phased || inner.empty() || leaves.empty()) {
        const i64 gather = choice.primitive == MOVE_Q ? i64{GATHER_KV} : choice.primitive;
        spine_ = known(fused_ ? kFused : kSpine, gather);
        if (!fused_) replays_ = known(kReplays, choice.primitive);
    }
    Priced(const Priced&) = delete;

    const PassPrice& first() const { return spine_->front(); }

    std::vector<Offer> offers() const {
        Demand kept = first().demand();
        if (fused_) {
            const Pair pair = jobs_.pair(kept, jobs_.options.room).value_or(kNothing);
            Choice made = choice_;
            made.keep_layers = jobs_.said(pair).whole;
            made.keep_attention = jobs_.said(pair).attention;
            return {jobs_.offer({first().time(pair)}, first().peak(pair), made)};
        }
        for (std::size_t i = 1; i < spine_->size(); ++i) kept = kept.together((*spine_)[i].demand());
        Demand turn = replays_->front().demand();
        for (std::size_t i = 1; i < replays_->size(); ++i) turn = turn.in_turn((*replays_)[i].demand());
        std::vector<Offer> found;
        for (const auto& [first, second] : pairs(kept, turn)) found.push_back(phased_offer(first, second));
        return found;
    }

private:
    enum Part { kFused, kSpine, kReplays };

    // Prices of one kind of pass of the choice.
    const Prices* known(Part part, i64 primitive) {
        PassSpec p;
        p.primitive = static_cast<int>(primitive);
        p.pieces = choice_.pieces;
        p.node_ranks = choice_.node_ranks;
        p.keep = choice_.keep;
        p.prefetch = choice_.prefetch && part == kReplays;
        p.offload = choice_.offload && part == kSpine;
        if (!memo_) {
            own_[part] = exact(part, p);
            return &own_[part];
        }
        const i64 split = part == kFused ? 1 : part == kSpine ? choice_.chunks : choice_.waves;
        const i64 lane = part == kSpine ? 1 : choice_.lane_degree, wide = part == kSpine ? 0 : choice_.wide;
        const Key lies{part, split, lane, wide};
        const Key moves{part, split, lane, wide, p.primitive, p.pieces, p.node_ranks,
                        p.keep + 2 * p.prefetch + 4 * p.offload};
        auto [at, fresh] = memo_->prices.try_emplace(moves);
        if (fresh) {
            auto [rows, unknown] = memo_->rows.try_emplace(lies);
            if (unknown) rows->second = typical(part);
            for (const TypicalRows& x : rows->second) {
                at->second.emplace_back(jobs_.constants, x.loads(p), p, part == kSpine);
            }
        }
        return &at->second;
    }

    Lanes lanes(const Nodes& inner, const Nodes& leaves) const {
        return {inner, leaves, choice_.degree, choice_.lane_degree,
                std::min(choice_.wide, static_cast<i64>(leaves.size()))};
    }

    std::vector<Lanes> runs() const {
        i64 total = 0;
        for (int node : inner_) total += jobs_.forest.rows[node];
        const i64 chunks = std::max<i64>(1, std::min(choice_.chunks, total));
        std::vector<Lanes> found;
        for (i64 i = 0; i < chunks; ++i) {
            found.push_back({inner_, {}, choice_.degree, 1, 0, total * i / chunks, total * (i + 1) / chunks});
        }
        return found;
    }

    std::vector<TypicalRows> typical(Part part) const {
        std::vector<TypicalRows> found;
        const auto add = [&](const Lanes& lay, i64 state_rows, i64 state_nodes) {
            Lay made{{}, lay.leaves, lay.width, lay.lane_degree, lay.wide, state_rows, state_nodes};
            i64 start = 0;
            for (int node : lay.inner) {
                const i64 rows = jobs_.forest.rows[node];
                const i64 lo = lay.hi < 0 ? 0 : std::max<i64>(lay.lo - start, 0);
                const i64 hi = lay.hi < 0 ? rows : std::min(lay.hi - start, rows);
                if (lo < hi || lay.hi < 0) made.inner.push_back({node, lo, hi});
                start += rows;
            }
            found.emplace_back(jobs_.forest, jobs_.constants, std::move(made), jobs_.options.unit);
        };
        if (part == kFused) {
            add(lanes(inner_, leaves_), 0, 0);
        } else if (part == kSpine) {
            for (const Lanes& run : runs()) add(run, run.lo, 0);
        } else {
            i64 total = 0;
            for (int node : inner_) total += jobs_.forest.rows[node];
            for (const Nodes& wave : jobs_.waves_of(leaves_, choice_.waves)) {
                add(lanes({}, wave), total, static_cast<i64>(inner_.size()));
            }
        }
        return found;
    }

    Prices exact(Part part, const PassSpec& p) {
        const Constants& c = jobs_.constants;
        const i64 unit = jobs_.options.unit;
        Prices found;
        const auto add = [&](Placement placement, const std::vector<const Placement*>& reads) {
            found.emplace_back(c, PassRows(jobs_.forest, c, std::move(placement), reads, 0).loads(p), p, part == kSpine);
        };
        if (part == kFused) {
            add(place(jobs_.forest, lanes(inner_, leaves_), unit), {});
            return found;
        }
        std::vector<const Placement*> reads;
        if (part == kSpine) {
            for (const Lanes& run : runs()) states_.push_back(place(jobs_.forest, run, unit));
            for (const Placement& state : states_) {
                add(state, reads);
                reads.push_back(&state);
            }
            return found;
        }
        for (const Placement& state : states_) reads.push_back(&state);
        for (const Nodes& wave : jobs_.waves_of(leaves_, choice_.waves)) {
            add(place(jobs_.forest, lanes({}, wave), unit), reads);
        }
        return found;
    }

    std::vector<std::pair<Pair, Pair>> pairs(const Demand& kept, const Demand& turn) const {
        const i64 room = jobs_.options.room;
        if (jobs_.options.whole != -1) {
            const Pair same = jobs_.pair(kept, room).value_or(kNothing);
            return {{same, same}};
        }
        const Pair wave = turn.fit(room - kept.kept(kNothing)).value_or(kNothing);
        const Pair first = kept.beside(turn.peak(kNothing)).fit(room).value_or(kNothing);
        return {{kept.beside(turn.peak(wave)).fit(room).value_or(kNothing), wave},
                {first, turn.fit(room - kept.kept(first)).value_or(kNothing)}};
    }

    Offer phased_offer(Pair own, Pair wave) const {
        std::vector<std::pair<i64, i64>> times;
        std::vector<i64> alive(first().lines.size(), 0);
        i64 peak = 0;
        for (const PassPrice& price : *spine_) {
            times.push_back(price.time(own));
            for (std::size_t i = 0; i < price.lines.size(); ++i) {
                alive[i] += price.kept(price.lines[i], own);
                peak = std::max(peak, alive[i] + price.work(price.lines[i], own));
            }
        }
        for (const PassPrice& price : *replays_) {
            times.push_back(price.time(wave));
            for (std::size_t i = 0; i < price.lines.size(); ++i) {
                // One rank stands for all of an even spine, two may for a wave.
                const i64 below = alive[std::min(i, alive.size() - 1)];
                const Line& x = price.lines[i];
                peak = std::max(peak, below + price.kept(x, wave) + price.work(x, wave));
            }
        }
        Choice made = choice_;
        made.keep_layers = jobs_.said(own).whole;
        made.keep_attention = jobs_.said(own).attention;
        made.wave_layers = jobs_.said(wave).whole;
        made.wave_attention = jobs_.said(wave).attention;
        return jobs_.offer(times, peak, made);
    }

    Jobs& jobs_;
    const Nodes& inner_;
    const Nodes& leaves_;
    Choice choice_;
    Memo* memo_;
    bool fused_;
    const Prices* spine_ = nullptr;
    const Prices* replays_ = nullptr;
    std::vector<Placement> states_;
    Prices own_[3];
};

}  // namespace augtree
