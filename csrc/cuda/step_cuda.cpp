// The CUDA side of a step's bookkeeping: checks, then one launch. vllm_ddtree/step.py defines what they do.
#include "step_cuda.h"

#include <algorithm>
#include <array>

#include "torch_launch.h"

namespace ddtree {
namespace {

constexpr ScalarType kInt = ScalarType::Int;
constexpr ScalarType kLong = ScalarType::Long;

void expect_least(const char* op, const char* name, const Tensor& tensor, int64_t least, const Tensor& like) {
  expect(op, name, tensor, kInt, {tensor.dim() == 1 ? tensor.size(0) : -1}, like);
  STD_TORCH_CHECK(tensor.size(0) >= least, "ddtree::", op, " needs `", name, "` with at least ", least,
                  " elements; found ", tensor.size(0), ". Pass the offsets of the whole batch.");
}

}  // namespace

void top_logps(const Tensor& logits, const Tensor& logps, const Tensor& tokens) {
  const char* op = "top_logps";
  STD_TORCH_CHECK(logits.dim() == 2 && logps.dim() == 2, "ddtree::top_logps needs 2-D tensors.");
  const int64_t rows = logits.size(0), vocab = logits.size(1), ranks = logps.size(1);
  const ScalarType type = logits.scalar_type();
  const bool wide = type == ScalarType::Float, brain = type == ScalarType::BFloat16;
  STD_TORCH_CHECK(wide || brain || type == ScalarType::Half,
                  "ddtree::top_logps needs float32, bfloat16 or float16 logits; found ", toString(type), ".");
  expect(op, "logits", logits, type, {rows, vocab}, logits);
  expect(op, "logps", logps, ScalarType::Float, {rows, ranks}, logits);
  expect(op, "tokens", tokens, kLong, {rows, ranks}, logits);
  STD_TORCH_CHECK(ranks <= std::min(kMaxTop, vocab) && vocab % (wide ? 4 : 8) == 0,
                  "ddtree::top_logps needs K <= min(", kMaxTop,
                  ", V) and rows of whole 16-byte words; found K = ", ranks, ", V = ", vocab,
                  ". Use torch.topk for these.");
  if (rows * ranks == 0) return;
  const Launch launch(op, logits);
  launch.check(launch_top_logps(logits.const_data_ptr(),
                                wide    ? LogitType::kFloat32
                                : brain ? LogitType::kBFloat16
                                        : LogitType::kFloat16,
                                rows, vocab, out<float>(logps), out<int64_t>(tokens), ranks,
                                launch.stream()));
}

void build_trees(const Tensor& top_logps, const Tensor& top_tokens, const Tensor& budgets, const Tensor& rows,
                 const Tensor& is_chain, const Tensor& tokens, const Tensor& parents, const Tensor& depths,
                 const Tensor& node_logws, const Tensor& num_nodes, const Tensor& next_token,
                 const Tensor& next_sibling, const Tensor& mask, const Tensor& drafts) {
  const char* op = "build_trees";
  STD_TORCH_CHECK(top_logps.dim() == 3 && tokens.dim() == 2 && rows.dim() == 1,
                  "ddtree::build_trees needs top_logps [n, L, K], tokens [states, Q] and rows [n].");
  const int64_t n = top_logps.size(0), depth = top_logps.size(1), ranks = top_logps.size(2);
  const int64_t states = tokens.size(0), q_len = tokens.size(1);
  expect(op, "top_logps", top_logps, ScalarType::Float, {n, depth, ranks}, top_logps);
  expect(op, "top_tokens", top_tokens, kLong, {n, depth, ranks}, top_logps);
  expect(op, "budgets", budgets, kInt, {n}, top_logps);
  STD_TORCH_CHECK(rows.scalar_type() == kLong && rows.size(0) == n && rows.is_cuda(),
                  "ddtree::build_trees needs `rows` as an int64 tensor of one state per request.");
  expect(op, "is_chain", is_chain, ScalarType::Bool, {states}, top_logps);
  expect(op, "tokens", tokens, kLong, {states, q_len}, top_logps);
  expect(op, "parents", parents, kInt, {states, q_len}, top_logps);
  expect(op, "depths", depths, kInt, {states, q_len}, top_logps);
  expect(op, "node_logws", node_logws, ScalarType::Float, {states, q_len}, top_logps);
  expect(op, "num_nodes", num_nodes, kInt, {states}, top_logps);
  expect(op, "next_token", next_token, kInt, {states, q_len}, top_logps);
  expect(op, "next_sibling", next_sibling, kInt, {states, q_len}, top_logps);
  expect(op, "mask", mask, kInt, {states, q_len, (q_len + 31) / 32}, top_logps);
  expect(op, "drafts", drafts, kLong, {n, q_len - 1}, top_logps);
  check_width(op, q_len);
  if (n == 0) return;
  const Launch launch(op, top_logps);
  const TreeStoreView store{out<int64_t>(tokens),       out<int32_t>(parents),   out<int32_t>(depths),
                            out<float>(node_logws),     out<int32_t>(num_nodes), out<int32_t>(next_token),
                            out<int32_t>(next_sibling), out<int32_t>(mask)};
  launch.check(launch_build_trees(in<float>(top_logps), in<int64_t>(top_tokens), in<int32_t>(budgets),
                                  in<int64_t>(rows), rows.stride(0), in<bool>(is_chain), store,
                                  out<int64_t>(drafts), n, depth, ranks, q_len, launch.stream()));
}

void begin_step(const Tensor& states, const Tensor& query_start, const Tensor& cu_logits,
                const Tensor& computed, const Tensor& depths, const Tensor& mask, const Tensor& positions,
                const Tensor& local_pos, const Tensor& step_mask, const Tensor& tree_len) {
  const char* op = "begin_step";
  STD_TORCH_CHECK(depths.dim() == 2 && tree_len.dim() == 1,
                  "ddtree::begin_step needs depths [states, Q] and tree_len [slots].");
  const int64_t n = states.size(0), q_len = depths.size(1), slots = tree_len.size(0);
  const int64_t words = (q_len + 31) / 32;
  expect(op, "states", states, kInt, {n}, states);
  expect_least(op, "query_start", query_start, n + 1, states);
  expect_least(op, "cu_logits", cu_logits, n + 1, states);
  expect_least(op, "computed", computed, 0, states);
  expect(op, "depths", depths, kInt, {depths.size(0), q_len}, states);
  expect(op, "mask", mask, kInt, {depths.size(0), q_len, words}, states);
  expect(op, "positions", positions, kLong, {positions.size(0)}, states);
  expect_least(op, "local_pos", local_pos, 0, states);
  expect(op, "step_mask", step_mask, kInt, {slots, q_len, words}, states);
  expect(op, "tree_len", tree_len, kInt, {slots}, states);
  STD_TORCH_CHECK(n <= slots, "ddtree::begin_step needs a slot per request; found ", slots, " for ", n, ".");
  check_batch(op, slots);
  const Launch launch(op, states);
  launch.check(launch_begin_step(in<int32_t>(states), in<int32_t>(query_start), in<int32_t>(cu_logits),
                                 in<int32_t>(computed), in<int32_t>(depths), in<int32_t>(mask),
                                 out<int64_t>(positions), out<int32_t>(local_pos), out<int32_t>(step_mask),
                                 out<int32_t>(tree_len), n, slots, q_len, launch.stream()));
}

void walk_rows(const Tensor& drawn, const Tensor& drafts, const Tensor& cu_logits, const Tensor& states,
               const Tensor& next_token, const Tensor& next_sibling, const Tensor& num_nodes,
               const Tensor& sampled, const Tensor& accept_index, const Tensor& num_sampled) {
  const char* op = "walk_rows";
  STD_TORCH_CHECK(next_token.dim() == 2 && accept_index.dim() == 2 && drawn.dim() == 1,
                  "ddtree::walk_rows needs drawn [rows], pointers [states, Q] and accept_index [n, D + 1].");
  const int64_t n = states.size(0), q_len = next_token.size(1), width = accept_index.size(1);
  const int64_t rows = drawn.size(0), all = next_token.size(0);
  expect(op, "drawn", drawn, kLong, {rows}, drawn);
  expect(op, "drafts", drafts, kInt, {rows}, drawn);
  expect_least(op, "cu_logits", cu_logits, n + 1, drawn);
  expect(op, "states", states, kInt, {n}, drawn);
  expect(op, "next_token", next_token, kInt, {all, q_len}, drawn);
  expect(op, "next_sibling", next_sibling, kInt, {all, q_len}, drawn);
  expect(op, "num_nodes", num_nodes, kInt, {all}, drawn);
  expect(op, "sampled", sampled, kLong, {n, width}, drawn);
  expect(op, "accept_index", accept_index, kLong, {n, width}, drawn);
  expect(op, "num_sampled", num_sampled, kInt, {n}, drawn);
  check_width(op, q_len);
  if (n == 0) return;
  const Launch launch(op, drawn);
  launch.check(launch_walk_rows(in<int64_t>(drawn), in<int32_t>(drafts), in<int32_t>(cu_logits),
                                in<int32_t>(states), in<int32_t>(next_token), in<int32_t>(next_sibling),
                                in<int32_t>(num_nodes), out<int64_t>(sampled), out<int64_t>(accept_index),
                                out<int32_t>(num_sampled), n, q_len, width - 1, launch.stream()));
}

void commit_cache(const Tensor& table, int64_t row_bytes, const Tensor& accept_index,
                  const Tensor& query_start, int64_t q_len, const Tensor& slot_mapping) {
  const char* op = "commit_cache";
  STD_TORCH_CHECK(table.dim() == 2 && accept_index.dim() == 2 && slot_mapping.dim() == 1 && q_len >= 1,
                  "ddtree::commit_cache needs table [views, 8], accept_index [n, D + 1] and slots [rows].");
  const int64_t n = accept_index.size(0), moves = accept_index.size(1) - 1;
  expect(op, "table", table, kLong, {table.size(0), 8}, accept_index);
  expect(op, "accept_index", accept_index, kLong, {n, moves + 1}, accept_index);
  expect_least(op, "query_start", query_start, n, accept_index);
  expect(op, "slot_mapping", slot_mapping, kLong, {slot_mapping.size(0)}, accept_index);
  check_batch(op, std::max(n, table.size(0)));
  check_depth(op, moves);
  if (n * moves == 0) return;
  const Launch launch(op, accept_index);
  launch.check(launch_commit_cache(
      in<int64_t>(table), table.size(0), row_bytes / 16, in<int64_t>(accept_index), in<int32_t>(query_start),
      q_len, in<int64_t>(slot_mapping), slot_mapping.size(0), n, moves, launch.stream()));
}

void commit_rows(std::vector<Tensor> hidden, const Tensor& positions, const Tensor& accept_index,
                 const Tensor& query_start, const Tensor& states, const Tensor& computed, int64_t q_len) {
  const char* op = "commit_rows";
  STD_TORCH_CHECK(accept_index.dim() == 2 && positions.dim() == 1 && q_len >= 1,
                  "ddtree::commit_rows needs accept_index [n, D + 1] and positions [rows].");
  const int64_t n = accept_index.size(0), tensors = static_cast<int64_t>(hidden.size());
  expect(op, "positions", positions, kLong, {positions.size(0)}, accept_index);
  expect(op, "accept_index", accept_index, kLong, {n, accept_index.size(1)}, accept_index);
  expect_least(op, "query_start", query_start, n + 1, accept_index);
  expect(op, "states", states, kInt, {n}, accept_index);
  expect_least(op, "computed", computed, 0, accept_index);
  check_batch(op, n);
  STD_TORCH_CHECK(tensors <= kMaxHiddenTensors, "ddtree::commit_rows takes at most ", kMaxHiddenTensors,
                  " tensors; found ", tensors, ". Call it once per group of them.");
  std::array<void*, kMaxHiddenTensors> pointers{};
  std::array<int64_t, kMaxHiddenTensors> strides{};
  int64_t row_bytes = 0;
  for (int64_t i = 0; i < tensors; ++i) {
    const Tensor& rows = hidden[i];
    const int64_t size = static_cast<int64_t>(rows.element_size());
    const bool good = rows.is_cuda() && rows.dim() == 2 && rows.stride(1) == 1 &&
                      (i == 0 || rows.size(1) * size == row_bytes);
    row_bytes = good ? rows.size(1) * size : 0;
    strides[i] = good ? rows.stride(0) * size : 1;
    pointers[i] = rows.mutable_data_ptr();
    STD_TORCH_CHECK(good && (row_bytes | strides[i] | reinterpret_cast<int64_t>(pointers[i])) % 16 == 0,
                    "ddtree::commit_rows needs 2-D rows of one width in whole aligned 16-byte words; tensor ",
                    i, " is not. Rows are copied as such words: move these with index_copy_.");
  }
  if (n == 0) return;
  const Launch launch(op, accept_index);
  launch.check(launch_commit_rows(pointers.data(), strides.data(), tensors, row_bytes,
                                  out<int64_t>(positions), in<int64_t>(accept_index),
                                  in<int32_t>(query_start), in<int32_t>(states), in<int32_t>(computed), n,
                                  q_len, accept_index.size(1) - 1, launch.stream()));
}

}  // namespace ddtree
