// What planning/joint.py calls. It has checked every value and bounded every sum: see joint.py, `_tables`.

#include "joint.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <utility>

namespace py = pybind11;

using Table = py::array_t<joint::Int, py::array::c_style>;  // int64; anything else is refused (noconvert)

static std::vector<joint::Int> values(const Table& table) {
    return {table.data(), table.data() + table.size()};
}

static joint::Batch batch_of(const Table& times, const Table& widths, joint::Int pool) {
    joint::Batch batch{static_cast<int>(times.shape(0)), static_cast<int>(times.shape(1)), pool, 1,
                       values(times), values(widths)};
    while (batch.size < pool) batch.size *= 2;
    return batch;
}

// starts: [start, 2, job]: index of the width, first rank of the block.
static std::vector<joint::Schedule> schedules_of(const joint::Batch& batch, const Table& starts) {
    std::vector<joint::Schedule> found(starts.shape(0));
    const joint::Int* next = starts.data();
    for (joint::Schedule& schedule : found) {
        joint::Blocks blocks(batch);
        schedule.option.assign(next, next + batch.jobs);
        schedule.start.assign(next + batch.jobs, next + 2 * batch.jobs);
        for (int job = 0; job < batch.jobs; ++job) {
            const int option = schedule.option[job];
            blocks.change(blocks.node(option, schedule.start[job]), batch.time(job, option), 1);
        }
        schedule.makespan = blocks.best[1];
        next += 2 * batch.jobs;
    }
    return found;
}

static py::tuple tuple_of(const joint::Schedule& schedule, bool optimal) {
    return py::make_tuple(schedule.option, schedule.start, schedule.makespan, optimal);
}

void bind_joint(py::module_& module) {
    module.def(
        "joint_place",
        [](const Table& times, const Table& widths, joint::Int pool, const std::vector<int>& option) {
            return tuple_of(joint::place(batch_of(times, widths, pool), option), false);
        },
        py::arg("times").noconvert(), py::arg("widths").noconvert(), py::arg("pool"), py::arg("option"));
    module.def(
        "joint_lower_bound",
        [](const Table& times, const Table& widths, joint::Int pool) {
            const joint::Batch batch = batch_of(times, widths, pool);
            return joint::lower_bound(batch, joint::limits_of(batch));
        },
        py::arg("times").noconvert(), py::arg("widths").noconvert(), py::arg("pool"));
    module.def(
        "joint_search",
        [](const Table& times, const Table& widths, joint::Int pool, const Table& starts,
           const std::vector<joint::Int>& given) {
            const joint::Batch batch = batch_of(times, widths, pool);
            const joint::Effort effort{given.at(0), given.at(1), given.at(2),
                                       given.at(3), given.at(4), given.at(5)};
            const joint::Schedule found = joint::search(batch, schedules_of(batch, starts), effort);
            return tuple_of(found, found.makespan == joint::lower_bound(batch, joint::limits_of(batch)));
        },
        py::arg("times").noconvert(), py::arg("widths").noconvert(), py::arg("pool"),
        py::arg("starts").noconvert(), py::arg("effort"));
    module.def(
        "joint_exact",
        [](const Table& times, const Table& widths, joint::Int pool, const Table& incumbent,
           joint::Int branches) {
            const joint::Batch batch = batch_of(times, widths, pool);
            joint::Schedule best = schedules_of(batch, incumbent).at(0);
            const bool optimal = joint::exact(batch, best, branches);
            return tuple_of(best, optimal);
        },
        py::arg("times").noconvert(), py::arg("widths").noconvert(), py::arg("pool"),
        py::arg("incumbent").noconvert(), py::arg("branches"));
}
