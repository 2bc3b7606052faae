// CUDA backend of norm_factors: sums of squares, and one block per matrix that turns them into a
// factor.

#include <cmath>
#include <type_traits>

#include "products/normalize/normalize.cuh"

namespace optimizer::normalization {

// The kernels of norm_factors: sums of squares of chunks, and one block per matrix that turns its
// sums into a factor. Of a symmetric matrix only the tiles that reach its diagonal or lie above it
// are read.

// Tiles whose loads are under way at once: 32 KiB per block, of which a multiprocessor takes three.
template <typename T>
constexpr int kTogether = 8 / static_cast<int>(sizeof(T));
constexpr int kSumBlocks = 3;

struct SumProblem {
  Matrices x;
  Tiling tiling;
  bool triangle;
  double prefactor;
  double* sums;  // (x.count, chunks)
};

template <typename T, bool kTransposed>
__device__ __forceinline__ void load_tile(Neighbours<T, kTransposed>& into, const SumProblem& p,
                                          const Piece& piece, const T* x, Spot at) {
  const T* const corner = x + at.row * piece.row + at.col * piece.col;
  if (whole_lines(piece, at, p.x.rows, p.x.cols)) {
    into.load_lines(corner, kTransposed ? piece.col : piece.row);
  } else {
    into.load(corner, piece, at, p.x.rows, p.x.cols);
  }
}

// Squares of 4 x 4 neighbours in one order whatever their layout. Those of float16 are exact in
// float32 and in range, and a row of them is rounded by 2^-24 at most three times: a conversion to
// double is as slow as four of its additions.
template <typename T>
struct Rows {
  double sum[kSide] = {};

  template <typename Elements>
  __device__ __forceinline__ void add(const Elements& x) {
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
      if constexpr (std::is_same_v<T, __half>) {
        float row = 0.0f;
#pragma unroll
        for (int j = 0; j < kSide; ++j) row = fmaf(x.value(i, j), x.value(i, j), row);
        sum[i] += row;
      } else {
#pragma unroll
        for (int j = 0; j < kSide; ++j) {
          const auto value = static_cast<double>(x.value(i, j));
          sum[j] = fma(value, value, sum[j]);
        }
      }
    }
  }
  __device__ __forceinline__ double total() const { return (sum[0] + sum[1]) + (sum[2] + sum[3]); }
};

// The sum of a thread's squares in a chunk; elements above the diagonal of a triangle count twice,
// those on it once.
template <typename T, bool kTransposed, bool kTriangle>
__device__ __forceinline__ double sum_chunk(const SumProblem& p, const Piece& piece, const T* x,
                                            int64_t chunk) {
  constexpr int kBatch = kTogether<T>;
  const Spot in_tile = p.tiling.of_thread(threadIdx.x);
  const int64_t last = p.tiling.last(chunk);
  Rows<T> squares;
  double diagonal = 0.0;
  for (int64_t tile = p.tiling.first(chunk); tile < last; tile += kBatch) {
    Neighbours<T, kTransposed> elements[kBatch];
    Spot at[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      at[k] = kTriangle ? p.tiling.of_upper_tile(tile + k, in_tile)
                        : p.tiling.of_tile(tile + k, in_tile);
      const bool needed = tile + k < last && (!kTriangle || at[k].row <= at[k].col);
      elements[k] = {};
      if (needed) load_tile(elements[k], p, piece, x, at[k]);
    }
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (kTriangle && at[k].row == at[k].col) {
#pragma unroll
        for (int i = 0; i < kSide; ++i) {
#pragma unroll
          for (int j = i; j < kSide; ++j) {
            const auto value = static_cast<double>(elements[k].value(i, j));
            double& sum = i == j ? diagonal : squares.sum[j];
            sum = fma(value, value, sum);
          }
        }
      } else if (!kTriangle || at[k].row < at[k].col) {
        squares.add(elements[k]);
      }
    }
  }
  return kTriangle ? fma(2.0, squares.total(), diagonal) : squares.total();
}

template <typename T, bool kTriangle>
__device__ __forceinline__ double sum_chunk(const SumProblem& p, int64_t matrix, int64_t chunk) {
  const Piece& piece = p.x.piece[0];
  const T* const x = static_cast<const T*>(piece.data) + matrix * piece.batch;
  return piece.layout == Layout::kColumns ? sum_chunk<T, true, kTriangle>(p, piece, x, chunk)
                                          : sum_chunk<T, false, kTriangle>(p, piece, x, chunk);
}

// Over the block, in thread 0
__device__ __forceinline__ double block_sum(double value) {
  __shared__ double warps[kWarps];
  value = warp_sum(value);
  __syncthreads();  // what the last call left has been read
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  return threadIdx.x == 0 ? sum_of(warps) : 0.0;
}

template <typename T, bool kTriangle>
__global__ void __launch_bounds__(kThreads, kSumBlocks)
    sum_kernel(const __grid_constant__ SumProblem p) {
  let_next_kernel_begin();
  wait_for_kernel_before();
  const auto chunks = static_cast<uint32_t>(p.tiling.chunks);
  const uint32_t matrix = blockIdx.x / chunks, chunk = blockIdx.x - matrix * chunks;
  const double sum = block_sum(sum_chunk<T, kTriangle>(p, matrix, chunk));
  if (threadIdx.x == 0) p.sums[blockIdx.x] = sum;
}

// factors, roots (x.count,): what would scale each matrix to the norm 1 / prefactor, and its square
// root.
static __global__ void __launch_bounds__(kThreads)
    factor_kernel(const __grid_constant__ SumProblem p, float* factors, float* roots) {
  let_next_kernel_begin();
  wait_for_kernel_before();
  const double* const sums = p.sums + blockIdx.x * p.tiling.chunks;
  double sum = 0.0;
  for (int64_t k = threadIdx.x; k < p.tiling.chunks; k += kThreads) sum += __ldcg(sums + k);
  sum = block_sum(sum);
  if (threadIdx.x == 0) {
    const Factor factor = factor_of(sum, p.prefactor);
    const double value = static_cast<double>(factor.power) * factor.rest;
    factors[blockIdx.x] = static_cast<float>(value);
    roots[blockIdx.x] = static_cast<float>(sqrt(value));
  }
}

}  // namespace optimizer::normalization

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
  const Tensor sums = allocate(x, {blocks}, ScalarType::Double);
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
