// What every rank of a pass does in one layer: the twin of planning/loads.py.
#include <algorithm>

#include "pricing.h"

namespace augtree {

namespace {

using Mask = std::vector<std::uint64_t>;

void set(std::uint64_t* mask, int rank) { mask[rank >> 6] |= std::uint64_t{1} << (rank & 63); }
bool test(const std::uint64_t* mask, int rank) { return mask[rank >> 6] >> (rank & 63) & 1; }
i64 count(const std::uint64_t* mask, int words) {
    i64 bits = 0;
    for (int w = 0; w < words; ++w) bits += __builtin_popcountll(mask[w]);
    return bits;
}
i64 shared(const std::uint64_t* a, const std::uint64_t* b, int words) {
    i64 bits = 0;
    for (int w = 0; w < words; ++w) bits += __builtin_popcountll(a[w] & b[w]);
    return bits;
}

}  // namespace

// Keys of one node in some placements; see loads._Keys.
struct PassRows::Keys {
    struct Key {
        i64 hi, lo;
        int rank;
    };
    std::vector<Key> spans;
    std::vector<i64> held, group;
    std::vector<i64> below;  // [machine node][i], prefix sums over the sorted spans
};

PassRows::PassRows(
    const Forest& f, const Constants& c, Placement placement, std::vector<const Placement*> states, i64 start)
    : f_(f), c_(c), placement_(std::move(placement)), states_(std::move(states)),
      world_(static_cast<int>(placement_.size())), words_((world_ + 63) / 64), local_(f.rows.size(), -1) {
    i64 before = -1;
    for (int rank = 0; rank < world_; ++rank) {
        const i64 number = (start + rank) / c.node_ranks;
        if (number != before) mates_.emplace_back(words_, 0);
        before = number;
        node_of_.push_back(static_cast<int>(mates_.size()) - 1);
        set(mates_.back().data(), rank);
    }
    machine_nodes_ = static_cast<int>(mates_.size());
    index();
    basic();
}

void PassRows::index() {
    const auto number = [&](int node) {
        if (local_[node] < 0) {
            local_[node] = nodes_++;
            forest_node_.push_back(node);
        }
        return local_[node];
    };
    own_.resize(world_);
    last_.resize(world_);
    whole_.resize(world_);
    std::vector<int> stamp(f_.rows.size(), -1);
    before_last_.resize(world_);
    std::vector<i64> sizes;  // of each node's last span
    for (int rank = 0; rank < world_; ++rank) {
        sizes.clear();
        for (const Span& s : placement_[rank]) {
            const int i = number(s.node);
            if (own_[rank].empty() || own_[rank].back().first != i) {
                own_[rank].push_back({i, 0});
                last_[rank].push_back({i, 0});
                sizes.push_back(0);
                for (int a : f_.ancestors[s.node]) {
                    if (stamp[a] != rank) {
                        stamp[a] = rank;
                        whole_[rank].push_back(number(a));
                    }
                }
            }
            own_[rank].back().second += s.hi - s.lo;
            last_[rank].back().second = s.lo;
            sizes.back() = s.hi - s.lo;
        }
        // Cut nodes only, each with its rows before the last span.
        std::size_t kept = 0;
        for (std::size_t k = 0; k < own_[rank].size(); ++k) {
            if (stamp[forest_node_[own_[rank][k].first]] == rank) continue;
            last_[rank][kept++] = last_[rank][k];
            before_last_[rank].push_back(own_[rank][k].second - sizes[k]);
        }
        last_[rank].resize(kept);
    }
    seen_whole_.assign(nodes_, Mask(words_, 0));
    std::vector<std::vector<std::pair<i64, int>>> partly(nodes_);
    for (int rank = 0; rank < world_; ++rank) {
        for (int i : whole_[rank]) set(seen_whole_[i].data(), rank);
        for (const auto& [i, far] : last_[rank]) partly[i].push_back({far, rank});
    }
    ends_.resize(nodes_);
    below_.resize(nodes_);
    for (int i = 0; i < nodes_; ++i) {
        auto& order = partly[i];
        std::sort(order.begin(), order.end());
        const int n = static_cast<int>(order.size());
        below_[i].assign(static_cast<std::size_t>(n + 1) * words_, 0);
        for (int k = n - 1; k >= 0; --k) {
            std::copy_n(&below_[i][(k + 1) * words_], words_, &below_[i][k * words_]);
            set(&below_[i][k * words_], order[k].second);
        }
        for (const auto& [far, rank] : order) ends_[i].push_back(far);
    }
}

// Ranks with a query that sees a span of keys.
std::uint64_t* PassRows::viewers(const Span& s, std::uint64_t* into) const {
    const int i = local_[s.node];
    if (i < 0) {
        std::fill_n(into, words_, 0);
        return into;
    }
    const auto& ends = ends_[i];
    const std::size_t k = std::lower_bound(ends.begin(), ends.end(), s.hi) - ends.begin();
    for (int w = 0; w < words_; ++w) into[w] = seen_whole_[i][w] | below_[i][k * words_ + w];
    return into;
}

void PassRows::basic() {
    std::vector<i64> holders(nodes_, 0);
    for (const auto& own : own_) {
        for (const auto& [i, rows] : own) holders[i] += 1;
    }
    std::vector<i64> mine(f_.rows.size(), 0), held(f_.rows.size(), 0);
    basic_.resize(world_);
    for (int rank = 0; rank < world_; ++rank) {
        RankLoad& x = basic_[rank];
        for (const Span& s : placement_[rank]) {
            x.scored += std::min(f_.scored[s.node], s.hi - s.lo);
            x.pairs += f_.area(s.node, s.lo, s.hi);
        }
        for (const auto& [i, rows] : own_[rank]) mine[forest_node_[i]] = rows;
        for (const Placement* state : states_) {
            for (const Span& s : (*state)[rank]) held[s.node] += s.hi - s.lo;
        }
        std::vector<char> cut(own_[rank].size(), 0);
        std::size_t at = 0;
        for (std::size_t k = 0; k < own_[rank].size(); ++k) {
            const int i = own_[rank][k].first;
            if (at < last_[rank].size() && last_[rank][at].first == i) {
                cut[k] = holders[i] > 1;
                ++at;
            }
        }
        i64 below = 0;
        for (std::size_t k = 0; k < own_[rank].size(); ++k) {
            const auto& [i, rows] = own_[rank][k];
            const int node = forest_node_[i];
            x.rows += rows;
            below += f_.parents[node] >= 0 ? rows : 0;
            x.diagonal += rows * std::min(rows, c_.tile_rows) / 2;
            x.triangle += rows * (rows + 1) / 2;
            i64 seen = 0;
            for (int a : f_.ancestors[node]) seen += mine[a] + held[a];
            x.early += rows * seen;
            if (f_.inner[node]) x.early += rows * (rows + 1) / 2 + rows * held[node];
            x.tiles_a_source += cut[k];
            x.merged_a_source += cut[k] ? rows : 0;
        }
        const i64 shared_nodes = std::min<i64>(static_cast<i64>(whole_[rank].size()), 2);
        x.tiles = static_cast<i64>(own_[rank].size()) + shared_nodes;
        x.tiles_a_source += shared_nodes;
        x.merged = x.rows + below;
        x.merged_a_source += below;
        for (const auto& [i, rows] : own_[rank]) mine[forest_node_[i]] = 0;
        for (const Placement* state : states_) {
            for (const Span& s : (*state)[rank]) held[s.node] = 0;
        }
    }
}

void PassRows::gather(std::vector<RankLoad>& out, bool with_states) {
    std::vector<const Placement*> kinds{&placement_};
    if (with_states) kinds.insert(kinds.end(), states_.begin(), states_.end());
    std::vector<Keys> keys(nodes_);
    for (const Placement* kind : kinds) {
        for (int rank = 0; rank < world_; ++rank) {
            for (const Span& s : (*kind)[rank]) {
                if (local_[s.node] >= 0) keys[local_[s.node]].spans.push_back({s.hi, s.lo, rank});
            }
        }
    }
    for (int i = 0; i < nodes_; ++i) {
        Keys& k = keys[i];
        k.held.assign(world_, 0);
        k.group.assign(machine_nodes_, 0);
        for (const auto& x : k.spans) {
            k.held[x.rank] += x.hi - x.lo;
            k.group[node_of_[x.rank]] += x.hi - x.lo;
        }
        if (ends_[i].empty()) continue;
        std::sort(k.spans.begin(), k.spans.end(), [](const auto& a, const auto& b) {
            return std::tie(a.hi, a.lo, a.rank) < std::tie(b.hi, b.lo, b.rank);
        });
        const std::size_t n = k.spans.size();
        k.below.assign((n + 1) * machine_nodes_, 0);
        for (std::size_t j = 0; j < n; ++j) {
            for (int g = 0; g < machine_nodes_; ++g) {
                const i64 rows = node_of_[k.spans[j].rank] == g ? k.spans[j].hi - k.spans[j].lo : 0;
                k.below[(j + 1) * machine_nodes_ + g] = k.below[j * machine_nodes_ + g] + rows;
            }
        }
    }
    std::vector<i64> totals(nodes_, 0);
    for (int i = 0; i < nodes_; ++i) {
        for (i64 rows : keys[i].group) totals[i] += rows;
    }
    Mask mask(words_), reached(words_);
    for (int rank = 0; rank < world_; ++rank) {
        const int home = node_of_[rank];
        i64 near = 0, far = 0;
        for (int i : whole_[rank]) {
            near += keys[i].group[home] - keys[i].held[rank];
            far += totals[i] - keys[i].group[home];
        }
        std::size_t at = 0;
        for (const auto& [i, down] : last_[rank]) {
            const Keys& k = keys[i];
            const std::size_t n = std::upper_bound(k.spans.begin(), k.spans.end(), down,
                                                   [](i64 value, const auto& x) { return value < x.hi; }) -
                                  k.spans.begin();
            i64 mine = before_last_[rank][at++];  // the rank's own rows that end there
            for (std::size_t state = 1; state < kinds.size(); ++state) {
                for (const Span& s : (*kinds[state])[rank]) {
                    if (local_[s.node] == i && s.hi <= down) mine += s.hi - s.lo;
                }
            }
            i64 all = 0;
            for (int g = 0; g < machine_nodes_; ++g) all += k.below[n * machine_nodes_ + g];
            near += k.below[n * machine_nodes_ + home] - mine;
            far += all - k.below[n * machine_nodes_ + home];
        }
        RankLoad& x = out[rank];
        x.kv_in = near + far;
        x.kv_far_in = far;
        std::fill(reached.begin(), reached.end(), 0);
        for (const Placement* kind : kinds) {
            for (const Span& s : (*kind)[rank]) {
                viewers(s, mask.data());
                mask[rank >> 6] &= ~(std::uint64_t{1} << (rank & 63));
                for (int w = 0; w < words_; ++w) reached[w] |= mask[w];
                const i64 all = count(mask.data(), words_), here = shared(mask.data(), mates_[home].data(), words_);
                x.kv_out += (s.hi - s.lo) * all;
                x.kv_far_out += (s.hi - s.lo) * (all - here);
            }
        }
        x.messages = count(reached.data(), words_);
    }
}

// Keys cross to another node once, to a relay, which hands them on there: see loads._handed_on. What a rank wants
// from far comes from a relay of its node instead, unless it is the relay itself.
void PassRows::handed_on(std::vector<RankLoad>& out) {
    std::vector<std::vector<int>> ranks_of(machine_nodes_);
    std::vector<int> place(world_);
    for (int rank = 0; rank < world_; ++rank) {
        place[rank] = static_cast<int>(ranks_of[node_of_[rank]].size());
        ranks_of[node_of_[rank]].push_back(rank);
    }
    for (RankLoad& x : out) {
        x.kv_out -= x.kv_far_out;  // what goes to its own node
        x.kv_far_in = x.kv_far_out = 0;
    }
    std::vector<const Placement*> kinds{&placement_};
    kinds.insert(kinds.end(), states_.begin(), states_.end());
    std::vector<Mask> first(world_, Mask(words_, 0)), then = first;
    Mask seen(words_);
    for (const Placement* kind : kinds) {
        for (int src = 0; src < world_; ++src) {
            const int home = node_of_[src];
            for (const Span& s : (*kind)[src]) {
                const i64 size = s.hi - s.lo;
                viewers(s, seen.data());
                seen[src >> 6] &= ~(std::uint64_t{1} << (src & 63));
                for (int w = 0; w < words_; ++w) first[src][w] |= seen[w] & mates_[home][w];
                for (int node = 0; node < machine_nodes_; ++node) {
                    if (node == home) continue;
                    const std::vector<int>& ranks = ranks_of[node];
                    const int low = ranks.front() >> 6, words = (ranks.back() >> 6) - low + 1;
                    const i64 wanting = shared(&seen[low], &mates_[node][low], words);
                    if (!wanting) continue;
                    const int relay = ranks[place[src] % ranks.size()];
                    const i64 itself = test(seen.data(), relay);
                    out[src].kv_out += size;
                    out[src].kv_far_out += size;
                    out[relay].kv_far_in += size;
                    out[relay].kv_in += itself ? 0 : size;  // otherwise it was counted
                    out[relay].kv_out += size * (wanting - itself);
                    set(first[src].data(), relay);
                    for (int w = low; w < low + words; ++w) then[relay][w] |= seen[w] & mates_[node][w];
                }
            }
        }
    }
    for (int rank = 0; rank < world_; ++rank) {
        then[rank][rank >> 6] &= ~(std::uint64_t{1} << (rank & 63));
        out[rank].messages = count(first[rank].data(), words_) + count(then[rank].data(), words_);
    }
}

void PassRows::ring(std::vector<RankLoad>& out) {
    std::vector<i64> shards(world_, 0);
    i64 total = 0;
    for (int rank = 0; rank < world_; ++rank) {
        for (const Span& s : placement_[rank]) shards[rank] += s.hi - s.lo;
        for (const Placement* state : states_) {
            for (const Span& s : (*state)[rank]) shards[rank] += s.hi - s.lo;
        }
        total += shards[rank];
    }
    i64 filled = 0;
    for (i64 rows : shards) filled += rows > 0;
    for (int rank = 0; rank < world_; ++rank) {
        const int after = (rank + 1) % world_, before = (rank + world_ - 1) % world_;
        RankLoad& x = out[rank];
        // All shards but the next rank's pass through.
        x.kv_out = world_ > 1 ? total - shards[after] : 0;
        x.kv_in = world_ > 1 ? total - shards[rank] : 0;
        x.messages = world_ > 1 ? filled - (shards[after] > 0) : 0;
        x.kv_far_in = node_of_[before] != node_of_[rank] ? x.kv_in : 0;
        x.kv_far_out = node_of_[after] != node_of_[rank] ? x.kv_out : 0;
    }
}

void PassRows::move_q(std::vector<RankLoad>& out) {
    gather(out, false);
    std::vector<std::vector<i64>> rows(world_, std::vector<i64>(world_, 0)), pairs = rows;  // [holder][query's rank]
    std::vector<i64> total(f_.rows.size(), 0);
    for (int holder = 0; holder < world_; ++holder) {
        for (const Placement* state : states_) {
            for (const Span& s : (*state)[holder]) total[s.node] += s.hi - s.lo;
        }
        for (int src = 0; src < world_; ++src) {
            for (const Span& q : placement_[src]) {
                i64 seen = 0;
                for (int a : f_.ancestors[q.node]) seen += total[a];
                if (total[q.node]) {
                    for (const Placement* state : states_) {
                        for (const Span& s : (*state)[holder]) {
                            if (s.node == q.node && s.hi <= q.lo) seen += s.hi - s.lo;
                        }
                    }
                }
                if (seen) rows[holder][src] += q.hi - q.lo;
                pairs[holder][src] += (q.hi - q.lo) * seen;
            }
        }
        for (const Placement* state : states_) {
            for (const Span& s : (*state)[holder]) total[s.node] = 0;
        }
    }
    Mask receivers(words_), mask(words_);
    for (int rank = 0; rank < world_; ++rank) {
        RankLoad& x = out[rank];
        std::fill(receivers.begin(), receivers.end(), 0);
        for (const Span& s : placement_[rank]) {
            viewers(s, mask.data());
            for (int w = 0; w < words_; ++w) receivers[w] |= mask[w];
        }
        i64 come = 0, go = 0, back = 0;
        for (int other = 0; other < world_; ++other) {
            if (other == rank) continue;
            const bool far = node_of_[other] != node_of_[rank];
            x.q_out += rows[other][rank];
            x.q_in += rows[rank][other];
            x.q_far_out += far ? rows[other][rank] : 0;
            x.q_far_in += far ? rows[rank][other] : 0;
            go += pairs[other][rank];
            come += pairs[rank][other];
            if (rows[other][rank]) set(receivers.data(), other);
            back += rows[rank][other] > 0;
        }
        receivers[rank >> 6] &= ~(std::uint64_t{1} << (rank & 63));
        x.messages = count(receivers.data(), words_) + back;
        x.pairs += come - go;
        x.visiting = come;
        x.tiles += 1;
        x.merged += x.q_in + x.q_out;
    }
}

Loads PassRows::loads(const PassSpec& p) {
    Loads found;
    const i64 remote = world_ - 1;
    const bool crosses = p.node_ranks && machine_nodes_ > 1 && p.primitive == GATHER_KV;
    found.ranks = basic_;
    if (p.primitive == MOVE_Q) {
        found.sources = 1;
        move_q(found.ranks);
    } else if (p.primitive == RING) {
        found.sources = remote;
        ring(found.ranks);
    } else {
        found.sources = p.primitive == MOVE_KV ? remote : std::min(p.pieces, remote);
        if (!direct_) {
            direct_ = basic_;
            gather(*direct_, true);
        }
        found.ranks = *direct_;
        if (crosses) handed_on(found.ranks);
    }
    bool moves = false;
    for (RankLoad& x : found.ranks) {
        x.tiles += x.tiles_a_source * found.sources;
        x.merged += x.merged_a_source * found.sources;
        moves = moves || x.messages;
    }
    if (remote && moves) {
        found.stages = remote;
        if (p.primitive == MOVE_Q) found.stages = 2;
        if (p.primitive == GATHER_KV || p.primitive == LOCAL) found.stages = std::min(p.pieces, remote) + crosses;
    }
    return found;
}

}  // namespace augtree
