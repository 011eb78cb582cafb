#include <algorithm>

#include "../kernels/step.cuh"
#include "../kernels/topk.cuh"
#include "launch.h"

namespace ddtree {

static_assert(kMaxTop == kTopMax && kMaxHiddenTensors == kMaxHidden);

cudaError_t launch_top_logps(const void* logits, LogitType type, int64_t rows, int64_t vocab, float* logps,
                             int64_t* tokens, int64_t ranks, cudaStream_t stream) {
  const int64_t size = type == LogitType::kFloat32 ? 4 : 2;
  const TopArgs args{logits, vocab * size, logps, tokens, static_cast<int>(vocab), static_cast<int>(ranks)};
  const unsigned grid = static_cast<unsigned>(rows);
  if (type == LogitType::kFloat32) {
    top_logps_kernel<Float32Logits><<<grid, kTopThreads, 0, stream>>>(args);
  } else if (type == LogitType::kBFloat16) {
    top_logps_kernel<BFloat16Logits><<<grid, kTopThreads, 0, stream>>>(args);
  } else {
    top_logps_kernel<Float16Logits><<<grid, kTopThreads, 0, stream>>>(args);
  }
  return cudaGetLastError();
}

cudaError_t launch_begin_step(const int32_t* states, const int32_t* query_start, const int32_t* cu_logits,
                              const int32_t* computed, const int32_t* depths, const int32_t* mask,
                              int64_t* positions, int32_t* local_pos, int32_t* step_mask, int32_t* tree_len,
                              int64_t n, int64_t slots, int64_t q_len, cudaStream_t stream) {
  const int words = static_cast<int>((q_len + 31) / 32);
  const int64_t tiles = std::clamp<int64_t>(q_len * words / (4 * kStepThreads), 1, 16);
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(slots));
  begin_step_kernel<<<grid, kStepThreads, 0, stream>>>({states, query_start, cu_logits, computed, depths,
                                                        mask, positions, local_pos, step_mask, tree_len,
                                                        static_cast<int>(n), static_cast<int>(q_len), words});
  return cudaGetLastError();
}

cudaError_t launch_walk_rows(const int64_t* drawn, const int32_t* drafts, const int32_t* cu_logits,
                             const int32_t* states, const int32_t* next_token, const int32_t* next_sibling,
                             const int32_t* num_nodes, int64_t* sampled, int64_t* accept_index,
                             int32_t* num_sampled, int64_t n, int64_t q_len, int64_t max_depth,
                             cudaStream_t stream) {
  const size_t bytes = (sizeof(int64_t) + 3 * sizeof(int32_t)) * q_len;
  walk_rows_kernel<<<static_cast<unsigned>(n), 32, bytes, stream>>>(
      {drawn, drafts, cu_logits, states, next_token, next_sibling, num_nodes, sampled, accept_index,
       num_sampled, static_cast<int>(q_len), static_cast<int>(max_depth)});
  return cudaGetLastError();
}

cudaError_t launch_commit_rows(void* const* hidden, const int64_t* strides, int64_t tensors,
                               int64_t row_bytes, int64_t* positions, const int64_t* accept_index,
                               const int32_t* query_start, const int32_t* states, const int32_t* computed,
                               int64_t n, int64_t q_len, int64_t max_depth, cudaStream_t stream) {
  HiddenArgs args{};
  for (int64_t i = 0; i < tensors; ++i) {
    args.rows[i] = static_cast<char*>(hidden[i]);
    args.stride[i] = strides[i];
  }
  args.accept_index = accept_index;
  args.query_start = query_start;
  args.states = states;
  args.computed = computed;
  args.positions = positions;
  args.row_bytes = static_cast<int>(row_bytes);
  args.q_len = static_cast<int>(q_len);
  args.max_depth = static_cast<int>(max_depth);
  args.tensors = static_cast<int>(tensors);
  const int64_t tiles = std::clamp<int64_t>((row_bytes / 16 + kStepThreads - 1) / kStepThreads, 1, 16);
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(tensors + 1), static_cast<unsigned>(n));
  commit_rows_kernel<<<grid, kStepThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace ddtree
