#include "../kernels/walk.cuh"
#include "../kernels/walk_coins.cuh"
#include "../kernels/walk_residual.cuh"
#include "launch.h"

namespace ddtree {

cudaError_t launch_walk(const int64_t* candidates, const int32_t* next_token, const int32_t* next_sibling,
                        const int32_t* num_nodes, const int64_t* target_tokens, int64_t* predict,
                        int64_t* accept_index, int32_t* accept_token_num, int64_t n, int64_t q_len,
                        int64_t max_depth, cudaStream_t stream) {
  const size_t bytes = (SharedTree::kBytesPerSlot + sizeof(int64_t)) * q_len;
  walk_kernel<<<static_cast<unsigned>(n), 32, bytes, stream>>>(
      WalkArgs{candidates, next_token, next_sibling, num_nodes, predict, accept_index, accept_token_num,
               static_cast<int>(q_len), static_cast<int>(max_depth)},
      target_tokens);
  return cudaGetLastError();
}

cudaError_t launch_walk_coins(const int64_t* candidates, const int32_t* next_token,
                              const int32_t* next_sibling, const int32_t* num_nodes,
                              const float* target_probs, const float* coins, const float* final_coins,
                              int64_t* predict, int64_t* accept_index, int32_t* accept_token_num, int64_t n,
                              int64_t q_len, int64_t max_depth, int64_t vocab, cudaStream_t stream) {
  const size_t bytes =
      (SharedTree::kBytesPerSlot + sizeof(int64_t) + sizeof(double) + sizeof(int32_t)) * q_len;
  walk_coins_kernel<<<static_cast<unsigned>(n), kCoinThreads, bytes, stream>>>(
      WalkArgs{candidates, next_token, next_sibling, num_nodes, predict, accept_index, accept_token_num,
               static_cast<int>(q_len), static_cast<int>(max_depth)},
      CoinArgs{target_probs, coins, final_coins, vocab});
  return cudaGetLastError();
}

cudaError_t launch_walk_residual(const int64_t* candidates, const int32_t* next_token,
                                 const int32_t* next_sibling, const int32_t* num_nodes,
                                 const float* target_probs, const float* draft_probs, const float* coins,
                                 const float* final_coins, int64_t* predict, int64_t* accept_index,
                                 int32_t* accept_token_num, int64_t n, int64_t q_len, int64_t max_depth,
                                 int64_t depths, int64_t vocab, cudaStream_t stream) {
  const size_t bytes = (SharedTree::kBytesPerSlot + sizeof(int64_t)) * q_len;
  walk_residual_kernel<<<static_cast<unsigned>(n), kCoinThreads, bytes, stream>>>(
      WalkArgs{candidates, next_token, next_sibling, num_nodes, predict, accept_index, accept_token_num,
               static_cast<int>(q_len), static_cast<int>(max_depth)},
      ResidualArgs{CoinArgs{target_probs, coins, final_coins, vocab}, draft_probs, depths});
  return cudaGetLastError();
}

}  // namespace ddtree
