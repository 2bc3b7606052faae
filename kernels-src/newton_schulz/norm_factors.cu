// CUDA backend of norm_factors: sums of squares, and one block per matrix that turns them into a
// factor.

#include <cmath>

#include "newton_schulz/norm_factors.cuh"
#include "newton_schulz/normalize_launch.cuh"

namespace optimizer {
namespace {

using namespace normalization;

// Both launches; either starts early.
constexpr const char* kOp = "norm_factors";

template <typename T>
void run(SumProblem& p, const Tensor& x, const Tensor& factors, const Tensor& roots, int device,
         cudaStream_t stream) {
  p.x.piece[0] = piece_of(x, 0, sizeof(T));
  const int64_t chunk =
      quotient_up(tiling_of(p.x.rows, p.x.cols, 0).chunk, kTogether<T>) * kTogether<T>;
  p.tiling = p.triangle ? upper_tiling_of(p.x.rows, chunk) : tiling_of(p.x.rows, p.x.cols, chunk);
  STD_TORCH_CHECK(p.tiling.tiles <= INT32_MAX, "norm_factors: a matrix has too many elements");
  const int64_t blocks = p.x.count * p.tiling.chunks;
  const Tensor sums = torch::stable::new_empty(x, {blocks}, ScalarType::Double);
  p.sums = static_cast<double*>(sums.data_ptr());
  const bool early = starts_early(device);
  if (p.triangle) {
    launch(kOp, sum_kernel<T, true>, blocks, kThreads, 0, early, stream, p);
  } else {
    launch(kOp, sum_kernel<T, false>, blocks, kThreads, 0, early, stream, p);
  }
  launch(kOp, factor_kernel, p.x.count, kThreads, 0, early, stream, p,
         static_cast<float*>(factors.data_ptr()), static_cast<float*>(roots.data_ptr()));
}

}  // namespace

void norm_factors_cuda(const Tensor& x, const Tensor& factors, const Tensor& roots,
                       double prefactor, bool symmetric) {
  STD_TORCH_CHECK(x.dim() == 3 && x.size(1) > 0 && x.size(2) > 0,
                  "norm_factors: x must be (G, r, c), not empty");
  STD_TORCH_CHECK(x.size(1) <= kLargestSide && x.size(2) <= kLargestSide,
                  "norm_factors: r and c must be at most 2^30");
  STD_TORCH_CHECK(!symmetric || x.size(1) == x.size(2),
                  "norm_factors: a symmetric x must be square, got ", x.size(1), " x ", x.size(2));
  for (const Tensor* out : {&factors, &roots}) {
    STD_TORCH_CHECK(out->dim() == 1 && out->size(0) == x.size(0) && out->is_contiguous() &&
                        out->scalar_type() == ScalarType::Float && out->device() == x.device(),
                    "norm_factors: factors and roots must be (G,), contiguous, float32, on x's "
                    "device");
  }
  STD_TORCH_CHECK(prefactor > 0 && std::isfinite(prefactor),
                  "norm_factors: prefactor must be positive and finite, got ", prefactor);
  if (x.size(0) == 0) return;
  const int device = x.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  const auto on = static_cast<cudaStream_t>(stream);

  SumProblem p{};
  p.x.rows = static_cast<int>(x.size(1));
  p.x.cols = static_cast<int>(x.size(2));
  p.x.count = x.size(0);
  p.x.pieces = 1;
  p.prefactor = prefactor;
  p.triangle = symmetric && has_upper_tiling(x.size(1));
  switch (x.scalar_type()) {
    case ScalarType::Half:
      return run<__half>(p, x, factors, roots, device, on);
    case ScalarType::BFloat16:
      return run<__nv_bfloat16>(p, x, factors, roots, device, on);
    case ScalarType::Float:
      return run<float>(p, x, factors, roots, device, on);
    default:
      STD_TORCH_CHECK(false, "norm_factors: x must be float16, bfloat16 or float32");
  }
}

}  // namespace optimizer
