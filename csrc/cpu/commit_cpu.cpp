// Planning and doing the row moves of a commit on the CPU.
#include <torch/csrc/stable/library.h>

#include <cstring>
#include <vector>

#include "../checks.h"

namespace ddtree {
namespace {

int64_t start_of(const Tensor& query_start, int64_t r) {
  return query_start.scalar_type() == ScalarType::Long ? query_start.const_data_ptr<int64_t>()[r]
                                                       : query_start.const_data_ptr<int32_t>()[r];
}

void plan_moves(const Tensor& accept_index, const Tensor& query_start, int64_t q_len,
                const Tensor& slot_mapping, const Tensor& src, const Tensor& dst) {
  const MoveShape s = check_plan(accept_index, query_start, q_len, slot_mapping, src, dst);
  const int64_t rows = slot_mapping.size(0);
  const int64_t* slots = slot_mapping.const_data_ptr<int64_t>();
  for (int64_t r = 0; r < s.n; ++r) {
    const int64_t start = start_of(query_start, r);
    for (int64_t d = 1; d <= s.moves; ++d) {
      const int64_t accepted = accept_index.const_data_ptr<int64_t>()[r * (s.moves + 1) + d];
      int64_t from = -1, to = -1;
      if (accepted >= 0 && start >= 0 && start < rows && start + accepted % q_len < rows &&
          start + d < rows) {
        from = slots[start + accepted % q_len];
        to = slots[start + d];
      }
      const bool moves = from >= 0 && to >= 0 && from != to;
      src.mutable_data_ptr<int64_t>()[r * s.moves + d - 1] = moves ? from : -1;
      dst.mutable_data_ptr<int64_t>()[r * s.moves + d - 1] = moves ? to : -1;
    }
  }
}

struct View {
  char* base;
  int64_t rows, block_size, block_stride, slot_stride, head_stride, heads, head_bytes;

  explicit View(const Tensor& t) {
    STD_TORCH_CHECK(
        t.dim() == 4 && (t.size(3) <= 1 || t.stride(3) == 1),
        "ddtree::move_rows needs 4-D views [num_blocks, block_size, H, E] with the last dimension "
        "contiguous; found ",
        t.dim(), " dimensions. Rows are copied as bytes: permute or slice first.");
    const int64_t item = static_cast<int64_t>(t.element_size());
    base = static_cast<char*>(t.mutable_data_ptr());
    rows = t.size(0) * t.size(1);
    block_size = t.size(1);
    block_stride = t.stride(0) * item;
    slot_stride = t.stride(1) * item;
    head_stride = t.stride(2) * item;
    heads = t.size(2);
    head_bytes = t.size(3) * item;
  }

  char* row(int64_t slot) const {
    return base + slot / block_size * block_stride + slot % block_size * slot_stride;
  }
};

void move_rows(std::vector<Tensor> tensors, const Tensor& table, const Tensor& src, const Tensor& dst) {
  const MoveShape s = check_moves(tensors, table, src, dst);
  const int64_t* from = src.const_data_ptr<int64_t>();
  const int64_t* to = dst.const_data_ptr<int64_t>();
  for (const Tensor& tensor : tensors) {
    const View view(tensor);
    for (int64_t i = 0; i < s.n * s.moves; ++i) {
      if (from[i] < 0 || to[i] < 0) continue;
      STD_TORCH_CHECK(from[i] < view.rows && to[i] < view.rows, "ddtree::move_rows needs rows below ",
                      view.rows, " (num_blocks * block_size); found ", from[i], " -> ", to[i],
                      ". src and dst are slots of this cache: plan them with its own slot mapping.");
      for (int64_t h = 0; h < view.heads; ++h) {
        std::memmove(view.row(to[i]) + h * view.head_stride, view.row(from[i]) + h * view.head_stride,
                     static_cast<size_t>(view.head_bytes));
      }
    }
  }
}

}  // namespace
}  // namespace ddtree

STABLE_TORCH_LIBRARY_IMPL(ddtree, CPU, m) {
  m.impl("plan_moves", TORCH_BOX(&ddtree::plan_moves));
  m.impl("move_rows", TORCH_BOX(&ddtree::move_rows));
}
