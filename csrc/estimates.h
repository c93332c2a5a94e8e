// A job's choices by its heaviest ranks: what is searched.
#pragma once

#include <array>
#include <memory>

#include "priced.h"

namespace augtree {

// Values by key, which stay where they are. A search has a few dozen, so that looking at all of them is fastest:
// at a sum of each key first. Cleared, values keep their memory for the next ones, and what they held: who gets a
// new one empties it.
template <class Value>
class Known {
public:
    using Key = std::array<i64, 8>;

    void clear() {
        keys_.clear();
        sums_.clear();
    }

    // (value, whether it is new: then as it was left)
    std::pair<Value*, bool> of(const Key& key) {
        std::uint64_t sum = 0;
        for (const i64 part : key) sum = (sum + static_cast<std::uint64_t>(part)) * 0x9E3779B97F4A7C15u;
        for (std::size_t k = 0; k < sums_.size(); ++k) {
            if (sums_[k] == sum && keys_[k] == key) return {values_[k].get(), false};
        }
        sums_.push_back(sum);
        keys_.push_back(key);
        if (values_.size() < keys_.size()) values_.push_back(std::make_unique<Value>());
        return {values_[keys_.size() - 1].get(), true};
    }

private:
    std::vector<std::uint64_t> sums_;
    std::vector<Key> keys_;
    std::vector<std::unique_ptr<Value>> values_;
};

// The leaves of a job in order, and dealt to waves: the same on blocks of every width.
struct Dealing {
    Nodes leaves;
    LeafOrder order;
    Known<std::vector<LeafSet>> waves;  // by their number
};

// Dealings of the jobs of late: a tree and its parts come up once for each width.
class Dealings {
public:
    Dealing& of(const Forest& f, i64 unit, const Nodes& leaves) {
        for (std::size_t k = 0; k < count_; ++k) {
            if (held_[k]->leaves == leaves) return *held_[k];
        }
        if (count_ == kMany) count_ = 0;
        if (held_.size() == count_) held_.push_back(std::make_unique<Dealing>());
        Dealing& made = *held_[count_++];
        made.leaves = leaves;
        made.order.start(f, unit, leaves);
        made.waves.clear();
        return made;
    }

private:
    static constexpr std::size_t kMany = 64;
    std::vector<std::unique_ptr<Dealing>> held_;
    std::size_t count_ = 0;
};

// The passes of one job's choices by its heaviest ranks, each kind priced once. It is used for one job after
// the other: most of the time would go to memory that each takes and gives back.
class Estimates {
public:
    explicit Estimates(const Jobs& jobs)
        : jobs_(jobs), block_(jobs.forest, jobs.constants) {}
    Estimates(const Estimates&) = delete;

    void start(const Nodes& inner, const Nodes& leaves, i64 width) {
        dealing_ = &dealings_.of(jobs_.forest, jobs_.options.unit, leaves);
        inner_rows_ = rows_of(jobs_.forest, inner);
        inner_count_ = static_cast<i64>(inner.size());
        spans_.clear();
        for (int node : inner) spans_.push_back({node, 0, jobs_.forest.rows[node]});
        block_.start(dealing_->order, width);
        inner_sums_ = block_.inner_sums(spans_);
        rows_.clear();
        groups_.clear();
    }

    const TypicalRows& fused(i64 lane_degree, i64 wide) {
        fused_.clear();
        if (dealing_->leaves.empty()) return block_.spine(inner_sums_, {}, fused_);
        return block_.with_leaves(inner_sums_, dealt(1).front(), lane_degree, wide, inner_count_, fused_);
    }

    // What a rank does of some rows; until the next ones are asked for.
    const TypicalLoads& loads(const TypicalRows& rows, const PassSpec& p) {
        rows.loads(p, rows.landing(p), loads_);
        return loads_;
    }

    PassPrice price(const TypicalRows& rows, const PassSpec& p, bool provides) {
        const TypicalLoads& x = loads(rows, p);
        return {jobs_.constants, x.ranks, static_cast<std::size_t>(x.count), x.stages, p, provides};
    }

    const Group& spine(const Choice& choice) {
        const PassSpec p = spec_of(choice, kSpine);
        const auto [group, fresh] =
            groups_.of({kSpine, choice.chunks, 1, 0, p.primitive, p.pieces, moves(p)});
        if (fresh) fill(*group, chunk_rows(choice.chunks), p, true);
        return *group;
    }

    const Group& waves(const Choice& choice) {
        const PassSpec p = spec_of(choice, kWaves);
        const i64 wide = wide_of(choice.waves, choice.wide);
        const auto [group, fresh] = groups_.of(
            {kWaves, choice.waves, choice.lane_degree, wide, p.primitive, p.pieces, moves(p), choice.chunks});
        if (fresh) {
            std::vector<TypicalRows>& rows = wave_rows(choice.waves, choice.lane_degree, wide);
            const i64 chunks = std::max<i64>(1, std::min(choice.chunks, inner_rows_));
            for (TypicalRows& wave : rows) wave.resume({inner_rows_, chunks});
            fill(*group, rows, p, false);
        }
        return *group;
    }

    // How many leaves of a wave are cut over the block at the most: of no wave more than it has.
    i64 wide_of(i64 waves, i64 wide) {
        if (!wide) return 0;
        std::size_t most = 0;
        for (const LeafSet& wave : dealt(waves)) most = std::max(most, wave.members.size());
        return std::min(wide, static_cast<i64>(most));
    }

private:
    void fill(Group& group, const std::vector<TypicalRows>& passes, const PassSpec& p, bool spine) {
        group.clear();
        const Landing landing = passes.front().landing(p);  // they lie alike
        for (const TypicalRows& rows : passes) {
            rows.loads(p, landing, loads_);
            const auto ranks = static_cast<std::size_t>(loads_.count);
            group.prices.emplace_back(jobs_.constants, loads_.ranks, ranks, loads_.stages, p, spine);
        }
        group.finish(!spine);
    }

    static i64 moves(const PassSpec& p) {
        return (p.node_ranks ? 8 : 0) + 4 * p.keep + 2 * p.prefetch + p.offload;
    }

    const std::vector<TypicalRows>& chunk_rows(i64 chunks) {
        const auto [found, fresh] = rows_.of({kSpine, chunks});
        if (!fresh) return *found;
        found->clear();
        if (chunks == 1) {
            block_.spine(inner_sums_, {}, *found);
            return *found;
        }
        for (const auto& [lo, hi] : chunks_of(inner_rows_, chunks)) {
            chunk_.clear();
            i64 start = 0;
            for (const Span& s : spans_) {
                const i64 first = std::max<i64>(lo - start, 0), last = std::min(hi - start, s.hi);
                if (first < last) chunk_.push_back({s.node, first, last});
                start += s.hi;
            }
            const State before{lo, static_cast<i64>(found->size())};
            block_.spine(block_.inner_sums(chunk_), before, *found);
        }
        return *found;
    }

    // However many chunks are before them: who prices them says so.
    std::vector<TypicalRows>& wave_rows(i64 waves, i64 lane_degree, i64 wide) {
        const auto [found, fresh] = rows_.of({kWaves, waves, lane_degree, wide});
        if (!fresh) return *found;
        found->clear();
        for (const LeafSet& wave : dealt(waves)) {
            block_.with_leaves({}, wave, lane_degree, wide, inner_count_, *found);
        }
        return *found;
    }

    // The leaves of each wave; all of them, where there is one.
    const std::vector<LeafSet>& dealt(i64 waves) {
        const auto [found, fresh] = dealing_->waves.of({waves});
        if (!fresh) return *found;
        const Nodes& order = dealing_->order.by_rows;
        wave_of_.assign(order.size(), 0);
        if (waves > 1) {
            const std::vector<int> where = jobs_.wave_of(dealing_->leaves, waves);
            number_.resize(jobs_.forest.rows.size());
            for (std::size_t i = 0; i < where.size(); ++i) number_[dealing_->leaves[i]] = where[i];
            for (std::size_t leaf = 0; leaf < order.size(); ++leaf) wave_of_[leaf] = number_[order[leaf]];
        }
        const int last = wave_of_.empty() ? 0 : *std::max_element(wave_of_.begin(), wave_of_.end());
        found->resize(static_cast<std::size_t>(last) + 1);
        for (LeafSet& set : *found) set.clear();
        for (std::size_t leaf = 0; leaf < order.size(); ++leaf) {
            (*found)[wave_of_[leaf]].add(jobs_.forest, order[leaf], static_cast<int>(leaf));
        }
        return *found;
    }

    const Jobs& jobs_;
    Dealings dealings_;
    Dealing* dealing_ = nullptr;
    i64 inner_rows_ = 0, inner_count_ = 0;
    std::vector<Span> spans_, chunk_;
    RankSums inner_sums_;
    TypicalBlock block_;
    std::vector<TypicalRows> fused_;        // the last one
    TypicalLoads loads_;
    Known<std::vector<TypicalRows>> rows_;  // by how they lie
    Known<Group> groups_;                   // and by how they move, too
    std::vector<int> wave_of_, number_;     // [leaf by rows], [node] its wave
};

}  // namespace augtree
