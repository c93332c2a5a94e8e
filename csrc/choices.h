// The choices that are tried for a job: the twin of planning/choices.py, candidate by candidate.
//
// An estimate asks for the cheapest offer alone. So what cannot be cheaper even if nothing is recomputed is left
// out there, and so are repetitions; what is to be settled needs every offer.
#pragma once

#include "estimates.h"
#include "least.h"

namespace augtree {

constexpr std::size_t kTries = 3;
constexpr i64 kEveryRank = 0;

// The choices for some nodes on a block of some ranks, each priced by its heaviest ranks: see planning/choices.py.
class Search {
public:
    enum Aim { kCheapest, kEvery };

    // An offer of `below` or more may be left out where only the cheapest counts.
    Search(Jobs& jobs, const Nodes& nodes, i64 width, Aim aim, i64 below = INT64_MAX)
        : jobs_(jobs), o_(jobs.options), width_(width), aim_(aim), below_(below),
          estimates_(jobs.estimates()) {
        jobs.split_inner(nodes, inner_, leaves_);
        const bool tree = !inner_.empty() && !leaves_.empty();
        if (width < o_.least) return;
        estimates_.start(inner_, leaves_, width);
        ways_ = ways();
        if (o_.fused || !tree) fused();
        if (tree && asks_for_waves() && !waves_are_hopeless()) phased();
    }
    Search(const Search&) = delete;

    std::vector<Choice> worth_settling() const {
        std::vector<const Offer*> order, fitting, near;
        for (const Offer& offer : offers_) order.push_back(&offer);
        std::stable_sort(order.begin(), order.end(), [](const Offer* a, const Offer* b) { return a->cost < b->cost; });
        for (const Offer* offer : order) {
            if (offer->peak <= o_.room) {
                if (fitting.size() < kTries) fitting.push_back(offer);
            } else if (offer->peak <= o_.room + o_.room / 16 && near.size() < kTries) {
                near.push_back(offer);
            }
        }
        fitting.insert(fitting.end(), near.begin(), near.end());
        if (!offers_.empty()) {
            fitting.push_back(&*std::min_element(offers_.begin(), offers_.end(),
                                                 [](const Offer& a, const Offer& b) { return a.peak < b.peak; }));
        }
        std::vector<Choice> worth;
        for (const Offer* offer : fitting) {
            const bool known = std::any_of(worth.begin(), worth.end(), [&](const Choice& c) {
                return c.fields() == offer->choice.fields();
            });
            if (!known) worth.push_back(offer->choice);
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

    // What was tried: so many times, with these offers each time.
    struct Tried {
        Choice choice;
        const Group *spine, *waves;
        Offers offers;
        int times;
        Phased phased(const Jobs& jobs) const { return {jobs, choice, *spine, *waves}; }
    };

    // What may lead to others: the leanest, and the cheapest that fits.
    struct Seed {
        const Choice* choice = nullptr;
        const Group *spine = nullptr, *waves = nullptr;
        Terms terms{};
    };
    struct Seeds {
        Seed lean, cheap;
    };

    bool consider(const Offer& offer) {
        if (aim_ == kEvery) offers_.push_back(offer);
        if (offer.peak > o_.room || (best && offer.cost >= best->cost)) return false;
        best = offer;
        return true;
    }

    bool consider(const Choice& choice, const Terms& terms) {
        const bool cheaper = terms.peak <= o_.room && (!best || terms.cost < best->cost);
        if (aim_ == kCheapest && !cheaper) return false;
        return consider(offer_of(jobs_, choice, terms));
    }

    bool too_dear(i64 least_cost) const { return aim_ == kCheapest && best && least_cost >= best->cost; }

    // The same of waves; nothing depends on what fused passes cost any more.
    bool hopeless(i64 least_cost) const { return too_dear(least_cost) || (aim_ == kCheapest && least_cost >= below_); }

    bool waves_are_hopeless() const {
        if (aim_ != kCheapest || jobs_.constants.stages > 1 || (!best && below_ == INT64_MAX)) return false;
        return hopeless(LeastPhased(jobs_, width_).ns(inner_, leaves_));
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
        costs.reserve(leaves_.size());
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
            const TypicalRows& rows = estimates_.fused(lane, wide);
            if (best && aim_ == kCheapest && least_cost(rows) >= best->cost) continue;
            for (const Way& way : ways_) {
                Choice choice;
                choice.degree = width_;
                choice.primitive = way.primitive;
                choice.pieces = way.pieces;
                choice.node_ranks = way.hop;
                choice.lane_degree = lane;
                choice.wide = wide;
                if (all_hides(choice, rows)) break;
            }
        }
    }

    // What a fused pass of some rows costs if it moves nothing: no way to move them is cheaper.
    i64 least_cost(const TypicalRows& rows) const {
        PassSpec p;
        p.primitive = GATHER_KV;
        TypicalLoads loads = estimates_.loads(rows, p);
        for (RankLoad& x : loads.ranks) x.kv_in = x.kv_out = x.kv_far_in = x.kv_far_out = x.messages = 0;
        return least_cost(PassPrice(jobs_.constants, loads.ranks, loads.count, 0, p, false));
    }

    i64 least_cost(const PassPrice& price) const {
        const i64 least = price.least_time();
        return jobs_.cost(least, price.least_slot(least));
    }

    bool all_hides(Choice choice, const TypicalRows& rows) {
        bool hidden = false;
        for (bool keep : {true, false}) {
            if (!keep && !o_.lean) break;
            choice.keep = keep;
            const PassPrice price = estimates_.price(rows, spec_of(choice, kFused), false);
            if (keep) hidden = !price.shown();
            // Giving up what was received costs no less.
            if (too_dear(least_cost(price))) break;
            const Offer offer = fused_offer(jobs_, choice, price);
            if (consider(offer)) unrepeated_ = price.least_time();
            if (width_ == 1 || (offer.peak <= o_.room && !repeats(offer.choice.keep_layers))) break;
        }
        return hidden;
    }

    // Whether passes that keep so many layers run others again; -1 stands for the flags.
    bool repeats(i64 kept) const {
        const Constants& c = jobs_.constants;
        return (kept >= 0 ? kept : c.layers - c.recomputed) < c.layers;
    }

    void phased() {
        const bool several = jobs_.constants.stages > 1;
        std::vector<Choice> choices;
        for (std::size_t i = 0; i < (several ? o_.chunks.size() : 1); ++i) add_waves(o_.chunks[i], choices);
        Seeds gathers, queries;
        for (const Choice& choice : choices) first(choice, choice.primitive == MOVE_Q ? queries : gathers);
        std::vector<Tried> seeds, more;
        seeds.reserve(16);
        more.reserve(16);
        for (const Seeds* found : {&gathers, &queries}) {
            for (const Seed& seed : {found->lean, found->cheap}) {
                if (!seed.choice) continue;
                seeds.push_back({*seed.choice, seed.spine, seed.waves, {{seed.terms}, 1}, 1});
            }
        }
        for (std::size_t i = 0; i < seeds.size(); ++i) {
            if (aim_ == kCheapest && i > 0 && same_passes(seeds[i].choice, seeds[i - 1].choice)) continue;
            const Tried& seed = seeds[i];
            const Phased phased = seed.phased(jobs_);
            if (hopeless(phased.bare_cost())) continue;
            if (!several && phased.spine_is_heavy()) other_chunks(seed.choice, more);
            if (phased.shows_traffic()) other_ways(seed.choice, more);
        }
        seeds.insert(seeds.end(), more.begin(), more.end());
        const bool sends = queries.cheap.choice &&
                           !(gathers.cheap.choice && gathers.cheap.terms.cost <= queries.cheap.terms.cost);
        const Seed& cheap = sends ? queries.cheap : gathers.cheap;
        if (cheap.choice && wants_memory(cheap.terms)) add_halved(*cheap.choice, choices, seeds);
        if (o_.lean && width_ > 1) {
            for (std::size_t i = 0, fat = seeds.size(); i < fat; ++i) {
                // Without keeping what was received the same passes take no less.
                if (hopeless(seeds[i].phased(jobs_).least_cost())) continue;
                Choice choice = seeds[i].choice;
                choice.keep = 0;
                attempt(choice, seeds[i].times * wanting(seeds[i].offers), seeds);
            }
        }
        if (!o_.offload || !jobs_.constants.has_host) return;
        more.clear();
        for (const Tried& seed : seeds) {
            if (hopeless(seed.phased(jobs_).least_cost())) continue;  // copies only add to it
            Choice choice = seed.choice;
            choice.offload = 1;
            attempt(choice, seed.times * wanting(seed.offers), more);
        }
    }

    // The same in half as many waves: they may want memory, too, and cost less once they have it.
    void add_halved(const Choice& seed, const std::vector<Choice>& choices, std::vector<Tried>& into) {
        for (const Choice& choice : choices) {
            Choice twice = choice;
            twice.waves *= 2;
            if (!same_passes(twice, seed)) continue;
            const Group &spine = estimates_.spine(choice), &waves = estimates_.waves(choice);
            const Phased phased(jobs_, choice, spine, waves);
            if (!hopeless(phased.bare_cost())) into.push_back({choice, &spine, &waves, phased.offers(true), 1});
        }
    }

    // A choice of prefill and waves. A cost matters that may be the lowest, of all or of its primitive.
    void first(const Choice& choice, Seeds& seeds) {
        const Group &spine = estimates_.spine(choice), &waves = estimates_.waves(choice);
        const Phased phased(jobs_, choice, spine, waves);
        const i64 least = phased.least_cost();
        const bool matters = !(hopeless(least) && seeds.cheap.choice && least >= seeds.cheap.terms.cost);
        for (const Terms& terms : phased.offers(matters)) {
            consider(choice, terms);
            const bool leaner = !seeds.lean.choice || terms.peak < seeds.lean.terms.peak;
            if (leaner) seeds.lean = {&choice, &spine, &waves, terms};
            const bool cheaper = !seeds.cheap.choice || terms.cost < seeds.cheap.terms.cost;
            if (terms.peak <= o_.room && cheaper) seeds.cheap = {&choice, &spine, &waves, terms};
        }
    }

    // How many offers do not fit or run layers again: others may want less memory.
    int wanting(const Offers& offers) const {
        return static_cast<int>(
            std::count_if(offers.begin(), offers.end(), [&](const Terms& o) { return wants_memory(o); }));
    }

    bool wants_memory(const Terms& o) const {
        return o.peak > o_.room || repeats(jobs_.said(o.own).whole) || repeats(jobs_.said(o.wave).whole);
    }

    static bool same_passes(const Choice& a, const Choice& b) {
        return a.chunks == b.chunks && a.waves == b.waves && a.primitive == b.primitive && a.pieces == b.pieces &&
               a.node_ranks == b.node_ranks && a.lane_degree == b.lane_degree && a.wide == b.wide;
    }

    void other_chunks(const Choice& seed, std::vector<Tried>& into) {
        for (std::size_t i = 1; i < o_.chunks.size(); ++i) {
            Choice choice = seed;
            choice.chunks = o_.chunks[i];
            attempt(choice, 1, into);
        }
    }

    void other_ways(const Choice& seed, std::vector<Tried>& into) {
        for (std::size_t i = 1; i < ways_.size(); ++i) {
            const Way& way = ways_[i];
            Choice choice = seed;
            if (choice.primitive == MOVE_Q && !way.hop) {
                choice.pieces = way.primitive == MOVE_KV ? width_ - 1 : way.pieces;
                attempt(choice, 1, into);
            } else if (choice.primitive == GATHER_KV) {
                choice.primitive = way.primitive;
                choice.pieces = way.pieces;
                choice.node_ranks = way.hop;
                attempt(choice, 1, into);
            }
        }
    }

    // Tries a choice so many times, as the twin does for each offer of a seed: how often an offer stands in the
    // list of what may be settled counts there.
    void attempt(const Choice& choice, int times, std::vector<Tried>& into) {
        if (!times) return;
        const Group &spine = estimates_.spine(choice), &waves = estimates_.waves(choice);
        const Phased phased(jobs_, choice, spine, waves);
        if (hopeless(phased.least_cost())) return;
        if (aim_ == kCheapest) times = 1;
        const Offers offers = phased.offers(true);
        for (int i = 0; i < times; ++i) {
            for (const Terms& terms : offers) consider(choice, terms);
        }
        into.push_back({choice, &spine, &waves, offers, times});
    }

    void add_waves(i64 chunks, std::vector<Choice>& found) {
        std::vector<i64> counts;
        for (i64 waves : o_.waves) {
            const i64 count = std::min(waves, static_cast<i64>(leaves_.size()));
            if (std::find(counts.begin(), counts.end(), count) == counts.end()) counts.push_back(count);
        }
        const std::vector<std::pair<i64, i64>> lay = lanes({});
        for (i64 waves : counts) {
            std::vector<std::pair<i64, i64>> seen;
            for (const auto& [lane, wide] : lay) {
                // Lays that differ in leaves which no wave has cost the same: only the first may be the cheapest.
                const std::pair<i64, i64> same{lane, estimates_.wide_of(waves, wide)};
                if (aim_ == kCheapest && std::find(seen.begin(), seen.end(), same) != seen.end()) continue;
                seen.push_back(same);
                Choice choice;
                choice.degree = width_;
                choice.phased = 1;
                choice.chunks = chunks;
                choice.waves = waves;
                choice.lane_degree = lane;
                choice.wide = wide;
                for (const Way& way : ways_) {
                    if (!o_.gather && width_ > 1) break;
                    if (way.primitive != ways_[0].primitive || way.pieces != ways_[0].pieces) continue;
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
    }

    bool queries_are_few(i64 waves) const {
        const Constants& c = jobs_.constants;
        const i64 leaves = rows_of(jobs_.forest, leaves_), spine = rows_of(jobs_.forest, inner_);
        return leaves * (c.query + c.attended) <= 4 * waves * spine * c.kv;
    }

    Jobs& jobs_;
    const Options& o_;
    i64 width_;
    Aim aim_;
    i64 below_;
    Nodes inner_, leaves_;
    std::vector<Way> ways_;
    Estimates& estimates_;
    std::vector<Offer> offers_;
    i64 unrepeated_ = 0;
};

}  // namespace augtree
