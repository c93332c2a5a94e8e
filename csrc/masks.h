// Sets of ranks as bits of words.
#pragma once

#include <vector>

#include "pricing.h"

namespace augtree {

using Mask = std::vector<std::uint64_t>;

// Without a table or an instruction that not every machine has.
inline int bits(std::uint64_t x) {
    x -= x >> 1 & 0x5555555555555555u;
    x = (x & 0x3333333333333333u) + (x >> 2 & 0x3333333333333333u);
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0Fu;
    return static_cast<int>(x * 0x0101010101010101u >> 56);
}

inline void set(std::uint64_t* mask, int rank) { mask[rank >> 6] |= std::uint64_t{1} << (rank & 63); }
inline void unset(std::uint64_t* mask, int rank) { mask[rank >> 6] &= ~(std::uint64_t{1} << (rank & 63)); }
inline bool test(const std::uint64_t* mask, int rank) { return mask[rank >> 6] >> (rank & 63) & 1; }
inline i64 count(const std::uint64_t* mask, int words) {
    i64 found = 0;
    for (int w = 0; w < words; ++w) found += bits(mask[w]);
    return found;
}

}  // namespace augtree
