// The choices that are tried for a job: the twin of planning/choices.py, candidate by candidate.
#pragma once

#include "priced.h"

namespace augtree {

constexpr std::size_t kTries = 3;
constexpr i64 kEveryRank = 0;

// The choices for some nodes on a block of some ranks, each priced by its heaviest ranks: see planning/choices.py.
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

}  // namespace augtree
