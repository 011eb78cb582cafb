// The ops of step_cuda.cpp, which ops_cuda.cpp registers.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <vector>

namespace ddtree {

using torch::stable::Tensor;

void top_logps(const Tensor& logits, const Tensor& logps, const Tensor& tokens);

void build_trees(const Tensor& top_logps, const Tensor& top_tokens, const Tensor& budgets, const Tensor& rows,
                 const Tensor& is_chain, const Tensor& tokens, const Tensor& parents, const Tensor& depths,
                 const Tensor& node_logws, const Tensor& num_nodes, const Tensor& next_token,
                 const Tensor& next_sibling, const Tensor& mask, const Tensor& drafts);

void begin_step(const Tensor& states, const Tensor& query_start, const Tensor& cu_logits,
                const Tensor& computed, const Tensor& depths, const Tensor& mask, const Tensor& positions,
                const Tensor& local_pos, const Tensor& step_mask, const Tensor& tree_len);

void walk_rows(const Tensor& drawn, const Tensor& drafts, const Tensor& cu_logits, const Tensor& states,
               const Tensor& next_token, const Tensor& next_sibling, const Tensor& num_nodes,
               const Tensor& sampled, const Tensor& accept_index, const Tensor& num_sampled);

void commit_cache(const Tensor& table, int64_t row_bytes, const Tensor& accept_index,
                  const Tensor& query_start, int64_t q_len, const Tensor& slot_mapping);

void commit_rows(std::vector<Tensor> hidden, const Tensor& positions, const Tensor& accept_index,
                 const Tensor& query_start, const Tensor& states, const Tensor& computed, int64_t q_len);

}  // namespace ddtree
