// What every rank of a placed pass does; see loads.cpp.
#pragma once

#include <algorithm>

#include "placing.h"

namespace augtree {

using Placements = Vec<const Placement*>;

struct Loads {
    Vec<RankLoad> ranks;
    i64 stages = 0;
};

// Tiles of a rank's rows of a node that is cut over some ranks, with the others' rows of it.
i64 cut_tiles(i64 landings, i64 ranks, bool mixed);
// Stages in which keys land. `most`, `least`: ranks of the block on one node of the machine.
i64 landings(const PassSpec& p, i64 width, i64 most, i64 least, i64 machine_nodes, bool crosses);

// Loads of a pass; `start` is the pool rank that its block begins with. The placements stay where they are.
class PassRows {
public:
    PassRows(const Forest& f, const Constants& c, const Placement& placement, const Placements& states,
             i64 start, Memory* memory);
    PassRows(const Forest&, const Constants&, Placement&&, const Placements&, i64, Memory*) = delete;
    Loads loads(const PassSpec& p);

private:
    using Mask = Vec<std::uint64_t>;
    struct Keys;
    struct Machine {  // a machine node: neighbours
        Machine(int from, int to)
            : first(from), end(to), word(from >> 6), last((to - 1) >> 6), ranks(in_word(word)) {}
        int first, end;
        int word, last;       // of a mask: where its ranks' bits are
        std::uint64_t ranks;  // their bits of the first of these words
        int size() const { return end - first; }
        // Which bits of a word of a mask are its ranks'.
        std::uint64_t in_word(int word) const {
            const int lo = std::max(first - 64 * word, 0), hi = std::min(end - 64 * word, 64);
            return ~std::uint64_t{0} >> (64 - (hi - lo)) << lo;
        }
    };
    struct Relays;
    struct Own {  // what a rank holds of a node: its rows, where its last span begins, that one's rows
        int index;
        bool partly;  // it does not see all of it
        i64 rows, far, last;
    };
    struct Reader {  // a rank that sees a node's keys so far down; its own rows there but for the last span
        i64 far, before;
        int rank;
    };
    struct Viewers {
        const std::uint64_t* mask;
        i64 count;
    };
    void limits();
    void index();
    void readers();
    void basic();
    Keys keys_of(const Placements& kinds) const;
    void gather(Vec<RankLoad>& out, const Placements& kinds);
    void received(Vec<RankLoad>& out, const Placements& kinds) const;
    void sent(Vec<RankLoad>& out, const Placements& kinds);
    void handed_on(Vec<RankLoad>& out);
    i64 relay(int src, i64 rows, const std::uint64_t* seen, Relays& relays) const;
    void ring(Vec<RankLoad>& out);
    void move_q(Vec<RankLoad>& out);
    Viewers viewers(const Span& s) const;
    i64 of_machine(const std::uint64_t* mask, const Machine& m) const;
    i64 landings_of(const PassSpec& p, bool crosses) const;

    const Forest& f_;
    const Constants& c_;
    const Placement& placement_;
    Memory* memory_;
    Placements kinds_;  // its own placement, then those of the states that it reads
    int world_, words_, nodes_ = 0, machine_nodes_ = 0, lowest_ = 0;
    Mask none_;
    Vec<Machine> machines_{memory_};
    Vec<int> node_of_{memory_};      // [rank] machine node
    Vec<int> local_{memory_};        // [forest node - lowest_] index, -1 where no rank sees it
    Vec<int> forest_node_{memory_};  // [index]
    Vec<Own> own_{memory_};          // by rank
    Vec<int> whole_{memory_};        // by rank: indices seen whole
    Vec<std::size_t> own_at_{memory_}, whole_at_{memory_};  // [rank] where they begin
    Vec<Reader> readers_{memory_};                          // by index, then by how far they see
    Vec<std::size_t> reader_at_{memory_};                   // [index] where they begin
    Mask seen_{memory_};  // [reader, and one more an index] ranks that see as far or further
    Vec<i64> seen_count_{memory_};
    Vec<Viewers> span_viewers_{memory_};  // of what is gathered: by rank, then by placement, then by span
    Vec<RankLoad> basic_{memory_};
    std::optional<Vec<RankLoad>> direct_, handed_on_;  // whatever the pieces
};

}  // namespace augtree
