// Binds the prices of jobs and of whole plans; planning/fast.py calls them.
#include "loads.h"
#include "pipeline.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <stdexcept>

namespace py = pybind11;

namespace augtree {

namespace {

using Table = py::array_t<i64, py::array::c_style | py::array::forcecast>;

std::vector<i64> column(const Table& t) { return {t.data(), t.data() + t.size()}; }

// Takes the constants one after the other, in the order of `constants` in planning/fast.py.
Constants constants_of(const std::vector<i64>& v) {
    Constants c{};
    std::vector<i64*> fields{
        &c.layers, &c.stages, &c.recomputed, &c.attention_kept, &c.logit_rows, &c.saved, &c.input, &c.attended,
        &c.kv, &c.kv_grad, &c.query, &c.result, &c.result_grad, &c.query_grad, &c.logit, &c.hidden,
        &c.node_ranks, &c.half_rows, &c.tile_ns, &c.tile_rows, &c.query_rows, &c.attention_pct, &c.gemm_pct,
        &c.stage_ns, &c.layer_ns, &c.pass_ns, &c.message_ns, &c.overlap, &c.has_host};
    const auto rates = {&c.linear, &c.vocabulary, &c.beside, &c.merging,
                        &c.attention, &c.link, &c.nic, &c.host};
    for (Rate* rate : rates) {
        fields.push_back(&rate->multiplier);
        fields.push_back(&rate->shift);
    }
    if (fields.size() != v.size()) throw std::invalid_argument("constants");
    for (std::size_t i = 0; i < v.size(); ++i) *fields[i] = v[i];
    for (Rate* rate : rates) rate->prepare();
    c.stage_layers = (c.layers + c.stages - 1) / c.stages;
    return c;
}

Options options_of(const std::vector<i64>& v, const Table& pieces, const Table& chunks, const Table& waves) {
    Options o{};
    std::vector<i64*> fields{&o.least, &o.limit, &o.lane_degree, &o.fused, &o.phased, &o.gather, &o.move_q, &o.lean,
                             &o.hops, &o.prefetch, &o.offload, &o.copies, &o.whole, &o.attention, &o.room,
                             &o.slot_weight, &o.unit};
    if (fields.size() != v.size()) throw std::invalid_argument("options");
    for (std::size_t i = 0; i < v.size(); ++i) *fields[i] = v[i];
    o.pieces = column(pieces);
    o.chunks = column(chunks);
    o.waves = column(waves);
    return o;
}

Forest forest_of(const Table& parents, const Table& rows, const Table& scored) {
    Forest f;
    f.rows = column(rows);
    f.scored = column(scored);
    const std::vector<i64> parent = column(parents);
    f.parents.assign(parent.begin(), parent.end());
    f.starts.assign(f.rows.size(), 0);
    f.ancestors.resize(f.rows.size());
    f.inner.assign(f.rows.size(), 0);
    for (std::size_t node = 0; node < f.rows.size(); ++node) {
        const int p = f.parents[node];
        if (p < 0) continue;
        f.starts[node] = f.starts[p] + f.rows[p];
        f.ancestors[node] = f.ancestors[p];
        f.ancestors[node].push_back(p);
        f.inner[p] = 1;
    }
    return f;
}

// An offer and a choice as numbers, in the order of `_offer` and `_choice_numbers` in planning/fast.py.
std::vector<i64> numbers(const Offer& o) {
    const Choice& c = o.choice;
    return {o.cost, o.time, o.slot, o.peak, c.degree, c.phased, c.chunks, c.waves, c.primitive, c.pieces,
            c.node_ranks, c.prefetch, c.lane_degree, c.wide, c.keep, c.keep_layers, c.keep_attention,
            c.wave_layers, c.wave_attention, c.offload};
}

py::object numbers(const std::optional<Offer>& found) { return found ? py::cast(numbers(*found)) : py::none(); }

std::vector<i64> settle(Jobs& jobs, const std::vector<int>& nodes, const std::vector<i64>& v) {
    if (v.size() != 16) throw std::invalid_argument("choice");
    Choice c;
    std::size_t i = 0;
    for (i64* field : {&c.degree, &c.phased, &c.chunks, &c.waves, &c.primitive, &c.pieces, &c.node_ranks, &c.prefetch,
                       &c.lane_degree, &c.wide, &c.keep, &c.keep_layers, &c.keep_attention, &c.wave_layers,
                       &c.wave_attention, &c.offload}) {
        *field = v[i++];
    }
    return numbers(jobs.settle(nodes, c));
}

py::object listed(const std::optional<std::vector<Job>>& found) {
    if (!found) return py::none();
    py::list made;
    for (const Job& job : *found) made.append(py::make_tuple(job.nodes, job.offset, numbers(job.offer)));
    return made;
}

// A recipe's numbers, in the order of `recipe_table` in planning/fast.py.
enum Field { START, WIDTH, LANE, WIDE, LO, HI, PRIMITIVE, PIECES, NODE_RANKS, KEEP, PREFETCH, WHOLE, ATTENTION,
             OFFLOAD, INNER, LEAVES, READS, FIELDS };

// A priced pass as the pipeline plays it.
PipelinePass piped_of(
    const Constants& c, i64 start, i64 world, const Loads& loads, const PassPrice& priced, Pair pair,
    const std::vector<int>& reads) {
    PipelinePass made;
    made.start = start;
    made.width = static_cast<i64>(loads.ranks.size());
    made.reads = reads;
    std::tie(made.time[0], made.time[1]) = priced.time(pair, false);
    std::tie(made.time[2], made.time[3]) = priced.time(pair);
    std::vector<i64> rows;
    for (const RankLoad& x : loads.ranks) rows.push_back(x.rows);
    made.hops = hops_of(c, start, rows, world);
    return made;
}

// (ns, bytes) of a plan's recipes and events: the twin of planner.price.
std::pair<i64, i64> price(
    Jobs& jobs, const Table& table, const Table& lists, const Table& events, i64 world) {
    const Forest& f = jobs.forest;
    const Constants& c = jobs.constants;
    const std::vector<i64> list = column(lists);
    const i64 count = table.size() / FIELDS;
    std::vector<std::optional<Placement>> kept_rows(count);  // of passes that others read
    std::vector<char> provides(count, 0);
    std::vector<std::vector<int>> reads(count);
    std::vector<Lanes> lanes(count);
    std::size_t at = 0;
    const auto take = [&](i64 n) {
        std::vector<int> part(list.begin() + at, list.begin() + at + n);
        at += n;
        return part;
    };
    for (i64 i = 0; i < count; ++i) {
        const i64* r = table.data() + i * FIELDS;
        lanes[i] = {take(r[INNER]), take(r[LEAVES]), r[WIDTH], r[LANE], r[WIDE], r[LO], r[HI]};
        reads[i] = take(r[READS]);
        for (int read : reads[i]) provides[read] = 1;
    }
    std::vector<std::pair<i64, i64>> times(count);
    std::vector<std::vector<i64>> kept(count), work(count);
    std::vector<PipelinePass> piped;
    for (i64 i = 0; i < count; ++i) {
        const i64* r = table.data() + i * FIELDS;
        std::pmr::monotonic_buffer_resource memory(Jobs::scratch(), Jobs::kScratch);
        const Placement placed = place(f, lanes[i], jobs.options.unit, &memory);
        Placements states(&memory);
        for (int read : reads[i]) states.push_back(&*kept_rows[read]);
        PassSpec p;
        p.primitive = static_cast<int>(r[WIDTH] > 1 ? r[PRIMITIVE] : LOCAL);
        p.pieces = r[PIECES];
        p.node_ranks = r[NODE_RANKS];
        p.keep = r[KEEP];
        p.prefetch = r[PREFETCH];
        p.offload = r[OFFLOAD];
        PassRows rows(f, c, placed, states, r[START], &memory);
        const Loads loads = rows.loads(p);
        const std::size_t ranks = loads.ranks.size();
        const PassPrice priced(c, loads.ranks.data(), ranks, loads.stages, p, provides[i], &memory);
        const Pair pair = r[WHOLE] < 0 ? Pair{c.layers - c.recomputed, c.attention_kept} : Pair{r[WHOLE], r[ATTENTION]};
        if (provides[i]) kept_rows[i] = placed;
        times[i] = priced.time(pair);
        if (c.stages > 1) piped.push_back(piped_of(c, r[START], world, loads, priced, pair, reads[i]));
        for (const Line& x : priced.lines) {
            kept[i].push_back(priced.kept(x, pair));
            work[i].push_back(priced.work(x, pair));
        }
    }
    std::vector<i64> busy(world, 0), alive(world, 0);
    i64 peak = 0;
    for (i64 e = 0; e < events.size() / 2; ++e) {
        const bool backward = events.data()[2 * e];
        const i64 i = events.data()[2 * e + 1], start = table.data()[i * FIELDS + START];
        for (std::size_t k = 0; k < kept[i].size(); ++k) {
            busy[start + k] += backward ? times[i].second : times[i].first;
            if (!backward) alive[start + k] += kept[i][k];
            peak = std::max(peak, alive[start + k] + work[i][k]);
            if (backward) alive[start + k] -= kept[i][k];
        }
    }
    if (c.stages == 1) return {*std::max_element(busy.begin(), busy.end()), peak};
    std::vector<PlanEvent> played;
    for (i64 e = 0; e < events.size() / 2; ++e) {
        played.push_back({events.data()[2 * e] != 0, static_cast<int>(events.data()[2 * e + 1])});
    }
    return {pipeline_ns(c, piped, played, world), peak};
}

}  // namespace

}  // namespace augtree

void bind_pricing(py::module_& module) {
    using namespace augtree;
    py::class_<Jobs>(module, "Jobs")
        .def(py::init([](const Table& parents, const Table& rows, const Table& scored, const Table& constants,
                         const Table& options, const Table& pieces, const Table& chunks, const Table& waves) {
            return std::make_unique<Jobs>(forest_of(parents, rows, scored), constants_of(column(constants)),
                                          options_of(column(options), pieces, chunks, waves));
        }))
        .def("estimate", [](Jobs& jobs, const Nodes& nodes, i64 width) { return numbers(jobs.estimate(nodes, width)); })
        .def("best", [](Jobs& jobs, const Nodes& nodes, i64 width) { return numbers(jobs.best(nodes, width)); })
        .def("settle", &settle)
        .def("with_copies", [](Jobs& jobs, const Nodes& nodes, i64 width) { return listed(jobs.with_copies(nodes, width)); })
        .def("tree_jobs", [](Jobs& jobs, int first, int end, i64 width) { return listed(jobs.tree_jobs(first, end, width)); })
        .def("table", &Jobs::table)
        .def("leanest", [](Jobs& jobs) { return numbers(jobs.leanest); })
        .def("price", &price);
}
