// The bookkeeping of one verification step: positions and masks before the forward, the walk over rows of
// logits and the commit after it. Each is one launch over all requests. Knows no torch.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace ddtree {

constexpr int kStepThreads = 128;
constexpr int kMaxHidden = 32;  // tensors of hidden rows that one launch takes

struct BeginArgs {
  const int32_t* states;       // [n] state of each request
  const int32_t* query_start;  // [n + 1]
  const int32_t* cu_logits;    // [n + 1]
  const int32_t* computed;     // by state
  const int32_t* depths;       // by state, [q_len]
  const int32_t* mask;         // by state, [q_len, words]
  int64_t* positions;
  int32_t* local_pos;
  int32_t* step_mask;
  int32_t* tree_len;
  int n, q_len, words;
};

// Grid: (tiles, slots of the step). Slots behind the batch only lose their tree.
__global__ void __launch_bounds__(kStepThreads) begin_step_kernel(BeginArgs a) {
  const int r = blockIdx.y;
  const int first = blockIdx.x * kStepThreads + threadIdx.x, step = gridDim.x * kStepThreads;
  const int rows = r < a.n ? a.cu_logits[r + 1] - a.cu_logits[r] : 0;
  const bool verified = rows > 1;
  if (first == 0) a.tree_len[r] = verified ? rows : 0;
  if (r >= a.n) return;
  const int64_t state = a.states[r];
  const int32_t* depths = a.depths + state * a.q_len;
  for (int i = first; i < rows; i += step) a.local_pos[a.cu_logits[r] + i] = depths[min(i, a.q_len - 1)];
  const int size = a.q_len * a.words;
  for (int i = first; i < size; i += step) a.step_mask[r * size + i] = a.mask[state * size + i];
  if (!verified) return;
  const int start = a.query_start[r], length = a.query_start[r + 1] - start;
  for (int i = first; i < length; i += step) {
    a.positions[start + i] = a.computed[state] + depths[min(i, a.q_len - 1)];
  }
}

struct WalkRowsArgs {
  const int64_t* drawn;       // [rows of logits] the target's own tokens
  const int32_t* drafts;      // [rows of logits] negative = not a draft
  const int32_t* cu_logits;   // [n + 1]
  const int32_t* states;      // [n]
  const int32_t* next_token;  // by state
  const int32_t* next_sibling;
  const int32_t* num_nodes;
  int64_t* sampled;       // [n, max_depth + 1]
  int64_t* accept_index;  // [n, max_depth + 1]
  int32_t* num_sampled;   // [n]
  int q_len, max_depth;
};

// One warp per request.
__global__ void __launch_bounds__(32) walk_rows_kernel(WalkRowsArgs a) {
  extern __shared__ int64_t memory[];
  const int64_t r = blockIdx.x;
  const int64_t state = a.states[r];
  const int start = a.cu_logits[r], rows = a.cu_logits[r + 1] - start;
  // A draft that the scheduler cut short is the smaller tree.
  const int count = min(min(max(a.num_nodes[state], 0), rows - 1), a.q_len - 1);
  int64_t* drawn = memory;
  int32_t* tokens = reinterpret_cast<int32_t*>(drawn + a.q_len);
  int32_t* next_token = tokens + a.q_len;
  int32_t* next_sibling = next_token + a.q_len;
  for (int i = threadIdx.x; i <= count; i += 32) {
    const int child = a.next_token[state * a.q_len + i], sibling = a.next_sibling[state * a.q_len + i];
    drawn[i] = a.drawn[start + i];
    tokens[i] = a.drafts[start + i];
    next_token[i] = child > i && child <= count ? child : -1;
    next_sibling[i] = sibling > i && sibling <= count ? sibling : -1;
  }
  __syncthreads();
  int64_t* path = a.accept_index + r * (a.max_depth + 1);
  int64_t* sampled = a.sampled + r * (a.max_depth + 1);
  int depth = 0;
  if (threadIdx.x == 0) {
    for (int node = 0;; ++depth) {
      const int64_t token = drawn[node];
      path[depth] = r * a.q_len + node;
      sampled[depth] = token;
      if (depth == a.max_depth) break;
      int child = next_token[node];
      while (child >= 0 && tokens[child] != token) child = next_sibling[child];
      if (child < 0) break;
      node = child;
    }
    a.num_sampled[r] = depth + 1;
  }
  depth = __shfl_sync(0xffffffffu, depth, 0);
  for (int d = depth + 1 + threadIdx.x; d <= a.max_depth; d += 32) path[d] = sampled[d] = -1;
}

struct HiddenArgs {
  char* rows[kMaxHidden];
  int64_t stride[kMaxHidden];  // bytes between rows
  const int64_t* accept_index;
  const int32_t* query_start;  // [n + 1]
  const int32_t* states;       // [n]
  const int32_t* computed;     // by state
  int64_t* positions;
  int row_bytes, q_len, max_depth, tensors;
};

// Grid: (tiles, tensors + 1, n). The last row of blocks makes positions linear again. A node never comes
// before its depth, so no row is read after it was written and each thread may copy its chunk in order.
__global__ void __launch_bounds__(kStepThreads) commit_rows_kernel(HiddenArgs a) {
  const int64_t r = blockIdx.z;
  const int start = a.query_start[r];
  const int first = blockIdx.x * kStepThreads + threadIdx.x, step = gridDim.x * kStepThreads;
  const int tensor = blockIdx.y;
  if (tensor == a.tensors) {
    const int length = a.query_start[r + 1] - start;
    for (int i = first; i < length; i += step) {
      a.positions[start + i] = static_cast<int64_t>(a.computed[a.states[r]]) + i;
    }
    return;
  }
  const int64_t* path = a.accept_index + r * (a.max_depth + 1);
  char* rows = a.rows[tensor];
  const int64_t stride = a.stride[tensor];
  for (int chunk = first; chunk < a.row_bytes / 16; chunk += step) {
    for (int d = 1; d <= a.max_depth && path[d] >= 0; ++d) {
      const int64_t node = path[d] % a.q_len;
      if (node == d) continue;
      *reinterpret_cast<uint4*>(rows + (start + d) * stride + chunk * 16) =
          *reinterpret_cast<const uint4*>(rows + (start + node) * stride + chunk * 16);
    }
  }
}

}  // namespace ddtree
