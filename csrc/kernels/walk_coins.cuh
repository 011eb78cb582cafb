// The walk with explicit coins, one block per request. Knows no torch.
// Masses are float64: decisions then match the reference but for coins within about 1e-15 of a boundary.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "walk.cuh"

namespace ddtree {

constexpr int kCoinThreads = 1024;
constexpr int kCoinWarps = kCoinThreads / 32;
constexpr int kFilterWords = 128;
constexpr double kSkipped = -1.0;  // the mass of a repeated token

__device__ inline double warp_sum(double value) {
  for (int step = 16; step; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
  return value;
}

// The rejected tokens of the current node. A hash filter answers nearly every id of the vocabulary at once,
// so that the exact scan of the list is paid for a handful of ids only.
struct Excluded {
  int64_t* tokens;
  uint32_t* filter;
  int count;

  __device__ void clear() {
    count = 0;
    for (int w = threadIdx.x; w < kFilterWords; w += blockDim.x) filter[w] = 0;
  }

  // Marks a token that stands, or is about to stand, in the list.
  __device__ void mark(int64_t token) {
    const int bit = bit_of(token);
    atomicOr(&filter[bit / 32], 1u << (bit % 32));
  }

  __device__ bool has(int64_t v) const {
    const int bit = bit_of(v);
    if (!(filter[bit / 32] >> (bit % 32) & 1u)) return false;
    for (int k = 0; k < count; ++k) {
      if (tokens[k] == v) return true;
    }
    return false;
  }

  __device__ static int bit_of(int64_t token) { return static_cast<int>(token & (kFilterWords * 32 - 1)); }
};

// What the last draw of the coin walk is made from.
struct CoinMass {
  const float* probs;
  Excluded excluded;

  __device__ double operator()(int64_t v) const {
    const float p = probs[v];
    return p > 0.0f && !excluded.has(v) ? p : 0.0;
  }
};

// Narrows [low, high) to the id where the running mass passes coin * total, a 32nd of the range at a time:
// each warp sums one part, all agree on the part, repeat. Returns -1 when no mass is left. A part without
// mass is never taken, so the result has positive probability whatever the rounding.
template <class Mass>
__device__ int64_t inverse_cdf(const Mass& mass, int64_t vocab, float coin, double* part_mass) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  int64_t low = 0, high = vocab;
  double goal = -1.0;  // not known before the total is
  while (goal < 0.0 || high - low > 1) {
    const int64_t width = (high - low + kCoinWarps - 1) / kCoinWarps;
    const int64_t first = low + warp * width, last = min(first + width, high);
    double sum = 0.0;
    for (int64_t v = first + lane; v < last; v += 32) sum += mass(v);
    sum = warp_sum(sum);
    if (lane == 0) part_mass[warp] = sum;
    __syncthreads();
    if (goal < 0.0) {
      double total = 0.0;
      for (int w = 0; w < kCoinWarps; ++w) total += part_mass[w];
      if (!(total > 0.0)) return -1;
      goal = static_cast<double>(coin) * total;
      if (!(goal >= 0.0)) goal = 0.0;
    }
    double running = 0.0, before = 0.0;
    int part = -1;
    for (int w = 0; w < kCoinWarps; ++w) {
      if (part_mass[w] > 0.0) {
        part = w;
        before = running;
        running += part_mass[w];
        if (running > goal) break;
      }
    }
    __syncthreads();  // part_mass is read before the next round writes it
    low += part * width;
    high = min(low + width, high);
    goal = max(goal - before, 0.0);
  }
  return low;
}

// The id of the greatest probability, the smallest such id; all threads return it.
__device__ inline int64_t most_probable(const float* probs, int64_t vocab, float* values, int64_t* ids) {
  const int lane = threadIdx.x & 31;
  float best = 0.0f;
  int64_t id = 0;
  for (int64_t v = threadIdx.x; v < vocab; v += kCoinThreads) {
    if (probs[v] > best) {
      best = probs[v];
      id = v;
    }
  }
  for (int step = 16; step; step /= 2) {
    const float other = __shfl_xor_sync(0xffffffffu, best, step);
    const int64_t other_id = __shfl_xor_sync(0xffffffffu, id, step);
    if (other > best || (other == best && other_id < id)) {
      best = other;
      id = other_id;
    }
  }
  if (lane == 0) {
    values[threadIdx.x / 32] = best;
    ids[threadIdx.x / 32] = id;
  }
  __syncthreads();
  best = 0.0f;
  id = 0;
  for (int w = 0; w < kCoinWarps; ++w) {
    if (values[w] > best || (values[w] == best && best > 0.0f && ids[w] < id)) {
      best = values[w];
      id = ids[w];
    }
  }
  return id;
}

__global__ void __launch_bounds__(kCoinThreads) walk_coins_kernel(WalkArgs a, CoinArgs c) {
  extern __shared__ int64_t memory[];
  __shared__ double part_mass[kCoinWarps];
  __shared__ float part_best[kCoinWarps];
  __shared__ int64_t part_id[kCoinWarps];
  __shared__ uint32_t filter[kFilterWords];
  __shared__ int children_shared, accepted_shared;
  SharedTree tree(memory, a.q_len);
  Excluded tried{memory + 2 * a.q_len, filter, 0};
  double* masses = reinterpret_cast<double*>(tried.tokens + a.q_len);
  int32_t* child_of = reinterpret_cast<int32_t*>(masses + a.q_len);
  const int64_t r = blockIdx.x;
  tree.load(a, r);
  __syncthreads();

  int depth = 0;
  for (int node = 0;; ++depth) {
    const float* probs = c.target_probs + (r * a.q_len + node) * c.vocab;
    if (threadIdx.x == 0) {
      int count = 0;
      if (depth < a.max_depth) {
        for (int child = tree.next_token[node]; child >= 0; child = tree.next_sibling[child]) {
          tried.tokens[count] = tree.tokens[child];
          child_of[count++] = child;
        }
      }
      children_shared = count;
      accepted_shared = -1;
      a.accept_index[r * (a.max_depth + 1) + depth] = r * a.q_len + node;
    }
    tried.clear();
    __syncthreads();

    const int count = tried.count = children_shared;
    for (int k = threadIdx.x; k < count; k += kCoinThreads) {
      const int64_t token = tried.tokens[k];
      const float p = token >= 0 && token < c.vocab ? probs[token] : 0.0f;
      double mass = p > 0.0f ? p : 0.0;
      for (int j = 0; j < k && mass != kSkipped; ++j) {
        if (tried.tokens[j] == token) mass = kSkipped;
      }
      masses[k] = mass;
      tried.mark(token);
    }
    __syncthreads();

    if (threadIdx.x == 0) {
      double rejected = 0.0;
      for (int k = 0; k < count; ++k) {
        const double p = masses[k];
        if (!(p > 0.0)) continue;
        if (static_cast<double>(c.coins[r * a.q_len + child_of[k]]) * (1.0 - rejected) < p) {
          accepted_shared = child_of[k];
          break;
        }
        rejected += p;
      }
    }
    __syncthreads();
    const int accepted = accepted_shared;
    if (accepted >= 0) {
      if (threadIdx.x == 0) a.predict[r * a.q_len + node] = tree.tokens[accepted];
      node = accepted;
      __syncthreads();  // accepted_shared is read before the next node resets it
      continue;
    }
    int64_t token = inverse_cdf(CoinMass{probs, tried}, c.vocab, c.final_coins[r], part_mass);
    if (token < 0) token = most_probable(probs, c.vocab, part_best, part_id);
    if (threadIdx.x == 0) {
      a.predict[r * a.q_len + node] = token;
      a.accept_token_num[r] = depth;
    }
    return;
  }
}

}  // namespace ddtree
