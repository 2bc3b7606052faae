#pragma once
// 16-byte stores and read-once loads for kernels whose time is their bytes.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace optimizer {

// A read-once word: no L1 line is spent on it. volatile keeps the load where it was written; ptxas
// would otherwise sink it to its first use and leave one load in flight.
__device__ __forceinline__ uint32_t load_once(const uint32_t* address) {
  uint32_t word;
  asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(word) : "l"(address));
  return word;
}

__device__ __forceinline__ uint32_t as_bits(__nv_bfloat162 pair) {
  return *reinterpret_cast<uint32_t*>(&pair);
}
__device__ __forceinline__ uint32_t as_bits(__half2 pair) {
  return *reinterpret_cast<uint32_t*>(&pair);
}

// `Vector<out_t>::kLanes` fp32 values make 16 bytes of out_t, each rounded once to nearest even.
template <typename out_t>
struct Vector;

template <>
struct Vector<__nv_bfloat16> {
  static constexpr int kLanes = 8;
  static __device__ __forceinline__ __nv_bfloat16 round(float x) { return __float2bfloat16_rn(x); }
  static __device__ __forceinline__ uint4 pack(const float (&x)[kLanes]) {
    return make_uint4(
        as_bits(__floats2bfloat162_rn(x[0], x[1])), as_bits(__floats2bfloat162_rn(x[2], x[3])),
        as_bits(__floats2bfloat162_rn(x[4], x[5])), as_bits(__floats2bfloat162_rn(x[6], x[7])));
  }
};

template <>
struct Vector<__half> {
  static constexpr int kLanes = 8;
  static __device__ __forceinline__ __half round(float x) { return __float2half_rn(x); }
  static __device__ __forceinline__ uint4 pack(const float (&x)[kLanes]) {
    return make_uint4(
        as_bits(__floats2half2_rn(x[0], x[1])), as_bits(__floats2half2_rn(x[2], x[3])),
        as_bits(__floats2half2_rn(x[4], x[5])), as_bits(__floats2half2_rn(x[6], x[7])));
  }
};

template <>
struct Vector<float> {
  static constexpr int kLanes = 4;
  static __device__ __forceinline__ float round(float x) { return x; }
  static __device__ __forceinline__ uint4 pack(const float (&x)[kLanes]) {
    return make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
                      __float_as_uint(x[3]));
  }
};

}  // namespace optimizer
