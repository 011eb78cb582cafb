// The order of draft-tree nodes of equal score, shared by the CPU and the CUDA builder so that they cannot
// differ. Knows neither torch nor CUDA types.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define DDTREE_HD __host__ __device__
#else
#define DDTREE_HD
#endif

namespace ddtree {

// Whether the rank tuple of candidate a (child number rank_a of node parent_a) comes before that of candidate
// b. Two candidates are never nodes yet, so neither tuple is a prefix of the other and the tuples first
// differ below the lowest common ancestor.
DDTREE_HD inline bool comes_before(int32_t parent_a, int32_t rank_a, int32_t parent_b, int32_t rank_b,
                                   const int32_t* parents, const int32_t* ranks, const int32_t* depths) {
  int32_t depth_a = depths[parent_a];
  int32_t depth_b = depths[parent_b];
  for (; depth_a > depth_b; --depth_a) {
    rank_a = ranks[parent_a];
    parent_a = parents[parent_a];
  }
  for (; depth_b > depth_a; --depth_b) {
    rank_b = ranks[parent_b];
    parent_b = parents[parent_b];
  }
  while (parent_a != parent_b) {
    rank_a = ranks[parent_a];
    parent_a = parents[parent_a];
    rank_b = ranks[parent_b];
    parent_b = parents[parent_b];
  }
  return rank_a < rank_b;
}

}  // namespace ddtree
