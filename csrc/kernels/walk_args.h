// What the walks read and write, as the bindings fill it in and the kernels get it. Knows neither torch nor
// CUDA types.
#pragma once

#include <cstdint>

namespace ddtree {

struct WalkArgs {
  const int64_t* candidates;
  const int32_t* next_token;
  const int32_t* next_sibling;
  const int32_t* num_nodes;
  int64_t* predict;
  int64_t* accept_index;
  int32_t* accept_token_num;
  int q_len, max_depth;
};

struct CoinArgs {
  const float* target_probs;
  const float* coins;
  const float* final_coins;
  int64_t vocab;
};

struct ResidualArgs {
  CoinArgs coins;
  const float* draft_probs;
  int64_t depths;  // rows of draft_probs per request
};

}  // namespace ddtree
