// The K most probable tokens of each row of logits with their log-probabilities, one block per row. Knows no
// torch.
//
// A row is read three times and nothing of its size is written. The K-th largest of the threads' own maxima
// is a lower bound of the K-th largest value, so few values pass it; these are sorted in shared memory. Where
// too many pass (equal values), the bound is raised by bisection, and what is left to take of one value is
// taken in the order of ids. Order: value descending, then id ascending.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "keys.cuh"

namespace ddtree {

constexpr int kTopThreads = 1024;
constexpr int kTopWarps = kTopThreads / 32;
constexpr int kTopCapacity = 2048;  // values that may pass the bound
constexpr int kTopMax = 1024;       // K, so that the threads' maxima are a bound

// How a logit lies in memory.
struct Float32Logits {
  using Word = uint32_t;
  static constexpr int kPerWord = 1;
  __device__ static float get(Word word, int) { return __uint_as_float(word); }
};
struct BFloat16Logits {
  using Word = uint32_t;
  static constexpr int kPerWord = 2;
  __device__ static float get(Word word, int half) {
    return __uint_as_float(half ? word & 0xffff0000u : word << 16);
  }
};
struct Float16Logits {
  using Word = uint32_t;
  static constexpr int kPerWord = 2;
  __device__ static float get(Word word, int half) {
    // Exponent moved from a bias of 15 to 127 by a multiplication, which also normalises subnormals.
    const uint32_t bits = half ? word >> 16 : word & 0xffffu;
    const uint32_t sign = (bits & 0x8000u) << 16, rest = (bits & 0x7fffu) << 13;
    if (rest >= 0x0f800000u) return __uint_as_float(sign | rest | 0x7f800000u);
    return __uint_as_float(sign | __float_as_uint(__uint_as_float(rest) * 0x1p112f));
  }
};

// Calls visit(id, value) for every value of the thread's share of a row.
template <typename Logits, typename Visit>
__device__ inline void each_value(const uint32_t* row, int vocab, Visit visit) {
  constexpr int kPerVector = 4 * Logits::kPerWord;
  const uint4* vectors = reinterpret_cast<const uint4*>(row);
#pragma unroll 2
  for (int v = threadIdx.x; v < vocab / kPerVector; v += kTopThreads) {
    const uint4 words = vectors[v];
#pragma unroll
    for (int i = 0; i < kPerVector; ++i) {
      const int w = i / Logits::kPerWord;
      const uint32_t word = w == 0 ? words.x : w == 1 ? words.y : w == 2 ? words.z : words.w;
      visit(v * kPerVector + i, Logits::get(word, i % Logits::kPerWord));
    }
  }
  const int left = vocab / kPerVector * kPerVector + threadIdx.x;
  if (left < vocab) visit(left, Logits::get(row[left / Logits::kPerWord], left % Logits::kPerWord));
}

__device__ inline int block_sum(int value, int* parts) {
  for (int step = 16; step; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
  __syncthreads();  // parts is free
  if ((threadIdx.x & 31) == 0) parts[threadIdx.x / 32] = value;
  __syncthreads();
  int total = 0;
  for (int w = 0; w < kTopWarps; ++w) total += parts[w];
  return total;
}

__device__ inline void sort_descending(uint64_t* items, int size) {
  for (int span = 2; span <= size; span *= 2) {
    for (int step = span / 2; step; step /= 2) {
      for (int pair = threadIdx.x; pair < size / 2; pair += kTopThreads) {
        const int low = pair / step * step * 2 + pair % step, high = low + step;
        const uint64_t a = items[low], b = items[high];
        if ((a < b) == ((low & span) == 0)) {
          items[low] = b;
          items[high] = a;
        }
      }
      __syncthreads();
    }
  }
}

struct TopArgs {
  const void* logits;
  int64_t row_bytes;
  float* logps;
  int64_t* tokens;
  int vocab, ranks;
};

template <typename Logits>
__global__ void __launch_bounds__(kTopThreads, 2) top_logps_kernel(TopArgs a) {
  __shared__ uint64_t items[kTopCapacity];
  __shared__ float sums[kTopWarps];
  __shared__ int parts[kTopWarps];
  __shared__ int taken;
  const int64_t r = blockIdx.x;
  const uint32_t* row =
      reinterpret_cast<const uint32_t*>(static_cast<const char*>(a.logits) + r * a.row_bytes);
  float mine = -INFINITY;
  bool poisoned = false;
  each_value<Logits>(row, a.vocab, [&](int, float value) {
    mine = fmaxf(mine, value);
    poisoned |= value != value;
  });
  items[threadIdx.x] = logit_key(mine);
  if (threadIdx.x == 0) taken = 0;
  __syncthreads();
  sort_descending(items, kTopThreads);
  const float top = number_of(static_cast<uint32_t>(items[0]));
  uint32_t bound = static_cast<uint32_t>(items[a.ranks - 1]);  // -inf where fewer threads have values

  float sum = 0.0f;
  int passing = 0;
  each_value<Logits>(row, a.vocab, [&](int, float value) {
    sum += __expf(value - top);
    passing += value >= number_of(bound);
  });
  if (poisoned) sum = NAN;
  for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if ((threadIdx.x & 31) == 0) sums[threadIdx.x / 32] = sum;
  int count = block_sum(passing, parts);
  float total = 0.0f;
  for (int w = 0; w < kTopWarps; ++w) total += sums[w];
  const float norm = top + logf(total);

  auto count_from = [&](uint32_t key) {
    int here = 0;
    each_value<Logits>(row, a.vocab, [&](int, float value) { here += value >= number_of(key); });
    return block_sum(here, parts);
  };
  uint32_t tied = 0;  // the value of which only some are taken
  if (count > kTopCapacity) {
    uint32_t low = bound, high = 0xffffffffu;  // too many pass low, too few pass high
    while (high - low > 1) {
      const uint32_t middle = low + (high - low) / 2;
      const int passed = count_from(middle);
      if (passed > kTopCapacity) {
        low = middle;
      } else {
        high = middle;
        if (passed >= a.ranks) break;
      }
    }
    bound = high;
    count = count_from(bound);
    if (count < a.ranks) tied = low;
  }
  each_value<Logits>(row, a.vocab, [&](int id, float value) {
    if (value >= number_of(bound)) {
      const int at = atomicAdd(&taken, 1);
      items[at] = static_cast<uint64_t>(logit_key(value)) << 32 | (0xffffffffu - static_cast<uint32_t>(id));
    }
  });
  __syncthreads();
  if (tied) {
    const int word_of = Logits::kPerWord;
    for (int first = 0; first < a.vocab && count < a.ranks; first += kTopThreads) {
      const int id = first + threadIdx.x;
      const bool equal = id < a.vocab && logit_key(Logits::get(row[id / word_of], id % word_of)) == tied;
      const unsigned lanes = __ballot_sync(0xffffffffu, equal);
      __syncthreads();  // parts is free
      if ((threadIdx.x & 31) == 0) parts[threadIdx.x / 32] = __popc(lanes);
      __syncthreads();
      int before = __popc(lanes & ((1u << (threadIdx.x & 31)) - 1)), all = 0;
      for (int w = 0; w < kTopWarps; ++w) {
        if (w < static_cast<int>(threadIdx.x) / 32) before += parts[w];
        all += parts[w];
      }
      if (equal && count + before < a.ranks) {
        items[count + before] = static_cast<uint64_t>(tied) << 32 | (0xffffffffu - static_cast<uint32_t>(id));
      }
      count = min(count + all, a.ranks);
    }
  }
  int size = 32;
  while (size < count) size *= 2;
  __syncthreads();
  for (int i = count + threadIdx.x; i < size; i += kTopThreads) items[i] = 0;
  __syncthreads();
  sort_descending(items, size);
  for (int k = threadIdx.x; k < a.ranks; k += kTopThreads) {
    const uint64_t item = k < count ? items[k] : 0;
    const int64_t at = r * a.ranks + k;
    a.tokens[at] = item ? static_cast<int64_t>(0xffffffffu - static_cast<uint32_t>(item)) : 0;
    a.logps[at] = item ? number_of(static_cast<uint32_t>(item >> 32)) - norm : -INFINITY;
  }
}

}  // namespace ddtree
