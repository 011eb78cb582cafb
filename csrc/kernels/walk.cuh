// The walk along the target's own tokens, one warp per request. Knows no torch.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "walk_args.h"

namespace ddtree {

// One tree in shared memory. Pointers that do not lead forward to a real node are cut, which is what ends
// every walk.
struct SharedTree {
  int64_t* tokens;
  int32_t* next_token;
  int32_t* next_sibling;

  static constexpr int kBytesPerSlot = 16;

  __device__ SharedTree(void* memory, int q_len) {
    tokens = static_cast<int64_t*>(memory);
    next_token = reinterpret_cast<int32_t*>(tokens + q_len);
    next_sibling = next_token + q_len;
  }

  // Loads row r and blanks its outputs.
  __device__ void load(const WalkArgs& a, int64_t r) {
    const int count = min(max(a.num_nodes[r], 0), a.q_len - 1);
    for (int i = threadIdx.x; i < a.q_len; i += blockDim.x) {
      const int64_t at = r * a.q_len + i;
      const int child = a.next_token[at], sibling = a.next_sibling[at];
      tokens[i] = a.candidates[at];
      next_token[i] = i <= count && child > i && child <= count ? child : -1;
      next_sibling[i] = i <= count && sibling > i && sibling <= count ? sibling : -1;
      a.predict[at] = -1;
    }
    for (int d = threadIdx.x; d <= a.max_depth; d += blockDim.x)
      a.accept_index[r * (a.max_depth + 1) + d] = -1;
  }
};

__global__ void __launch_bounds__(32) walk_kernel(WalkArgs a, const int64_t* target_tokens) {
  extern __shared__ int64_t memory[];
  SharedTree tree(memory, a.q_len);
  int64_t* drawn = memory + 2 * a.q_len;
  const int64_t r = blockIdx.x;
  tree.load(a, r);
  for (int i = threadIdx.x; i < a.q_len; i += blockDim.x) drawn[i] = target_tokens[r * a.q_len + i];
  __syncthreads();
  if (threadIdx.x != 0) return;
  int64_t* path = a.accept_index + r * (a.max_depth + 1);
  int depth = 0;
  for (int node = 0;; ++depth) {
    const int64_t token = drawn[node];
    path[depth] = r * a.q_len + node;
    a.predict[r * a.q_len + node] = token;
    if (depth == a.max_depth) break;
    int child = tree.next_token[node];
    while (child >= 0 && tree.tokens[child] != token) child = tree.next_sibling[child];
    if (child < 0) break;
    node = child;
  }
  a.accept_token_num[r] = depth;
}

}  // namespace ddtree
