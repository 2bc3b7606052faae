// CUDA backend of find_well_conditioned: the Gram matrices that a short polynomial may serve, and
// the factors that all of them need. The sums of norm_factors, then one block.

#include "newton_schulz/find_subsets.cuh"

namespace optimizer {
namespace {

using namespace normalization;

constexpr int kFactors = 4;  // per matrix

// Eigenvalues of mean t and relative variance v are taken to lie within t (1 -+ sqrt(v))^2, as
// those of X X^T do for independent elements (Marchenko and Pastur 1967, v = m / n). Whoever relies
// on it checks the result: find_converged.
__global__ void __launch_bounds__(kThreads)
    well_conditioned_kernel(Sums sums, double prefactor, double spread, float* factors,
                            int32_t* found, int32_t* subset) {
  let_next_start();
  wait_for_launch_before();
  const int count = sums.count;
  for (int matrix = threadIdx.x / 32; matrix < count; matrix += kWarps) {
    const double squares = total_of(sums.squares, sums.chunks, matrix);
    const double mean = total_of(sums.traces, sums.chunks, matrix) / sums.side;
    if (threadIdx.x % 32 != 0) continue;
    const Factor factor = factor_of(squares, prefactor);
    const double general = static_cast<double>(factor.power) * factor.rest;
    const double variance = squares / (sums.side * mean * mean) - 1.0;
    const double root = sqrt(fmax(variance, 0.0));
    const double largest = mean * (1.0 + root) * (1.0 + root);
    const bool well = variance > -1.0 && root <= spread && mean > 0.0;  // false for NaN
    const double narrow = well ? 1.0 / largest : 0.0;
    factors[matrix] = static_cast<float>(general);
    factors[count + matrix] = static_cast<float>(sqrt(general));
    factors[2 * count + matrix] = static_cast<float>(narrow);
    factors[3 * count + matrix] = static_cast<float>(sqrt(narrow));
    found[matrix] = well;
  }
  __syncthreads();
  gather_marked(found, count, 1, subset);
}

}  // namespace

void find_well_conditioned_cuda(const Tensor& r, double prefactor, double spread, int64_t side,
                                const Tensor& factors, const Tensor& found, const Tensor& subset) {
  constexpr const char* kOp = "find_well_conditioned";
  check_matrices(r, side, kOp);
  check_list(found, r, 0, kOp);
  check_list(subset, r, 1, kOp);
  STD_TORCH_CHECK(factors.dim() == 2 && factors.size(0) == kFactors &&
                      factors.size(1) == r.size(0) && factors.is_contiguous() &&
                      factors.scalar_type() == ScalarType::Float && factors.device() == r.device(),
                  kOp, ": factors must be (4, G), contiguous, float32, on r's device");
  STD_TORCH_CHECK(prefactor > 0, kOp, ": prefactor must be positive");
  const int device = r.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(device);
  const bool early = starts_early(device);
  const SumProblem p = gram_sums(r, nullptr);
  const Tensor memory =
      torch::stable::new_empty(r, {2 * p.x.count * p.tiling.chunks}, ScalarType::Double);
  if (p.x.count == 0) return;
  const Sums sums = sum_squares(memory, p, static_cast<int>(side), early, stream);
  launch(well_conditioned_kernel, sums, 1, 0, early, stream, prefactor, spread,
         static_cast<float*>(factors.data_ptr()), list_of(found), list_of(subset));
}

}  // namespace optimizer
