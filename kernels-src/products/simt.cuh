#pragma once
// float32 by fused multiply-adds, no TF32: a square tile, a square of sums per thread, two slots of
// shared memory with k outermost. The next slot's elements wait in registers during the products.

#include "common/scalars.cuh"
#include "products/symmetric_matmul.h"

namespace optimizer::symmetric {

constexpr int kSimtThreads = 256;

template <int kSide>
struct SimtTile {
  static constexpr int kSums = kSide / 16;              // per thread and direction
  static constexpr int kDepth = kSide == 128 ? 8 : 16;  // one 16-byte load per thread and operand
  static constexpr int kPitch = kSide + 4;              // floats; keeps groups of 4 on 16 bytes
  static constexpr int kSlot = kDepth * kPitch;         // floats of one operand
  static constexpr int kStagedPitch = kSide + 1;        // columns are read without bank conflicts
  static constexpr int kSharedBytes =
      4 * (4 * kSlot > kSide * kStagedPitch ? 4 * kSlot : kSide * kStagedPitch);
};

template <int kSide, Layout kLayout>
struct SimtOperand {
  static constexpr int kDepth = SimtTile<kSide>::kDepth;
  static constexpr int kElements = kSide * kDepth / kSimtThreads;
  static constexpr int kWidth = kLayout == Layout::kAny ? 1 : 4;
  static constexpr int kLoads = kElements / kWidth;
  static constexpr int kPitch = SimtTile<kSide>::kPitch;

  const float* source;  // first row of the tile
  int64_t row_stride;
  int64_t k_stride;
  int rows;  // of the matrix from there on
  float held[kElements];

  __device__ __forceinline__ SimtOperand(const Matrices& x, int64_t matrix, int first, int m)
      : source(static_cast<const float*>(x.data) + matrix * x.batch + first * x.row),
        row_stride(x.row),
        k_stride(x.col),
        rows(m - first) {}

  // Row and k of the first of kWidth elements
  __device__ __forceinline__ int2 place(int load) const {
    const int index = static_cast<int>(threadIdx.x) + load * kSimtThreads;
    if constexpr (kLayout == Layout::kColumns) {
      return make_int2(index % (kSide / 4) * 4, index / (kSide / 4));
    } else if constexpr (kLayout == Layout::kRows) {
      return make_int2(index / (kDepth / 4), index % (kDepth / 4) * 4);
    } else {
      return k_stride <= row_stride ? make_int2(index / kDepth, index % kDepth)
                                    : make_int2(index % kSide, index / kSide);
    }
  }

  __device__ __forceinline__ void fetch(int from, int k) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int2 at = place(i);
      const float* address = source + at.x * row_stride + (from + at.y) * k_stride;
      constexpr int kAlongRow = kLayout == Layout::kColumns ? 1 : 0;
      const int left = kAlongRow ? rows - at.x : k - from - at.y;
      const bool inside = at.x < rows && from + at.y < k;
      if (kWidth == 4 && inside && left >= 4) {
        const float4 x = *reinterpret_cast<const float4*>(address);
        held[i * kWidth] = x.x;
        held[i * kWidth + 1 % kWidth] = x.y;
        held[i * kWidth + 2 % kWidth] = x.z;
        held[i * kWidth + 3 % kWidth] = x.w;
      } else {
#pragma unroll
        for (int e = 0; e < kWidth; ++e) held[i * kWidth + e] = inside && e < left ? address[e] : 0;
      }
    }
  }

  __device__ __forceinline__ void keep(float* slot) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int2 at = place(i);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        const int row = at.x + (kLayout == Layout::kColumns ? e : 0);
        const int depth = at.y + (kLayout == Layout::kColumns ? 0 : e);
        slot[depth * kPitch + row] = held[i * kWidth + e];
      }
    }
  }
};

// Where sum number `index` of thread coordinate `at` (0 to 15) lies in the tile
__device__ __forceinline__ int simt_place(int at, int index) {
  return index / 4 * 64 + at * 4 + index % 4;
}

template <int kSide>
__device__ __forceinline__ void simt_multiply(
    float (&sum)[SimtTile<kSide>::kSums][SimtTile<kSide>::kSums], const float* a, const float* b) {
  constexpr int kSums = SimtTile<kSide>::kSums;
  const int row = static_cast<int>(threadIdx.x) / 16, col = static_cast<int>(threadIdx.x) % 16;
#pragma unroll
  for (int k = 0; k < SimtTile<kSide>::kDepth; ++k) {
    float x[kSums], y[kSums];
#pragma unroll
    for (int g = 0; g < kSums; g += 4) {
      const int line = k * SimtTile<kSide>::kPitch;
      *reinterpret_cast<float4*>(x + g) =
          *reinterpret_cast<const float4*>(a + line + simt_place(row, g));
      *reinterpret_cast<float4*>(y + g) =
          *reinterpret_cast<const float4*>(b + line + simt_place(col, g));
    }
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
#pragma unroll
      for (int j = 0; j < kSums; ++j) sum[i][j] = fmaf(x[i], y[j], sum[i][j]);
    }
  }
}

// The sums, staged in shared memory, to both triangles. Neighbouring lanes write neighbours.
template <int kSide>
__device__ __forceinline__ void simt_write(const Problem& p, const TileOrigin& origin,
                                           const float* staged) {
  constexpr int kPitch = SimtTile<kSide>::kStagedPitch;
  float* out = static_cast<float*>(const_cast<void*>(p.out.data)) + origin.matrix * p.out.batch;
  for (int i = static_cast<int>(threadIdx.x); i < kSide * kSide; i += kSimtThreads) {
    const int line = i / kSide, at = i % kSide;
    const int row = origin.row + line, col = origin.col + at;
    if (row <= col && col < p.m) {
      out[row * p.out.row + col * p.out.col] = staged[line * kPitch + at];
    }
    const int first = origin.row + at, second = origin.col + line;
    if (first < second && second < p.m) {
      out[second * p.out.row + first * p.out.col] = staged[at * kPitch + line];
    }
  }
}

template <int kSide, Layout kLayout>
__global__ void __launch_bounds__(kSimtThreads, kSide == 128 ? 1 : 2)
    simt_kernel(const Problem p, uint32_t first_matrix) {
  extern __shared__ __align__(128) char shared[];
  constexpr int kSlot = SimtTile<kSide>::kSlot, kSums = SimtTile<kSide>::kSums;
  constexpr int kDepth = SimtTile<kSide>::kDepth;
  auto* slots = reinterpret_cast<float*>(shared);
  TileOrigin origin = TriangularSchedule::of(p.m, kSide, kSide).locate(blockIdx.x);
  origin.matrix += first_matrix;
  SimtOperand<kSide, kLayout> a(p.a, origin.matrix, origin.row, p.m);
  SimtOperand<kSide, kLayout> b(p.b, origin.matrix, origin.col, p.m);
  float sum[kSums][kSums] = {};
  a.fetch(0, p.k);
  b.fetch(0, p.k);
  for (int from = 0, slot = 0; from < p.k; from += kDepth, slot ^= 1) {
    float* const a_slot = slots + 2 * slot * kSlot;
    a.keep(a_slot);
    b.keep(a_slot + kSlot);
    __syncthreads();  // two slots: nobody still reads the one that is written next
    a.fetch(from + kDepth, p.k);
    b.fetch(from + kDepth, p.k);
    simt_multiply<kSide>(sum, a_slot, a_slot + kSlot);
  }
  __syncthreads();

  const Scalars scalars(p, origin.matrix, p.c.data != nullptr);
  const float* c = static_cast<const float*>(p.c.data) + origin.matrix * p.c.batch;
  const int row = static_cast<int>(threadIdx.x) / 16, col = static_cast<int>(threadIdx.x) % 16;
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
#pragma unroll
    for (int j = 0; j < kSums; ++j) {
      const int line = simt_place(row, i), at = simt_place(col, j);
      const int r = origin.row + line, s = origin.col + at;
      const bool reads = scalars.reads_c && r < p.m && s < p.m;
      const float old = reads ? c[r * p.c.row + s * p.c.col] : 0.0f;
      slots[line * SimtTile<kSide>::kStagedPitch + at] = scalars(sum[i][j], old, r == s);
    }
  }
  __syncthreads();
  simt_write<kSide>(p, origin, slots);
}

}  // namespace optimizer::symmetric
