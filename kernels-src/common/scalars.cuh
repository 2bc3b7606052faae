#pragma once
// How float32 sums become output: scale^alpha_power alpha sum + scale^beta_power beta c, + diag on
// the diagonal, rounded once.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace optimizer {

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

// Of one matrix. The operations are named, so that every kernel rounds alike.
class Scalars {
 public:
  // p: a problem with alpha, beta, diag, the scales of its matrices and their powers.
  template <typename Problem>
  __device__ __forceinline__ Scalars(const Problem& p, int64_t matrix, bool reads_c)
      : Scalars(p, Scale{scale_of(p, matrix)}, reads_c) {}
  // Where the scale was loaded before, so that nobody waits for it here.
  template <typename Problem>
  static __device__ __forceinline__ Scalars with_scale(const Problem& p, float scale,
                                                       bool reads_c) {
    return Scalars(p, Scale{scale}, reads_c);
  }
  template <typename Problem>
  static __device__ __forceinline__ float scale_of(const Problem& p, int64_t matrix) {
    return p.scale == nullptr ? 1.0f : p.scale[matrix];
  }

  __device__ __forceinline__ float scaled(float sum, float c) const {
    const float value = __fmul_rn(alpha_, sum);
    return reads_c ? __fmaf_rn(beta_, c, value) : value;
  }
  __device__ __forceinline__ float with_diagonal(float value, bool on_diagonal) const {
    return on_diagonal && diag_ != 0.0f ? __fadd_rn(value, diag_) : value;
  }
  __device__ __forceinline__ float operator()(float sum, float c, bool on_diagonal) const {
    return with_diagonal(scaled(sum, c), on_diagonal);
  }

  const bool reads_c;

 private:
  struct Scale {
    float value;
  };
  template <typename Problem>
  __device__ __forceinline__ Scalars(const Problem& p, Scale scale, bool reads_c)
      : reads_c(reads_c),
        alpha_(times_power(p.alpha, scale.value, p.alpha_power)),
        beta_(times_power(p.beta, scale.value, p.beta_power)),
        diag_(p.diag) {}

  static __device__ __forceinline__ float times_power(float x, float scale, int power) {
#pragma unroll 1
    for (int i = 0; i < power; ++i) x = __fmul_rn(scale, x);
    return x;
  }

  float alpha_;
  float beta_;
  float diag_;
};

}  // namespace optimizer
