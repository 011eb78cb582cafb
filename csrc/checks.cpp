#include "checks.h"

#include <sstream>
#include <string>

namespace ddtree {
namespace {

std::string shape_text(const int64_t* sizes, size_t count) {
  std::ostringstream out;
  out << "[";
  for (size_t i = 0; i < count; ++i) out << (i ? ", " : "") << sizes[i];
  out << "]";
  return out.str();
}

bool same_device(const Tensor& a, const Tensor& b) {
  return a.is_cuda() == b.is_cuda() && a.get_device_index() == b.get_device_index();
}

void expect_rank(const char* op, const char* name, const Tensor& tensor, int64_t rank) {
  STD_TORCH_CHECK(tensor.dim() == rank, "ddtree::", op, " needs `", name, "` with ", rank,
                  " dimensions; found ", tensor.dim(),
                  ". See the docstring in vllm_ddtree/ops.py for its shape.");
}

void expect_root(const char* op, const char* name, int64_t q_len) {
  STD_TORCH_CHECK(
      q_len >= 1, "ddtree::", op, " needs `", name,
      "` at least 1 wide, since slot 0 is the root; found width 0. Allocate max_nodes + 1 slots.");
}

}  // namespace

void expect(const char* op, const char* name, const Tensor& tensor, ScalarType dtype,
            std::initializer_list<int64_t> shape, const Tensor& like) {
  bool good = tensor.scalar_type() == dtype && tensor.dim() == static_cast<int64_t>(shape.size()) &&
              same_device(tensor, like);
  for (size_t i = 0; good && i < shape.size(); ++i) good = tensor.size(i) == shape.begin()[i];
  if (good && tensor.is_contiguous()) return;
  auto sizes = tensor.sizes();
  STD_TORCH_CHECK(
      false, "ddtree::", op, " needs `", name, "` as a contiguous ", toString(dtype), " tensor of shape ",
      shape_text(shape.begin(), shape.size()), " on the device of its first argument; found ",
      toString(tensor.scalar_type()), " of shape ", shape_text(sizes.data(), sizes.size()),
      tensor.is_contiguous() ? ", contiguous" : ", not contiguous",
      same_device(tensor, like) ? "" : ", on another device",
      ". The kernels read raw memory and convert nothing: allocate it with that dtype and shape.");
}

BuildShape check_build(const Tensor& top_logps, const Tensor& top_tokens, const Tensor& budgets,
                       const Tensor& tokens, const Tensor& parents, const Tensor& depths,
                       const Tensor& node_logws, const Tensor& num_nodes) {
  const char* op = "build";
  expect_rank(op, "top_logps", top_logps, 3);
  expect_rank(op, "tokens", tokens, 2);
  BuildShape s{top_logps.size(0), top_logps.size(1), top_logps.size(2), tokens.size(1)};
  expect_root(op, "tokens", s.q_len);
  expect(op, "top_logps", top_logps, ScalarType::Float, {s.n, s.depths, s.ranks}, top_logps);
  expect(op, "top_tokens", top_tokens, ScalarType::Long, {s.n, s.depths, s.ranks}, top_logps);
  expect(op, "budgets", budgets, ScalarType::Int, {s.n}, top_logps);
  expect(op, "tokens", tokens, ScalarType::Long, {s.n, s.q_len}, top_logps);
  expect(op, "parents", parents, ScalarType::Int, {s.n, s.q_len}, top_logps);
  expect(op, "depths", depths, ScalarType::Int, {s.n, s.q_len}, top_logps);
  expect(op, "node_logws", node_logws, ScalarType::Float, {s.n, s.q_len}, top_logps);
  expect(op, "num_nodes", num_nodes, ScalarType::Int, {s.n}, top_logps);
  return s;
}

TreeShape check_retrieve(const Tensor& parents, const Tensor& num_nodes, const Tensor& index,
                         const Tensor& next_token, const Tensor& next_sibling) {
  const char* op = "retrieve";
  expect_rank(op, "parents", parents, 2);
  TreeShape s{parents.size(0), parents.size(1)};
  expect_root(op, "parents", s.q_len);
  expect(op, "parents", parents, ScalarType::Int, {s.n, s.q_len}, parents);
  expect(op, "num_nodes", num_nodes, ScalarType::Int, {s.n}, parents);
  expect(op, "retrieve_index", index, ScalarType::Long, {s.n, s.q_len}, parents);
  expect(op, "retrieve_next_token", next_token, ScalarType::Int, {s.n, s.q_len}, parents);
  expect(op, "retrieve_next_sibling", next_sibling, ScalarType::Int, {s.n, s.q_len}, parents);
  return s;
}

TreeShape check_mask(const Tensor& parents, const Tensor& num_nodes, const Tensor& mask) {
  const char* op = "ancestor_mask";
  expect_rank(op, "parents", parents, 2);
  TreeShape s{parents.size(0), parents.size(1)};
  expect_root(op, "parents", s.q_len);
  expect(op, "parents", parents, ScalarType::Int, {s.n, s.q_len}, parents);
  expect(op, "num_nodes", num_nodes, ScalarType::Int, {s.n}, parents);
  expect(op, "mask", mask, ScalarType::Int, {s.n, s.q_len, (s.q_len + 31) / 32}, parents);
  return s;
}

WalkShape check_walk(const char* op, const Tensor& candidates, const Tensor& next_token,
                     const Tensor& next_sibling, const Tensor& num_nodes, const Tensor& predict,
                     const Tensor& accept_index, const Tensor& accept_token_num) {
  expect_rank(op, "candidates", candidates, 2);
  expect_rank(op, "accept_index", accept_index, 2);
  WalkShape s{candidates.size(0), candidates.size(1), accept_index.size(1) - 1, 0};
  expect_root(op, "candidates", s.q_len);
  expect_root(op, "accept_index", s.max_depth + 1);
  expect(op, "candidates", candidates, ScalarType::Long, {s.n, s.q_len}, candidates);
  expect(op, "retrieve_next_token", next_token, ScalarType::Int, {s.n, s.q_len}, candidates);
  expect(op, "retrieve_next_sibling", next_sibling, ScalarType::Int, {s.n, s.q_len}, candidates);
  expect(op, "num_nodes", num_nodes, ScalarType::Int, {s.n}, candidates);
  expect(op, "predict", predict, ScalarType::Long, {s.n * s.q_len}, candidates);
  expect(op, "accept_index", accept_index, ScalarType::Long, {s.n, s.max_depth + 1}, candidates);
  expect(op, "accept_token_num", accept_token_num, ScalarType::Int, {s.n}, candidates);
  return s;
}

void check_targets(const WalkShape& s, const Tensor& candidates, const Tensor& target_tokens) {
  expect("walk", "target_tokens", target_tokens, ScalarType::Long, {s.n, s.q_len}, candidates);
}

void check_coins(const char* op, WalkShape& s, const Tensor& candidates, const Tensor& target_probs,
                 const Tensor& coins, const Tensor& final_coins) {
  expect_rank(op, "target_probs", target_probs, 3);
  s.vocab = target_probs.size(2);
  STD_TORCH_CHECK(s.vocab >= 1, "ddtree::", op, " needs a vocabulary; found target_probs with V = 0.");
  expect(op, "target_probs", target_probs, ScalarType::Float, {s.n, s.q_len, s.vocab}, candidates);
  expect(op, "coins", coins, ScalarType::Float, {s.n, s.q_len}, candidates);
  expect(op, "final_coins", final_coins, ScalarType::Float, {s.n}, candidates);
}

int64_t check_draft_probs(const WalkShape& s, const Tensor& candidates, const Tensor& draft_probs) {
  const char* op = "walk_residual";
  expect_rank(op, "draft_probs", draft_probs, 3);
  const int64_t rows = draft_probs.size(1);
  STD_TORCH_CHECK(rows >= s.max_depth,
                  "ddtree::walk_residual needs draft_probs with a row per depth, at least ", s.max_depth,
                  " by accept_index; found ", rows, ". Pass what the children were drawn from.");
  expect(op, "draft_probs", draft_probs, ScalarType::Float, {s.n, rows, s.vocab}, candidates);
  return rows;
}

MoveShape check_plan(const Tensor& accept_index, const Tensor& query_start, int64_t q_len,
                     const Tensor& slot_mapping, const Tensor& src, const Tensor& dst) {
  const char* op = "plan_moves";
  expect_rank(op, "accept_index", accept_index, 2);
  expect_rank(op, "slot_mapping", slot_mapping, 1);
  expect_root(op, "accept_index", accept_index.size(1));
  STD_TORCH_CHECK(q_len >= 1, "ddtree::plan_moves needs Q >= 1 (max_nodes + 1); found ", q_len, ".");
  MoveShape s{accept_index.size(0), accept_index.size(1) - 1};
  const bool wide = query_start.scalar_type() == ScalarType::Long;
  expect(op, "accept_index", accept_index, ScalarType::Long, {s.n, s.moves + 1}, accept_index);
  expect(op, "query_start", query_start, wide ? ScalarType::Long : ScalarType::Int, {s.n}, accept_index);
  expect(op, "slot_mapping", slot_mapping, ScalarType::Long, {slot_mapping.size(0)}, accept_index);
  expect(op, "src", src, ScalarType::Long, {s.n, s.moves}, accept_index);
  expect(op, "dst", dst, ScalarType::Long, {s.n, s.moves}, accept_index);
  return s;
}

MoveShape check_moves(const std::vector<Tensor>& views, const Tensor& table, const Tensor& src,
                      const Tensor& dst) {
  const char* op = "move_rows";
  STD_TORCH_CHECK(!views.empty(), "ddtree::move_rows needs at least one view; found none. ",
                  "Skip the call when no cache is registered.");
  expect_rank(op, "src", src, 2);
  MoveShape s{src.size(0), src.size(1)};
  expect(op, "table", table, ScalarType::Long, {static_cast<int64_t>(views.size()), 8}, table);
  expect(op, "src", src, ScalarType::Long, {s.n, s.moves}, views[0]);
  expect(op, "dst", dst, ScalarType::Long, {s.n, s.moves}, views[0]);
  return s;
}

}  // namespace ddtree
