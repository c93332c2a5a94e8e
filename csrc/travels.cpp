// Loads of a pass whose keys go node by node or in a ring, or whose queries travel: see loads.cpp.
#include <algorithm>

#include "loads.h"
#include "masks.h"

namespace augtree {

// What ranks get, and send, as relays; and whom they send to: at first, and handing on.
struct PassRows::Relays {
    Vec<i64> far_in, more_in, sent;
    Mask first, then;
};

// Keys cross to another node once, to a relay, which hands them on there: see loads._handed_on. What a rank wants
// from far comes from a relay of its node instead, unless it is the relay itself.
void PassRows::handed_on(Vec<RankLoad>& out) {
    const auto none = [&] { return Vec<i64>(world_, 0, memory_); };
    const auto nobody = [&] { return Mask(static_cast<std::size_t>(world_) * words_, 0, memory_); };
    Relays relays{none(), none(), none(), nobody(), nobody()};
    const Viewers* seen = span_viewers_.data();
    for (RankLoad& x : out) {
        x.kv_out -= x.kv_far_out;  // what goes to its own node
        x.kv_far_out = 0;
    }
    for (int src = 0; src < world_; ++src) {
        // What everyone sees goes the same way.
        i64 everyone = 0;
        const std::uint64_t* all = nullptr;
        const auto send = [&](i64 rows, const std::uint64_t* mask) {
            const i64 crossing = rows * relay(src, rows, mask, relays);
            out[src].kv_out += crossing;
            out[src].kv_far_out += crossing;
        };
        for (const Placement* kind : kinds_) {
            for (const Span& s : (*kind)[src]) {
                if (seen->count == world_) {
                    everyone += s.hi - s.lo;
                    all = seen->mask;
                } else if (seen->count) {
                    send(s.hi - s.lo, seen->mask);
                }
                ++seen;
            }
        }
        if (all) send(everyone, all);
    }
    for (int rank = 0; rank < world_; ++rank) {
        RankLoad& x = out[rank];
        x.kv_far_in = relays.far_in[rank];
        x.kv_in += relays.more_in[rank];
        x.kv_out += relays.sent[rank];
        const std::size_t at = static_cast<std::size_t>(rank) * words_;
        std::uint64_t *mine = &relays.first[at], *on = &relays.then[at];
        unset(mine, rank);
        unset(on, rank);
        x.messages = count(mine, words_) + count(on, words_);
    }
}

// Some rows of a rank on their way to those who see them. Returns how many machine nodes they cross to.
i64 PassRows::relay(int src, i64 rows, const std::uint64_t* seen, Relays& relays) const {
    const Machine& home = machines_[node_of_[src]];
    const int place = src - home.first;
    std::uint64_t* mine = &relays.first[static_cast<std::size_t>(src) * words_];
    i64 crossings = 0;
    for (const Machine& machine : machines_) {
        const bool at_home = &machine == &home, one_word = machine.word == machine.last;
        if (one_word && !(seen[machine.word] & machine.ranks)) continue;
        const int relay = machine.first + (place < machine.size() ? place : place % machine.size());
        std::uint64_t* on = at_home ? mine : &relays.then[static_cast<std::size_t>(relay) * words_];
        i64 wanting = 0;
        if (one_word) {
            const std::uint64_t wanted = seen[machine.word] & machine.ranks;
            on[machine.word] |= wanted;
            wanting = wanted == machine.ranks ? machine.size() : bits(wanted);  // mostly all of them
        } else {
            for (int w = machine.word; w <= machine.last; ++w) {
                const std::uint64_t wanted = seen[w] & machine.in_word(w);
                on[w] |= wanted;
                wanting += bits(wanted);
            }
        }
        if (at_home || !wanting) continue;
        const bool itself = test(seen, relay);
        crossings += 1;
        relays.far_in[relay] += rows;
        relays.more_in[relay] += itself ? 0 : rows;  // otherwise it was counted
        relays.sent[relay] += rows * (wanting - itself);
        set(mine, relay);
    }
    return crossings;
}

void PassRows::ring(Vec<RankLoad>& out) {
    Vec<i64> shards(world_, 0, memory_);
    i64 total = 0;
    for (int rank = 0; rank < world_; ++rank) {
        for (const Placement* kind : kinds_) {
            for (const Span& s : (*kind)[rank]) shards[rank] += s.hi - s.lo;
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

void PassRows::move_q(Vec<RankLoad>& out) {
    gather(out, Placements({&placement_}, memory_));
    const Placements states(kinds_.begin() + 1, kinds_.end(), memory_);
    std::vector<std::vector<i64>> rows(world_, std::vector<i64>(world_, 0)), pairs = rows;  // [holder][query's rank]
    std::vector<i64> total(f_.rows.size(), 0);
    for (int holder = 0; holder < world_; ++holder) {
        for (const Placement* state : states) {
            for (const Span& s : (*state)[holder]) total[s.node] += s.hi - s.lo;
        }
        for (int src = 0; src < world_; ++src) {
            for (const Span& q : placement_[src]) {
                i64 seen = 0;
                for (int a : f_.ancestors[q.node]) seen += total[a];
                if (total[q.node]) {
                    for (const Placement* state : states) {
                        for (const Span& s : (*state)[holder]) {
                            if (s.node == q.node && s.hi <= q.lo) seen += s.hi - s.lo;
                        }
                    }
                }
                if (seen) rows[holder][src] += q.hi - q.lo;
                pairs[holder][src] += (q.hi - q.lo) * seen;
            }
        }
        for (const Placement* state : states) {
            for (const Span& s : (*state)[holder]) total[s.node] = 0;
        }
    }
    Mask receivers(words_, 0, memory_);
    for (int rank = 0; rank < world_; ++rank) {
        RankLoad& x = out[rank];
        std::fill(receivers.begin(), receivers.end(), 0);
        for (const Span& s : placement_[rank]) {
            const Viewers seen = viewers(s);
            for (int w = 0; w < words_; ++w) receivers[w] |= seen.mask[w];
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
        unset(receivers.data(), rank);
        x.messages = count(receivers.data(), words_) + back;
        x.pairs += come - go;
        x.visiting = come;
        x.tiles += x.states;
        x.merged += x.q_in + x.q_out;
    }
}

}  // namespace augtree
