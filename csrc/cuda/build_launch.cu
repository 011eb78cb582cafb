#include <algorithm>

#include "../kernels/build.cuh"
#include "launch.h"

namespace ddtree {
namespace {

template <int kSlots, bool kStaged>
cudaError_t run(const BuildArgs& args, int64_t n, size_t bytes, cudaStream_t stream) {
  if (bytes > 48 * 1024) {  // what a kernel gets without asking, on every architecture
    const cudaError_t error = cudaFuncSetAttribute(
        build_kernel<kSlots, kStaged>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
    if (error != cudaSuccess) return error;
  }
  build_kernel<kSlots, kStaged><<<static_cast<unsigned>(n), kBuildThreads, bytes, stream>>>(args);
  return cudaGetLastError();
}

template <int kSlots>
cudaError_t run(const BuildArgs& args, int64_t n, cudaStream_t stream) {
  int device = 0, limit = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  if (error != cudaSuccess) return error;
  const size_t tree = sizeof(float) * 5 * args.q_len;
  const size_t ranks = std::min(args.rank_limit, args.q_len - 1);
  const size_t staged = tree + sizeof(float) * args.depth_limit * ranks;
  // 64 bytes: the kernel's static shared memory counts against the same limit.
  return staged + 64 <= static_cast<size_t>(limit) ? run<kSlots, true>(args, n, staged, stream)
                                                   : run<kSlots, false>(args, n, tree, stream);
}

}  // namespace

cudaError_t launch_build(const float* top_logps, const int64_t* top_tokens, const int32_t* budgets,
                         int64_t* tokens, int32_t* parents, int32_t* depths, float* node_logws,
                         int32_t* num_nodes, int64_t n, int64_t depth_limit, int64_t rank_limit,
                         int64_t q_len, cudaStream_t stream) {
  const BuildArgs args{top_logps,
                       top_tokens,
                       budgets,
                       tokens,
                       parents,
                       depths,
                       node_logws,
                       num_nodes,
                       static_cast<int>(depth_limit),
                       static_cast<int>(rank_limit),
                       static_cast<int>(q_len)};
  const int64_t nodes = q_len - 1;  // node N needs no slot: nothing is popped after it
  if (nodes <= 32) return run<1>(args, n, stream);
  if (nodes <= 64) return run<2>(args, n, stream);
  if (nodes <= 128) return run<4>(args, n, stream);
  if (nodes <= 256) return run<8>(args, n, stream);
  if (nodes <= 512) return run<16>(args, n, stream);
  return run<32>(args, n, stream);
}

}  // namespace ddtree
