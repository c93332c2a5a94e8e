// Rows on ranks; see placing.cpp.
#pragma once

#include "pricing.h"

namespace augtree {

// How rows lie: see lanes.place.
struct Lanes {
    std::vector<int> inner, leaves;
    i64 width = 1, lane_degree = 1, wide = 0;
    i64 lo = 0, hi = -1;
};

// Which rows lie on which rank.
struct Placement {
    struct Spans {
        const Span *first, *last;
        const Span* begin() const { return first; }
        const Span* end() const { return last; }
        std::size_t size() const { return static_cast<std::size_t>(last - first); }
        const Span& operator[](std::size_t i) const { return first[i]; }
    };

    explicit Placement(Memory* memory) : spans(memory), at(1, 0, memory) {}
    std::size_t size() const { return at.size() - 1; }
    Spans operator[](std::size_t rank) const {
        return {spans.data() + at[rank], spans.data() + at[rank + 1]};
    }

    Vec<Span> spans;      // by rank, then by node, then by row
    Vec<std::size_t> at;  // [rank] where its spans begin; and where the last one's end
};

Placement place(const Forest& f, const Lanes& r, i64 unit, Memory* memory);
std::vector<int> assign(const std::vector<i64>& weights, const std::vector<i64>& loads);
std::vector<int> longest_first(const std::vector<i64>& weights, const std::vector<i64>& loads);
std::vector<i64> level(const std::vector<i64>& loads, i64 amount);

// Bins, of which the least loaded takes what comes, the first of several.
class LeastLoaded {
public:
    LeastLoaded() = default;
    explicit LeastLoaded(std::vector<i64> loads);
    void start(std::size_t bins);  // empty ones
    int add(i64 weight);
    const std::vector<i64>& loads() const { return loads_; }

private:
    bool before(int a, int b) const { return loads_[a] != loads_[b] ? loads_[a] < loads_[b] : a < b; }
    void sift(std::size_t at);
    std::vector<i64> loads_;
    std::vector<int> heap_;
};

}  // namespace augtree
