#include <algorithm>
#include <iterator>

#include "joint.h"

namespace joint {

// Nodes are numbered from 1 on, the halves of one are twice its number and the next.
static bool inside(Int inner, Int outer) {
    const int deeper = __builtin_clzll(outer) - __builtin_clzll(inner);
    return deeper >= 0 && inner >> deeper == outer;
}

static bool shorter(const Schedule& a, const Schedule& b) { return a.makespan < b.makespan; }

struct Change {
    Int after;
    int job, option;
    Int node;
    int other;
};

class Descent {
  public:
    Int effort;

    Descent(const Batch& given, const Schedule& from, Int left)
        : effort(left), batch(given), blocks(given), option(given.jobs), node(given.jobs),
          above(2 * given.size, 0), peak(2 * given.size, 0) {
        for (int job = 0; job < batch.jobs; ++job)
            put(job, from.option[job], blocks.node(from.option[job], from.start[job]));
        effort -= 2 * batch.size + batch.jobs;
    }

    Int makespan() const { return blocks.best[1]; }

    Schedule schedule() const {
        Schedule result{option, std::vector<Int>(batch.jobs), makespan()};
        for (int job = 0; job < batch.jobs; ++job) result.start[job] = blocks.start(option[job], node[job]);
        return result;
    }

    bool improve() {
        Change best{makespan(), -1, 0, 0, -1};
        for (const int job : busiest()) {
            effort -= 2 * batch.size + batch.jobs;
            move(job, best);
            swap(job, best);
        }
        if (best.job < 0) return false;
        const int from_option = option[best.job];
        const Int from = node[best.job];
        take(best.job);
        if (best.other >= 0) {
            take(best.other);
            put(best.other, from_option, from);
        }
        put(best.job, best.option, best.node);
        return true;
    }

    bool resettle(Int taken, Int floor, Int branches) {
        std::vector<int> busy = busiest(), others;
        std::stable_sort(busy.begin(), busy.end(), [&](int a, int b) { return time(a) > time(b); });
        if (static_cast<Int>(busy.size()) > taken - 2) busy.resize(taken - 2);
        for (int job = 0; job < batch.jobs; ++job)
            if (std::find(busy.begin(), busy.end(), job) == busy.end()) others.push_back(job);
        std::stable_sort(others.begin(), others.end(),
                         [&](int a, int b) { return peak[node[a]] < peak[node[b]]; });
        if (others.empty()) return again(busy, floor, branches);
        for (const int partner : others) {
            if (effort <= 0) return false;
            std::vector<int> jobs = busy;
            jobs.push_back(partner);
            for (const bool around : {true, false}) {
                for (const int job : others) {
                    if (static_cast<Int>(jobs.size()) == taken) break;
                    if (job != partner && inside(node[partner], node[job]) == around) jobs.push_back(job);
                }
            }
            if (again(jobs, floor, branches)) return true;
        }
        return false;
    }

  private:
    const Batch& batch;
    Blocks blocks;
    std::vector<int> option;
    std::vector<Int> node, above, peak;
    Int work = 0;

    Int time(int job) const { return batch.time(job, option[job]); }

    void put(int job, int to, Int at) {
        option[job] = to;
        node[job] = at;
        work += batch.work(job, to);
        blocks.change(at, time(job), 1);
    }

    void take(int job) {
        work -= batch.work(job, option[job]);
        blocks.change(node[job], -time(job), -1);
    }

    std::vector<int> busiest() {
        effort -= 2 * batch.size + batch.jobs;
        peak[1] = blocks.best[1];
        for (Int at = 2; at < 2 * batch.size; ++at) {
            above[at] = above[at / 2] + blocks.own[at / 2];
            peak[at] = above[at] + blocks.best[at];
        }
        Int rank = 1;
        while (rank < batch.size) rank = 2 * rank + (blocks.best[2 * rank + 1] > blocks.best[2 * rank]);
        std::vector<int> found;
        for (int job = 0; job < batch.jobs; ++job)
            if (inside(rank, node[job])) found.push_back(job);
        return found;
    }

    Int beside(Int inner, Int outer) const {
        Int found = 0;
        for (; inner != outer; inner /= 2) found = std::max(found, peak[inner ^ 1]);
        return found;
    }

    void move(int job, Change& best) const {
        const Int from = node[job], left = peak[from] - time(job), width = batch.widths[option[job]];
        for (int to = 0; to < batch.options; ++to) {
            const Int takes = batch.time(job, to), wide = batch.widths[to];
            if (takes < 0 || std::max(left, takes) >= best.after) continue;
            const Int first = batch.size / wide, end = first + batch.pool / wide;
            const Int low = wide <= width ? from * (width / wide) : from / (wide / width);
            const Int high = wide <= width ? low + width / wide : low + 1;
            for (Int at = first; at < end; ++at) {
                const bool related = low <= at && at < high;
                if (!related && peak[at] + takes >= best.after) continue;  // most blocks
                if (at == from) continue;
                Int load = peak[at];
                if (related) load = wide < width ? load - time(job) : std::max(left, beside(from, at));
                const Int after = std::max(load + takes, left);
                if (after < best.after) best = {after, job, to, at, -1};
            }
        }
    }

    void swap(int job, Change& best) const {
        const Int from = node[job];
        for (int other = 0; other < batch.jobs; ++other) {
            const Int at = node[other];
            const Int there = batch.time(job, option[other]), here = batch.time(other, option[job]);
            if (there < 0 || here < 0 || inside(from, at)) continue;
            const Int more = here - time(job), less = there - time(other);
            Int after;
            if (inside(at, from))
                after = std::max(beside(at, from), peak[at] + less) + more;
            else
                after = std::max(peak[from] + more, peak[at] + less);
            if (after < best.after) best = {after, job, option[other], at, other};
        }
    }

    bool again(const std::vector<int>& jobs, Int floor, Int branches) {
        const Int limit = makespan();
        for (const int job : jobs) take(job);
        Branch branch(blocks, jobs, limit, floor, branches);
        const bool found = branch.run(work);
        for (const int job : jobs)
            put(job, found ? branch.best_option[job] : option[job], found ? branch.best_node[job] : node[job]);
        effort -= branch.looked + batch.jobs;
        return found;
    }
};

static int nearest(const Batch& batch, int job, int option) {
    for (int to = option; to < batch.options; ++to)
        if (batch.fits(job, to)) return to;
    while (!batch.fits(job, option)) --option;
    return option;
}

static std::vector<Schedule> first_schedules(const Batch& batch, const std::vector<Int>& limits, Int floor,
                                             Int most) {
    std::vector<Schedule> found;
    std::vector<int> option(batch.jobs);
    const auto add = [&](Int limit) {
        for (int job = 0; job < batch.jobs; ++job) option[job] = canonical(batch, job, limit);
        if (found.empty() || option != found.back().option) found.push_back(place(batch, option));
    };
    add(floor);
    const Int count = std::upper_bound(limits.begin(), limits.end(), found[0].makespan) - limits.begin();
    const Int steps = std::min(count, most);
    for (Int step = 0; step < steps; ++step) add(limits[step * (count - 1) / std::max<Int>(steps - 1, 1)]);
    for (int width = 0; width < batch.options; ++width) {
        for (int job = 0; job < batch.jobs; ++job) option[job] = nearest(batch, job, width);
        found.push_back(place(batch, option));
    }
    return found;
}

Schedule search(const Batch& batch, std::vector<Schedule> starts, const Effort& effort) {
    const std::vector<Int> limits = limits_of(batch);
    const Int floor = lower_bound(batch, limits), scale = batch.jobs + batch.pool;
    std::vector<Schedule> found = first_schedules(batch, limits, floor, effort.limits);
    std::move(starts.begin(), starts.end(), std::back_inserter(found));
    std::stable_sort(found.begin(), found.end(), shorter);
    if (found[0].makespan == floor) return found[0];
    Int left = effort.descent * scale;
    for (Schedule& schedule : found) {
        if (left <= 0) break;
        Descent descent(batch, schedule, left);
        while (descent.effort > 0 && descent.makespan() > floor && descent.improve()) {}
        schedule = descent.schedule();
        if (schedule.makespan == floor) return schedule;
        left = descent.effort;
    }
    std::stable_sort(found.begin(), found.end(), shorter);
    found.resize(std::min<std::size_t>(found.size(), effort.resettled));
    left = effort.resettling * scale;
    for (Schedule& schedule : found) {
        if (left <= 0) break;
        Descent descent(batch, schedule, left);
        while (descent.effort > 0 && descent.makespan() > floor &&
               descent.resettle(effort.taken, floor, effort.branches)) {}
        schedule = descent.schedule();
        left = descent.effort;
    }
    return *std::min_element(found.begin(), found.end(), shorter);
}

}  // namespace joint
