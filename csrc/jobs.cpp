// The cheapest way to play a job: the twin of planning/jobs.py, candidate by candidate.
#include <algorithm>
#include <array>
#include <map>
#include <numeric>

#include "pricing.h"

namespace augtree {

namespace {

constexpr std::size_t kTries = 3;
constexpr i64 kEveryRank = 0;
constexpr Pair kNothing{0, 0};

i64 cost_of(const std::vector<Job>& jobs) {
    i64 cost = 0;
    for (const Job& job : jobs) cost = std::max(cost, job.offer.cost);
    return cost;
}

using Prices = std::vector<PassPrice>;
using Key = std::array<i64, 9>;

// What the choices of one search have in common: rows by how they lie, prices by how they move, too.
struct Memo {
    std::map<Key, std::vector<TypicalRows>> rows;
    std::map<Key, Prices> prices;
};

// The passes of a choice with their prices: see jobs.Priced. With a memo by the heaviest ranks, without by all.
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

// The choices for some nodes on a block of some ranks, each priced by its heaviest ranks: see jobs._Search.
class Search {
public:
    Search(Jobs& jobs, const Nodes& nodes, i64 width) : jobs_(jobs), o_(jobs.options), width_(width) {
        jobs.split_inner(nodes, inner_, leaves_);
        const bool tree = !inner_.empty() && !leaves_.empty();
        if (width < o_.least) return;
        if (o_.fused || !tree) fused();
        if (tree && asks_for_waves()) phased();
    }

    std::vector<Choice> worth_settling() const {
        std::vector<Offer> order = offers_, fitting, near;
        std::stable_sort(order.begin(), order.end(), [](const Offer& a, const Offer& b) { return a.cost < b.cost; });
        for (const Offer& offer : order) {
            if (offer.peak <= o_.room) {
                if (fitting.size() < kTries) fitting.push_back(offer);
            } else if (offer.peak <= o_.room + o_.room / 16 && near.size() < kTries) {
                near.push_back(offer);
            }
        }
        fitting.insert(fitting.end(), near.begin(), near.end());
        if (!offers_.empty()) fitting.push_back(leanest(offers_));
        std::vector<Choice> worth;
        for (const Offer& offer : fitting) {
            const bool known = std::any_of(worth.begin(), worth.end(), [&](const Choice& c) {
                return c.fields() == offer.choice.fields();
            });
            if (!known) worth.push_back(offer.choice);
        }
        return worth;
    }

    std::optional<Offer> best;

private:
    struct Way {
        i64 hop;
        int primitive;
        i64 pieces;
    };

    static const Offer& leanest(const std::vector<Offer>& offers) {
        return *std::min_element(offers.begin(), offers.end(),
                                 [](const Offer& a, const Offer& b) { return a.peak < b.peak; });
    }

    bool consider(const Offer& offer) {
        offers_.push_back(offer);
        if (offer.peak > o_.room || (best && offer.cost >= best->cost)) return false;
        best = offer;
        return true;
    }

    bool asks_for_waves() const {
        if (o_.phased != 1) return o_.phased == 2;
        if (!best || jobs_.constants.stages > 1) return true;
        return o_.whole == -1 && 50 * unrepeated_ < 49 * best->cost;
    }

    std::vector<std::pair<i64, i64>> lanes(const Nodes& inner) const {
        if (o_.lane_degree) {
            if (width_ % o_.lane_degree) return {};
            return {{o_.lane_degree, 0}};
        }
        if (width_ == 1) return {{1, 0}};
        i64 total = 0, longest = 0;
        std::vector<i64> costs;
        for (int node : inner) total += jobs_.row_cost(node);
        for (int node : leaves_) {
            costs.push_back(jobs_.row_cost(node));
            total += costs.back();
            longest = std::max(longest, costs.back());
        }
        const i64 share = total / width_;
        std::vector<std::pair<i64, i64>> found{{width_, 0}};
        if (!leaves_.empty() && 2 * longest <= 3 * share) found.push_back({1, 0});
        for (i64 part : {1, 2, 4}) {
            i64 wide = 0;
            for (i64 cost : costs) wide += cost * part > share;
            const std::pair<i64, i64> lane{1, wide};
            const bool known = std::find(found.begin(), found.end(), lane) != found.end();
            if (0 < wide && wide < static_cast<i64>(leaves_.size()) && !known) found.push_back(lane);
        }
        return found;
    }

    std::vector<Way> ways() const {
        if (width_ == 1) return {{0, LOCAL, 1}};
        std::vector<Way> found;
        const bool far = o_.hops && width_ > jobs_.constants.node_ranks, only = o_.pieces.size() == 1;
        for (i64 pieces : o_.pieces) {
            if (pieces == kEveryRank) {
                if (width_ > 2 || only) found.push_back({0, MOVE_KV, 1});
            } else if (pieces < width_ || only) {
                found.push_back({0, GATHER_KV, pieces});
                if (far) found.push_back({jobs_.constants.node_ranks, GATHER_KV, pieces});
            }
        }
        return found;
    }

    void fused() {
        for (const auto& [lane, wide] : lanes(inner_)) {
            for (const Way& way : ways()) {
                Choice choice;
                choice.degree = width_;
                choice.primitive = way.primitive;
                choice.pieces = way.pieces;
                choice.node_ranks = way.hop;
                choice.lane_degree = lane;
                choice.wide = wide;
                if (all_hides(choice)) break;
            }
        }
    }

    bool all_hides(Choice choice) {
        bool hidden = false;
        for (bool keep : {true, false}) {
            if (!keep && !o_.lean) break;
            choice.keep = keep;
            const Priced priced(jobs_, inner_, leaves_, choice, &memo_);
            if (keep) hidden = priced.first().hidden();
            const Offer offer = priced.offers()[0];
            if (consider(offer)) {
                const auto [forward, backward] = priced.first().time({jobs_.constants.layers, 0});
                unrepeated_ = forward + backward;
            }
            if (width_ == 1 || (offer.peak <= o_.room && !repeats(offer.choice))) break;
        }
        return hidden;
    }

    bool repeats(const Choice& choice) const {
        const Constants& c = jobs_.constants;
        return (choice.keep_layers >= 0 ? choice.keep_layers : c.layers - c.recomputed) < c.layers;
    }

    void phased() {
        const bool several = jobs_.constants.stages > 1;
        std::vector<Offer> tried, more;
        for (std::size_t i = 0; i < (several ? o_.chunks.size() : 1); ++i) {
            for (const Choice& choice : waves(o_.chunks[i])) attempt(choice, tried);
        }
        if (tried.empty()) return;
        std::vector<Offer> seeds;
        for (const bool queries : {false, true}) {
            const Offer *lean = nullptr, *cheap = nullptr;
            for (const Offer& offer : tried) {
                if ((offer.choice.primitive == MOVE_Q) != queries) continue;
                if (!lean || offer.peak < lean->peak) lean = &offer;
                if (offer.peak <= o_.room && (!cheap || offer.cost < cheap->cost)) cheap = &offer;
            }
            if (lean) seeds.push_back(*lean);
            if (cheap) seeds.push_back(*cheap);
        }
        for (const Offer& seed : seeds) {
            for (std::size_t i = 1; !several && i < o_.chunks.size(); ++i) {
                Choice choice = seed.choice;
                choice.chunks = o_.chunks[i];
                attempt(choice, more);
            }
            const std::vector<Way> all = ways();
            for (std::size_t i = 1; i < all.size(); ++i) {
                Choice choice = seed.choice;
                if (choice.primitive == MOVE_Q && !all[i].hop) {
                    choice.pieces = all[i].primitive == MOVE_KV ? width_ - 1 : all[i].pieces;
                    attempt(choice, more);
                } else if (choice.primitive == GATHER_KV) {
                    choice.primitive = all[i].primitive;
                    choice.pieces = all[i].pieces;
                    choice.node_ranks = all[i].hop;
                    attempt(choice, more);
                }
            }
        }
        if (o_.lean && width_ > 1 && !best) {
            std::vector<Offer> fat = seeds;
            fat.insert(fat.end(), more.begin(), more.end());
            for (const Offer& seed : fat) {
                Choice choice = seed.choice;
                choice.keep = 0;
                attempt(choice, more);
            }
        }
        if (!o_.offload || !jobs_.constants.has_host) return;
        seeds.insert(seeds.end(), more.begin(), more.end());
        std::vector<Offer> rested;
        for (const Offer& seed : seeds) {
            Choice choice = seed.choice;
            choice.offload = 1;
            attempt(choice, rested);
        }
    }

    void attempt(const Choice& choice, std::vector<Offer>& into) {
        for (const Offer& offer : Priced(jobs_, inner_, leaves_, choice, &memo_).offers()) {
            consider(offer);
            into.push_back(offer);
        }
    }

    std::vector<Choice> waves(i64 chunks) const {
        std::vector<Choice> found;
        const std::vector<Way> all = ways();
        std::vector<i64> counts;
        for (i64 waves : o_.waves) {
            const i64 count = std::min(waves, static_cast<i64>(leaves_.size()));
            if (std::find(counts.begin(), counts.end(), count) == counts.end()) counts.push_back(count);
        }
        for (i64 waves : counts) {
            for (const auto& [lane, wide] : lanes({})) {
                Choice choice;
                choice.degree = width_;
                choice.phased = 1;
                choice.chunks = chunks;
                choice.waves = waves;
                choice.lane_degree = lane;
                choice.wide = wide;
                for (const Way& way : all) {
                    if (!o_.gather && width_ > 1) break;
                    if (way.primitive != all[0].primitive || way.pieces != all[0].pieces) continue;
                    Choice gather = choice;
                    gather.primitive = way.primitive;
                    gather.pieces = way.pieces;
                    gather.node_ranks = way.hop;
                    gather.prefetch = o_.prefetch && jobs_.constants.overlap && width_ > 1;
                    found.push_back(gather);
                }
                if (o_.move_q && width_ > 1 && (!o_.gather || queries_are_few(waves))) {
                    choice.primitive = MOVE_Q;
                    found.push_back(choice);
                }
            }
        }
        return found;
    }

    bool queries_are_few(i64 waves) const {
        i64 leaves = 0, spine = 0;
        for (int node : leaves_) leaves += jobs_.forest.rows[node];
        for (int node : inner_) spine += jobs_.forest.rows[node];
        const Constants& c = jobs_.constants;
        return leaves * (c.query + c.attended) <= 4 * waves * spine * c.kv;
    }

    Jobs& jobs_;
    const Options& o_;
    i64 width_;
    Nodes inner_, leaves_;
    std::vector<Offer> offers_;
    Memo memo_;
    i64 unrepeated_ = 0;
};

}  // namespace

std::optional<Offer> Jobs::estimate(const Nodes& nodes, i64 width) { return Search(*this, nodes, width).best; }

std::optional<Offer> Jobs::best(const Nodes& nodes, i64 width) {
    std::optional<Offer> best;
    for (const Choice& choice : Search(*this, nodes, width).worth_settling()) {
        const Offer offer = settle(nodes, choice);
        if (offer.peak <= options.room) {
            if (!best || offer.cost < best->cost) best = offer;
        } else if (!leanest || offer.peak < leanest->peak) {
            leanest = offer;
        }
    }
    return best;
}

Offer Jobs::settle(const Nodes& nodes, const Choice& choice) {
    Nodes inner, leaves;
    split_inner(nodes, inner, leaves);
    const std::vector<Offer> offers = Priced(*this, inner, leaves, choice, nullptr).offers();
    return *std::min_element(offers.begin(), offers.end(), [&](const Offer& a, const Offer& b) {
        const bool fat = a.peak > options.room, fatter = b.peak > options.room;
        return fat != fatter ? fat < fatter : a.cost < b.cost;
    });
}

void Jobs::split_inner(const Nodes& nodes, Nodes& inner, Nodes& leaves) {
    for (int node : nodes) {
        if (forest.parents[node] >= 0) mark_[forest.parents[node]] = 1;
    }
    for (int node : nodes) (mark_[node] ? inner : leaves).push_back(node);
    for (int node : nodes) {
        if (forest.parents[node] >= 0) mark_[forest.parents[node]] = 0;
    }
}

Offer Jobs::offer(const std::vector<std::pair<i64, i64>>& times, i64 peak, const Choice& choice) const {
    i64 time = 0, slot = 0;
    for (const auto& [forward, backward] : times) {
        time += forward + backward;
        slot = std::max(slot, forward + backward);
    }
    return {time + slot * (constants.stages - 1) * options.slot_weight / 16, time, slot, peak, choice};
}

i64 Jobs::ideal(const Nodes& nodes, i64 ranks) const {
    const Constants& c = constants;
    i64 rows = 0, pairs = 0;
    for (int node : nodes) {
        rows += forest.rows[node];
        pairs += forest.area(node, 0, forest.rows[node]);
    }
    const i64 linear = (c.linear.ns(rows) + c.beside.ns(rows)) * (100 + c.gemm_pct);
    const i64 attention = c.attention.ns(pairs) * (100 + c.attention_pct);
    return c.layers * (linear / 100 + attention / 100) / (ranks * c.stages);
}

i64 Jobs::floor(const Nodes& nodes, i64 ranks) const {
    const Constants& c = constants;
    return ideal(nodes, ranks) + (c.layers + c.stages - 1) / c.stages * 3 * c.layer_ns + 2 * c.pass_ns;
}

std::optional<Pair> Jobs::pair(const Demand& d, i64 room) const {
    if (options.whole == -1) return d.fit(room);
    if (options.whole == -2) return Pair{constants.layers - constants.recomputed, constants.attention_kept};
    return Pair{std::min(options.whole, constants.layers),
                std::min(options.attention, constants.layers - options.whole)};
}

std::vector<Nodes> Jobs::waves_of(const Nodes& leaves, i64 waves) const {
    waves = std::min(waves, static_cast<i64>(leaves.size()));
    if (waves == 1) return {leaves};
    std::vector<i64> weights;
    for (int node : leaves) weights.push_back(row_cost(node));
    const std::vector<int> where = assign(weights, std::vector<i64>(waves, 0));
    std::vector<Nodes> dealt(waves);
    for (std::size_t i = 0; i < leaves.size(); ++i) dealt[where[i]].push_back(leaves[i]);
    dealt.erase(std::remove_if(dealt.begin(), dealt.end(), [](const Nodes& n) { return n.empty(); }), dealt.end());
    return dealt;
}

std::vector<Nodes> Jobs::copies_of(const Nodes& nodes, i64 copies) {
    Nodes inner, leaves;
    split_inner(nodes, inner, leaves);
    copies = std::min(copies, static_cast<i64>(leaves.size()));
    if (copies < 2) return {nodes};
    std::vector<Nodes> parts = waves_of(leaves, copies);
    for (Nodes& part : parts) {
        Nodes chain;
        for (int leaf : part) {
            chain.push_back(leaf);
            chain.insert(chain.end(), forest.ancestors[leaf].begin(), forest.ancestors[leaf].end());
        }
        std::sort(chain.begin(), chain.end());
        chain.erase(std::unique(chain.begin(), chain.end()), chain.end());
        part = std::move(chain);
    }
    return parts;
}

const std::optional<std::vector<Job>>& Jobs::tree_jobs(int first, int end, i64 width) {
    auto [at, fresh] = trees_.try_emplace({first, end, width});
    if (fresh) {
        Nodes nodes(end - first);
        std::iota(nodes.begin(), nodes.end(), first);
        at->second = with_copies(nodes, width);
    }
    return at->second;
}

std::vector<std::vector<i64>> Jobs::table(
    const std::vector<std::pair<int, int>>& trees, const std::vector<i64>& widths, i64 enough) {
    std::vector<std::vector<i64>> rows;
    for (const auto& [first, end] : trees) {
        std::vector<i64> costs;
        for (i64 width : widths) {
            const auto& jobs = tree_jobs(first, end, width);
            costs.push_back(jobs ? cost_of(*jobs) : -1);
            if (jobs && costs.back() < enough) break;
        }
        rows.push_back(std::move(costs));
    }
    return rows;
}

std::optional<std::vector<Job>> Jobs::with_copies(const Nodes& nodes, i64 width) {
    std::optional<std::vector<Job>> best;
    if (options.copies < 2) {
        if (const auto whole = estimate(nodes, width)) best = std::vector<Job>{{nodes, 0, *whole}};
    }
    Nodes inner, leaves;
    split_inner(nodes, inner, leaves);
    std::vector<i64> counts;
    if (options.copies > 1 && width % options.copies == 0) counts.push_back(options.copies);
    const i64 most = std::min(width, static_cast<i64>(leaves.size()));
    for (i64 copies = 2; !options.copies && !inner.empty() && copies <= most; copies *= 2) {
        if (width % copies == 0) counts.push_back(copies);
    }
    for (i64 copies : counts) {
        const std::vector<Nodes> parts = copies_of(nodes, copies);
        i64 least = 0;
        for (const Nodes& part : parts) least = std::max(least, floor(part, width / copies));
        if (best && least >= cost_of(*best)) continue;
        std::vector<Job> jobs;
        for (std::size_t i = 0; i < parts.size(); ++i) {
            const auto offer = estimate(parts[i], width / copies);
            if (!offer) break;
            jobs.push_back({parts[i], static_cast<i64>(i) * (width / copies), *offer});
        }
        if (jobs.size() == parts.size() && (!best || cost_of(jobs) < cost_of(*best))) best = jobs;
    }
    return best;
}

}  // namespace augtree
