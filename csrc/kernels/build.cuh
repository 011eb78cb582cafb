// Best-first build, one warp popping per request. Knows no torch.
//
// The frontier needs no heap: node j offers exactly one candidate at a time, its next unborn child, so
// frontier slot j belongs to node j. A pop advances one slot and opens one; slots live in registers (slot j
// in lane j % 32) and the pop is one warp-wide max over ordered integers. Equal scores, which are rare, take
// the rank-tuple path.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../tree_order.h"
#include "keys.cuh"

namespace ddtree {

constexpr unsigned kFullWarp = 0xffffffffu;
constexpr int kBuildThreads = 128;

// Shared-memory view of the tree being built; each array has one entry per slot.
struct Growing {
  float* scores;
  int32_t* parents;
  int32_t* ranks;
  int32_t* depths;
  int32_t* cursors;  // rank of the child a node offers next
  int32_t* first_child;
  int32_t* last_child;
  int32_t* next_sibling;

  static constexpr int kBytesPerSlot = 32;

  __device__ Growing(void* memory, int q_len) {
    scores = static_cast<float*>(memory);
    parents = reinterpret_cast<int32_t*>(scores + q_len);
    ranks = parents + q_len;
    depths = ranks + q_len;
    cursors = depths + q_len;
    first_child = cursors + q_len;
    last_child = first_child + q_len;
    next_sibling = last_child + q_len;
  }

  __device__ void add(int node, int parent, int rank, int depth, float score) {
    scores[node] = score;
    parents[node] = parent;
    ranks[node] = rank;
    depths[node] = depth;
    cursors[node] = 0;
    first_child[node] = next_sibling[node] = -1;
    if (node == 0) return;
    cursors[parent] = rank + 1;
    if (rank == 0) {
      first_child[parent] = node;
    } else {
      next_sibling[last_child[parent]] = node;
    }
    last_child[parent] = node;
  }

  __device__ bool before(int a, int b) const {
    return comes_before(a, cursors[a], b, cursors[b], parents, ranks, depths);
  }
};

// All lanes return the first slot in rank-tuple order among the tied ones (bit s of a lane's mask: slot s *
// 32 + lane).
__device__ inline int break_tie(const Growing& tree, uint32_t mine, unsigned lanes, int lane) {
  int best = -1;
  for (; mine; mine &= mine - 1) {
    const int slot = (__ffs(mine) - 1) * 32 + lane;
    if (best < 0 || tree.before(slot, best)) best = slot;
  }
  int winner = -1;
  for (; lanes; lanes &= lanes - 1) {
    const int slot = __shfl_sync(kFullWarp, best, __ffs(lanes) - 1);
    if (winner < 0 || tree.before(slot, winner)) winner = slot;
  }
  return winner;
}

template <int kSlots>
__device__ int grow(Growing& tree, const float* logps, int stride, int depth_limit, int rank_limit,
                    int budget) {
  const int lane = threadIdx.x & 31;
  uint32_t keys[kSlots];
#pragma unroll
  for (int s = 0; s < kSlots; ++s) keys[s] = kNoKey;
  if (lane == 0 && depth_limit > 0 && rank_limit > 0) keys[0] = score_key(0.0f + logps[0]);

  for (int node = 1; node <= budget; ++node) {
    uint32_t mine = keys[0];
#pragma unroll
    for (int s = 1; s < kSlots; ++s) mine = max(mine, keys[s]);
    const uint32_t best = __reduce_max_sync(kFullWarp, mine);
    if (best == kNoKey) return node - 1;

    uint32_t tied = 0;
#pragma unroll
    for (int s = 0; s < kSlots; ++s) tied |= (keys[s] == best ? 1u : 0u) << s;
    const unsigned lanes = __ballot_sync(kFullWarp, tied != 0);
    const int owner = __ffs(lanes) - 1;
    const uint32_t owned = __shfl_sync(kFullWarp, tied, owner);
    int slot = (__ffs(owned) - 1) * 32 + owner;
    if ((lanes & (lanes - 1)) | (owned & (owned - 1))) slot = break_tie(tree, tied, lanes, lane);

    const int depth = tree.depths[slot];
    const int rank = tree.cursors[slot];
    const float prefix = tree.scores[slot];
    const float score = number_of(best);
    uint32_t sibling = kNoKey, child = kNoKey;
    if (rank + 1 < rank_limit) sibling = score_key(prefix + logps[depth * stride + rank + 1]);
    if (depth + 1 < depth_limit) child = score_key(score + logps[(depth + 1) * stride]);
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      const int here = s * 32 + lane;
      if (here == slot) keys[s] = sibling;
      if (here == node) keys[s] = child;
    }
    __syncwarp();  // every lane has read the slot before it advances
    if (lane == 0) tree.add(node, slot, rank, depth + 1, score);
    __syncwarp();
  }
  return budget;
}

struct BuildArgs {
  const float* top_logps;
  const int64_t* top_tokens;
  const int32_t* budgets;
  int64_t* tokens;
  int32_t* parents;
  int32_t* depths;
  float* node_logws;
  int32_t* num_nodes;
  int depth_limit, rank_limit, q_len;
};

// What a tree that goes straight into the store of all requests needs on top (vllm_ddtree/step.py).
struct StoreArgs {
  const int64_t* rows = nullptr;  // store row of each request, negative = none; null: request r is row r
  int64_t rows_stride = 0;
  const bool* is_chain = nullptr;
  int32_t* next_token = nullptr;
  int32_t* next_sibling = nullptr;
  int32_t* mask = nullptr;
  int64_t* drafts = nullptr;  // [n, q_len - 1], by request
};

__device__ inline uint32_t ancestor_word(const Growing& tree, int node, int word, bool real) {
  uint32_t bits = node / 32 == word ? 1u << (node % 32) : 0;
  if (!real) return bits;
  for (int at = tree.parents[node]; at >= 0; at = tree.parents[at]) {
    if (at / 32 == word) bits |= 1u << (at % 32);
  }
  return bits;
}

// kStaged: the log-probabilities that the budget can reach are copied to shared memory first.
template <int kSlots, bool kStaged>
__global__ void __launch_bounds__(kBuildThreads) build_kernel(BuildArgs a, StoreArgs store) {
  extern __shared__ float memory[];
  __shared__ int count_shared;
  Growing tree(memory, a.q_len);
  const int64_t r = blockIdx.x;
  const int64_t row = store.rows ? store.rows[r * store.rows_stride] : r;
  const int budget = min(max(a.budgets[r], 0), a.q_len - 1);
  // A child of rank k is popped after its k elder siblings, so ranks from the budget on are out of reach.
  int rank_limit = min(a.rank_limit, budget);
  if (store.is_chain && row >= 0 && store.is_chain[row]) rank_limit = min(rank_limit, 1);
  const float* logps = a.top_logps + r * a.depth_limit * a.rank_limit;
  int stride = a.rank_limit;
  if (kStaged) {
    float* staged = memory + Growing::kBytesPerSlot / sizeof(float) * a.q_len;
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    for (int d = warp; d < a.depth_limit; d += kBuildThreads / 32) {
      for (int k = lane; k < rank_limit; k += 32) staged[d * rank_limit + k] = logps[d * stride + k];
    }
    logps = staged;
    stride = rank_limit;
  }
  if (threadIdx.x == 0) tree.add(0, -1, 0, 0, 0.0f);
  __syncthreads();
  if (threadIdx.x < 32) {
    const int count = grow<kSlots>(tree, logps, stride, a.depth_limit, rank_limit, budget);
    if (threadIdx.x == 0) count_shared = count;
  }
  __syncthreads();
  const int count = count_shared;
  const int64_t* ids = a.top_tokens + r * a.depth_limit * a.rank_limit;
  if (threadIdx.x == 0 && row >= 0) a.num_nodes[row] = count;
  for (int i = threadIdx.x; i < a.q_len; i += kBuildThreads) {
    const bool real = i <= count;
    const int64_t token = real && i > 0 ? ids[(tree.depths[i] - 1) * a.rank_limit + tree.ranks[i]] : 0;
    if (store.drafts && i > 0) store.drafts[r * (a.q_len - 1) + i - 1] = token;
    if (row < 0) continue;
    const int64_t at = row * a.q_len + i;
    a.tokens[at] = token;
    a.parents[at] = real ? tree.parents[i] : -1;
    a.depths[at] = real ? tree.depths[i] : 0;
    a.node_logws[at] = real ? tree.scores[i] : -INFINITY;
    if (store.next_token) {
      store.next_token[at] = real ? tree.first_child[i] : -1;
      store.next_sibling[at] = real ? tree.next_sibling[i] : -1;
    }
  }
  if (!store.mask || row < 0) return;
  const int words = (a.q_len + 31) / 32;
  for (int item = threadIdx.x; item < a.q_len * words; item += kBuildThreads) {
    const int node = item / words;
    store.mask[row * a.q_len * words + item] =
        static_cast<int32_t>(ancestor_word(tree, node, item % words, node <= count));
  }
}

}  // namespace ddtree
