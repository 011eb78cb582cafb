// Planning and doing the row moves of a commit. Knows no torch.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace ddtree {

constexpr int kPlanThreads = 128;
constexpr int kMoveThreads = 128;
constexpr int kMoveBatch = 8;

template <typename Start>
__global__ void __launch_bounds__(kPlanThreads)
    plan_moves_kernel(const int64_t* accept_index, const Start* query_start, int64_t q_len,
                      const int64_t* slots, int64_t rows, int64_t* src, int64_t* dst, int64_t n,
                      int64_t moves) {
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kPlanThreads + threadIdx.x;
  if (item >= n * moves) return;
  const int64_t r = item / moves, d = item % moves + 1;
  const int64_t accepted = accept_index[r * (moves + 1) + d];
  const int64_t start = query_start[r];
  int64_t from = -1, to = -1;
  if (accepted >= 0 && start >= 0 && start < rows && start + accepted % q_len < rows && start + d < rows) {
    from = slots[start + accepted % q_len];
    to = slots[start + d];
  }
  const bool needed = from >= 0 && to >= 0 && from != to;
  src[item] = needed ? from : -1;
  dst[item] = needed ? to : -1;
}

// One row of the move table; the order of the fields is make_move_table's in vllm_ddtree/ops.py. Strides in
// bytes.
struct MoveView {
  int64_t base, num_blocks, block_size, block_stride, slot_stride, head_stride, heads, head_bytes;

  __device__ int64_t offset(int64_t slot) const {
    return slot / block_size * block_stride + slot % block_size * slot_stride;
  }
};

// Each thread owns a fixed chunk of the row and takes the moves in order, so a row read late in the list may
// be one written early. `ordered` is false when no source is an earlier destination: then loads are issued in
// batches.
template <typename Chunk>
__device__ void move_chunks(const MoveView& view, const int64_t* from, const int64_t* to, int count,
                            bool ordered) {
  const int64_t per_head = view.head_bytes / static_cast<int64_t>(sizeof(Chunk));
  const int64_t total = per_head * view.heads;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kMoveThreads;
  for (int64_t c = static_cast<int64_t>(blockIdx.x) * kMoveThreads + threadIdx.x; c < total; c += step) {
    char* at = reinterpret_cast<char*>(view.base) + c / per_head * view.head_stride +
               c % per_head * static_cast<int64_t>(sizeof(Chunk));
    if (ordered) {
      for (int d = 0; d < count; ++d) {
        *reinterpret_cast<Chunk*>(at + to[d]) = *reinterpret_cast<const Chunk*>(at + from[d]);
      }
      continue;
    }
    for (int d = 0; d < count; d += kMoveBatch) {
      Chunk held[kMoveBatch];
#pragma unroll
      for (int k = 0; k < kMoveBatch; ++k) {
        if (d + k < count) held[k] = *reinterpret_cast<const Chunk*>(at + from[d + k]);
      }
#pragma unroll
      for (int k = 0; k < kMoveBatch; ++k) {
        if (d + k < count) *reinterpret_cast<Chunk*>(at + to[d + k]) = held[k];
      }
    }
  }
}

// Moves that were planned before.
struct PlannedMoves {
  const int64_t* src;  // [n, moves]
  const int64_t* dst;

  __device__ void get(int64_t r, int move, int moves, int64_t* from, int64_t* to) const {
    *from = src[r * moves + move];
    *to = dst[r * moves + move];
  }
};

// Moves planned on the spot: from the accepted path and the slots of the step's rows.
struct PathMoves {
  const int64_t* accept_index;  // [n, moves + 1]
  const int32_t* query_start;   // [n]
  const int64_t* slots;         // [rows]
  int64_t rows;
  int q_len;

  __device__ void get(int64_t r, int move, int moves, int64_t* from, int64_t* to) const {
    const int64_t start = query_start[r], node = accept_index[r * (moves + 1) + move + 1];
    const int64_t source = start + node % q_len, target = start + move + 1;
    *from = *to = -1;
    if (node < 0 || source == target || source >= rows || target >= rows) return;
    *from = slots[source];
    *to = slots[target];
  }
};

// Grid: (chunk tiles, views, requests). Shared memory: two int64 per move.
template <typename Moves>
__global__ void __launch_bounds__(kMoveThreads)
    move_rows_kernel(const MoveView* table, Moves source, int moves) {
  extern __shared__ int64_t offsets[];
  __shared__ int count_shared, ordered_shared;
  int64_t* from = offsets;
  int64_t* to = offsets + moves;
  const int64_t r = blockIdx.z;
  const MoveView view = table[blockIdx.y];
  const int64_t rows = view.num_blocks * view.block_size;
  if (threadIdx.x < 32) {
    int count = 0;
    for (int d = 0; d < moves; d += 32) {
      const int mine = d + threadIdx.x;
      int64_t a = -1, b = -1;
      if (mine < moves) source.get(r, mine, moves, &a, &b);
      const bool valid = a >= 0 && b >= 0 && a < rows && b < rows;
      const unsigned kept = __ballot_sync(0xffffffffu, valid);
      if (valid) {
        const int at = count + __popc(kept & ((1u << threadIdx.x) - 1));
        from[at] = view.offset(a);
        to[at] = view.offset(b);
      }
      count += __popc(kept);
    }
    if (threadIdx.x == 0) {
      count_shared = count;
      ordered_shared = 0;
    }
  }
  __syncthreads();
  const int count = count_shared;
  if (count == 0) return;
  for (int pair = threadIdx.x; pair < count * count; pair += kMoveThreads) {
    const int early = pair / count, late = pair % count;
    // Two writes to one row must keep their order as well.
    if (early < late && (to[early] == from[late] || to[early] == to[late])) ordered_shared = 1;
  }
  __syncthreads();
  const bool ordered = ordered_shared != 0;
  const int64_t alignment =
      view.base | view.block_stride | view.slot_stride | view.head_stride | view.head_bytes;
  if (alignment % 16 == 0) {
    move_chunks<uint4>(view, from, to, count, ordered);
  } else if (alignment % 4 == 0) {
    move_chunks<uint32_t>(view, from, to, count, ordered);
  } else if (alignment % 2 == 0) {
    move_chunks<uint16_t>(view, from, to, count, ordered);
  } else {
    move_chunks<uint8_t>(view, from, to, count, ordered);
  }
}

}  // namespace ddtree
