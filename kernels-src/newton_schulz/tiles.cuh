#pragma once
// Which tile of which matrix a thread block computes, and how its float32 sums become output.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "newton_schulz/symmetric_matmul.h"

namespace optimizer::symmetric {

// Columns of tiles that are walked together, so that the operands of blocks in flight stay in L2.
constexpr uint32_t kBand = 8;

struct TileOrigin {
  int64_t matrix;
  int row;
  int col;
};

__host__ __device__ constexpr uint32_t triangle(uint32_t n) { return n * (n + 1) / 2; }

// Largest j with triangle(j) <= t. The float root is off by one at most.
__device__ __forceinline__ uint32_t triangle_root(uint32_t t) {
  auto j = static_cast<uint32_t>((sqrt(8.0 * t + 1.0) - 1.0) * 0.5);
  while (triangle(j) > t) --j;
  while (triangle(j + 1) <= t) ++j;
  return j;
}

// Squares of kCols x kCols on and above the diagonal, each cut into kCols / kRows tiles. `t` counts
// the squares band by band: first the rows above the band's triangle, then the triangle itself.
template <int kRows, int kCols>
__device__ __forceinline__ TileOrigin locate(uint32_t block, uint32_t squares_per_side) {
  constexpr uint32_t kParts = kCols / kRows;
  const uint32_t per_matrix = triangle(squares_per_side) * kParts;
  const uint32_t matrix = block / per_matrix;
  const uint32_t part = (block - matrix * per_matrix) % kParts;
  const uint32_t t = (block - matrix * per_matrix) / kParts;
  const uint32_t first = triangle_root(t) / kBand * kBand;
  const uint32_t width = min(kBand, squares_per_side - first);
  const uint32_t rest = t - triangle(first);
  uint32_t row, col;
  if (rest < first * width) {
    row = rest / width;
    col = first + rest - row * width;
  } else {
    const uint32_t inner = rest - first * width;
    const uint32_t j = triangle_root(inner);
    row = first + inner - triangle(j);
    col = first + j;
  }
  return {matrix, static_cast<int>(row * kCols + part * kRows), static_cast<int>(col * kCols)};
}

template <typename T>
__device__ __forceinline__ T rounded(float x);
template <>
__device__ __forceinline__ float rounded<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half rounded<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 rounded<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
__device__ __forceinline__ float widened(float x) { return x; }
__device__ __forceinline__ float widened(__half x) { return __half2float(x); }
__device__ __forceinline__ float widened(__nv_bfloat16 x) { return __bfloat162float(x); }

// alpha sum + beta c + diag on the diagonal, in float32
struct Scalars {
  float alpha;
  float beta;
  float diag;
  bool reads_c;

  __device__ __forceinline__ explicit Scalars(const Problem& p)
      : alpha(p.alpha), beta(p.beta), diag(p.diag), reads_c(p.c.data != nullptr) {}

  __device__ __forceinline__ float operator()(float sum, float c, bool on_diagonal) const {
    float value = alpha * sum;
    if (reads_c) value = fmaf(beta, c, value);
    return on_diagonal && diag != 0.0f ? value + diag : value;
  }
};

}  // namespace optimizer::symmetric
