// Launchers of the kernels: plain pointers and sizes in, cudaError_t out. No torch, so nvcc never sees its
// headers. Each is one launch on the given stream, allocates nothing, waits for nothing and may be captured.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../kernels/walk_args.h"

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

cudaError_t launch_walk(const WalkArgs& args, const int64_t* target_tokens, int64_t n, cudaStream_t stream);

cudaError_t launch_walk_coins(const WalkArgs& args, const CoinArgs& coins, int64_t n, cudaStream_t stream);

cudaError_t launch_walk_residual(const WalkArgs& args, const ResidualArgs& residual, int64_t n,
                                 cudaStream_t stream);

cudaError_t launch_plan_moves(const int64_t* accept_index, const void* query_start, bool wide_start,
                              int64_t q_len, const int64_t* slots, int64_t rows, int64_t* src, int64_t* dst,
                              int64_t n, int64_t moves, cudaStream_t stream);

// Moves per request that a block can list: two int64 each in the 48 KB it gets without asking.
constexpr int64_t kMaxMoves = 2048;

// chunks: 16-byte chunks of the largest row, which sizes the grid.
cudaError_t launch_move_rows(const int64_t* table, int64_t views, const int64_t* src, const int64_t* dst,
                             int64_t n, int64_t moves, int64_t chunks, cudaStream_t stream);

// The bookkeeping of a step (../kernels/step.cuh, build.cuh, commit.cuh, topk.cuh). Pointers of several ops
// travel in the kernels' own argument structs, which the launchers copy.
struct TreeStoreView {
  int64_t* tokens;
  int32_t* parents;
  int32_t* depths;
  float* node_logws;
  int32_t* num_nodes;
  int32_t* next_token;
  int32_t* next_sibling;
  int32_t* mask;
};

cudaError_t launch_build_trees(const float* top_logps, const int64_t* top_tokens, const int32_t* budgets,
                               const int64_t* rows, int64_t rows_stride, const bool* is_chain,
                               const TreeStoreView& store, int64_t* drafts, int64_t n, int64_t depth_limit,
                               int64_t rank_limit, int64_t q_len, cudaStream_t stream);

enum class LogitType { kFloat32, kBFloat16, kFloat16 };

// K that the top-k kernel takes at most.
constexpr int64_t kMaxTop = 1024;

cudaError_t launch_top_logps(const void* logits, LogitType type, int64_t rows, int64_t vocab, float* logps,
                             int64_t* tokens, int64_t ranks, cudaStream_t stream);

cudaError_t launch_begin_step(const int32_t* states, const int32_t* query_start, const int32_t* cu_logits,
                              const int32_t* computed, const int32_t* depths, const int32_t* mask,
                              int64_t* positions, int32_t* local_pos, int32_t* step_mask, int32_t* tree_len,
                              int64_t n, int64_t slots, int64_t q_len, cudaStream_t stream);

cudaError_t launch_walk_rows(const int64_t* drawn, const int32_t* drafts, const int32_t* cu_logits,
                             const int32_t* states, const int32_t* next_token, const int32_t* next_sibling,
                             const int32_t* num_nodes, int64_t* sampled, int64_t* accept_index,
                             int32_t* num_sampled, int64_t n, int64_t q_len, int64_t max_depth,
                             cudaStream_t stream);

// chunks: 16-byte chunks of the largest row, which sizes the grid.
cudaError_t launch_commit_cache(const int64_t* table, int64_t views, int64_t chunks,
                                const int64_t* accept_index, const int32_t* query_start, int64_t q_len,
                                const int64_t* slots, int64_t rows, int64_t n, int64_t moves,
                                cudaStream_t stream);

// Tensors of hidden rows that one launch takes.
constexpr int64_t kMaxHiddenTensors = 32;

cudaError_t launch_commit_rows(void* const* hidden, const int64_t* strides, int64_t tensors,
                               int64_t row_bytes, int64_t* positions, const int64_t* accept_index,
                               const int32_t* query_start, const int32_t* states, const int32_t* computed,
                               int64_t n, int64_t q_len, int64_t max_depth, cudaStream_t stream);

}  // namespace ddtree
