#include "pipeline.h"

#include <algorithm>
#include <map>
#include <queue>
#include <utility>

namespace augtree {

namespace {

enum What { FREE, HERE, DONE };

struct Moment {
    i64 time;
    What what;
    int backward, stage, which;  // a team that is free, or a pass
    bool operator>(const Moment& o) const { return time > o.time; }
};

class Pipeline {
  public:
    Pipeline(const Constants& c, const std::vector<PipelinePass>& passes, const std::vector<PlanEvent>& events, i64 world)
        : passes_(passes), stages_(static_cast<int>(c.stages)), overlap_(c.overlap), count_(static_cast<int>(passes.size())) {
        form_teams(world);
        for (const PlanEvent& e : events) {
            for (int team : teams_[e.pass]) queue_[e.backward][team].push_back(e.pass);
        }
        std::vector<int> readers(count_, 0);
        for (const PipelinePass& p : passes) {
            for (int read : p.reads) ++readers[read];
        }
        for (int s = 0; s < stages_; ++s) waiting_.insert(waiting_.end(), readers.begin(), readers.end());
        for (int b : {0, 1}) {
            done_[b].assign(stages_ * count_, 0);
            here_[b].assign(stages_ * count_, 0);
            next_[b].assign(stages_ * size_, 0);
        }
        std::fill(here_[0].begin(), here_[0].begin() + count_, 1);
        free_.assign(stages_ * size_, 1);
        inside_.resize(stages_ * size_);
        touched_.assign(stages_ * size_, 1);
    }

    i64 play() {
        const i64 left = 2 * i64{stages_} * count_;
        i64 now = 0;
        while (true) {
            for (int s = 0; s < stages_; ++s) {
                for (int team = 0; team < size_; ++team) {
                    if (std::exchange(touched_[s * size_ + team], 0)) begin(s, team, now);
                }
            }
            if (moments_.empty()) {
                if (begun_ == left) return end_;
                ++extra_;
                std::fill(touched_.begin(), touched_.end(), 1);
                continue;
            }
            now = moments_.top().time;
            while (!moments_.empty() && moments_.top().time == now) {
                const Moment m = moments_.top();
                moments_.pop();
                happen(m);
            }
        }
    }

  private:
    struct Wanted {
        int backward = 0, pass = -1;
        bool operator==(const Wanted& o) const { return backward == o.backward && pass == o.pass; }
    };

    // Ranks that play the same passes are one team; a pass has its teams.
    void form_teams(i64 world) {
        std::vector<std::vector<int>> mine(world);
        for (int p = 0; p < count_; ++p) {
            for (i64 r = passes_[p].start; r < passes_[p].start + passes_[p].width; ++r) mine[r].push_back(p);
        }
        std::map<std::vector<int>, int> numbers;
        std::vector<int> team_of;
        for (const auto& played : mine) {
            team_of.push_back(numbers.emplace(played, static_cast<int>(numbers.size())).first->second);
        }
        size_ = static_cast<int>(numbers.size());
        queue_[0].resize(size_);
        queue_[1].resize(size_);
        for (const PipelinePass& p : passes_) {
            std::vector<int> found(team_of.begin() + p.start, team_of.begin() + p.start + p.width);
            std::sort(found.begin(), found.end());
            found.erase(std::unique(found.begin(), found.end()), found.end());
            teams_.push_back(std::move(found));
        }
    }

    void begin(int stage, int team, i64 now) {
        const Wanted w = wanted(stage, team);
        if (w.pass < 0) return;
        for (int mate : teams_[w.pass]) {
            if (!(wanted(stage, mate) == w)) return;
        }
        ++begun_;
        const PipelinePass& p = passes_[w.pass];
        const int at = w.backward ? stage - 1 : stage;
        const i64 hop = at >= 0 && at < stages_ - 1 ? p.hops[at] : 0;
        const i64 end = now + p.time[2 * (stage == stages_ - 1) + w.backward] + (overlap_ ? 0 : hop);
        for (int mate : teams_[w.pass]) {
            const int place = stage * size_ + mate;
            free_[place] = 0;
            ++next_[w.backward][place];
            moments_.push({end, FREE, w.backward, stage, mate});
            std::vector<int>& inside = inside_[place];
            if (w.backward) {
                inside.erase(std::find(inside.begin(), inside.end(), w.pass));
            } else {
                inside.push_back(w.pass);
            }
        }
        end_ = std::max(end_, end);
        moments_.push({end, DONE, w.backward, stage, w.pass});
        const int after = w.backward ? stage - 1 : stage + 1;
        if (0 <= after && after < stages_) {
            moments_.push({end + (overlap_ ? hop : 0), HERE, w.backward, after, w.pass});
        } else if (!w.backward) {
            moments_.push({end, HERE, 1, stage, w.pass});
        }
    }

    Wanted wanted(int stage, int team) const {
        const int place = stage * size_ + team;
        if (!free_[place]) return {};
        for (int b : {0, 1}) {
            const std::vector<int>& queue = queue_[b][team];
            const std::size_t at = next_[b][place];
            if (at < queue.size() && may(b, queue[at], stage, place)) return {b, queue[at]};
        }
        return {};
    }

    bool may(int backward, int p, int stage, int place) const {
        const int row = stage * count_;
        if (!here_[backward][row + p]) return false;
        if (backward) return done_[0][row + p] && !waiting_[row + p];
        i64 inside = 0;
        for (int x : inside_[place]) inside += !waiting_[row + x];
        if (inside >= stages_ - stage + extra_) return false;
        const std::vector<int>& reads = passes_[p].reads;
        return std::all_of(reads.begin(), reads.end(), [&](int r) { return done_[0][row + r]; });
    }

    void happen(const Moment& m) {
        if (m.what == FREE) {
            free_[m.stage * size_ + m.which] = 1;
            touched_[m.stage * size_ + m.which] = 1;
            return;
        }
        const int row = m.stage * count_;
        if (m.what == HERE) {
            here_[m.backward][row + m.which] = 1;
        } else {
            done_[m.backward][row + m.which] = 1;
            if (m.backward) {
                for (int read : passes_[m.which].reads) --waiting_[row + read];
            }
        }
        for (int team : teams_[m.which]) touched_[m.stage * size_ + team] = 1;
    }

    const std::vector<PipelinePass>& passes_;
    const int stages_;
    const bool overlap_;
    const int count_;
    int size_ = 0;
    std::vector<std::vector<int>> teams_;                     // [pass] its teams
    std::vector<std::vector<int>> queue_[2];                  // [backward][team] passes in the plan's order
    std::vector<char> done_[2], here_[2];                     // [backward][stage, pass]
    std::vector<std::size_t> next_[2];                        // [backward][stage, team] of the queue
    std::vector<char> free_, touched_;                        // [stage, team]
    std::vector<std::vector<int>> inside_;                    // [stage, team] between forward and backward
    std::vector<int> waiting_;                                // [stage, pass] readers that are not back yet
    std::priority_queue<Moment, std::vector<Moment>, std::greater<Moment>> moments_;
    i64 begun_ = 0, extra_ = 0, end_ = 0;
};

}  // namespace

std::vector<i64> hops_of(const Constants& c, i64 start, const std::vector<i64>& rows, i64 world) {
    std::vector<i64> found;
    for (i64 stage = 0; stage + 1 < c.stages; ++stage) {
        i64 slowest = 0;
        for (std::size_t k = 0; k < rows.size(); ++k) {
            const i64 rank = start + static_cast<i64>(k);
            const bool near = (stage * world + rank) / c.node_ranks == ((stage + 1) * world + rank) / c.node_ranks;
            slowest = std::max(slowest, (near ? c.link : c.nic).ns(rows[k] * c.input) + c.message_ns);
        }
        found.push_back(slowest);
    }
    return found;
}

i64 pipeline_ns(
    const Constants& c, const std::vector<PipelinePass>& passes, const std::vector<PlanEvent>& events, i64 world) {
    return Pipeline(c, passes, events, world).play();
}

}  // namespace augtree
