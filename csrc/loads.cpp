// What every rank of a pass does in one layer: the twin of planning/loads.py and planning/viewers.py.
#include <algorithm>

#include "loads.h"
#include "masks.h"

namespace augtree {

PassRows::PassRows(const Forest& f, const Constants& c, const Placement& placement, const Placements& states,
                   i64 start, Memory* memory)
    : f_(f), c_(c), placement_(placement), memory_(memory), kinds_({&placement}, memory),
      world_(static_cast<int>(placement.size())), words_((world_ + 63) / 64), none_(words_, 0, memory) {
    kinds_.insert(kinds_.end(), states.begin(), states.end());
    node_of_.reserve(world_);
    for (i64 rank = 0; rank < world_;) {
        const i64 end = std::min<i64>(world_, rank + c.node_ranks - (start + rank) % c.node_ranks);
        node_of_.resize(end, static_cast<int>(machines_.size()));
        machines_.emplace_back(static_cast<int>(rank), static_cast<int>(end));
        rank = end;
    }
    machine_nodes_ = static_cast<int>(machines_.size());
    limits();
    index();
    readers();
    basic();
}

// How many of a machine node's ranks are in a mask.
i64 PassRows::of_machine(const std::uint64_t* mask, const Machine& m) const {
    i64 found = 0;
    if (m.word == m.last) return bits(mask[m.word] & m.ranks);
    for (int w = m.word; w <= m.last; ++w) found += bits(mask[w] & m.in_word(w));
    return found;
}

// The lowest and the highest node that is held or above one that is: arrays by node have these only.
void PassRows::limits() {
    int lowest = static_cast<int>(f_.rows.size()), highest = -1;
    for (const Placement* held : kinds_) {
        for (const Span& s : held->spans) {
            const std::vector<int>& above = f_.ancestors[s.node];
            lowest = std::min(lowest, above.empty() ? s.node : above.front());
            highest = std::max(highest, s.node);
        }
    }
    lowest_ = lowest;
    local_.assign(std::max(highest - lowest + 1, 0), -1);
}

// What every rank holds and sees, nodes numbered as they come.
void PassRows::index() {
    const auto number = [&](int node) {
        int& known = local_[node - lowest_];
        if (known < 0) {
            known = nodes_++;
            forest_node_.push_back(node);
        }
        return known;
    };
    Vec<int> stamp(local_.size(), -1, memory_);
    own_.reserve(placement_.spans.size());
    own_at_.reserve(world_ + 1);
    whole_at_.reserve(world_ + 1);
    for (int rank = 0; rank < world_; ++rank) {
        const std::size_t first = own_.size();
        own_at_.push_back(first);
        whole_at_.push_back(whole_.size());
        for (const Span& s : placement_[rank]) {
            const int i = number(s.node);
            if (own_.size() == first || own_.back().index != i) {
                own_.push_back({i, false, 0, 0, 0});
                for (int a : f_.ancestors[s.node]) {
                    if (stamp[a - lowest_] != rank) {
                        stamp[a - lowest_] = rank;
                        whole_.push_back(number(a));
                    }
                }
            }
            Own& own = own_.back();
            own.rows += s.hi - s.lo;
            own.far = s.lo;
            own.last = s.hi - s.lo;
        }
        for (std::size_t k = first; k < own_.size(); ++k) {
            own_[k].partly = stamp[forest_node_[own_[k].index] - lowest_] != rank;
        }
    }
    own_at_.push_back(own_.size());
    whole_at_.push_back(whole_.size());
}

// [index] ranks that see a part of a node, by how far down; and all ranks that see its keys from there on.
void PassRows::readers() {
    Mask whole(static_cast<std::size_t>(nodes_) * words_, 0, memory_);
    reader_at_.assign(nodes_ + 1, 0);
    for (const Own& own : own_) reader_at_[own.index + 1] += own.partly;
    for (int i = 0; i < nodes_; ++i) reader_at_[i + 1] += reader_at_[i];
    readers_.resize(reader_at_[nodes_]);
    Vec<std::size_t> next(reader_at_.begin(), reader_at_.end() - 1, memory_);
    // Of a node in zigzag the last rank sees least.
    for (int rank = world_ - 1; rank >= 0; --rank) {
        for (std::size_t k = whole_at_[rank]; k < whole_at_[rank + 1]; ++k) set(&whole[whole_[k] * words_], rank);
        for (std::size_t k = own_at_[rank]; k < own_at_[rank + 1]; ++k) {
            const Own& own = own_[k];
            if (own.partly) readers_[next[own.index]++] = {own.far, own.rows - own.last, rank};
        }
    }
    seen_.resize((readers_.size() + nodes_) * words_);
    seen_count_.resize(readers_.size() + nodes_);
    for (int i = 0; i < nodes_; ++i) {
        const auto first = readers_.begin() + reader_at_[i], end = readers_.begin() + reader_at_[i + 1];
        const auto nearer = [](const Reader& a, const Reader& b) { return a.far < b.far; };
        if (!std::is_sorted(first, end, nearer)) std::sort(first, end, nearer);
        std::uint64_t* mask = &seen_[(reader_at_[i + 1] + i) * words_];
        std::copy_n(&whole[static_cast<std::size_t>(i) * words_], words_, mask);
        i64 viewers = count(mask, words_);
        seen_count_[reader_at_[i + 1] + i] = viewers;
        for (std::size_t k = reader_at_[i + 1]; k-- > reader_at_[i];) {
            std::copy_n(mask, words_, mask - words_);
            mask -= words_;
            viewers += !test(mask, readers_[k].rank);
            set(mask, readers_[k].rank);
            seen_count_[k + i] = viewers;
        }
    }
}

// Ranks with a query that sees a span of keys, and how many they are.
PassRows::Viewers PassRows::viewers(const Span& s) const {
    const int i = local_[s.node - lowest_];
    if (i < 0) return {none_.data(), 0};
    const auto first = readers_.begin() + reader_at_[i], end = readers_.begin() + reader_at_[i + 1];
    auto from = first;  // of a cut node, half of the rows are seen by all ranks
    if (first != end && first->far < s.hi) {
        from = std::lower_bound(first, end, s.hi, [](const Reader& x, i64 hi) { return x.far < hi; });
    }
    const std::size_t at = static_cast<std::size_t>(from - readers_.begin()) + i;
    return {&seen_[at * words_], seen_count_[at]};
}

void PassRows::basic() {
    Vec<i64> holders(nodes_, 0, memory_);
    for (const Own& own : own_) holders[own.index] += 1;
    Vec<i64> mine(local_.size(), 0, memory_), held(local_.size(), 0, memory_);
    basic_.resize(world_);
    for (int rank = 0; rank < world_; ++rank) {
        RankLoad& x = basic_[rank];
        for (const Span& s : placement_[rank]) {
            x.scored += std::min(f_.scored[s.node], s.hi - s.lo);
            x.pairs += f_.area(s.node, s.lo, s.hi);
        }
        const Own *first = own_.data() + own_at_[rank], *end = own_.data() + own_at_[rank + 1];
        for (const Own* own = first; own != end; ++own) mine[forest_node_[own->index] - lowest_] = own->rows;
        for (std::size_t k = 1; k < kinds_.size(); ++k) {
            for (const Span& s : (*kinds_[k])[rank]) held[s.node - lowest_] += s.hi - s.lo;
            const auto kept = (*kinds_[k])[rank];
            x.states += kept.begin() != kept.end();
        }
        i64 below = 0;
        for (const Own* own = first; own != end; ++own) {
            const i64 rows = own->rows;
            const int node = forest_node_[own->index];
            x.rows += rows;
            below += f_.parents[node] >= 0 ? rows : 0;
            x.below += f_.starts[node] ? rows : 0;
            x.above += rows * f_.starts[node];
            x.diagonal += rows * std::min(rows, c_.tile_rows) / 2;
            x.triangle += rows * (rows + 1) / 2;
            i64 seen = 0;
            for (int a : f_.ancestors[node]) seen += mine[a - lowest_] + held[a - lowest_];
            x.early += rows * seen;
            (f_.inner[node] ? x.early : x.leaves_early) += rows * (rows + 1) / 2;
            if (f_.inner[node]) x.early += rows * held[node - lowest_];
            x.resumed = x.resumed || held[node - lowest_];
            if (holders[own->index] == world_) {
                x.cuts += world_ > 1;
                x.cut_rows += world_ > 1 ? rows : 0;
            } else if (holders[own->index] > 1) {
                x.lane_cuts += 1;
                x.lane_cut_rows += rows;
                x.lane = std::max(x.lane, holders[own->index]);
            }
        }
        const i64 shared_nodes = std::min<i64>(static_cast<i64>(whole_at_[rank + 1] - whole_at_[rank]), 2);
        x.tiles = (end - first) + std::max(shared_nodes, x.states);
        x.tiles_a_landing = shared_nodes;
        x.merged = x.rows + std::max(below, x.rows * x.states);
        x.merged_a_landing = below;
        for (const Own* own = first; own != end; ++own) mine[forest_node_[own->index] - lowest_] = 0;
        for (std::size_t k = 1; k < kinds_.size(); ++k) {
            for (const Span& s : (*kinds_[k])[rank]) held[s.node - lowest_] = 0;
        }
    }
}

// Keys of every node that is seen, of some placements; see loads._Keys.
struct PassRows::Keys {
    struct Key {
        i64 hi, rows;
        int rank;
    };
    explicit Keys(Memory* memory) : all(memory), at(memory), group(memory), total(memory) {}
    Vec<Key> all;           // by node, then by end
    Vec<std::size_t> at;    // [index] where a node's begin
    Vec<i64> group, total;  // [index, machine node], [index] rows
};

PassRows::Keys PassRows::keys_of(const Placements& kinds) const {
    Keys keys(memory_);
    keys.at.assign(nodes_ + 1, 0);
    keys.group.assign(static_cast<std::size_t>(nodes_) * machine_nodes_, 0);
    keys.total.assign(nodes_, 0);
    for (const Placement* kind : kinds) {
        for (int rank = 0; rank < world_; ++rank) {
            for (const Span& s : (*kind)[rank]) {
                const int i = local_[s.node - lowest_];
                if (i < 0) continue;
                keys.at[i + 1] += 1;
                keys.group[static_cast<std::size_t>(i) * machine_nodes_ + node_of_[rank]] += s.hi - s.lo;
                keys.total[i] += s.hi - s.lo;
            }
        }
    }
    for (int i = 0; i < nodes_; ++i) keys.at[i + 1] += keys.at[i];
    keys.all.resize(keys.at[nodes_]);
    Vec<std::size_t> next(keys.at.begin(), keys.at.end() - 1, memory_);
    // The order of zigzag chunks: all but the last of each rank upwards, the last ones downwards.
    for (auto kind = kinds.rbegin(); kind != kinds.rend(); ++kind) {
        for (const bool last : {false, true}) {
            for (int k = 0; k < world_; ++k) {
                const int rank = last ? world_ - 1 - k : k;
                const Placement::Spans spans = (**kind)[rank];
                for (std::size_t j = 0; j < spans.size(); ++j) {
                    const Span& s = spans[j];
                    const int i = local_[s.node - lowest_];
                    if (i < 0 || last != (j + 1 == spans.size() || spans[j + 1].node != s.node)) continue;
                    keys.all[next[i]++] = {s.hi, s.hi - s.lo, rank};
                }
            }
        }
    }
    for (int i = 0; i < nodes_; ++i) {
        const auto first = keys.all.begin() + keys.at[i], end = keys.all.begin() + keys.at[i + 1];
        const auto sooner = [](const Keys::Key& a, const Keys::Key& b) { return a.hi < b.hi; };
        if (reader_at_[i] < reader_at_[i + 1] && !std::is_sorted(first, end, sooner)) std::sort(first, end, sooner);
    }
    return keys;
}

void PassRows::gather(Vec<RankLoad>& out, const Placements& kinds) {
    received(out, kinds);
    sent(out, kinds);
}

void PassRows::received(Vec<RankLoad>& out, const Placements& kinds) const {
    const Keys keys = keys_of(kinds);
    Vec<i64> near(world_, 0, memory_), far(world_, 0, memory_), below(machine_nodes_, 0, memory_);
    // Nodes of which a rank sees a part: keys up to there, ranks by how far they see.
    for (int i = 0; i < nodes_; ++i) {
        std::fill(below.begin(), below.end(), 0);
        i64 all = 0;
        std::size_t at = keys.at[i];
        for (std::size_t k = reader_at_[i]; k < reader_at_[i + 1]; ++k) {
            const Reader& reader = readers_[k];
            for (; at < keys.at[i + 1] && keys.all[at].hi <= reader.far; ++at) {
                below[node_of_[keys.all[at].rank]] += keys.all[at].rows;
                all += keys.all[at].rows;
            }
            i64 mine = reader.before;
            for (std::size_t state = 1; state < kinds.size(); ++state) {
                for (const Span& s : (*kinds[state])[reader.rank]) {
                    if (s.node == forest_node_[i] && s.hi <= reader.far) mine += s.hi - s.lo;
                }
            }
            const i64 home = below[node_of_[reader.rank]];
            near[reader.rank] += home - mine;
            far[reader.rank] += all - home;
        }
    }
    // Nodes that it sees whole.
    Vec<int> stamp(nodes_, -1, memory_);
    for (int rank = 0; rank < world_; ++rank) {
        for (std::size_t k = whole_at_[rank]; k < whole_at_[rank + 1]; ++k) {
            const int i = whole_[k];
            const i64 home = keys.group[static_cast<std::size_t>(i) * machine_nodes_ + node_of_[rank]];
            stamp[i] = rank;
            near[rank] += home;
            far[rank] += keys.total[i] - home;
        }
        for (const Placement* kind : kinds) {
            for (const Span& s : (*kind)[rank]) {
                const int i = local_[s.node - lowest_];
                if (i >= 0 && stamp[i] == rank) near[rank] -= s.hi - s.lo;
            }
        }
        out[rank].kv_in = near[rank] + far[rank];
        out[rank].kv_far_in = far[rank];
    }
}

void PassRows::sent(Vec<RankLoad>& out, const Placements& kinds) {
    Mask reached(words_, 0, memory_);
    span_viewers_.clear();
    std::size_t spans = 0;
    for (const Placement* kind : kinds) spans += kind->spans.size();
    span_viewers_.reserve(spans);
    for (int rank = 0; rank < world_; ++rank) {
        RankLoad& x = out[rank];
        const Machine& home = machines_[node_of_[rank]];
        bool everyone = false;
        std::fill(reached.begin(), reached.end(), 0);
        for (const Placement* kind : kinds) {
            for (const Span& s : (*kind)[rank]) {
                const Viewers seen = viewers(s);
                span_viewers_.push_back(seen);
                const i64 here = seen.count == world_ ? home.end - home.first : of_machine(seen.mask, home);
                x.kv_out += (s.hi - s.lo) * (seen.count - test(seen.mask, rank));
                x.kv_far_out += (s.hi - s.lo) * (seen.count - here);
                everyone = everyone || seen.count == world_;
                for (int w = 0; w < words_ && !everyone; ++w) reached[w] |= seen.mask[w];
            }
        }
        unset(reached.data(), rank);
        x.messages = everyone ? world_ - 1 : count(reached.data(), words_);
    }
}

i64 landings(const PassSpec& p, i64 width, i64 most, i64 least, i64 machine_nodes, bool crosses) {
    if (p.primitive == MOVE_Q) return 1;
    if (p.primitive == RING || p.primitive == MOVE_KV) return width - 1;
    if (!crosses) return std::min(p.pieces, width - 1);
    const i64 far = (machine_nodes - 1) * ((most + least - 1) / least);
    return std::max(std::min(p.pieces, most - 1), std::min(p.pieces, far) + 1);
}

i64 cut_tiles(i64 landings, i64 ranks, bool mixed) {
    const i64 own = std::min(landings, ranks - 1);
    return mixed ? 2 * landings : own + (own < ranks - 1);
}

i64 PassRows::landings_of(const PassSpec& p, bool crosses) const {
    i64 most = 0, least = world_;
    for (const Machine& m : machines_) {
        most = std::max<i64>(most, m.end - m.first);
        least = std::min<i64>(least, m.end - m.first);
    }
    return landings(p, world_, most, least, machine_nodes_, crosses);
}

Loads PassRows::loads(const PassSpec& p) {
    Loads found{Vec<RankLoad>(memory_), 0};
    const i64 remote = world_ - 1;
    const bool crosses = p.node_ranks && machine_nodes_ > 1 && p.primitive == GATHER_KV;
    const i64 landings = landings_of(p, crosses);
    if (p.primitive == MOVE_Q) {
        found.ranks = basic_;
        move_q(found.ranks);
    } else if (p.primitive == RING) {
        found.ranks = basic_;
        ring(found.ranks);
    } else {
        if (!direct_) {
            direct_.emplace(basic_, memory_);
            gather(*direct_, kinds_);
        }
        if (crosses && !handed_on_) {
            handed_on_.emplace(*direct_, memory_);
            handed_on(*handed_on_);
        }
        found.ranks = crosses ? *handed_on_ : *direct_;
    }
    bool moves = false;
    for (RankLoad& x : found.ranks) {
        x.tiles += x.tiles_a_landing * landings + x.cuts * cut_tiles(landings, world_, crosses || x.resumed) +
                   x.lane_cuts * cut_tiles(landings, x.lane, false);
        x.merged += (x.merged_a_landing + x.cut_rows) * landings + x.lane_cut_rows * std::min(landings, x.lane - 1);
        x.early += p.primitive == MOVE_Q ? 0 : x.leaves_early;
        moves = moves || x.messages;
    }
    if (remote && moves) found.stages = p.primitive == MOVE_Q ? 2 : landings;
    return found;
}

}  // namespace augtree
