#include <algorithm>
#include <functional>
#include <numeric>
#include <queue>
#include <utility>

#include "joint.h"

namespace joint {

Blocks::Blocks(const Batch& given)
    : batch(given), own(2 * given.size, 0), best(2 * given.size, 0), count(2 * given.size, 0) {}

void Blocks::change(Int node, Int time, int jobs) {
    own[node] += time;
    best[node] += time;
    count[node] += jobs;
    for (node /= 2; node > 0; node /= 2) {
        best[node] = own[node] + std::max(best[2 * node], best[2 * node + 1]);
        count[node] += jobs;
    }
}

Schedule place(const Batch& batch, const std::vector<int>& option) {
    std::vector<int> order(batch.jobs);
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](int a, int b) {
        if (option[a] != option[b]) return option[a] > option[b];
        const Int first = batch.time(a, option[a]), second = batch.time(b, option[b]);
        return first != second ? first > second : a < b;
    });
    using Block = std::pair<Int, Int>;  // load, index
    std::priority_queue<Block, std::vector<Block>, std::greater<Block>> heap;
    std::vector<Int> loads;
    Schedule result{option, std::vector<Int>(batch.jobs), 0};
    int now = -1;
    for (const int job : order) {
        if (option[job] != now) {
            const Int width = batch.widths[option[job]], parts = now < 0 ? 1 : batch.widths[now] / width;
            const std::vector<Int> wider = std::move(loads);
            loads.assign(batch.pool / width, 0);
            std::vector<Block> blocks;
            for (std::size_t block = 0; block < loads.size(); ++block) {
                if (block / parts < wider.size()) loads[block] = wider[block / parts];
                blocks.emplace_back(loads[block], block);
            }
            heap = decltype(heap)(std::greater<Block>(), std::move(blocks));
            now = option[job];
        }
        const Int block = heap.top().second;
        heap.pop();
        loads[block] += batch.time(job, now);
        heap.emplace(loads[block], block);
        result.start[job] = block * batch.widths[now];
        result.makespan = std::max(result.makespan, loads[block]);
    }
    return result;
}

int canonical(const Batch& batch, int job, Int limit) {
    int found = -1;
    for (int option = 0; option < batch.options; ++option) {
        if (!batch.fits(job, option) || batch.time(job, option) > limit) continue;
        if (found < 0 || batch.work(job, option) < batch.work(job, found)) found = option;
    }
    return found;
}

std::vector<Int> limits_of(const Batch& batch) {
    Int least = 0;
    for (int job = 0; job < batch.jobs; ++job) {
        Int shortest = -1;
        for (int option = 0; option < batch.options; ++option) {
            if (batch.fits(job, option) && (shortest < 0 || batch.time(job, option) < shortest))
                shortest = batch.time(job, option);
        }
        least = std::max(least, shortest);
    }
    std::vector<Int> limits;
    for (const Int time : batch.times)
        if (time >= least) limits.push_back(time);
    std::sort(limits.begin(), limits.end());
    limits.erase(std::unique(limits.begin(), limits.end()), limits.end());
    return limits;
}

static Int least_work(const Batch& batch, Int limit) {
    Int total = 0;
    for (int job = 0; job < batch.jobs; ++job) total += batch.work(job, canonical(batch, job, limit));
    return total;
}

Int lower_bound(const Batch& batch, const std::vector<Int>& limits) {
    std::size_t low = 0, high = limits.size();
    while (low < high) {
        const std::size_t middle = (low + high) / 2;
        if (least_work(batch, limits[middle]) <= batch.pool * limits[middle]) high = middle;
        else low = middle + 1;
    }
    if (low == 0) return limits[0];
    const Int share = (least_work(batch, limits[low - 1]) + batch.pool - 1) / batch.pool;
    return low < limits.size() ? std::min(limits[low], share) : share;
}

}  // namespace joint
