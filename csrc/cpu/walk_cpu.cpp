// The two walks on the CPU. Masses are float64 so that every device takes the same decisions.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <vector>

#include "../checks.h"

namespace ddtree {
namespace {

struct Row {
  const int64_t* tokens;
  const int32_t* next_token;
  const int32_t* next_sibling;
  int32_t count;

  // Children in sibling order. Pointers must lead forward, which is also what makes every walk end.
  void children(int32_t node, std::vector<int32_t>& out) const {
    out.clear();
    int32_t at = node;
    for (int32_t next = next_token[node]; next != -1; next = next_sibling[at]) {
      STD_TORCH_CHECK(next > at && next <= count,
                      "ddtree::walk needs every child or sibling pointer of node ", at, " to be -1 or in (",
                      at, ", ", count, "]; found ", next,
                      ". Pointers only lead forward to real nodes: pass the arrays retrieve wrote.");
      out.push_back(next);
      at = next;
    }
  }
};

struct Outputs {
  int64_t first;  // flat slot of the root
  int64_t* predict;
  int64_t* accept_index;
  int64_t max_depth;
  int64_t length = 0;

  Outputs(const WalkShape& s, int64_t r, const Tensor& predict_all, const Tensor& accept_all)
      : first(r * s.q_len),
        predict(predict_all.mutable_data_ptr<int64_t>() + r * s.q_len),
        accept_index(accept_all.mutable_data_ptr<int64_t>() + r * (s.max_depth + 1)),
        max_depth(s.max_depth) {
    std::fill_n(predict, s.q_len, -1);
    std::fill_n(accept_index, s.max_depth + 1, -1);
  }

  void visit(int32_t node) { accept_index[length++] = first + node; }
  bool full() const { return length > max_depth; }
};

Row row_of(const char* op, const WalkShape& s, int64_t r, const Tensor& candidates, const Tensor& next_token,
           const Tensor& next_sibling, const Tensor& num_nodes) {
  const int32_t count = num_nodes.const_data_ptr<int32_t>()[r];
  STD_TORCH_CHECK(count >= 0 && count < s.q_len, "ddtree::", op, " needs num_nodes[", r, "] in [0, ",
                  s.q_len - 1, "]; found ", count, ". Pass what build wrote.");
  return {candidates.const_data_ptr<int64_t>() + r * s.q_len,
          next_token.const_data_ptr<int32_t>() + r * s.q_len,
          next_sibling.const_data_ptr<int32_t>() + r * s.q_len, count};
}

void walk(const Tensor& candidates, const Tensor& next_token, const Tensor& next_sibling,
          const Tensor& num_nodes, const Tensor& target_tokens, const Tensor& predict,
          const Tensor& accept_index, const Tensor& accept_token_num) {
  const WalkShape s = check_walk("walk", candidates, next_token, next_sibling, num_nodes, predict,
                                 accept_index, accept_token_num);
  check_targets(s, candidates, target_tokens);
  std::vector<int32_t> children;
  for (int64_t r = 0; r < s.n; ++r) {
    const Row row = row_of("walk", s, r, candidates, next_token, next_sibling, num_nodes);
    const int64_t* drawn = target_tokens.const_data_ptr<int64_t>() + r * s.q_len;
    Outputs out(s, r, predict, accept_index);
    for (int32_t node = 0; node != -1;) {
      out.visit(node);
      const int64_t token = out.predict[node] = drawn[node];
      int32_t match = -1;
      if (!out.full()) {
        row.children(node, children);
        auto found = std::find_if(children.begin(), children.end(),
                                  [&](int32_t child) { return row.tokens[child] == token; });
        if (found != children.end()) match = *found;
      }
      node = match;
    }
    accept_token_num.mutable_data_ptr<int32_t>()[r] = static_cast<int32_t>(out.length - 1);
  }
}

int64_t residual_token(const float* probs, int64_t vocab, std::vector<int64_t>& excluded, float coin) {
  std::sort(excluded.begin(), excluded.end());
  auto allowed = [&](int64_t v) {
    return probs[v] > 0.0f && !std::binary_search(excluded.begin(), excluded.end(), v);
  };
  double total = 0.0;
  int64_t last = -1;
  for (int64_t v = 0; v < vocab; ++v) {
    if (!allowed(v)) continue;
    total += probs[v];
    last = v;
  }
  if (last == -1) {  // rounding let the whole support be rejected
    int64_t best = 0;
    for (int64_t v = 0; v < vocab; ++v) {
      if (probs[v] > 0.0f && !(probs[best] >= probs[v])) best = v;
    }
    return best;
  }
  const double goal = static_cast<double>(coin) * total;
  double running = 0.0;
  for (int64_t v = 0; v < last; ++v) {
    if (!allowed(v)) continue;
    running += probs[v];
    if (running > goal) return v;
  }
  return last;
}

void walk_coins(const Tensor& candidates, const Tensor& next_token, const Tensor& next_sibling,
                const Tensor& num_nodes, const Tensor& target_probs, const Tensor& coins,
                const Tensor& final_coins, const Tensor& predict, const Tensor& accept_index,
                const Tensor& accept_token_num) {
  WalkShape s = check_walk("walk_coins", candidates, next_token, next_sibling, num_nodes, predict,
                           accept_index, accept_token_num);
  check_coins(s, candidates, target_probs, coins, final_coins);
  std::vector<int32_t> children;
  std::vector<int64_t> tried;
  for (int64_t r = 0; r < s.n; ++r) {
    const Row row = row_of("walk_coins", s, r, candidates, next_token, next_sibling, num_nodes);
    const float* coin = coins.const_data_ptr<float>() + r * s.q_len;
    Outputs out(s, r, predict, accept_index);
    for (int32_t node = 0; node != -1;) {
      out.visit(node);
      const float* probs = target_probs.const_data_ptr<float>() + (r * s.q_len + node) * s.vocab;
      double rejected = 0.0;
      int32_t accepted = -1;
      tried.clear();
      children.clear();
      if (!out.full()) row.children(node, children);
      for (const int32_t child : children) {
        const int64_t token = row.tokens[child];
        if (std::find(tried.begin(), tried.end(), token) != tried.end()) continue;
        const double p = token >= 0 && token < s.vocab && probs[token] > 0.0f ? probs[token] : 0.0;
        if (p > 0.0 && static_cast<double>(coin[child]) * (1.0 - rejected) < p) {
          accepted = child;
          break;
        }
        tried.push_back(token);
        rejected += p;
      }
      out.predict[node] = accepted != -1
                              ? row.tokens[accepted]
                              : residual_token(probs, s.vocab, tried, final_coins.const_data_ptr<float>()[r]);
      node = accepted;
    }
    accept_token_num.mutable_data_ptr<int32_t>()[r] = static_cast<int32_t>(out.length - 1);
  }
}

}  // namespace
}  // namespace ddtree

STABLE_TORCH_LIBRARY_IMPL(ddtree, CPU, m) {
  m.impl("walk", TORCH_BOX(&ddtree::walk));
  m.impl("walk_coins", TORCH_BOX(&ddtree::walk_coins));
}
