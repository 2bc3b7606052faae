// CUDA backend of find_well_conditioned and find_converged: which Gram matrices a short polynomial
// may serve, and which of those it did serve. A host that asked would have to wait, so the answers
// are subsets (subset.h) that the products read. Both run the sums of norm_factors, then one block
// that knows every matrix.

#include <cmath>

#include "newton_schulz/norm_factors.cuh"
#include "newton_schulz/normalize_launch.cuh"

namespace optimizer {
namespace {

using namespace normalization;

constexpr int kFactors = 4;  // per matrix, see find_well_conditioned

struct Sums {
  const double* squares;  // (matrices, chunks)
  const double* traces;   // or null
  int64_t chunks;
  int count;
  int side;  // of the matrices that zeros fill up
};

// By one warp, the same in every lane and in any batch.
__device__ __forceinline__ double total_of(const double* sums, int64_t chunks, int64_t place) {
  double total = 0.0;
  for (int64_t k = threadIdx.x % 32; k < chunks; k += 32) {
    total += __ldcg(sums + place * chunks + k);
  }
  return warp_sum(total);
}

// Numbers below count whose mark is `wanted` -> subset. By the whole block, whose marks are
// written.
__device__ __forceinline__ void gather_marked(const int32_t* marks, int count, int32_t wanted,
                                              int32_t* subset) {
  __shared__ int warps[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int before = 0;
  for (int first = 0; first < count; first += kThreads) {
    const int number = first + static_cast<int>(threadIdx.x);
    const bool marked = number < count && marks[number] == wanted;
    const uint32_t votes = __ballot_sync(~0u, marked);
    if (lane == 0) warps[warp] = __popc(votes);
    __syncthreads();
    int place = before + __popc(votes & ((1u << lane) - 1));
    for (int other = 0; other < kWarps; ++other) {
      if (other < warp) place += warps[other];
      before += warps[other];
    }
    if (marked) subset[1 + place] = number;
    __syncthreads();
  }
  if (threadIdx.x == 0) subset[0] = before;
}

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

void check_matrices(const Tensor& x, int64_t side, const char* op) {
  STD_TORCH_CHECK(x.dim() == 3 && x.size(1) == x.size(2) && has_upper_tiling(x.size(1)) &&
                      x.size(1) <= kLargestSide && x.size(0) < INT32_MAX,
                  op, ": the matrices must be (G, m, m) with m > 128");
  STD_TORCH_CHECK(side > 0 && side <= x.size(1), op, ": side must be 1 to m, got ", side);
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Half, op, ": the matrices must be float16");
}

void check_list(const Tensor& list, const Tensor& x, int64_t longer, const char* op) {
  STD_TORCH_CHECK(list.dim() == 1 && list.size(0) == x.size(0) + longer && list.is_contiguous() &&
                      list.scalar_type() == ScalarType::Int && list.device() == x.device(),
                  op,
                  ": found must be (G,), subsets (1 + G,), contiguous, int32, on the matrices' "
                  "device");
}

// Sums of squares of the matrices of a subset, or of all and their traces.
Sums sum_squares(const Tensor& memory, const SumProblem& given, int side, bool early,
                 cudaStream_t stream) {
  SumProblem p = given;
  p.sums = static_cast<double*>(memory.data_ptr());
  if (p.subset == nullptr) p.traces = p.sums + p.x.count * p.tiling.chunks;
  launch(sum_kernel<__half, true>, p, p.x.count * p.tiling.chunks, 0, early, stream);
  return {p.sums, p.traces, p.tiling.chunks, static_cast<int>(p.x.count), side};
}

SumProblem describe(const Tensor& x, const int32_t* subset) {
  SumProblem p{};
  p.x.rows = p.x.cols = static_cast<int>(x.size(1));
  p.x.count = x.size(0);
  p.x.pieces = 1;
  p.x.piece[0] = piece_of(x, 0, sizeof(__half));
  p.triangle = true;
  p.subset = subset;
  constexpr int64_t kBatch = kTogether<__half>;
  const int64_t chunk = tiling_of(p.x.rows, p.x.cols, 0).chunk;
  p.tiling = upper_tiling_of(p.x.rows, quotient_up(chunk, kBatch) * kBatch);
  STD_TORCH_CHECK(p.tiling.tiles <= INT32_MAX, "find: a matrix has too many elements");
  return p;
}

cudaStream_t current_stream(int device) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return static_cast<cudaStream_t>(stream);
}

int32_t* list_of(const Tensor& x) { return static_cast<int32_t*>(x.data_ptr()); }

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
  const SumProblem p = describe(r, nullptr);
  const Tensor memory =
      torch::stable::new_empty(r, {2 * p.x.count * p.tiling.chunks}, ScalarType::Double);
  if (p.x.count == 0) return;
  const Sums sums = sum_squares(memory, p, static_cast<int>(side), early, stream);
  launch(well_conditioned_kernel, sums, 1, 0, early, stream, prefactor, spread,
         static_cast<float*>(factors.data_ptr()), list_of(found), list_of(subset));
}

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
  const SumProblem p = describe(residual, list_of(subset));
  const Tensor memory =
      torch::stable::new_empty(residual, {p.x.count * p.tiling.chunks}, ScalarType::Double);
  if (p.x.count == 0) return;
  const Sums sums = sum_squares(memory, p, static_cast<int>(side), early, stream);
  launch(converged_kernel, sums, 1, 0, early, stream, bound,
         static_cast<int>(residual.size(1) - side), list_of(found), list_of(subset), list_of(rest));
}

}  // namespace optimizer
