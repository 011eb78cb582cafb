// Floats as unsigned integers of the same order, which the builder's pops and the top-k's sort compare. Knows
// no torch.
//
// Each has its own rule for what has no key or shares one:
//
//        score_key (build.cuh)                          logit_key (topk.cuh)
//   NaN  no key: absent, ends its row of siblings       no key: never taken
//  -inf  no key: as NaN                                 a value: the last to be taken, with its id
//    -0  needs no rule: a score is a sum that starts    the key of 0: equal values go in the order of ids
//        at 0, and no such sum is -0
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace ddtree {

constexpr uint32_t kNoKey = 0;  // below the key of every number, -inf included

// The key of a number, which is not NaN; -0 comes right before 0.
__device__ inline uint32_t key_of(float number) {
  const uint32_t bits = __float_as_uint(number);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The number that has this key.
__device__ inline float number_of(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

__device__ inline uint32_t score_key(float score) {
  if (!(score > -INFINITY)) return kNoKey;
  return key_of(score);
}

__device__ inline uint32_t logit_key(float logit) {
  if (logit != logit) return kNoKey;
  return key_of(logit == 0.0f ? 0.0f : logit);
}

}  // namespace ddtree
