#include <algorithm>

#include "../kernels/commit.cuh"
#include "launch.h"

namespace ddtree {
namespace {

template <typename Moves>
cudaError_t move_rows(const int64_t* table, int64_t views, int64_t chunks, const Moves& source, int64_t n,
                      int64_t moves, cudaStream_t stream) {
  static_assert(sizeof(MoveView) == 8 * sizeof(int64_t), "the table has 8 columns");
  const int64_t tiles = std::clamp<int64_t>((chunks + kMoveThreads - 1) / kMoveThreads, 1, 16);
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(views), static_cast<unsigned>(n));
  move_rows_kernel<<<grid, kMoveThreads, 2 * sizeof(int64_t) * moves, stream>>>(
      reinterpret_cast<const MoveView*>(table), source, static_cast<int>(moves));
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_plan_moves(const int64_t* accept_index, const void* query_start, bool wide_start,
                              int64_t q_len, const int64_t* slots, int64_t rows, int64_t* src, int64_t* dst,
                              int64_t n, int64_t moves, cudaStream_t stream) {
  const unsigned blocks = static_cast<unsigned>((n * moves + kPlanThreads - 1) / kPlanThreads);
  if (wide_start) {
    plan_moves_kernel<<<blocks, kPlanThreads, 0, stream>>>(
        accept_index, static_cast<const int64_t*>(query_start), q_len, slots, rows, src, dst, n, moves);
  } else {
    plan_moves_kernel<<<blocks, kPlanThreads, 0, stream>>>(
        accept_index, static_cast<const int32_t*>(query_start), q_len, slots, rows, src, dst, n, moves);
  }
  return cudaGetLastError();
}

cudaError_t launch_move_rows(const int64_t* table, int64_t views, const int64_t* src, const int64_t* dst,
                             int64_t n, int64_t moves, int64_t chunks, cudaStream_t stream) {
  return move_rows(table, views, chunks, PlannedMoves{src, dst}, n, moves, stream);
}

cudaError_t launch_commit_cache(const int64_t* table, int64_t views, int64_t chunks,
                                const int64_t* accept_index, const int32_t* query_start, int64_t q_len,
                                const int64_t* slots, int64_t rows, int64_t n, int64_t moves,
                                cudaStream_t stream) {
  return move_rows(table, views, chunks,
                   PathMoves{accept_index, query_start, slots, rows, static_cast<int>(q_len)}, n, moves,
                   stream);
}

}  // namespace ddtree
