// The CUDA side of the tree ops: checks, then one launch on torch's current stream.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <vector>

#include "step_cuda.h"
#include "torch_launch.h"

namespace ddtree {
namespace {

void build(const Tensor& top_logps, const Tensor& top_tokens, const Tensor& budgets, const Tensor& tokens,
           const Tensor& parents, const Tensor& depths, const Tensor& node_logws, const Tensor& num_nodes) {
  const BuildShape s =
      check_build(top_logps, top_tokens, budgets, tokens, parents, depths, node_logws, num_nodes);
  check_width("build", s.q_len);
  if (s.n == 0) return;
  const Launch launch("build", top_logps);
  launch.check(launch_build(in<float>(top_logps), in<int64_t>(top_tokens), in<int32_t>(budgets),
                            out<int64_t>(tokens), out<int32_t>(parents), out<int32_t>(depths),
                            out<float>(node_logws), out<int32_t>(num_nodes), s.n, s.depths, s.ranks, s.q_len,
                            launch.stream()));
}

void retrieve(const Tensor& parents, const Tensor& num_nodes, const Tensor& index, const Tensor& next_token,
              const Tensor& next_sibling) {
  const TreeShape s = check_retrieve(parents, num_nodes, index, next_token, next_sibling);
  check_width("retrieve", s.q_len);
  if (s.n == 0) return;
  const Launch launch("retrieve", parents);
  launch.check(launch_retrieve(in<int32_t>(parents), in<int32_t>(num_nodes), out<int64_t>(index),
                               out<int32_t>(next_token), out<int32_t>(next_sibling), s.n, s.q_len,
                               launch.stream()));
}

void ancestor_mask(const Tensor& parents, const Tensor& num_nodes, const Tensor& mask) {
  const TreeShape s = check_mask(parents, num_nodes, mask);
  check_width("ancestor_mask", s.q_len);
  check_batch("ancestor_mask", s.n);
  if (s.n == 0) return;
  const Launch launch("ancestor_mask", parents);
  launch.check(launch_ancestor_mask(in<int32_t>(parents), in<int32_t>(num_nodes), out<int32_t>(mask), s.n,
                                    s.q_len, launch.stream()));
}

WalkArgs walk_args(const WalkShape& s, const Tensor& candidates, const Tensor& next_token,
                   const Tensor& next_sibling, const Tensor& num_nodes, const Tensor& predict,
                   const Tensor& accept_index, const Tensor& accept_token_num) {
  return WalkArgs{in<int64_t>(candidates),        in<int32_t>(next_token),   in<int32_t>(next_sibling),
                  in<int32_t>(num_nodes),         out<int64_t>(predict),     out<int64_t>(accept_index),
                  out<int32_t>(accept_token_num), static_cast<int>(s.q_len), static_cast<int>(s.max_depth)};
}

CoinArgs coin_args(const WalkShape& s, const Tensor& target_probs, const Tensor& coins,
                   const Tensor& final_coins) {
  return {in<float>(target_probs), in<float>(coins), in<float>(final_coins), s.vocab};
}

void walk(const Tensor& candidates, const Tensor& next_token, const Tensor& next_sibling,
          const Tensor& num_nodes, const Tensor& target_tokens, const Tensor& predict,
          const Tensor& accept_index, const Tensor& accept_token_num) {
  const WalkShape s = check_walk("walk", candidates, next_token, next_sibling, num_nodes, predict,
                                 accept_index, accept_token_num);
  check_targets(s, candidates, target_tokens);
  check_width("walk", s.q_len);
  if (s.n == 0) return;
  const Launch launch("walk", candidates);
  const WalkArgs args =
      walk_args(s, candidates, next_token, next_sibling, num_nodes, predict, accept_index, accept_token_num);
  launch.check(launch_walk(args, in<int64_t>(target_tokens), s.n, launch.stream()));
}

void walk_coins(const Tensor& candidates, const Tensor& next_token, const Tensor& next_sibling,
                const Tensor& num_nodes, const Tensor& target_probs, const Tensor& coins,
                const Tensor& final_coins, const Tensor& predict, const Tensor& accept_index,
                const Tensor& accept_token_num) {
  WalkShape s = check_walk("walk_coins", candidates, next_token, next_sibling, num_nodes, predict,
                           accept_index, accept_token_num);
  check_coins("walk_coins", s, candidates, target_probs, coins, final_coins);
  check_width("walk_coins", s.q_len);
  if (s.n == 0) return;
  const Launch launch("walk_coins", candidates);
  const WalkArgs args =
      walk_args(s, candidates, next_token, next_sibling, num_nodes, predict, accept_index, accept_token_num);
  launch.check(launch_walk_coins(args, coin_args(s, target_probs, coins, final_coins), s.n, launch.stream()));
}

void walk_residual(const Tensor& candidates, const Tensor& next_token, const Tensor& next_sibling,
                   const Tensor& num_nodes, const Tensor& target_probs, const Tensor& draft_probs,
                   const Tensor& coins, const Tensor& final_coins, const Tensor& predict,
                   const Tensor& accept_index, const Tensor& accept_token_num) {
  WalkShape s = check_walk("walk_residual", candidates, next_token, next_sibling, num_nodes, predict,
                           accept_index, accept_token_num);
  check_coins("walk_residual", s, candidates, target_probs, coins, final_coins);
  const int64_t depths = check_draft_probs(s, candidates, draft_probs);
  check_width("walk_residual", s.q_len);
  if (s.n == 0) return;
  const Launch launch("walk_residual", candidates);
  const WalkArgs args =
      walk_args(s, candidates, next_token, next_sibling, num_nodes, predict, accept_index, accept_token_num);
  const ResidualArgs residual{coin_args(s, target_probs, coins, final_coins), in<float>(draft_probs), depths};
  launch.check(launch_walk_residual(args, residual, s.n, launch.stream()));
}

void plan_moves(const Tensor& accept_index, const Tensor& query_start, int64_t q_len,
                const Tensor& slot_mapping, const Tensor& src, const Tensor& dst) {
  const MoveShape s = check_plan(accept_index, query_start, q_len, slot_mapping, src, dst);
  if (s.n * s.moves == 0) return;
  const Launch launch("plan_moves", accept_index);
  launch.check(launch_plan_moves(in<int64_t>(accept_index), query_start.const_data_ptr(),
                                 query_start.scalar_type() == ScalarType::Long, q_len,
                                 in<int64_t>(slot_mapping), slot_mapping.size(0), out<int64_t>(src),
                                 out<int64_t>(dst), s.n, s.moves, launch.stream()));
}

void move_rows(std::vector<Tensor> views, const Tensor& table, const Tensor& src, const Tensor& dst) {
  const MoveShape s = check_moves(views, table, src, dst);
  STD_TORCH_CHECK(
      table.is_cuda() && table.get_device_index() == views[0].get_device_index(),
      "ddtree::move_rows needs `table` on the device of the views; found it elsewhere. The kernel reads "
      "it there: make it once with make_move_table(views).");
  const int64_t count = static_cast<int64_t>(views.size());
  check_batch("move_rows", std::max(s.n, count));
  check_depth("move_rows", s.moves);
  if (s.n * s.moves == 0) return;
  int64_t chunks = 1;
  for (const Tensor& view : views) {
    chunks = std::max(chunks, view.size(2) * view.size(3) * static_cast<int64_t>(view.element_size()) / 16);
  }
  const Launch launch("move_rows", views[0]);
  launch.check(launch_move_rows(in<int64_t>(table), count, in<int64_t>(src), in<int64_t>(dst), s.n, s.moves,
                                chunks, launch.stream()));
}

}  // namespace
}  // namespace ddtree

STABLE_TORCH_LIBRARY_IMPL(ddtree, CUDA, m) {
  m.impl("build", TORCH_BOX(&ddtree::build));
  m.impl("retrieve", TORCH_BOX(&ddtree::retrieve));
  m.impl("ancestor_mask", TORCH_BOX(&ddtree::ancestor_mask));
  m.impl("walk", TORCH_BOX(&ddtree::walk));
  m.impl("walk_coins", TORCH_BOX(&ddtree::walk_coins));
  m.impl("walk_residual", TORCH_BOX(&ddtree::walk_residual));
  m.impl("plan_moves", TORCH_BOX(&ddtree::plan_moves));
  m.impl("move_rows", TORCH_BOX(&ddtree::move_rows));
  m.impl("top_logps", TORCH_BOX(&ddtree::top_logps));
  m.impl("build_trees", TORCH_BOX(&ddtree::build_trees));
  m.impl("begin_step", TORCH_BOX(&ddtree::begin_step));
  m.impl("walk_rows", TORCH_BOX(&ddtree::walk_rows));
  m.impl("commit_cache", TORCH_BOX(&ddtree::commit_cache));
  m.impl("commit_rows", TORCH_BOX(&ddtree::commit_rows));
}
