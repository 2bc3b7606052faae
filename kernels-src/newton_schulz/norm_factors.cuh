#pragma once
// The kernels of norm_factors: sums of squares of chunks, and one block per matrix that turns its
// sums into a factor. Of a symmetric matrix only the tiles that reach its diagonal or lie above it
// are read. find_well_conditioned and find_converged (find_subsets.cu) share the sums.

#include "newton_schulz/normalize.cuh"
#include "newton_schulz/subset.h"

namespace optimizer::normalization {

// Tiles whose loads are under way at once: 32 KiB per block, of which a multiprocessor takes three.
template <typename T>
constexpr int kTogether = 8 / static_cast<int>(sizeof(T));
constexpr int kSumBlocks = 3;

struct SumProblem {
  Matrices x;
  Tiling tiling;
  bool triangle;
  double prefactor;
  double* sums;           // (x.count, chunks)
  double* traces;         // likewise, of a triangle; or null
  const int32_t* subset;  // see subset.h; sums are of its matrices in its order; or null: of all
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

// The sum of a thread's squares in a chunk; elements above the diagonal of a triangle count twice,
// those on it are added to its trace.
template <typename T, bool kTransposed, bool kTriangle>
__device__ __forceinline__ double sum_chunk(const SumProblem& p, const Piece& piece, const T* x,
                                            int64_t chunk, double& trace) {
  constexpr int kBatch = kTogether<T>;
  const Spot in_tile = p.tiling.of_thread(threadIdx.x);
  const int64_t last = p.tiling.last(chunk);
  Squares squares;
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
            if (i == j) trace += value;
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
__global__ void __launch_bounds__(kThreads, kSumBlocks)
    sum_kernel(const __grid_constant__ SumProblem p) {
  __shared__ double warps[kWarps];
  let_next_start();
  wait_for_launch_before();
  const auto chunks = static_cast<uint32_t>(p.tiling.chunks);
  const uint32_t place = blockIdx.x / chunks, chunk = blockIdx.x - place * chunks;
  if (place >= matrices_in(p.subset, p.x.count)) return;
  const int64_t matrix = matrix_at(p.subset, place);
  const Piece& piece = p.x.piece[0];
  const T* const x = static_cast<const T*>(piece.data) + matrix * piece.batch;
  double trace = 0.0;
  const double mine = piece.layout == Layout::kColumns
                          ? sum_chunk<T, true, kTriangle>(p, piece, x, chunk, trace)
                          : sum_chunk<T, false, kTriangle>(p, piece, x, chunk, trace);
  const double sum = warp_sum(mine);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) p.sums[blockIdx.x] = sum_of(warps);
  if (p.traces == nullptr) return;
  __syncthreads();  // `warps` has been read
  trace = warp_sum(trace);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = trace;
  __syncthreads();
  if (threadIdx.x == 0) p.traces[blockIdx.x] = sum_of(warps);
}

// factors, roots (x.count,): what would scale each matrix to the norm 1 / prefactor, and its square
// root.
static __global__ void __launch_bounds__(kThreads)
    factor_kernel(const __grid_constant__ SumProblem p, float* factors, float* roots) {
  __shared__ double warps[kWarps];
  let_next_start();
  wait_for_launch_before();
  const double* const sums = p.sums + blockIdx.x * p.tiling.chunks;
  double sum = 0.0;
  for (int64_t k = threadIdx.x; k < p.tiling.chunks; k += kThreads) sum += __ldcg(sums + k);
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    const Factor factor = factor_of(sum_of(warps), p.prefactor);
    const double value = static_cast<double>(factor.power) * factor.rest;
    factors[blockIdx.x] = static_cast<float>(value);
    roots[blockIdx.x] = static_cast<float>(sqrt(value));
  }
}

}  // namespace optimizer::normalization
