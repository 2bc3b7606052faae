// CUDA backend of norm_factors: the first launch of normalize, and one block per matrix that turns
// its partial sums into a factor.

#include <cmath>

#include "newton_schulz/normalize_launch.cuh"

namespace optimizer {

void norm_factors_cuda(const Tensor& x, const Tensor& factors, const Tensor& roots,
                       double prefactor) {
  STD_TORCH_CHECK(x.dim() == 3 && x.size(1) > 0 && x.size(2) > 0,
                  "norm_factors: x must be (G, r, c), not empty");
  for (const Tensor* out : {&factors, &roots}) {
    STD_TORCH_CHECK(out->dim() == 1 && out->size(0) == x.size(0) && out->is_contiguous() &&
                        out->scalar_type() == ScalarType::Float && out->device() == x.device(),
                    "norm_factors: factors and roots must be (G,), contiguous, float32, on x's "
                    "device");
  }
  STD_TORCH_CHECK(prefactor > 0 && std::isfinite(prefactor),
                  "norm_factors: prefactor must be positive and finite, got ", prefactor);
  if (x.size(0) == 0) return;
  using namespace normalization;
  const int device = x.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  const auto on = static_cast<cudaStream_t>(stream);

  Problem p{};
  p.rows = static_cast<int>(x.size(1));
  p.cols = static_cast<int>(x.size(2));
  p.prefactor = prefactor;
  p.input = tiling_of(p.rows, p.cols, 0);
  p.filled = x.size(0);
  p.pieces = 1;
  p.piece[0] = piece_of(x, 0, x.scalar_type() == ScalarType::Float ? 4 : 2);
  Tensor partial = torch::stable::new_empty(x, {p.filled * p.input.chunks}, ScalarType::Double);
  p.partial = static_cast<double*>(partial.data_ptr());
  const int64_t blocks = p.filled * p.input.chunks;
  switch (x.scalar_type()) {
    case ScalarType::Half:
      launch(sum_kernel<__half>, p, blocks, false, on);
      break;
    case ScalarType::BFloat16:
      launch(sum_kernel<__nv_bfloat16>, p, blocks, false, on);
      break;
    case ScalarType::Float:
      launch(sum_kernel<float>, p, blocks, false, on);
      break;
    default:
      STD_TORCH_CHECK(false, "norm_factors: x must be float16, bfloat16 or float32");
  }
  launch(factor_kernel, p, p.filled, starts_early(device), on,
         static_cast<float*>(factors.data_ptr()), static_cast<float*>(roots.data_ptr()));
}

}  // namespace optimizer
