// Launchers of the kernels: plain pointers and sizes in, cudaError_t out. No torch, so nvcc never sees its
// headers. Each is one launch on the given stream, allocates nothing, waits for nothing and may be captured.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace ddtree {

// Nodes per tree that the CUDA builder's registers hold (32 slots of 32 lanes).
constexpr int64_t kMaxNodes = 1024;

cudaError_t launch_build(const float* top_logps, const int64_t* top_tokens, const int32_t* budgets,
                         int64_t* tokens, int32_t* parents, int32_t* depths, float* node_logws,
                         int32_t* num_nodes, int64_t n, int64_t depth_limit, int64_t rank_limit,
                         int64_t q_len, cudaStream_t stream);

cudaError_t launch_retrieve(const int32_t* parents, const int32_t* num_nodes, int64_t* index,
                            int32_t* next_token, int32_t* next_sibling, int64_t n, int64_t q_len,
                            cudaStream_t stream);

cudaError_t launch_ancestor_mask(const int32_t* parents, const int32_t* num_nodes, int32_t* mask, int64_t n,
                                 int64_t q_len, cudaStream_t stream);

cudaError_t launch_walk(const int64_t* candidates, const int32_t* next_token, const int32_t* next_sibling,
                        const int32_t* num_nodes, const int64_t* target_tokens, int64_t* predict,
                        int64_t* accept_index, int32_t* accept_token_num, int64_t n, int64_t q_len,
                        int64_t max_depth, cudaStream_t stream);

cudaError_t launch_walk_coins(const int64_t* candidates, const int32_t* next_token,
                              const int32_t* next_sibling, const int32_t* num_nodes,
                              const float* target_probs, const float* coins, const float* final_coins,
                              int64_t* predict, int64_t* accept_index, int32_t* accept_token_num, int64_t n,
                              int64_t q_len, int64_t max_depth, int64_t vocab, cudaStream_t stream);

cudaError_t launch_plan_moves(const int64_t* accept_index, const void* query_start, bool wide_start,
                              int64_t q_len, const int64_t* slots, int64_t rows, int64_t* src, int64_t* dst,
                              int64_t n, int64_t moves, cudaStream_t stream);

// chunks: 16-byte chunks of the largest row, which sizes the grid.
cudaError_t launch_move_rows(const int64_t* table, int64_t views, const int64_t* src, const int64_t* dst,
                             int64_t n, int64_t moves, int64_t chunks, cudaStream_t stream);

}  // namespace ddtree
