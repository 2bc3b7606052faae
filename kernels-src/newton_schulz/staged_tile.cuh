#pragma once
// A finished 16-bit tile in shared memory, on its way to both triangles of the output.

#include "newton_schulz/mma.cuh"
#include "newton_schulz/scalars.cuh"
#include "newton_schulz/symmetric_matmul.h"

namespace optimizer::symmetric {

__device__ __forceinline__ bool stores_vectors(const Matrices& x, int64_t batches) {
  return x.col == 1 && reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && x.row % 8 == 0 &&
         (batches == 1 || x.batch % 8 == 0);
}

// Rows are one chunk longer than the tile, and chunks are XORed with the row / 8: the fragments of
// the accumulators, whole rows, and 8 columns x 32 rows transposed all go without bank conflicts.
template <int kRows, int kCols>
struct StagedTile {
  static constexpr int kChunks = kCols / 8;
  static constexpr int kBytes = kRows * (kCols + 8) * 2;
  static_assert(kRows % 32 == 0 && kChunks % 8 == 0);

  char* shared;

  // Of the chunk of 8 columns
  static __device__ __forceinline__ int offset(int row, int chunk) {
    return (row * (kChunks + 1) + (chunk ^ (row >> 3 & 3) << 1)) * 16;
  }
  __device__ __forceinline__ uint32_t* pair(int row, int col) const {
    return reinterpret_cast<uint32_t*>(shared + offset(row, col / 8) + col % 8 * 2);
  }

  // C into shared memory. What lies outside of C is not read, and left as it is.
  template <typename T, int kThreads>
  __device__ __forceinline__ void read(const Problem& p, const TileOrigin& origin) const {
    const T* c = static_cast<const T*>(p.c.data) + origin.matrix * p.c.batch;
    const bool vectors = stores_vectors(p.c, p.batches);
    for (int i = static_cast<int>(threadIdx.x); i < kRows * kChunks; i += kThreads) {
      const int row = i / kChunks, chunk = i % kChunks;
      const int r = origin.row + row, first = origin.col + chunk * 8;
      if (r >= p.m) break;
      const T* source = c + r * p.c.row + first * p.c.col;
      char* target = shared + offset(row, chunk);
      if (vectors && first + 8 <= p.m) {
        *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(source);
      } else {
        for (int e = 0; e < 8 && first + e < p.m; ++e) {
          reinterpret_cast<T*>(target)[e] = source[e * p.c.col];
        }
      }
    }
  }

  // Columns from the diagonal on
  template <typename T, int kThreads>
  __device__ __forceinline__ void write(const Problem& p, const TileOrigin& origin) const {
    T* out = static_cast<T*>(const_cast<void*>(p.out.data)) + origin.matrix * p.out.batch;
    const bool vectors = stores_vectors(p.out, p.batches);
    for (int i = static_cast<int>(threadIdx.x); i < kRows * kChunks; i += kThreads) {
      const int row = i / kChunks, chunk = i % kChunks;
      const int r = origin.row + row, first = origin.col + chunk * 8;
      if (r >= p.m) break;
      T* target = out + r * p.out.row + first * p.out.col;
      const char* source = shared + offset(row, chunk);
      if (vectors && first >= r && first + 8 <= p.m) {
        *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(source);
      } else {
        for (int e = max(0, r - first); e < 8 && first + e < p.m; ++e) {
          target[e * p.out.col] = reinterpret_cast<const T*>(source)[e];
        }
      }
    }
  }

  // The transpose, up to the diagonal. A warp turns 8 columns x 32 rows; lane l then holds rows
  // 8 (l % 4) to 8 (l % 4) + 7 of column l / 4, because matrix i is given the row pair 2 i of every
  // group of 8.
  template <typename T, int kThreads>
  __device__ __forceinline__ void write_mirrored(const Problem& p, const TileOrigin& origin) const {
    T* out = static_cast<T*>(const_cast<void*>(p.out.data)) + origin.matrix * p.out.batch;
    const bool vectors = stores_vectors(p.out, p.batches);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int given = lane % 8 / 2 * 8 + lane / 8 * 2 + lane % 2;
    for (int i = static_cast<int>(threadIdx.x) / 32; i < kRows / 32 * kChunks; i += kThreads / 32) {
      const int block = i % (kRows / 32) * 32, chunk = i / (kRows / 32);
      uint32_t words[4];
      load_fragments<true>(words, shared_address(shared) + offset(block + given, chunk));
      const int r = origin.col + chunk * 8 + lane / 4;  // row of the mirrored tile
      const int first = origin.row + block + lane % 4 * 8;
      if (r >= p.m) continue;
      T* target = out + r * p.out.row + first * p.out.col;
      if (vectors && first + 8 <= min(r, p.m)) {
        *reinterpret_cast<uint4*>(target) = make_uint4(words[0], words[1], words[2], words[3]);
      } else {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const auto bits = static_cast<uint16_t>(words[e / 2] >> e % 2 * 16);
          if (first + e < min(r, p.m)) {
            *reinterpret_cast<uint16_t*>(target + e * p.out.col) = bits;
          }
        }
      }
    }
  }
};

// Accumulators -> rounded values, in the place of C.
template <typename T, int kM, int kN, typename Staged>
__device__ __forceinline__ void finish(const Staged& staged, const float (&sum)[kM][kN][4],
                                       const Scalars& scalars, const TileOrigin& origin, int row,
                                       int col) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int i = 0; i < kM; ++i) {
#pragma unroll
    for (int j = 0; j < kN; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = row + 16 * i + 8 * half + lane / 4, c = col + 8 * j + lane % 4 * 2;
        uint32_t* place = staged.pair(r, c);
        alignas(4) T old[2] = {};
        if (scalars.reads_c) *reinterpret_cast<uint32_t*>(old) = *place;
        const int ahead = origin.col + c - origin.row - r;  // columns beyond the diagonal
        *place = pack(rounded<T>(scalars(sum[i][j][2 * half], widened(old[0]), ahead == 0)),
                      rounded<T>(scalars(sum[i][j][2 * half + 1], widened(old[1]), ahead == -1)));
      }
    }
  }
}

}  // namespace optimizer::symmetric
