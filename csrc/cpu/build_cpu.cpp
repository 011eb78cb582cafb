// The best-first builder on the CPU: a binary heap of (score, parent, rank).
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "../checks.h"
#include "../tree_order.h"

namespace ddtree {
namespace {

struct Candidate {
  float score;
  int32_t parent;
  int32_t rank;
};

constexpr float kAbsent = -std::numeric_limits<float>::infinity();

class Tree {
  auto worse() const {
    return [this](const Candidate& a, const Candidate& b) {
      if (a.score != b.score) return a.score < b.score;
      return comes_before(b.parent, b.rank, a.parent, a.rank, parents_, ranks_.data(), depths_);
    };
  }

 public:
  Tree(const float* logps, int64_t depth_limit, int64_t rank_limit, float* scores, int32_t* parents,
       int32_t* depths)
      : logps_(logps),
        depth_limit_(depth_limit),
        rank_limit_(rank_limit),
        scores_(scores),
        parents_(parents),
        depths_(depths),
        ranks_{0} {
    push(0, 0);
  }

  int32_t grow(int32_t budget) {
    int32_t count = 0;
    while (count < budget && !heap_.empty()) {
      std::pop_heap(heap_.begin(), heap_.end(), worse());
      const Candidate best = heap_.back();
      heap_.pop_back();
      ++count;
      scores_[count] = best.score;
      parents_[count] = best.parent;
      depths_[count] = depths_[best.parent] + 1;
      ranks_.push_back(best.rank);
      push(best.parent, best.rank + 1);
      push(count, 0);
    }
    return count;
  }

  int32_t rank(int32_t node) const { return ranks_[node]; }

 private:
  void push(int32_t parent, int32_t rank) {
    const int32_t depth = depths_[parent];
    if (depth >= depth_limit_ || rank >= rank_limit_) return;
    const float score = scores_[parent] + logps_[depth * rank_limit_ + rank];
    if (!(score > kAbsent)) return;  // NaN ends the row as -inf does
    heap_.push_back({score, parent, rank});
    std::push_heap(heap_.begin(), heap_.end(), worse());
  }

  const float* logps_;
  int64_t depth_limit_, rank_limit_;
  float* scores_;
  int32_t* parents_;
  int32_t* depths_;
  std::vector<int32_t> ranks_;
  std::vector<Candidate> heap_;
};

void build(const Tensor& top_logps, const Tensor& top_tokens, const Tensor& budgets, const Tensor& tokens,
           const Tensor& parents, const Tensor& depths, const Tensor& node_logws, const Tensor& num_nodes) {
  const BuildShape s =
      check_build(top_logps, top_tokens, budgets, tokens, parents, depths, node_logws, num_nodes);
  const int64_t plane = s.depths * s.ranks;
  for (int64_t r = 0; r < s.n; ++r) {
    int64_t* row_tokens = tokens.mutable_data_ptr<int64_t>() + r * s.q_len;
    int32_t* row_parents = parents.mutable_data_ptr<int32_t>() + r * s.q_len;
    int32_t* row_depths = depths.mutable_data_ptr<int32_t>() + r * s.q_len;
    float* row_scores = node_logws.mutable_data_ptr<float>() + r * s.q_len;
    std::fill_n(row_tokens, s.q_len, 0);
    std::fill_n(row_parents, s.q_len, -1);
    std::fill_n(row_depths, s.q_len, 0);
    std::fill_n(row_scores, s.q_len, kAbsent);
    row_scores[0] = 0.0f;
    const int32_t budget =
        static_cast<int32_t>(std::clamp<int64_t>(budgets.const_data_ptr<int32_t>()[r], 0, s.q_len - 1));
    Tree tree(top_logps.const_data_ptr<float>() + r * plane, s.depths, s.ranks, row_scores, row_parents,
              row_depths);
    const int32_t count = tree.grow(budget);
    const int64_t* ids = top_tokens.const_data_ptr<int64_t>() + r * plane;
    for (int32_t i = 1; i <= count; ++i) row_tokens[i] = ids[(row_depths[i] - 1) * s.ranks + tree.rank(i)];
    num_nodes.mutable_data_ptr<int32_t>()[r] = count;
  }
}

}  // namespace
}  // namespace ddtree

STABLE_TORCH_LIBRARY_IMPL(ddtree, CPU, m) { m.impl("build", TORCH_BOX(&ddtree::build)); }
