// Rows on ranks: twins of planning/{placement,assign,lanes,recipe}.py.
#include <algorithm>
#include <numeric>

#include "placing.h"

namespace augtree {

i64 Forest::area(int node, i64 lo, i64 hi) const {
    const i64 first = starts[node] + lo + 1, last = starts[node] + hi;
    return (first + last) * (hi - lo) / 2;
}

namespace {

constexpr std::size_t kExactItems = 10;
constexpr std::size_t kFewBins = 16;  // looking at all of them is faster than a heap

std::vector<int> by_weight(const std::vector<i64>& weights) {
    std::vector<int> order(weights.size());
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(),
              [&](int a, int b) { return weights[a] != weights[b] ? weights[a] > weights[b] : a < b; });
    return order;
}

// Items as they come, each to the least loaded bin.
std::vector<int> deal(const std::vector<int>& order, const std::vector<i64>& weights, std::vector<i64> loads) {
    std::vector<int> where(weights.size(), 0);
    if (loads.size() <= kFewBins) {
        for (int item : order) {
            const auto least = std::min_element(loads.begin(), loads.end());
            where[item] = static_cast<int>(least - loads.begin());
            *least += weights[item];
        }
        return where;
    }
    LeastLoaded bins(std::move(loads));
    for (int item : order) where[item] = bins.add(weights[item]);
    return where;
}

}  // namespace

std::vector<int> longest_first(const std::vector<i64>& weights, const std::vector<i64>& loads) {
    return deal(by_weight(weights), weights, loads);
}

LeastLoaded::LeastLoaded(std::vector<i64> loads) : loads_(std::move(loads)), heap_(loads_.size()) {
    std::iota(heap_.begin(), heap_.end(), 0);
    for (std::size_t at = heap_.size() / 2; at-- > 0;) sift(at);
}

void LeastLoaded::start(std::size_t bins) {
    loads_.assign(bins, 0);
    heap_.resize(bins);
    std::iota(heap_.begin(), heap_.end(), 0);
}

int LeastLoaded::add(i64 weight) {
    const int bin = heap_.front();
    loads_[bin] += weight;
    sift(0);
    return bin;
}

void LeastLoaded::sift(std::size_t at) {
    const int moved = heap_[at];
    while (2 * at + 1 < heap_.size()) {
        std::size_t child = 2 * at + 1;
        if (child + 1 < heap_.size() && before(heap_[child + 1], heap_[child])) ++child;
        if (!before(heap_[child], moved)) break;
        heap_[at] = heap_[child];
        at = child;
    }
    heap_[at] = moved;
}

namespace {

// Branch and bound: see assign.exact.
class Exact {
public:
    Exact(const std::vector<i64>& weights, const std::vector<i64>& loads)
        : weights_(weights), order_(by_weight(weights)), current_(loads), where_(weights.size(), 0) {
        best = deal(order_, weights, loads);
        std::vector<i64> filled = loads;
        for (std::size_t i = 0; i < weights.size(); ++i) filled[best[i]] += weights[i];
        limit_ = *std::max_element(filled.begin(), filled.end());
        const i64 total = std::accumulate(loads.begin(), loads.end(), i64{0}) +
                          std::accumulate(weights.begin(), weights.end(), i64{0});
        const i64 bins = static_cast<i64>(loads.size());
        floor_ = std::max(*std::max_element(loads.begin(), loads.end()), (total + bins - 1) / bins);
        descend(0);
    }
    std::vector<int> best;

private:
    void descend(std::size_t depth) {
        if (limit_ <= floor_) return;
        if (depth == order_.size()) {
            best = where_;
            limit_ = *std::max_element(current_.begin(), current_.end());
            return;
        }
        const int item = order_[depth];
        for (auto bin_ = current_.begin(); bin_ != current_.end(); ++bin_) {
            if (*bin_ + weights_[item] >= limit_ || std::find(current_.begin(), bin_, *bin_) != bin_) continue;
            const std::size_t bin = bin_ - current_.begin();
            where_[item] = static_cast<int>(bin);
            current_[bin] += weights_[item];
            descend(depth + 1);
            current_[bin] -= weights_[item];
        }
    }

    const std::vector<i64>& weights_;
    std::vector<int> order_;
    std::vector<i64> current_;
    std::vector<int> where_;
    i64 limit_ = 0, floor_ = 0;
};

}  // namespace

std::vector<i64> level(const std::vector<i64>& loads, i64 amount) {
    std::vector<int> order(loads.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return loads[a] < loads[b]; });
    std::vector<i64> rises(loads.size(), 0), shares(loads.size(), 0);  // rises: of the first i + 1 together
    i64 left = amount, height = loads.empty() ? 0 : loads[order[0]];
    for (std::size_t count = 1; count <= order.size() && left; ++count) {
        const bool top = count == order.size();
        const i64 ceiling = top ? 0 : loads[order[count]];
        const i64 even = left / static_cast<i64>(count);
        const i64 rise = top ? even : std::min(ceiling - height, even);
        rises[count - 1] = rise;
        left -= rise * static_cast<i64>(count);
        height += rise;
        if (!top && height < ceiling) break;
    }
    i64 share = 0;
    for (std::size_t i = order.size(); i-- > 0;) {
        share += rises[i];
        shares[order[i]] = share + (static_cast<i64>(i) < left);
    }
    return shares;
}

namespace {

// Spans as they come, by rank in the end.
class Pieces {
public:
    Pieces(i64 width, Memory* memory) : memory_(memory), width_(width), made_(memory) {}

    void expect(std::size_t spans) { made_.reserve(spans); }
    void add(int rank, const Span& span) { made_.push_back({rank, span}); }

    // Every rank's by node, then by row; neighbours joined.
    Placement sorted() const {
        Vec<std::size_t> next(width_ + 1, 0, memory_);
        for (const auto& [rank, span] : made_) next[rank + 1] += 1;
        for (i64 rank = 0; rank < width_; ++rank) next[rank + 1] += next[rank];
        Placement held(memory_);
        held.at.assign(next.begin(), next.end());
        held.spans.resize(made_.size());
        for (const auto& [rank, span] : made_) held.spans[next[rank]++] = span;
        std::size_t kept = 0;
        for (i64 rank = 0; rank < width_; ++rank) {
            const auto first = held.spans.begin() + held.at[rank];
            const auto end = held.spans.begin() + held.at[rank + 1];
            std::sort(first, end, [](const Span& a, const Span& b) {
                return a.node != b.node ? a.node < b.node : a.lo < b.lo;
            });
            const std::size_t start = kept;
            for (auto span = first; span != end; ++span) {
                Span* before = kept > start ? &held.spans[kept - 1] : nullptr;
                if (before && before->node == span->node && before->hi == span->lo) {
                    before->hi = span->hi;
                } else {
                    held.spans[kept++] = *span;
                }
            }
            held.at[rank] = start;
        }
        held.at[width_] = kept;
        held.spans.resize(kept);
        return held;
    }

private:
    Memory* memory_;
    i64 width_;
    Vec<std::pair<int, Span>> made_;
};

// Calls `into` with (rank, span) of the chunks that a node's rows are cut into, in zigzag.
template <class Into>
void zigzag(int node, i64 lo, i64 hi, const Vec<i64>& shares, Into into) {
    const int ranks = static_cast<int>(shares.size());
    i64 total = 0, seen = 0, edge = lo;
    for (i64 share : shares) total += 2 * share;
    for (int chunk = 0; chunk < 2 * ranks; ++chunk) {
        const int rank = std::min(chunk, 2 * ranks - 1 - chunk);
        seen += shares[rank];
        const i64 end = lo + static_cast<i64>(static_cast<i128>(hi - lo) * seen / total);
        if (end > edge) into(rank, Span{node, edge, end});
        edge = end;
    }
}

// The same with even shares, where nothing has to be divided.
template <class Into>
void zigzag(int node, i64 lo, i64 hi, int ranks, Into into) {
    if (ranks == 1) {
        if (hi > lo) into(0, Span{node, lo, hi});
        return;
    }
    const i64 chunks = 2 * ranks, rows = (hi - lo) / chunks, rest = (hi - lo) % chunks;
    i64 edge = lo, over = 0;
    for (int chunk = 0; chunk < chunks; ++chunk) {
        over += rest;
        const bool carry = over >= chunks;
        over -= carry ? chunks : 0;
        const i64 end = edge + rows + carry;
        if (end > edge) into(std::min(chunk, 2 * ranks - 1 - chunk), Span{node, edge, end});
        edge = end;
    }
}

i64 cost(const Forest& f, const Span& s, i64 unit) { return f.area(s.node, s.lo, s.hi) + unit * (s.hi - s.lo); }

// Places leaves as lanes.place does, on top of what is there.
class Placer {
private:
    auto into(int first_rank) {
        return [this, first_rank](int rank, const Span& span) {
            held_.add(first_rank + rank, span);
            loads_[first_rank + rank] += cost(f_, span, unit_);
        };
    }

public:
    Placer(const Forest& f, const Lanes& r, i64 unit, Memory* memory)
        : f_(f), r_(r), unit_(unit), memory_(memory), held_(r.width, memory), loads_(r.width, 0) {}

    Placement run() {
        std::vector<int> narrow, spread;
        deal(narrow, spread);
        held_.expect(2 * ((r_.inner.size() + spread.size()) * r_.width + narrow.size() * r_.lane_degree));
        for (int node : r_.inner) add_even(node, 0, r_.width);
        whole(narrow);
        for (int node : spread) {
            if (narrow.empty()) {
                add_even(node, 0, r_.width);
                continue;
            }
            const std::vector<i64> shares = level(loads_, cost(f_, {node, 0, f_.rows[node]}, unit_));
            const bool none = std::all_of(shares.begin(), shares.end(), [](i64 x) { return x == 0; });
            if (none) {
                add_even(node, 0, r_.width);
            } else {
                zigzag(node, 0, f_.rows[node], {shares.begin(), shares.end(), memory_}, into(0));
            }
        }
        return held_.sorted();
    }

private:
    void deal(std::vector<int>& narrow, std::vector<int>& spread) const {
        std::vector<int> order = r_.leaves;
        std::sort(order.begin(), order.end(), [&](int a, int b) {
            return f_.rows[a] != f_.rows[b] ? f_.rows[a] > f_.rows[b] : a < b;
        });
        const std::size_t wide = r_.lane_degree < r_.width ? static_cast<std::size_t>(r_.wide) : order.size();
        const std::size_t cut = std::min(wide, order.size());
        spread.assign(order.begin(), order.begin() + cut);
        narrow.assign(order.begin() + cut, order.end());
    }

    void whole(const std::vector<int>& narrow) {
        std::vector<i64> weights, lanes;
        for (int node : narrow) weights.push_back(cost(f_, {node, 0, f_.rows[node]}, unit_));
        for (i64 lo = 0; lo < r_.width; lo += r_.lane_degree) {
            lanes.push_back(std::accumulate(loads_.begin() + lo, loads_.begin() + lo + r_.lane_degree, i64{0}));
        }
        const std::vector<int> where = assign(weights, lanes);
        for (std::size_t i = 0; i < narrow.size(); ++i) {
            add_even(narrow[i], where[i] * r_.lane_degree, r_.lane_degree);
        }
    }

    void add_even(int node, i64 first_rank, i64 ranks) {
        zigzag(node, 0, f_.rows[node], static_cast<int>(ranks), into(static_cast<int>(first_rank)));
    }

    const Forest& f_;
    const Lanes& r_;
    i64 unit_;
    Memory* memory_;
    Pieces held_;
    std::vector<i64> loads_;
};

}  // namespace

std::vector<int> assign(const std::vector<i64>& weights, const std::vector<i64>& loads) {
    i64 leaves = 1;
    for (std::size_t i = 0; i < std::min<std::size_t>(weights.size(), 8) && leaves <= 4096; ++i) {
        leaves *= static_cast<i64>(loads.size());
    }
    if (weights.size() <= kExactItems && leaves <= 4096) return Exact(weights, loads).best;
    return longest_first(weights, loads);
}

Placement place(const Forest& f, const Lanes& r, i64 unit, Memory* memory) {
    if (r.hi < 0) return Placer(f, r, unit, memory).run();
    Pieces held(r.width, memory);
    i64 start = 0;
    held.expect(r.inner.size() * 2 * r.width);
    for (int node : r.inner) {
        const i64 first = std::max<i64>(r.lo - start, 0), last = std::min(r.hi - start, f.rows[node]);
        const auto add = [&](int rank, const Span& span) { held.add(rank, span); };
        if (first < last) zigzag(node, first, last, static_cast<int>(r.width), add);
        start += f.rows[node];
    }
    return held.sorted();
}

}  // namespace augtree
