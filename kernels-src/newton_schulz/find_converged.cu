// CUDA backend of find_converged: of the matrices that a short polynomial was tried for, those that
// it served, by the residuals; and all others. The sums of norm_factors, then one block.

#include "newton_schulz/find_subsets.cuh"

namespace optimizer {
namespace {

using namespace normalization;

__global__ void __launch_bounds__(kThreads)
    converged_kernel(Sums sums, double bound, int filled, int32_t* found, int32_t* subset,
                     int32_t* rest) {
  let_next_start();
  wait_for_launch_before();
  const int tried = subset[0];
  for (int place = threadIdx.x / 32; place < tried; place += kWarps) {
    // -1 for every row of zeros
    const double squares = total_of(sums.squares, sums.chunks, place) - filled;
    if (threadIdx.x % 32 == 0) found[subset[1 + place]] = squares <= bound * sums.side;
  }
  __syncthreads();
  gather_marked(found, sums.count, 1, subset);
  gather_marked(found, sums.count, 0, rest);
}

}  // namespace

void find_converged_cuda(const Tensor& residual, double bound, int64_t side, const Tensor& found,
                         const Tensor& subset, const Tensor& rest) {
  constexpr const char* kOp = "find_converged";
  check_matrices(residual, side, kOp);
  check_list(found, residual, 0, kOp);
  check_list(subset, residual, 1, kOp);
  check_list(rest, residual, 1, kOp);
  const int device = residual.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(device);
  const bool early = starts_early(device);
  const SumProblem p = gram_sums(residual, list_of(subset));
  const Tensor memory =
      torch::stable::new_empty(residual, {p.x.count * p.tiling.chunks}, ScalarType::Double);
  if (p.x.count == 0) return;
  const Sums sums = sum_squares(memory, p, static_cast<int>(side), early, stream);
  launch(converged_kernel, sums, 1, 0, early, stream, bound,
         static_cast<int>(residual.size(1) - side), list_of(found), list_of(subset), list_of(rest));
}

}  // namespace optimizer
