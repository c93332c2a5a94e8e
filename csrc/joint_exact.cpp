#include <algorithm>
#include <numeric>
#include <tuple>

#include "joint.h"

namespace joint {

// The least work of a job on a width that passes `allowed`; -1 where none does.
template <typename Allowed>
static Int least_work(const Batch& batch, int job, Allowed allowed) {
    Int found = -1;
    for (int option = 0; option < batch.options; ++option) {
        if (!batch.fits(job, option) || !allowed(option)) continue;
        if (found < 0 || batch.work(job, option) < found) found = batch.work(job, option);
    }
    return found;
}

Branch::Branch(Blocks& given, const std::vector<int>& jobs, Int below, Int bound, Int most)
    : limit(below), branches(most), blocks(given), batch(given.batch), floor(bound), order(jobs),
      option(batch.jobs), node(batch.jobs), lowest(batch.options) {
    std::vector<Int> works(batch.jobs, 0);
    for (const int job : order) works[job] = least_work(batch, job, [](int) { return true; });
    std::sort(order.begin(), order.end(), [&](int a, int b) {
        return works[a] != works[b] ? works[a] > works[b] : a < b;
    });
}

bool Branch::run(Int work) {
    visit(0, work, 0);
    return !best_option.empty();
}

void Branch::visit(std::size_t depth, Int work, Int finish) {
    if (depth == order.size()) {
        best_option = option, best_node = node, limit = finish;
        return;
    }
    if (--branches < 0) return;
    const int job = order[depth];
    std::vector<Choice> choices;
    std::fill(lowest.begin(), lowest.end(), limit);
    walk(job, 1, batch.size, batch.options - 1, 0, choices);
    if (hopeless(depth, work)) return;
    std::sort(choices.begin(), choices.end(), [](const Choice& a, const Choice& b) {
        return std::tie(a.finish, a.option, a.node) < std::tie(b.finish, b.option, b.node);
    });
    for (const Choice& choice : choices) {
        const Int later = std::max(finish, choice.finish), time = batch.time(job, choice.option);
        if (branches < 0 || limit <= floor || later >= limit) return;
        option[job] = choice.option, node[job] = choice.node;
        blocks.change(choice.node, time, 1);
        visit(depth + 1, work + batch.work(job, choice.option), later);
        blocks.change(choice.node, -time, -1);
    }
}

void Branch::walk(int job, Int at, Int width, int to, Int above, std::vector<Choice>& choices) {
    ++looked;
    const Int start = at * width - batch.size, inside = above + blocks.own[at];
    if (start >= batch.pool || inside >= limit) return;
    const bool whole = start + width <= batch.pool;
    if (batch.widths[to] == width) {
        const Int load = above + blocks.best[at];
        if (whole) {
            lowest[to] = std::min(lowest[to], load);
            const Int finish = load + batch.time(job, to);
            if (batch.fits(job, to) && finish < limit) choices.push_back({finish, to, at});
        }
        if (--to < 0) return;
    }
    walk(job, 2 * at, width / 2, to, inside, choices);
    if (!whole || blocks.count[2 * at] + blocks.count[2 * at + 1] > 0)
        walk(job, 2 * at + 1, width / 2, to, inside, choices);
}

bool Branch::hopeless(std::size_t depth, Int work) const {
    Int room = batch.pool * (limit - 1) - work;
    for (; depth < order.size(); ++depth) {
        const int job = order[depth];
        const Int least =
            least_work(batch, job, [&](int to) { return lowest[to] + batch.time(job, to) < limit; });
        if (least < 0) return true;
        room -= least;
    }
    return room < 0;
}

bool exact(const Batch& batch, Schedule& incumbent, Int branches) {
    Blocks blocks(batch);
    std::vector<int> jobs(batch.jobs);
    std::iota(jobs.begin(), jobs.end(), 0);
    Branch branch(blocks, jobs, incumbent.makespan, lower_bound(batch, limits_of(batch)), branches);
    if (branch.run(0)) {
        incumbent.option = branch.best_option;
        incumbent.makespan = branch.limit;
        for (const int job : jobs)
            incumbent.start[job] = blocks.start(branch.best_option[job], branch.best_node[job]);
    }
    return branch.complete();
}

}  // namespace joint
