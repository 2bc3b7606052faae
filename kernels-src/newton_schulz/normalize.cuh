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

// The second launch may start while the first runs (capability 9.0): it waits here.
__device__ __forceinline__ void wait_for_sums() {
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

// Of a thread's elements in the tiles of a chunk
template <typename T, Layout kLayout>
__device__ __forceinline__ double chunk_squares(const Problem& p, const Piece& piece, const T* x,
                                                int64_t chunk) {
  const Spot in_tile = p.input.of_thread(threadIdx.x);
  const int64_t last = p.input.last(chunk);
  int64_t tile = p.input.first(chunk);
  double sum[kSide] = {};
  Neighbours<T, kLayout> next;
  next.load(x, piece, p.input.of_tile(tile, in_tile), p.rows, p.cols);
  for (; tile < last; ++tile) {
    const Neighbours<T, kLayout> block = next;
    if (tile + 1 < last) {
      next.load(x, piece, p.input.of_tile(tile + 1, in_tile), p.rows, p.cols);
    }
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
#pragma unroll
      for (int j = 0; j < kSide; ++j) {
        const auto value = static_cast<double>(block.value(i, j));
        sum[j] = fma(value, value, sum[j]);
      }
    }
  }
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
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
  const uint32_t matrix = blockIdx.x / chunks, chunk = blockIdx.x - matrix * chunks;
  const Piece& piece = p.piece_of(matrix);
  double sum = 0.0;
  with_layout<T>(piece, matrix, [&](const T* x, auto layout) {
    sum = chunk_squares<T, decltype(layout)::value>(p, piece, x, chunk);
  });
  sum = block_sum(sum);
  if (threadIdx.x == 0) p.partial[blockIdx.x] = sum;
}

// The same in every block of a matrix: its partial sums are added in one order.
__device__ __forceinline__ Factor matrix_factor(const Problem& p, int64_t matrix) {
  wait_for_sums();
  const double* const partial = p.partial + matrix * p.input.chunks;
  double sum = 0.0;
  for (int64_t k = threadIdx.x; k < p.input.chunks; k += kThreads) sum += __ldcg(partial + k);
  sum = block_sum(sum);
  __shared__ Factor factor;
  if (threadIdx.x == 0) factor = factor_of(sum, p.prefactor);
  __syncthreads();
  return factor;
}

// value(i, j) for 4 x 4 neighbours of out, rounded once.
template <typename Out, typename Value>
__device__ __forceinline__ void store(const Problem& p, Out* out, Spot at, Value value) {
  if (at.col >= p.out_cols) return;
#pragma unroll
  for (int i = 0; i < kSide; ++i) {
    if (at.row + i >= p.out_rows) return;
    Pack<Out, kSide> pack{};
#pragma unroll
    for (int j = 0; j < kSide; ++j) pack.set(j, value(i, j));
    Out* const address = out + int64_t{at.row + i} * p.out_cols + at.col;
    if (p.vector) {
      store_words(address, pack.word);
    } else {
#pragma unroll
      for (int j = 0; j < kSide; ++j) {
        if (at.col + j < p.out_cols) {
          reinterpret_cast<typename Number<Out>::Bits*>(address)[j] = pack.bits(j);
        }
      }
    }
  }
}

template <typename T, typename Out, Layout kLayout>
__device__ __forceinline__ void scale_chunk(const Problem& p, const Piece& piece, const T* x,
                                            Out* out, int64_t matrix, int64_t chunk) {
  const Spot in_tile = p.output.of_thread(threadIdx.x);
  const int64_t last = p.output.last(chunk);
  int64_t tile = p.output.first(chunk);
  Neighbours<T, kLayout> next;
  next.load(x, piece, p.output.of_tile(tile, in_tile), p.rows, p.cols);
  const Factor factor = matrix_factor(p, matrix);
  for (; tile < last; ++tile) {
    const Neighbours<T, kLayout> block = next;
    const Spot at = p.output.of_tile(tile, in_tile);
    if (tile + 1 < last) {
      next.load(x, piece, p.output.of_tile(tile + 1, in_tile), p.rows, p.cols);
    }
    store(p, out, at, [&](int i, int j) {
      // A matrix of NaN keeps the zeros around it.
      const bool inside = at.row + i < p.rows && at.col + j < p.cols;
      return inside ? block.value(i, j) * factor.power * factor.rest : 0.0f;
    });
  }
}

// One block per chunk of out, from its end: what was read last is still in L2.
template <typename T, typename Out>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    scale_kernel(const __grid_constant__ Problem p) {
  const uint32_t number = gridDim.x - 1 - blockIdx.x;
  const auto chunks = static_cast<uint32_t>(p.output.chunks);
  const uint32_t matrix = number / chunks, chunk = number - matrix * chunks;
  Out* const out = static_cast<Out*>(p.out) + int64_t{matrix} * p.out_rows * p.out_cols;
  if (matrix >= p.filled) {
    wait_for_sums();
    const Spot in_tile = p.output.of_thread(threadIdx.x);
    for (int64_t tile = p.output.first(chunk); tile < p.output.last(chunk); ++tile) {
      store(p, out, p.output.of_tile(tile, in_tile), [](int, int) { return 0.0f; });
    }
    return;
  }
  const Piece& piece = p.piece_of(matrix);
  with_layout<T>(piece, matrix, [&](const T* x, auto layout) {
    scale_chunk<T, Out, decltype(layout)::value>(p, piece, x, out, matrix, chunk);
  });
}

}  // namespace optimizer::normalization
