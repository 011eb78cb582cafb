// Derived forms of a tree on the CPU: first-child / next-sibling pointers and the packed ancestor mask.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <vector>

#include "../checks.h"

namespace ddtree {
namespace {

void check_tree(const char* op, int64_t r, const int32_t* parents, int32_t count, int64_t q_len) {
  STD_TORCH_CHECK(count >= 0 && count < q_len, "ddtree::", op, " needs num_nodes[", r, "] in [0, ", q_len - 1,
                  "]; found ", count, ". The arrays have ", q_len,
                  " slots with the root: clamp the budget to max_nodes.");
  for (int32_t i = 1; i <= count; ++i) {
    STD_TORCH_CHECK(
        parents[i] >= 0 && parents[i] < i, "ddtree::", op, " needs parents[", r, ", ", i, "] in [0, ", i,
        "); found ", parents[i],
        ". Nodes are in pop order, a parent comes before its children: pass the arrays build wrote.");
  }
}

void retrieve(const Tensor& parents, const Tensor& num_nodes, const Tensor& index, const Tensor& next_token,
              const Tensor& next_sibling) {
  const TreeShape s = check_retrieve(parents, num_nodes, index, next_token, next_sibling);
  for (int64_t r = 0; r < s.n; ++r) {
    const int32_t* row = parents.const_data_ptr<int32_t>() + r * s.q_len;
    const int32_t count = num_nodes.const_data_ptr<int32_t>()[r];
    check_tree("retrieve", r, row, count, s.q_len);
    int64_t* flat = index.mutable_data_ptr<int64_t>() + r * s.q_len;
    int32_t* child = next_token.mutable_data_ptr<int32_t>() + r * s.q_len;
    int32_t* sibling = next_sibling.mutable_data_ptr<int32_t>() + r * s.q_len;
    for (int64_t i = 0; i < s.q_len; ++i) flat[i] = r * s.q_len + i;
    std::fill_n(child, s.q_len, -1);
    std::fill_n(sibling, s.q_len, -1);
    for (int32_t i = count; i >= 1; --i) {
      sibling[i] = child[row[i]];
      child[row[i]] = i;
    }
  }
}

void ancestor_mask(const Tensor& parents, const Tensor& num_nodes, const Tensor& mask) {
  const TreeShape s = check_mask(parents, num_nodes, mask);
  const int64_t words = (s.q_len + 31) / 32;
  for (int64_t r = 0; r < s.n; ++r) {
    const int32_t* row = parents.const_data_ptr<int32_t>() + r * s.q_len;
    const int32_t count = num_nodes.const_data_ptr<int32_t>()[r];
    check_tree("ancestor_mask", r, row, count, s.q_len);
    int32_t* out = mask.mutable_data_ptr<int32_t>() + r * s.q_len * words;
    for (int64_t i = 0; i < s.q_len; ++i) {
      int32_t* bits = out + i * words;
      if (i >= 1 && i <= count) {
        std::copy_n(out + row[i] * words, words, bits);
      } else {
        std::fill_n(bits, words, 0);
      }
      bits[i / 32] = static_cast<int32_t>(static_cast<uint32_t>(bits[i / 32]) | (1u << (i % 32)));
    }
  }
}

}  // namespace
}  // namespace ddtree

STABLE_TORCH_LIBRARY_IMPL(ddtree, CPU, m) {
  m.impl("retrieve", TORCH_BOX(&ddtree::retrieve));
  m.impl("ancestor_mask", TORCH_BOX(&ddtree::ancestor_mask));
}
