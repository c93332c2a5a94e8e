// 1F1B of priced passes over (rank, pipeline stage): the twin of planning/pipeline.py with `PricedTiming`.
#pragma once

#include "pricing.h"

namespace augtree {

// A pass of a plan: its block of neighbours, what it reads, and what it takes on a stage that is not the last
// one, then on the last: forward and backward, ns.
struct PipelinePass {
    i64 start = 0, width = 0;
    std::vector<int> reads;
    i64 time[4] = {};
    std::vector<i64> hops;  // [stage but the last] to the next
};

struct PlanEvent {
    bool backward;
    int pass;
};

// From a stage to the next, ns: the slowest rank's rows. Stages have the pool's ranks each.
std::vector<i64> hops_of(const Constants& c, i64 start, const std::vector<i64>& rows, i64 world);

// When the last pass is done, ns.
i64 pipeline_ns(
    const Constants& c, const std::vector<PipelinePass>& passes, const std::vector<PlanEvent>& events, i64 world);

}  // namespace augtree
