// What every CUDA op does around its one launch: torch's stream, the device, raw pointers. Seen by files that
// know torch, not by nvcc.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include "../checks.h"
#include "launch.h"

// Only a CUDA build of torch defines this. Weak, so that the same module loads beside a CPU-only torch.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device,
                                                                                   void** stream);

namespace ddtree {

// Makes the tensor's device current for the launch and gives its current stream. Torch's guard sets the
// driver's context, which the runtime linked into this module follows; where it does not, it is told. The
// guard alone restores: a second restore through this runtime could leave torch on a context it does not
// expect.
class Launch {
 public:
  Launch(const char* op, const Tensor& tensor)
      : op_(op), device_(tensor.get_device_index()), guard_(device_) {
    STD_TORCH_CHECK(
        aoti_torch_get_current_cuda_stream != nullptr, "ddtree::", op,
        " needs a CUDA build of torch; this torch does not export aoti_torch_get_current_cuda_stream. "
        "Install a CUDA torch, or keep the tensors on the CPU.");
    int current = -1;
    check(cudaGetDevice(&current));
    if (current != device_) check(cudaSetDevice(device_));
    void* stream = nullptr;
    STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream(device_, &stream) == 0, "ddtree::", op,
                    ": torch gave no current stream for device ", device_, ".");
    stream_ = static_cast<cudaStream_t>(stream);
  }
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;

  cudaStream_t stream() const { return stream_; }

  void check(cudaError_t error) const {
    STD_TORCH_CHECK(
        error == cudaSuccess, "ddtree::", op_, " could not launch on device ", device_, ": ",
        cudaGetErrorString(error),
        ". Earlier kernels report here too: rerun with CUDA_LAUNCH_BLOCKING=1 to find the first.");
  }

 private:
  const char* op_;
  int device_;
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
};

template <typename T>
const T* in(const Tensor& t) {
  return t.const_data_ptr<T>();
}
template <typename T>
T* out(const Tensor& t) {
  return t.mutable_data_ptr<T>();
}

inline void check_width(const char* op, int64_t q_len) {
  STD_TORCH_CHECK(q_len <= kMaxNodes + 1, "ddtree::", op, " on CUDA needs at most ", kMaxNodes,
                  " nodes per tree; found ", q_len - 1, ". A tree must fit one block: lower max_nodes.");
}

inline void check_batch(const char* op, int64_t n) {
  STD_TORCH_CHECK(n <= 65535, "ddtree::", op, " on CUDA needs at most 65535 requests; found ", n,
                  ". One grid dimension counts requests: split the batch.");
}

inline void check_depth(const char* op, int64_t moves) {
  STD_TORCH_CHECK(moves <= kMaxMoves, "ddtree::", op, " on CUDA needs at most ", kMaxMoves,
                  " moves per request; found ", moves,
                  ". A block lists them in shared memory: lower the draft depth.");
}

}  // namespace ddtree
