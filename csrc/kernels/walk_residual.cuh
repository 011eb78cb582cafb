// The walk over children drawn without replacement, one block per request. Knows no torch.
// Every rejection needs two sums over the vocabulary, which all threads of the block take together; each
// thread then takes the same decision from the same sums.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "walk_coins.cuh"

namespace ddtree {

// What is left of p after the rejections of a node: max(p - scale * q, 0), nothing at rejected tokens.
struct ResidualMass {
  const float* probs;
  const float* drawn_from;
  double scale;
  Excluded tried;

  __device__ double open(int64_t v) const {
    const float q = drawn_from[v];
    return q > 0.0f && !tried.has(v) ? q : 0.0;
  }

  __device__ double operator()(int64_t v) const {
    const float p = probs[v];
    if (!(p > 0.0f) || tried.has(v)) return 0.0;
    return scale > 0.0 ? untried(p, drawn_from[v]) : p;
  }

  // Rounded twice, as the reference does; a fused multiply-add would round once.
  __device__ double untried(float p, float q) const {
    return fmax(__dsub_rn(p, __dmul_rn(scale, q > 0.0f ? q : 0.0)), 0.0);
  }
};

// Values that a thread loads before it uses the first: a lone block waits for memory, not for arithmetic.
constexpr int kAhead = 8;

// The block's sums of left and open mass; parts holds two values per warp.
__device__ inline void residual_sums(const ResidualMass& left, int64_t vocab, double* parts, double* mass,
                                     double* open_mass) {
  double m = 0.0, o = 0.0;
  for (int64_t first = threadIdx.x; first < vocab; first += kAhead * kCoinThreads) {
    float p[kAhead], q[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int64_t v = first + k * kCoinThreads;
      p[k] = v < vocab ? left.probs[v] : 0.0f;
      q[k] = v < vocab ? left.drawn_from[v] : 0.0f;
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const bool has_p = p[k] > 0.0f, has_q = q[k] > 0.0f;
      if (!(has_p || has_q) || left.tried.has(first + k * kCoinThreads)) continue;
      if (has_p) m += left.scale > 0.0 ? left.untried(p[k], q[k]) : p[k];
      if (has_q) o += q[k];
    }
  }
  m = warp_sum(m);
  o = warp_sum(o);
  if ((threadIdx.x & 31) == 0) {
    parts[threadIdx.x / 32] = m;
    parts[kCoinWarps + threadIdx.x / 32] = o;
  }
  __syncthreads();
  *mass = *open_mass = 0.0;
  for (int w = 0; w < kCoinWarps; ++w) {
    *mass += parts[w];
    *open_mass += parts[kCoinWarps + w];
  }
  __syncthreads();  // parts are read before the next sums write them
}

__global__ void __launch_bounds__(kCoinThreads) walk_residual_kernel(WalkArgs a, ResidualArgs args) {
  extern __shared__ int64_t memory[];
  __shared__ double parts[2 * kCoinWarps];
  __shared__ float part_best[kCoinWarps];
  __shared__ int64_t part_id[kCoinWarps];
  __shared__ uint32_t filter[kFilterWords];
  SharedTree tree(memory, a.q_len);
  const CoinArgs& c = args.coins;
  const int64_t r = blockIdx.x;
  tree.load(a, r);
  __syncthreads();

  for (int node = 0, depth = 0;; ++depth) {
    ResidualMass left{c.target_probs + (r * a.q_len + node) * c.vocab,
                      args.draft_probs + (r * args.depths + depth) * c.vocab, 0.0,
                      Excluded{memory + 2 * a.q_len, filter, 0}};
    left.tried.clear();
    if (threadIdx.x == 0) a.accept_index[r * (a.max_depth + 1) + depth] = r * a.q_len + node;
    __syncthreads();

    int accepted = -1;
    int child = depth < a.max_depth ? tree.next_token[node] : -1;
    for (; child >= 0; child = tree.next_sibling[child]) {
      const int64_t token = tree.tokens[child];
      if (token < 0 || token >= c.vocab) continue;
      const double p = left(token), q = left.open(token);  // before the sums, whose barrier guards the list
      if (!(q > 0.0)) continue;
      double mass, open_mass;
      residual_sums(left, c.vocab, parts, &mass, &open_mass);
      if (!(mass > 0.0)) break;
      if (static_cast<double>(c.coins[r * a.q_len + child]) * q * mass < p * open_mass) {
        accepted = child;
        break;
      }
      left.scale += mass / open_mass;
      if (threadIdx.x == 0) {
        left.tried.tokens[left.tried.count] = token;
        left.tried.mark(token);
      }
      ++left.tried.count;
      __syncthreads();
    }
    if (accepted >= 0) {
      if (threadIdx.x == 0) a.predict[r * a.q_len + node] = tree.tokens[accepted];
      node = accepted;
      __syncthreads();  // all are past the list before the next node clears it
      continue;
    }
    int64_t token = inverse_cdf(left, c.vocab, c.final_coins[r], parts);
    if (token < 0) token = most_probable(left.probs, c.vocab, part_best, part_id);
    if (threadIdx.x == 0) {
      a.predict[r * a.q_len + node] = token;
      a.accept_token_num[r] = depth;
    }
    return;
  }
}

}  // namespace ddtree
