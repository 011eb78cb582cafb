// What every op demands of its tensors, once for the CPU and the CUDA side. The kernels read raw memory, so
// nothing reaches them unchecked; contents are checked elsewhere (CPU) or made harmless (CUDA).
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <initializer_list>
#include <vector>

namespace ddtree {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

struct BuildShape {
  int64_t n, depths, ranks, q_len;
};

struct TreeShape {
  int64_t n, q_len;
};

struct WalkShape {
  int64_t n, q_len, max_depth, vocab;
};

struct MoveShape {
  int64_t n, moves;
};

// A contiguous tensor of that type and shape on the device of `like`, or a clear error.
void expect(const char* op, const char* name, const Tensor& tensor, ScalarType dtype,
            std::initializer_list<int64_t> shape, const Tensor& like);

BuildShape check_build(const Tensor& top_logps, const Tensor& top_tokens, const Tensor& budgets,
                       const Tensor& tokens, const Tensor& parents, const Tensor& depths,
                       const Tensor& node_logws, const Tensor& num_nodes);

TreeShape check_retrieve(const Tensor& parents, const Tensor& num_nodes, const Tensor& index,
                         const Tensor& next_token, const Tensor& next_sibling);

TreeShape check_mask(const Tensor& parents, const Tensor& num_nodes, const Tensor& mask);

WalkShape check_walk(const char* op, const Tensor& candidates, const Tensor& next_token,
                     const Tensor& next_sibling, const Tensor& num_nodes, const Tensor& predict,
                     const Tensor& accept_index, const Tensor& accept_token_num);

void check_targets(const WalkShape& shape, const Tensor& candidates, const Tensor& target_tokens);

void check_coins(const char* op, WalkShape& shape, const Tensor& candidates, const Tensor& target_probs,
                 const Tensor& coins, const Tensor& final_coins);

// Returns L, the rows of draft_probs per request.
int64_t check_draft_probs(const WalkShape& shape, const Tensor& candidates, const Tensor& draft_probs);

MoveShape check_plan(const Tensor& accept_index, const Tensor& query_start, int64_t q_len,
                     const Tensor& slot_mapping, const Tensor& src, const Tensor& dst);

MoveShape check_moves(const std::vector<Tensor>& views, const Tensor& table, const Tensor& src,
                      const Tensor& dst);

}  // namespace ddtree
