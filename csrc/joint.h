// The joint schedule of a batch of jobs over the pool: the twin of planning/joint_blocks.py, joint_search.py
// and joint_exact.py. What is done, and why, is told there, under the same names. Same order, ties and results.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pybind11 {
class module_;
}

namespace joint {

using Int = std::int64_t;

struct Batch {
    int jobs, options;
    Int pool, size;
    std::vector<Int> times, widths;  // times[job * options + option]

    Int time(int job, int option) const { return times[static_cast<std::size_t>(job) * options + option]; }
    Int work(int job, int option) const { return widths[option] * time(job, option); }
    bool fits(int job, int option) const { return time(job, option) >= 0; }
};

struct Schedule {
    std::vector<int> option;
    std::vector<Int> start;
    Int makespan = 0;
};

struct Effort {
    Int limits, resettled, taken, descent, resettling, branches;
};

struct Blocks {
    const Batch& batch;
    std::vector<Int> own, best;
    std::vector<int> count;

    explicit Blocks(const Batch& given);
    Int node(int option, Int start) const { return (batch.size + start) / batch.widths[option]; }
    Int start(int option, Int node) const { return node * batch.widths[option] - batch.size; }
    void change(Int node, Int time, int jobs);
};

class Branch {
  public:
    std::vector<int> best_option;
    std::vector<Int> best_node;
    Int limit, branches, looked = 0;

    Branch(Blocks& given, const std::vector<int>& jobs, Int limit, Int floor, Int branches);
    bool run(Int work);
    bool complete() const { return branches >= 0 || limit <= floor; }

  private:
    struct Choice {
        Int finish;
        int option;
        Int node;
    };
    Blocks& blocks;
    const Batch& batch;
    Int floor;
    std::vector<int> order, option;
    std::vector<Int> node, lowest;

    void visit(std::size_t depth, Int work, Int finish);
    void walk(int job, Int node, Int width, int option, Int above, std::vector<Choice>& choices);
    bool hopeless(std::size_t depth, Int work) const;
};

Schedule place(const Batch& batch, const std::vector<int>& option);
int canonical(const Batch& batch, int job, Int limit);
std::vector<Int> limits_of(const Batch& batch);
Int lower_bound(const Batch& batch, const std::vector<Int>& limits);
Schedule search(const Batch& batch, std::vector<Schedule> starts, const Effort& effort);
bool exact(const Batch& batch, Schedule& incumbent, Int branches);

}  // namespace joint

void bind_joint(pybind11::module_& module);
