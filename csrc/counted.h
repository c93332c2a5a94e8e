// A job's choices counted rank by rank: what is settled.
#pragma once

#include <array>
#include <deque>
#include <map>

#include "priced.h"

namespace augtree {

// The choices of one job counted rank by rank. Rows that lie alike are placed and looked at once.
class Counted {
public:
    Counted(Jobs& jobs, const Nodes& inner, const Nodes& leaves)
        : jobs_(jobs), inner_(inner), leaves_(leaves), memory_(Jobs::scratch(), Jobs::kScratch) {}

    std::vector<Offer> offers(const Choice& choice) {
        if (!choice.phased || inner_.empty() || leaves_.empty()) {
            return {fused_offer(jobs_, choice, priced(fused(choice).front(), choice, kFused))};
        }
        Group spine, waves;
        for (Pass& pass : chunks(choice)) spine.prices.push_back(priced(pass, choice, kSpine));
        for (Pass& pass : this->waves(choice)) waves.prices.push_back(priced(pass, choice, kWaves));
        spine.finish(false);
        waves.finish(true);
        std::vector<Offer> found;
        for (const Terms& terms : Phased(jobs_, choice, spine, waves).offers(true)) {
            found.push_back(offer_of(jobs_, choice, terms));
        }
        return found;
    }

private:
    struct Pass {
        Pass(const Jobs& jobs, const Lanes& lay, const Placements& reads, Memory* memory)
            : placement(place(jobs.forest, lay, jobs.options.unit, memory)),
              rows(jobs.forest, jobs.constants, placement, reads, 0, memory) {}
        Placement placement;
        PassRows rows;
    };
    using Passes = std::pmr::deque<Pass>;  // rows keep on pointing at placements
    using Key = std::array<i64, 6>;

    Passes& fused(const Choice& choice) {
        Passes& found = known_[{kFused, choice.degree, choice.lane_degree, choice.wide}];
        if (found.empty()) add(found, lanes(choice, inner_, leaves_), Placements(&memory_));
        return found;
    }

    Passes& chunks(const Choice& choice) {
        Passes& found = known_[{kSpine, choice.degree, choice.chunks}];
        if (!found.empty()) return found;
        Placements before(&memory_);
        for (const auto& [lo, hi] : chunks_of(rows_of(jobs_.forest, inner_), choice.chunks)) {
            add(found, {inner_, {}, choice.degree, 1, 0, lo, hi}, before);
            before.push_back(&found.back().placement);
        }
        return found;
    }

    Passes& waves(const Choice& choice) {
        Placements prompt(&memory_);
        for (const Pass& pass : chunks(choice)) prompt.push_back(&pass.placement);
        Passes& found =
            known_[{kWaves, choice.degree, choice.lane_degree, choice.wide, choice.waves, choice.chunks}];
        if (!found.empty()) return found;
        for (const Nodes& wave : jobs_.waves_of(leaves_, choice.waves)) {
            add(found, lanes(choice, {}, wave), prompt);
        }
        return found;
    }

    void add(Passes& into, const Lanes& lay, const Placements& reads) {
        into.emplace_back(jobs_, lay, reads, &memory_);
    }

    static Lanes lanes(const Choice& choice, const Nodes& inner, const Nodes& leaves) {
        return {inner, leaves, choice.degree, choice.lane_degree,
                std::min(choice.wide, static_cast<i64>(leaves.size()))};
    }

    PassPrice priced(Pass& pass, const Choice& choice, Part part) {
        const PassSpec p = spec_of(choice, part);
        const Loads loads = pass.rows.loads(p);
        const std::size_t ranks = loads.ranks.size();
        return {jobs_.constants, loads.ranks.data(), ranks, loads.stages, p, part == kSpine, &memory_};
    }

    const Jobs& jobs_;
    const Nodes& inner_;
    const Nodes& leaves_;
    std::pmr::monotonic_buffer_resource memory_;  // of all of it: given back at once
    std::pmr::map<Key, Passes> known_{&memory_};
};

}  // namespace augtree
