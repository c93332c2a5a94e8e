// Loads of a pass whose keys go node by node or in a ring, or whose queries travel: see loads.cpp.
#include <algorithm>

#include "masks.h"
#include "pricing.h"

namespace augtree {

// Keys cross to another node once, to a relay, which hands them on there: see loads._handed_on. What a rank wants
// from far comes from a relay of its node instead, unless it is the relay itself.
void PassRows::handed_on(std::vector<RankLoad>& out) {
    for (RankLoad& x : out) {
        x.kv_out -= x.kv_far_out;  // what goes to its own node
        x.kv_far_in = x.kv_far_out = 0;
    }
    std::vector<const Placement*> kinds{&placement_};
    kinds.insert(kinds.end(), states_.begin(), states_.end());
    Mask first(static_cast<std::size_t>(world_) * words_, 0), then = first;
    for (int src = 0; src < world_; ++src) {
        // What everyone sees goes the same way.
        i64 everyone = 0;
        const std::uint64_t* all = nullptr;
        for (const Placement* kind : kinds) {
            for (const Span& s : (*kind)[src]) {
                const Viewers seen = viewers(s);
                if (seen.count == world_) {
                    everyone += s.hi - s.lo;
                    all = seen.mask;
                } else if (seen.count) {
                    relay(src, s.hi - s.lo, seen.mask, out, first.data(), then.data());
                }
            }
        }
        if (all) relay(src, everyone, all, out, first.data(), then.data());
    }
    for (int rank = 0; rank < world_; ++rank) {
        const std::size_t at = static_cast<std::size_t>(rank) * words_;
        std::uint64_t *mine = &first[at], *on = &then[at];
        unset(mine, rank);
        unset(on, rank);
        out[rank].messages = count(mine, words_) + count(on, words_);
    }
}

// Some rows of a rank on their way to those who see them; the masks say whom ranks send to: at first, and handing on.
void PassRows::relay(int src, i64 rows, const std::uint64_t* seen, std::vector<RankLoad>& out, std::uint64_t* first,
                     std::uint64_t* then) const {
    const Machine& home = machines_[node_of_[src]];
    std::uint64_t* mine = first + static_cast<std::size_t>(src) * words_;
    for (int w = home.first >> 6; w <= (home.end - 1) >> 6; ++w) mine[w] |= seen[w] & home.ranks[w];
    i64 crossings = 0;
    for (const Machine& machine : machines_) {
        if (&machine == &home) continue;
        const i64 wanting = of_machine(seen, machine);
        if (!wanting) continue;
        const int relay = machine.first + (src - home.first) % (machine.end - machine.first);
        const bool itself = test(seen, relay);
        RankLoad& x = out[relay];
        crossings += 1;
        x.kv_far_in += rows;
        x.kv_in += itself ? 0 : rows;  // otherwise it was counted
        x.kv_out += rows * (wanting - itself);
        set(mine, relay);
        std::uint64_t* on = then + static_cast<std::size_t>(relay) * words_;
        for (int w = machine.first >> 6; w <= (machine.end - 1) >> 6; ++w) on[w] |= seen[w] & machine.ranks[w];
    }
    out[src].kv_out += rows * crossings;
    out[src].kv_far_out += rows * crossings;
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
    Mask receivers(words_);
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
