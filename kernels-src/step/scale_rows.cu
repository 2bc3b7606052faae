// scale_rows: rows of matrices scaled in place, by the factor of their matrix (Muon+, arXiv
// 2602.21545) or each to norm 1, by no more than that factor (MuonEq, arXiv 2603.28254).
//
// Bound by its bytes: x read and written, 8 per element of float32. A block has a row; what it
// reads of the row a second time comes from a cache. Squares are added in double and in one order,
// so that a row has the same bits in any batch.

#include <cfloat>

#include "step/multi_tensor.cuh"

namespace optimizer {
namespace {

// visit(value) -> value for every element of a row that this thread has, in order
template <typename T, bool kVector, typename Visit>
__device__ __forceinline__ void for_elements(T* row, int64_t columns, bool write, Visit visit) {
  using Bits = typename Number<T>::Bits;
  if constexpr (kVector) {
    constexpr int L = kLanes<T>;
    for (int64_t at = int64_t{threadIdx.x} * L; at < columns; at += int64_t{kThreads} * L) {
      Pack<T, L> pack;
      pack.load(row + at, L);
#pragma unroll
      for (int lane = 0; lane < L; ++lane) pack.set(lane, visit(pack.value(lane)));
      if (write) pack.store(row + at, L);
    }
  } else {
    auto* const bits = reinterpret_cast<Bits*>(row);
    for (int64_t at = threadIdx.x; at < columns; at += kThreads) {
      const float value = visit(Number<T>::value(bits[at]));
      if (write) bits[at] = Number<T>::bits(value);
    }
  }
}

// The sum over the block, in every thread
__device__ __forceinline__ double block_sum(double value) {
  __shared__ double warps[kThreads / 32];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(~0u, value, distance);
  }
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  double sum = 0.0;
  for (int warp = 0; warp < kThreads / 32; ++warp) sum += warps[warp];
  return sum;
}

template <typename T, bool kVector>
__global__ void __launch_bounds__(kThreads)
    scale_kernel(T* x, int64_t rows, int64_t columns, const float* factors, bool to_norm_one) {
  T* const row = x + int64_t{blockIdx.x} * columns;
  float factor = __ldg(factors + blockIdx.x / rows);
  if (factor > FLT_MAX) factor = FLT_MAX;  // times which zeros stay zeros; NaN stays
  if (to_norm_one) {
    double squares = 0.0;
    for_elements<T, kVector>(row, columns, false, [&](float value) {
      squares = fma(static_cast<double>(value), static_cast<double>(value), squares);
      return value;
    });
    // False of a matrix with NaN, all of which shall be NaN.
    const double inverse = 1.0 / sqrt(block_sum(squares));
    if (inverse <= factor) factor = static_cast<float>(inverse);
  }
  for_elements<T, kVector>(row, columns, true, [&](float value) { return value * factor; });
}

}  // namespace

void scale_rows_cuda(const Tensor& x, const Tensor& factors, bool to_norm_one) {
  STD_TORCH_CHECK(x.dim() == 3 && x.is_contiguous(), "scale_rows: x must be contiguous (B, m, n)");
  STD_TORCH_CHECK(factors.scalar_type() == ScalarType::Float && factors.is_contiguous() &&
                      factors.dim() == 1 && factors.size(0) == x.size(0) &&
                      factors.device() == x.device(),
                  "scale_rows: factors must be (B,) float32, contiguous and on the device of x");
  const Kind kind = kind_of("scale_rows", "x", x);
  STD_TORCH_CHECK(is_float(kind), "scale_rows: x must be float32, float16 or bfloat16");
  if (x.numel() == 0) return;
  const int64_t rows = x.size(1), columns = x.size(2), blocks = x.size(0) * rows;
  STD_TORCH_CHECK(blocks <= INT32_MAX, "scale_rows: ", blocks, " rows are more than a grid");
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const cudaStream_t stream = stream_of(x);
  const auto* scales = static_cast<const float*>(factors.data_ptr());
  with_type(kind, [&](auto element) {
    using T = decltype(element);
    auto* data = static_cast<T*>(x.data_ptr());
    const bool vector = columns % kLanes<T> == 0 && reinterpret_cast<uintptr_t>(data) % 16 == 0;
    const auto kernel = vector ? scale_kernel<T, true> : scale_kernel<T, false>;
    kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(data, rows, columns, scales,
                                                                   to_norm_one);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

}  // namespace optimizer
