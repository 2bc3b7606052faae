#pragma once
// Everything an op source takes from torch: its stable ABI, target 2.11. ATen and c10 stay out.

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/device.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <vector>

// torch's header declares it only under USE_CUDA; the CUDA variant is also built beside a CPU
// torch.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace optimizer {

using torch::headeronly::IntHeaderOnlyArrayRef;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Unwritten, contiguous, where `like` lies. torch::stable::new_empty finds its op by name in every
// call, which takes the host three times as long: 0.8 and 2.8 us on a CPU.
inline Tensor allocate(const Tensor& like, IntHeaderOnlyArrayRef sizes, ScalarType dtype) {
  std::vector<int64_t> strides(sizes.size());
  int64_t step = 1;
  for (size_t d = sizes.size(); d-- > 0; step *= std::max<int64_t>(sizes[d], 1)) strides[d] = step;
  int32_t type = 0, index = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &index));
  using torch::stable::detail::from;
  using torch::stable::detail::to;
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(),
                                                  strides.data(), to<int32_t>(from(dtype)), type,
                                                  index, &made));
  return Tensor(made);
}

// A view from `first` elements behind x's first one on: 0.1 us, where narrow and transpose of
// torch::stable take 2 to 3.
inline Tensor viewed(const Tensor& x, IntHeaderOnlyArrayRef sizes, IntHeaderOnlyArrayRef strides,
                     int64_t first = 0) {
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(
      x.get(), static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), first, &made));
  return Tensor(made);
}

}  // namespace optimizer
