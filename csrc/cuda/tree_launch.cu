#include "../kernels/tree.cuh"
#include "launch.h"

namespace ddtree {

cudaError_t launch_retrieve(const int32_t* parents, const int32_t* num_nodes, int64_t* index,
                            int32_t* next_token, int32_t* next_sibling, int64_t n, int64_t q_len,
                            cudaStream_t stream) {
  const size_t bytes = 2 * sizeof(int32_t) * q_len;
  retrieve_kernel<<<static_cast<unsigned>(n), kTreeThreads, bytes, stream>>>(
      parents, num_nodes, index, next_token, next_sibling, static_cast<int>(q_len));
  return cudaGetLastError();
}

cudaError_t launch_ancestor_mask(const int32_t* parents, const int32_t* num_nodes, int32_t* mask, int64_t n,
                                 int64_t q_len, cudaStream_t stream) {
  const int64_t words = (q_len + 31) / 32;
  const int64_t tiles = (q_len * words + kTreeThreads - 1) / kTreeThreads;
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(n));
  ancestor_mask_kernel<<<grid, kTreeThreads, sizeof(int32_t) * q_len, stream>>>(
      parents, num_nodes, mask, static_cast<int>(q_len), static_cast<int>(words));
  return cudaGetLastError();
}

}  // namespace ddtree
