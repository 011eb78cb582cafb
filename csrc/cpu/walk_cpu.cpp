// The walks on the CPU. Masses are float64 so that every device takes the same decisions.
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

// The first id whose running mass exceeds coin * total, or -1 when there is no mass.
template <class Mass>
int64_t inverse_cdf(const Mass& mass, int64_t vocab, float coin) {
  double total = 0.0;
  int64_t last = -1;
  for (int64_t v = 0; v < vocab; ++v) {
    const double m = mass(v);
    if (!(m > 0.0)) continue;
    total += m;
    last = v;
  }
  const double goal = static_cast<double>(coin) * total;
  double running = 0.0;
  for (int64_t v = 0; v < last; ++v) {
    running += mass(v);
    if (running > goal && mass(v) > 0.0) return v;
  }
  return last;
}

int64_t most_probable(const float* probs, int64_t vocab) {
  int64_t best = 0;
  for (int64_t v = 0; v < vocab; ++v) {
    if (probs[v] > 0.0f && !(probs[best] >= probs[v])) best = v;
  }
  return best;
}

double positive(double p) { return p > 0.0 ? p : 0.0; }  // false for NaN

// Where a walk goes from a node, -1 where it ends, and the token emitted there.
struct Decision {
  int32_t accepted;
  int64_t token;
};

// The last draw of a walk; `mass` is what the rejections left of `probs`, which rounding may have emptied.
template <class Mass>
Decision last_draw(const Mass& mass, const float* probs, int64_t vocab, float coin) {
  const int64_t token = inverse_cdf(mass, vocab, coin);
  return {-1, token < 0 ? most_probable(probs, vocab) : token};
}

// From each root on, decide(request, depth, row, children, the coins of the row, the node's probabilities);
// at the depth limit there are no children.
template <class Decide>
void walk_deciding(const char* op, const WalkShape& s, const Tensor& candidates, const Tensor& next_token,
                   const Tensor& next_sibling, const Tensor& num_nodes, const Tensor& target_probs,
                   const Tensor& coins, const Tensor& predict, const Tensor& accept_index,
                   const Tensor& accept_token_num, const Decide& decide) {
  std::vector<int32_t> children;
  for (int64_t r = 0; r < s.n; ++r) {
    const Row row = row_of(op, s, r, candidates, next_token, next_sibling, num_nodes);
    const float* coin = coins.const_data_ptr<float>() + r * s.q_len;
    Outputs out(s, r, predict, accept_index);
    for (int32_t node = 0; node != -1;) {
      out.visit(node);
      children.clear();
      if (!out.full()) row.children(node, children);
      const float* probs = target_probs.const_data_ptr<float>() + (r * s.q_len + node) * s.vocab;
      const Decision decision = decide(r, out.length - 1, row, children, coin, probs);
      out.predict[node] = decision.token;
      node = decision.accepted;
    }
    accept_token_num.mutable_data_ptr<int32_t>()[r] = static_cast<int32_t>(out.length - 1);
  }
}

void walk_coins(const Tensor& candidates, const Tensor& next_token, const Tensor& next_sibling,
                const Tensor& num_nodes, const Tensor& target_probs, const Tensor& coins,
                const Tensor& final_coins, const Tensor& predict, const Tensor& accept_index,
                const Tensor& accept_token_num) {
  WalkShape s = check_walk("walk_coins", candidates, next_token, next_sibling, num_nodes, predict,
                           accept_index, accept_token_num);
  check_coins("walk_coins", s, candidates, target_probs, coins, final_coins);
  std::vector<int64_t> tried;
  auto decide = [&](int64_t r, int64_t, const Row& row, const std::vector<int32_t>& children,
                    const float* coin, const float* probs) -> Decision {
    double rejected = 0.0;
    tried.clear();
    for (const int32_t child : children) {
      const int64_t token = row.tokens[child];
      if (std::find(tried.begin(), tried.end(), token) != tried.end()) continue;
      const double p = token >= 0 && token < s.vocab ? positive(probs[token]) : 0.0;
      if (p > 0.0 && static_cast<double>(coin[child]) * (1.0 - rejected) < p) return {child, token};
      tried.push_back(token);
      rejected += p;
    }
    std::sort(tried.begin(), tried.end());
    auto mass = [&](int64_t v) {
      return std::binary_search(tried.begin(), tried.end(), v) ? 0.0 : positive(probs[v]);
    };
    return last_draw(mass, probs, s.vocab, final_coins.const_data_ptr<float>()[r]);
  };
  walk_deciding("walk_coins", s, candidates, next_token, next_sibling, num_nodes, target_probs, coins,
                predict, accept_index, accept_token_num, decide);
}

void walk_residual(const Tensor& candidates, const Tensor& next_token, const Tensor& next_sibling,
                   const Tensor& num_nodes, const Tensor& target_probs, const Tensor& draft_probs,
                   const Tensor& coins, const Tensor& final_coins, const Tensor& predict,
                   const Tensor& accept_index, const Tensor& accept_token_num) {
  WalkShape s = check_walk("walk_residual", candidates, next_token, next_sibling, num_nodes, predict,
                           accept_index, accept_token_num);
  check_coins("walk_residual", s, candidates, target_probs, coins, final_coins);
  const int64_t depths = check_draft_probs(s, candidates, draft_probs);
  std::vector<double> p(s.vocab), q(s.vocab);
  auto decide = [&](int64_t r, int64_t depth, const Row& row, const std::vector<int32_t>& children,
                    const float* coin, const float* probs) -> Decision {
    std::transform(probs, probs + s.vocab, p.begin(), positive);
    if (!children.empty()) {
      const float* drawn_from = draft_probs.const_data_ptr<float>() + (r * depths + depth) * s.vocab;
      std::transform(drawn_from, drawn_from + s.vocab, q.begin(), positive);
    }
    double scale = 0.0;
    auto left = [&](int64_t v) { return scale > 0.0 ? positive(p[v] - scale * q[v]) : p[v]; };
    for (const int32_t child : children) {
      const int64_t token = row.tokens[child];
      if (token < 0 || token >= s.vocab || !(q[token] > 0.0)) continue;  // a tried token has no q left
      double mass = 0.0, open_mass = 0.0;
      for (int64_t v = 0; v < s.vocab; ++v) {
        mass += left(v);
        open_mass += q[v];
      }
      if (!(mass > 0.0)) break;
      if (static_cast<double>(coin[child]) * q[token] * mass < left(token) * open_mass) return {child, token};
      scale += mass / open_mass;
      p[token] = q[token] = 0.0;
    }
    return last_draw(left, probs, s.vocab, final_coins.const_data_ptr<float>()[r]);
  };
  walk_deciding("walk_residual", s, candidates, next_token, next_sibling, num_nodes, target_probs, coins,
                predict, accept_index, accept_token_num, decide);
}

}  // namespace
}  // namespace ddtree

STABLE_TORCH_LIBRARY_IMPL(ddtree, CPU, m) {
  m.impl("walk", TORCH_BOX(&ddtree::walk));
  m.impl("walk_coins", TORCH_BOX(&ddtree::walk_coins));
  m.impl("walk_residual", TORCH_BOX(&ddtree::walk_residual));
}
