// First-child / next-sibling pointers and ancestor bits, one block (or several) per request. Knows no torch.
// A node whose parent is not an earlier node is treated as absent, so that bad input cannot loop or read
// outside.
#pragma once

#include <cuda_runtime.h>

#include <climits>
#include <cstdint>

namespace ddtree {

constexpr int kTreeThreads = 256;

// Copies one row of parents to shared memory with every unusable entry as -1; returns the number of real
// nodes.
__device__ inline int load_parents(const int32_t* parents, const int32_t* num_nodes, int64_t r, int q_len,
                                   int32_t* out) {
  const int count = min(max(num_nodes[r], 0), q_len - 1);
  for (int i = threadIdx.x; i < q_len; i += blockDim.x) {
    const int parent = parents[r * q_len + i];
    out[i] = i >= 1 && i <= count && parent >= 0 && parent < i ? parent : -1;
  }
  __syncthreads();
  return count;
}

__global__ void __launch_bounds__(kTreeThreads)
    retrieve_kernel(const int32_t* parents, const int32_t* num_nodes, int64_t* index, int32_t* next_token,
                    int32_t* next_sibling, int q_len) {
  extern __shared__ int32_t shared[];
  int32_t* parent_of = shared;
  int32_t* first_child = shared + q_len;
  const int64_t r = blockIdx.x;
  for (int i = threadIdx.x; i < q_len; i += blockDim.x) first_child[i] = INT_MAX;
  const int count = load_parents(parents, num_nodes, r, q_len, parent_of);
  for (int i = threadIdx.x; i <= count; i += blockDim.x) {
    if (parent_of[i] >= 0) atomicMin(&first_child[parent_of[i]], i);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < q_len; i += blockDim.x) {
    const int64_t at = r * q_len + i;
    int sibling = -1;
    if (parent_of[i] >= 0) {
      for (int j = i + 1; j <= count; ++j) {
        if (parent_of[j] == parent_of[i]) {
          sibling = j;
          break;
        }
      }
    }
    index[at] = at;
    next_token[at] = first_child[i] == INT_MAX ? -1 : first_child[i];
    next_sibling[at] = sibling;
  }
}

// Grid: (tiles, n). One thread makes one 32-bit word of one row by climbing from the row's node to the root.
__global__ void __launch_bounds__(kTreeThreads)
    ancestor_mask_kernel(const int32_t* parents, const int32_t* num_nodes, int32_t* mask, int q_len,
                         int words) {
  extern __shared__ int32_t parent_of[];
  const int64_t r = blockIdx.y;
  load_parents(parents, num_nodes, r, q_len, parent_of);
  const int total = q_len * words;
  for (int item = blockIdx.x * blockDim.x + threadIdx.x; item < total; item += gridDim.x * blockDim.x) {
    const int word = item % words;
    uint32_t bits = 0;
    for (int node = item / words; node >= 0; node = parent_of[node]) {
      if (node / 32 == word) bits |= 1u << (node % 32);
    }
    mask[r * total + item] = static_cast<int32_t>(bits);
  }
}

}  // namespace ddtree
