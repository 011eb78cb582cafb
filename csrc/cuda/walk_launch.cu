#include "../kernels/walk.cuh"
#include "../kernels/walk_coins.cuh"
#include "../kernels/walk_residual.cuh"
#include "launch.h"

namespace ddtree {

cudaError_t launch_walk(const WalkArgs& args, const int64_t* target_tokens, int64_t n, cudaStream_t stream) {
  const size_t bytes = (SharedTree::kBytesPerSlot + sizeof(int64_t)) * args.q_len;
  walk_kernel<<<static_cast<unsigned>(n), 32, bytes, stream>>>(args, target_tokens);
  return cudaGetLastError();
}

cudaError_t launch_walk_coins(const WalkArgs& args, const CoinArgs& coins, int64_t n, cudaStream_t stream) {
  const size_t bytes =
      (SharedTree::kBytesPerSlot + sizeof(int64_t) + sizeof(double) + sizeof(int32_t)) * args.q_len;
  walk_coins_kernel<<<static_cast<unsigned>(n), kCoinThreads, bytes, stream>>>(args, coins);
  return cudaGetLastError();
}

cudaError_t launch_walk_residual(const WalkArgs& args, const ResidualArgs& residual, int64_t n,
                                 cudaStream_t stream) {
  const size_t bytes = (SharedTree::kBytesPerSlot + sizeof(int64_t)) * args.q_len;
  walk_residual_kernel<<<static_cast<unsigned>(n), kCoinThreads, bytes, stream>>>(args, residual);
  return cudaGetLastError();
}

}  // namespace ddtree
