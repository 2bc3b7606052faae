#pragma once
// Packs: L neighbours of one operand in registers, moved 16 (or 8) bytes at a time.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "common/portable.h"

namespace optimizer {

// volatile keeps a load where it was written: all loads of a thread are under way before the first
// use. No L1 line is spent on bytes that are read once.
__device__ __forceinline__ void load_words(const void* address, uint32_t (&w)[4]) {
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
               : "l"(address));
}
__device__ __forceinline__ void load_words(const void* address, uint32_t (&w)[2]) {
  asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
               : "=r"(w[0]), "=r"(w[1])
               : "l"(address));
}
__device__ __forceinline__ void store_words(void* address, const uint32_t (&w)[4]) {
  *static_cast<uint4*>(address) = make_uint4(w[0], w[1], w[2], w[3]);
}
__device__ __forceinline__ void store_words(void* address, const uint32_t (&w)[2]) {
  *static_cast<uint2*>(address) = make_uint2(w[0], w[1]);
}

// The numbers of one element type: bits to float32 and back, rounded once to nearest even.
template <typename T>
struct Number;

template <>
struct Number<float> {
  using Bits = uint32_t;
  static __device__ __forceinline__ float value(Bits bits) { return __uint_as_float(bits); }
  static __device__ __forceinline__ Bits bits(float x) { return __float_as_uint(x); }
};

template <>
struct Number<__half> {
  using Bits = uint16_t;
  static __device__ __forceinline__ float value(Bits bits) {
    return __half2float(__ushort_as_half(bits));
  }
  static __device__ __forceinline__ Bits bits(float x) {
    return __half_as_ushort(__float2half_rn(x));
  }
};

template <>
struct Number<__nv_bfloat16> {
  using Bits = uint16_t;
  static __device__ __forceinline__ float value(Bits bits) {
    return __uint_as_float(static_cast<uint32_t>(bits) << 16);
  }
  static __device__ __forceinline__ Bits bits(float x) {
    return __bfloat16_as_ushort(__float2bfloat16_rn(x));
  }
};

template <>
struct Number<int16_t> {
  using Bits = uint16_t;
};

template <typename T, int L>
struct Pack {
  static constexpr int kWords = L * static_cast<int>(sizeof(T)) / 4;
  using Bits = typename Number<T>::Bits;
  uint32_t word[kWords];

  __device__ __forceinline__ Bits bits(int lane) const {
    if constexpr (sizeof(T) == 4) return word[lane];
    return static_cast<Bits>(word[lane / 2] >> (16 * (lane % 2)));
  }
  // The neighbour in a word stays: lanes may be set while others still wait to be read.
  __device__ __forceinline__ void set_bits(int lane, Bits value) {
    if constexpr (sizeof(T) == 4) {
      word[lane] = value;
    } else {
      word[lane / 2] = __byte_perm(word[lane / 2], value, lane % 2 == 0 ? 0x3254 : 0x5410);
    }
  }
  __device__ __forceinline__ float value(int lane) const { return Number<T>::value(bits(lane)); }
  __device__ __forceinline__ void set(int lane, float x) { set_bits(lane, Number<T>::bits(x)); }

  // Elements [0, valid) of `address`; lanes behind them hold zeros.
  __device__ __forceinline__ void load(const void* address, int valid) {
    if (valid >= L) return load_words(address, word);
#pragma unroll
    for (int lane = 0; lane < L; ++lane) {
      set_bits(lane, lane < valid ? static_cast<const Bits*>(address)[lane] : Bits{0});
    }
  }
  __device__ __forceinline__ void store(void* address, int valid) const {
    if (valid >= L) return store_words(address, word);
#pragma unroll
    for (int lane = 0; lane < L; ++lane) {
      if (lane < valid) static_cast<Bits*>(address)[lane] = bits(lane);
    }
  }
};

// Neighbours per thread: 16 bytes of the widest operand.
template <typename... T>
constexpr int kLanes = ((sizeof(T) == 2) && ...) ? 8 : 4;

// 16-byte stores and read-once loads for kernels whose time is their bytes.

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
