#pragma once
// The kernels of normalize: sums of squares, then factors and scaled elements.
//
// A thread holds 4 x 4 neighbours, read as four rows or as four columns of 4 elements, whichever is
// contiguous: a transposed view needs no transposition and gives the same sums. Squares are added
// in double: exact, and in range for every float32.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "common/packs.cuh"
#include "newton_schulz/normalize.h"

namespace optimizer::normalization {

constexpr int kWarps = kThreads / 32;
constexpr int kBlocksPerSm = 4;  // 64 registers: two tiles in flight per thread
constexpr int kPieces = 64;      // per launch

enum class Layout : uint8_t {
  kRows,     // rows are contiguous, 4 elements of a thread are one aligned word
  kColumns,  // columns are
  kAny,      // element by element
};

// (b, rows, cols) of the input; strides in elements.
struct Piece {
  const void* data;
  int64_t batch;
  int64_t row;
  int64_t col;
  int64_t first;  // number of its first matrix
  Layout layout;
};

struct Problem {
  Piece piece[kPieces];
  int pieces;
  int rows;  // of the input
  int cols;
  int out_rows;
  int out_cols;
  bool vector;       // rows of out start on words of 4 elements
  int64_t filled;    // matrices in the pieces; those behind them are zero
  int64_t matrices;  // of out
  int64_t base;      // the first matrix of a launch
  Tiling input;      // of the sums
  Tiling output;     // of what is written
  double* partial;   // (filled, input.chunks)
  void* out;         // (matrices, out_rows, out_cols), contiguous
  double prefactor;

  __device__ __forceinline__ const Piece& piece_of(int64_t matrix) const {
    int low = 0, high = pieces - 1;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (piece[middle].first <= matrix) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return piece[low];
  }
};

// A launch may start while the one before it runs (capability 9.0): it waits here.
__device__ __forceinline__ void wait_for_launch_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// 4 x 4 neighbours of a matrix; zeros behind its edges.
template <typename T, Layout kLayout>
class Neighbours {
 public:
  __device__ __forceinline__ void load(const T* x, const Piece& piece, Spot at, int rows,
                                       int cols) {
    const T* const corner = x + at.row * piece.row + at.col * piece.col;
    if (kLayout != Layout::kAny && at.row + kSide <= rows && at.col + kSide <= cols) {
      const int64_t stride = kLayout == Layout::kRows ? piece.row : piece.col;
#pragma unroll
      for (int k = 0; k < kSide; ++k) load_words(corner + k * stride, line_[k].word);
      return;
    }
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
#pragma unroll
      for (int j = 0; j < kSide; ++j) {
        const bool inside = at.row + i < rows && at.col + j < cols;
        const T* const address = corner + i * piece.row + j * piece.col;
        set_bits(i, j, inside ? *reinterpret_cast<const Bits*>(address) : Bits{0});
      }
    }
  }
  __device__ __forceinline__ float value(int i, int j) const {
    return kLayout == Layout::kColumns ? line_[j].value(i) : line_[i].value(j);
  }

 private:
  using Bits = typename Number<T>::Bits;
  __device__ __forceinline__ void set_bits(int i, int j, Bits bits) {
    kLayout == Layout::kColumns ? line_[j].set_bits(i, bits) : line_[i].set_bits(j, bits);
  }

  Pack<T, kSide> line_[kSide];
};

// Over the block, the same in every thread
__device__ __forceinline__ double block_sum(double value) {
  __shared__ double warps[kWarps];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(~0u, value, distance);
  }
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  double total = 0.0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) total += warps[warp];
  return total;
}

// visit(elements, spot) for a thread's elements in every tile of a chunk, in order. The loads of a
// tile are under way while the one before is visited, those of the first during begin().
template <Layout kLayout, typename T, typename Begin, typename Visit>
__device__ __forceinline__ void walk(const Problem& p, const Piece& piece, const T* x,
                                     const Tiling& tiling, int64_t chunk, Begin begin,
                                     Visit visit) {
  const Spot in_tile = tiling.of_thread(threadIdx.x);
  const int64_t last = tiling.last(chunk);
  Neighbours<T, kLayout> even, odd;
  const auto load = [&](Neighbours<T, kLayout>& into, int64_t tile) {
    if (tile < last) into.load(x, piece, tiling.of_tile(tile, in_tile), p.rows, p.cols);
  };
  int64_t tile = tiling.first(chunk);
  load(even, tile);
  begin();
  for (;;) {
    load(odd, tile + 1);
    visit(even, tiling.of_tile(tile, in_tile));
    if (++tile >= last) return;
    load(even, tile + 1);
    visit(odd, tiling.of_tile(tile, in_tile));
    if (++tile >= last) return;
  }
}

// visit(x, layout) with a matrix's elements, and its layout as a type.
template <Layout kLayout>
struct LayoutTag {
  static constexpr Layout value = kLayout;
};

template <typename T, typename Visit>
__device__ __forceinline__ void with_layout(const Piece& piece, int64_t matrix, Visit visit) {
  const T* const x = static_cast<const T*>(piece.data) + (matrix - piece.first) * piece.batch;
  switch (piece.layout) {
    case Layout::kRows:
      return visit(x, LayoutTag<Layout::kRows>{});
    case Layout::kColumns:
      return visit(x, LayoutTag<Layout::kColumns>{});
    case Layout::kAny:
      return visit(x, LayoutTag<Layout::kAny>{});
  }
}

// One block per chunk of a matrix.
template <typename T>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    sum_kernel(const __grid_constant__ Problem p) {
  let_next_start();
  const auto chunks = static_cast<uint32_t>(p.input.chunks);
  const uint32_t in_launch = blockIdx.x / chunks, chunk = blockIdx.x - in_launch * chunks;
  const int64_t matrix = p.base + in_launch;
  const Piece& piece = p.piece_of(matrix);
  double sum[kSide] = {};
  with_layout<T>(piece, matrix, [&](const T* x, auto layout) {
    walk<decltype(layout)::value>(
        p, piece, x, p.input, chunk, [] {},
        [&](const auto& block, Spot) {
#pragma unroll
          for (int i = 0; i < kSide; ++i) {
#pragma unroll
            for (int j = 0; j < kSide; ++j) {
              const auto value = static_cast<double>(block.value(i, j));
              sum[j] = fma(value, value, sum[j]);
            }
          }
        });
  });
  const double total = block_sum((sum[0] + sum[1]) + (sum[2] + sum[3]));
  if (threadIdx.x == 0) p.partial[matrix * chunks + chunk] = total;
  wait_for_launch_before();  // who waits for the end of this one counts on the one before, too
}

// The same in every block of a matrix: its partial sums are added in one order.
__device__ __forceinline__ Factor matrix_factor(const Problem& p, int64_t matrix) {
  wait_for_launch_before();
  const double* const partial = p.partial + matrix * p.input.chunks;
  double sum = 0.0;
  for (int64_t k = threadIdx.x; k < p.input.chunks; k += kThreads) sum += __ldcg(partial + k);
  sum = block_sum(sum);
  __shared__ Factor factor;
  if (threadIdx.x == 0) factor = factor_of(sum, p.prefactor);
  __syncthreads();
  return factor;
}

// value(i, j), rounded once, for those of 4 x 4 neighbours that lie in out; `whole`: all of them
// do, and their rows are aligned words.
template <typename Out, typename Value>
__device__ __forceinline__ void store(const Problem& p, Out* out, Spot at, bool whole,
                                      Value value) {
  using Bits = typename Number<Out>::Bits;
  Out* const corner = out + int64_t{at.row} * p.out_cols + at.col;
  if (whole) {
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
      Pack<Out, kSide> pack;
#pragma unroll
      for (int j = 0; j < kSide; ++j) pack.set(j, value(i, j));
      store_words(corner + int64_t{i} * p.out_cols, pack.word);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kSide; ++i) {
    Bits* const row = reinterpret_cast<Bits*>(corner + int64_t{i} * p.out_cols);
#pragma unroll
    for (int j = 0; j < kSide; ++j) {
      const bool inside = at.row + i < p.out_rows && at.col + j < p.out_cols;
      if (inside) row[j] = Number<Out>::bits(value(i, j));
    }
  }
}

// One block per chunk of out, from its end: what was read last is still in L2.
template <typename T, typename Out>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    scale_kernel(const __grid_constant__ Problem p) {
  let_next_start();
  const uint32_t number = gridDim.x - 1 - blockIdx.x;
  const auto chunks = static_cast<uint32_t>(p.output.chunks);
  const uint32_t in_launch = number / chunks, chunk = number - in_launch * chunks;
  const int64_t matrix = p.base + in_launch;
  Out* const out = static_cast<Out*>(p.out) + matrix * p.out_rows * p.out_cols;
  if (matrix >= p.filled) {
    wait_for_launch_before();
    const Spot in_tile = p.output.of_thread(threadIdx.x);
    for (int64_t tile = p.output.first(chunk); tile < p.output.last(chunk); ++tile) {
      const Spot at = p.output.of_tile(tile, in_tile);
      const bool whole = p.vector && at.row + kSide <= p.out_rows && at.col + kSide <= p.out_cols;
      store(p, out, at, whole, [](int, int) { return 0.0f; });
    }
    return;
  }
  const Piece& piece = p.piece_of(matrix);
  with_layout<T>(piece, matrix, [&](const T* x, auto layout) {
    Factor factor{};
    walk<decltype(layout)::value>(
        p, piece, x, p.output, chunk, [&] { factor = matrix_factor(p, matrix); },
        [&](const auto& block, Spot at) {
          const auto scaled = [&](int i, int j) {
            return block.value(i, j) * factor.power * factor.rest;
          };
          const bool whole = at.row + kSide <= p.rows && at.col + kSide <= p.cols;
          if (whole) return store(p, out, at, p.vector, scaled);
          // A matrix of NaN keeps the zeros around it.
          store(p, out, at, false, [&](int i, int j) {
            return at.row + i < p.rows && at.col + j < p.cols ? scaled(i, j) : 0.0f;
          });
        });
  });
}

// factors, roots (filled,): what would scale each matrix to the norm 1 / prefactor, and its square
// root. One block per matrix.
static __global__ void __launch_bounds__(kThreads)
    factor_kernel(const __grid_constant__ Problem p, float* factors, float* roots) {
  let_next_start();
  const Factor factor = matrix_factor(p, blockIdx.x);
  if (threadIdx.x == 0) {
    const double value = static_cast<double>(factor.power) * factor.rest;
    factors[blockIdx.x] = static_cast<float>(value);
    roots[blockIdx.x] = static_cast<float>(sqrt(value));
  }
}

}  // namespace optimizer::normalization
