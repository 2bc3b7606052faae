#pragma once
// What normalize and norm_factors share: a thread's elements and their squares.
//
// A thread holds 4 x 4 neighbours, read as four rows or as four columns of 4 elements, whichever is
// contiguous: a transposed view needs no transposition and gives the same sums. Squares are added
// in double: exact, and in range for every float32.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "common/launch.cuh"
#include "common/vector_io.cuh"
#include "products/normalize/normalize.h"

namespace optimizer::normalization {

constexpr int kWarps = kThreads / 32;
constexpr int kPieces = 64;  // per launch

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

struct Matrices {
  Piece piece[kPieces];
  int pieces;
  int rows;
  int cols;
  int64_t count;

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

// 4 x 4 neighbours of a matrix, as four contiguous lines of 4: rows, or columns if kTransposed.
template <typename T, bool kTransposed>
struct Neighbours {
  using Bits = typename Number<T>::Bits;
  Pack<T, kSide> line[kSide];

  // The lines at `corner`, which are aligned and lie in the matrix as a whole
  __device__ __forceinline__ void load_lines(const T* corner, int64_t stride) {
#pragma unroll
    for (int k = 0; k < kSide; ++k) load_words(corner + k * stride, line[k].word);
  }
  // Element by element; zeros behind the edges
  __device__ __forceinline__ void load(const T* corner, const Piece& piece, Spot at, int rows,
                                       int cols) {
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
#pragma unroll
      for (int j = 0; j < kSide; ++j) {
        const bool inside = at.row + i < rows && at.col + j < cols;
        const T* const address = corner + i * piece.row + j * piece.col;
        const Bits bits = inside ? *reinterpret_cast<const Bits*>(address) : Bits{0};
        kTransposed ? line[j].set_bits(i, bits) : line[i].set_bits(j, bits);
      }
    }
  }
  __device__ __forceinline__ float value(int i, int j) const {
    return kTransposed ? line[j].value(i) : line[i].value(j);
  }
};

__device__ __forceinline__ bool whole_lines(const Piece& piece, Spot at, int rows, int cols) {
  return piece.layout != Layout::kAny && at.row + kSide <= rows && at.col + kSide <= cols;
}

// A thread's sum of squares; its elements come in one order whatever their layout.
struct Squares {
  double sum[kSide] = {};

  template <typename Elements>
  __device__ __forceinline__ void add(const Elements& x) {
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
#pragma unroll
      for (int j = 0; j < kSide; ++j) {
        const auto value = static_cast<double>(x.value(i, j));
        sum[j] = fma(value, value, sum[j]);
      }
    }
  }
  __device__ __forceinline__ double total() const { return (sum[0] + sum[1]) + (sum[2] + sum[3]); }
};

// Over a warp, the same in every lane
__device__ __forceinline__ double warp_sum(double value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(~0u, value, distance);
  }
  return value;
}

__device__ __forceinline__ double sum_of(const double (&warps)[kWarps]) {
  double total = 0.0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) total += warps[warp];
  return total;
}

// How the host describes matrices to the kernels of normalize.cuh.

// `element`: bytes. torch gives a side of one element whatever stride.
inline Piece piece_of(const Tensor& x, int64_t first, int64_t element) {
  Piece piece{x.data_ptr(), x.stride(0), x.stride(1), x.stride(2), first, Layout::kAny};
  if (x.size(0) == 1) piece.batch = 0;
  if (x.size(1) == 1) piece.row = 0;
  if (x.size(2) == 1) piece.col = 0;
  const bool aligned =
      reinterpret_cast<uintptr_t>(piece.data) % (kSide * element) == 0 && piece.batch % kSide == 0;
  if (aligned && piece.col == 1 && piece.row % kSide == 0) piece.layout = Layout::kRows;
  if (aligned && piece.row == 1 && piece.col % kSide == 0) piece.layout = Layout::kColumns;
  return piece;
}

}  // namespace optimizer::normalization
