// What every rank of a placed plan's passes takes; planning/fast.py calls it for planning/timeline.py.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <stdexcept>

#include "loads.h"

namespace py = pybind11;

namespace augtree {

namespace {

using Table = py::array_t<i64, py::array::c_style | py::array::forcecast>;

// A pass's numbers, in the order of `FastJobs.rank_times` in planning/fast.py.
enum Field { START, RANKS, READS, PRIMITIVE, PIECES, NODE_RANKS, KEEP, PREFETCH, WHOLE, ATTENTION, OFFLOAD, FIELDS };

// [pass, rank of its block in turn] (forward, backward, both without the vocabulary: ns, rows), as if no rank
// waited for another.
//
// counts: [pass, rank in turn] spans; spans: (node, lo, hi) one after the other; reads: passes read, likewise.
py::array_t<i64> rank_times(
    Jobs& jobs, const Table& passes, const Table& counts, const Table& spans, const Table& reads) {
    const Constants& c = jobs.constants;
    const i64 number = passes.size() / FIELDS;
    const i64 *count = counts.data(), *span = spans.data(), *read = reads.data();
    i64 ranks = 0, held = 0, reading = 0;
    for (i64 i = 0; i < number; ++i) {
        ranks += passes.data()[i * FIELDS + RANKS];
        reading += passes.data()[i * FIELDS + READS];
    }
    if (counts.size() != ranks || reads.size() != reading) throw std::invalid_argument("passes");
    for (i64 i = 0; i < ranks; ++i) held += count[i];
    if (spans.size() != 3 * held) throw std::invalid_argument("spans");
    py::array_t<i64> found({ranks, i64{5}});
    i64* out = found.mutable_data();
    std::pmr::monotonic_buffer_resource memory;
    std::vector<Placement> placed;
    placed.reserve(number);
    for (i64 i = 0; i < number; ++i) {
        const i64* r = passes.data() + i * FIELDS;
        Placement& mine = placed.emplace_back(&memory);
        for (i64 rank = 0; rank < r[RANKS]; ++rank) {
            for (i64 k = *count++; k > 0; --k, span += 3) {
                mine.spans.push_back({static_cast<int>(span[0]), span[1], span[2]});
            }
            mine.at.push_back(mine.spans.size());
        }
        std::pmr::monotonic_buffer_resource passing(Jobs::scratch(), Jobs::kScratch);
        Placements states(&passing);
        for (i64 k = 0; k < r[READS]; ++k) states.push_back(&placed[*read++]);
        PassSpec p;
        p.primitive = static_cast<int>(r[PRIMITIVE]);
        p.pieces = r[PIECES];
        p.node_ranks = r[NODE_RANKS];
        p.keep = r[KEEP];
        p.prefetch = r[PREFETCH];
        p.offload = r[OFFLOAD];
        const Loads loads = PassRows(jobs.forest, c, placed[i], states, r[START], &passing).loads(p);
        const Pair pair = r[WHOLE] < 0 ? Pair{c.layers - c.recomputed, c.attention_kept} : Pair{r[WHOLE], r[ATTENTION]};
        for (std::size_t rank = 0; rank < loads.ranks.size(); ++rank, out += 5) {
            const PassPrice price(c, &loads.ranks[rank], 1, loads.stages, p, false);
            std::tie(out[0], out[1]) = price.time(pair);
            std::tie(out[2], out[3]) = price.time(pair, false);
            out[4] = loads.ranks[rank].rows;
        }
    }
    return found;
}

}  // namespace

}  // namespace augtree

// A method of `Jobs`, which pricing.cpp binds first.
void bind_timeline(py::module_& module) {
    const py::object jobs = module.attr("Jobs");
    jobs.attr("rank_times") = py::cpp_function(&augtree::rank_times, py::name("rank_times"), py::is_method(jobs));
}
