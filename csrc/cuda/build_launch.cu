#include <algorithm>

#include "../kernels/build.cuh"
#include "launch.h"

namespace ddtree {
namespace {

template <int kSlots, bool kStaged>
cudaError_t run(const BuildArgs& args, const StoreArgs& store, int64_t n, size_t bytes, cudaStream_t stream) {
  if (bytes > 48 * 1024) {  // what a kernel gets without asking, on every architecture
    const cudaError_t error = cudaFuncSetAttribute(
        build_kernel<kSlots, kStaged>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
    if (error != cudaSuccess) return error;
  }
  build_kernel<kSlots, kStaged><<<static_cast<unsigned>(n), kBuildThreads, bytes, stream>>>(args, store);
  return cudaGetLastError();
}

template <int kSlots>
cudaError_t run(const BuildArgs& args, const StoreArgs& store, int64_t n, cudaStream_t stream) {
  int device = 0, limit = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  if (error != cudaSuccess) return error;
  const size_t tree = static_cast<size_t>(Growing::kBytesPerSlot) * args.q_len;
  const size_t ranks = std::min(args.rank_limit, args.q_len - 1);
  const size_t staged = tree + sizeof(float) * args.depth_limit * ranks;
  // 64 bytes: the kernel's static shared memory counts against the same limit.
  return staged + 64 <= static_cast<size_t>(limit) ? run<kSlots, true>(args, store, n, staged, stream)
                                                   : run<kSlots, false>(args, store, n, tree, stream);
}

cudaError_t launch(const BuildArgs& args, const StoreArgs& store, int64_t n, cudaStream_t stream) {
  const int nodes = args.q_len - 1;  // node N needs no slot: nothing is popped after it
  if (nodes <= 32) return run<1>(args, store, n, stream);
  if (nodes <= 64) return run<2>(args, store, n, stream);
  if (nodes <= 128) return run<4>(args, store, n, stream);
  if (nodes <= 256) return run<8>(args, store, n, stream);
  if (nodes <= 512) return run<16>(args, store, n, stream);
  return run<32>(args, store, n, stream);
}

}  // namespace

cudaError_t launch_build(const float* top_logps, const int64_t* top_tokens, const int32_t* budgets,
                         int64_t* tokens, int32_t* parents, int32_t* depths, float* node_logws,
                         int32_t* num_nodes, int64_t n, int64_t depth_limit, int64_t rank_limit,
                         int64_t q_len, cudaStream_t stream) {
  return launch({top_logps, top_tokens, budgets, tokens, parents, depths, node_logws, num_nodes,
                 static_cast<int>(depth_limit), static_cast<int>(rank_limit), static_cast<int>(q_len)},
                {}, n, stream);
}

cudaError_t launch_build_trees(const float* top_logps, const int64_t* top_tokens, const int32_t* budgets,
                               const int64_t* rows, int64_t rows_stride, const bool* is_chain,
                               const TreeStoreView& store, int64_t* drafts, int64_t n, int64_t depth_limit,
                               int64_t rank_limit, int64_t q_len, cudaStream_t stream) {
  return launch(
      {top_logps, top_tokens, budgets, store.tokens, store.parents, store.depths, store.node_logws,
       store.num_nodes, static_cast<int>(depth_limit), static_cast<int>(rank_limit), static_cast<int>(q_len)},
      {rows, rows_stride, is_chain, store.next_token, store.next_sibling, store.mask, drafts}, n, stream);
}

}  // namespace ddtree
