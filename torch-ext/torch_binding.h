#pragma once
// The compiled ops, one declaration per backend.
// Sources: kernels-src/<family>/<op>.cu and kernels-src/cpu/<op>.cpp.

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>

namespace optimizer {

using torch::headeronly::IntHeaderOnlyArrayRef;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

Tensor nf4_dequant_cpu(const Tensor& packed, const Tensor& absmax, const Tensor& active_experts,
                       IntHeaderOnlyArrayRef expert_shape, int64_t blocksize, ScalarType dtype,
                       std::optional<Tensor> codebook, std::optional<Tensor> absmax_code,
                       std::optional<Tensor> absmax_scale, std::optional<Tensor> absmax_offset);

Tensor nf4_dequant_cuda(const Tensor& packed, const Tensor& absmax, const Tensor& active_experts,
                        IntHeaderOnlyArrayRef expert_shape, int64_t blocksize, ScalarType dtype,
                        std::optional<Tensor> codebook, std::optional<Tensor> absmax_code,
                        std::optional<Tensor> absmax_scale, std::optional<Tensor> absmax_offset);

}  // namespace optimizer
