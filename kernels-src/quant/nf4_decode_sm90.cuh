#pragma once
// From a stage's packed bytes to wgmma's left operand in registers (sm90/wgmma.cuh). Every
// weight is the codebook's value times its block's absmax in float32, rounded once.
//
// Lane l of a warp holds value l % 16 of the codebook, and a nibble names the lane to read: one
// shuffle per weight, exact in float32; product and rounding follow.

#include <cuda_bf16.h>

#include "common/mma.cuh"
#include "quant/nf4_tile_sm90.cuh"

namespace optimizer::nf4_product {

__device__ __forceinline__ float looked_up(float table, uint32_t nibble) {
  return __shfl_sync(0xffffffff, table, static_cast<int>(nibble), 16);
}

__device__ __forceinline__ uint32_t rounded_pair(float x, float y) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ float2 load_scales(uint32_t address) {
  float2 scales;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(scales.x), "=f"(scales.y)
               : "r"(address)
               : "memory");
  return scales;
}

// Four lanes hold four bytes each; lane i gets byte i of each, in the order of the lanes. Two words
// at a time share the shuffles.
class ByteTransposer {
 public:
  __device__ __forceinline__ ByteTransposer() {
    const bool upper = threadIdx.x % 4 >= 2, odd = threadIdx.x % 2 != 0;
    send_halves_ = upper ? 0x5410 : 0x7632;
    keep_first_half_ = upper ? 0x3254 : 0x5410;
    keep_second_half_ = upper ? 0x3276 : 0x7610;
    send_bytes_ = odd ? 0x6420 : 0x7531;
    keep_first_byte_ = odd ? 0x3514 : 0x5240;
    keep_second_byte_ = odd ? 0x3716 : 0x7260;
  }

  __device__ __forceinline__ void operator()(uint32_t& x, uint32_t& y) const {
    uint32_t other = __shfl_xor_sync(0xffffffff, __byte_perm(x, y, send_halves_), 2);
    x = __byte_perm(x, other, keep_first_half_);
    y = __byte_perm(y, other, keep_second_half_);
    other = __shfl_xor_sync(0xffffffff, __byte_perm(x, y, send_bytes_), 1);
    x = __byte_perm(x, other, keep_first_byte_);
    y = __byte_perm(y, other, keep_second_byte_);
  }

 private:
  uint32_t send_halves_, keep_first_half_, keep_second_half_;
  uint32_t send_bytes_, keep_first_byte_, keep_second_byte_;
};

template <bool kAlong, Format kFormat>
class Decoder;

// A line of a stage is a stored row with 32 bytes of the sum, swizzled by 32 bytes. ldmatrix gives
// a lane of four the four bytes of 8 elements; wgmma wants one byte of every 8, hence the
// transposer.
template <>
class Decoder<true, Format::kFourBit> {
 public:
  struct Fetched {
    uint32_t bytes[4];  // of two neighbouring columns: half of the sum, then the column
    float2 scales;
    float table;
  };

  __device__ __forceinline__ Decoder(const Arguments& p, int consumer)
      : table_(p.codebook[threadIdx.x % 16]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % kWarpgroup / 32;
    const int first = consumer * kPartColumns;
    const int line = first + pair_column<true, Format::kFourBit>(warp, lane % 8) + lane / 8 % 2;
    bytes_ = line * (kDepth / 2) + (lane / 16 ^ line / 4 % 2) * 16;
    scales_ = 4 * (first + pair_column<true, Format::kFourBit>(warp, lane / 4));
  }

  template <bool kOdd, typename Map>
  __device__ __forceinline__ void fetch(Fetched& to, const Map& at, uint32_t slot) const {
    to.table = table_;
    load_fragments<false>(to.bytes, at.packed(slot) + bytes_);
    to.scales = load_scales(at.scales(slot) + scales_);
    transpose_(to.bytes[0], to.bytes[1]);
    transpose_(to.bytes[2], to.bytes[3]);
  }

  // The 16 of the sum of a step: two bytes per column, of which the upper nibbles come first.
  template <int kStep>
  static __device__ __forceinline__ void decode(uint32_t (&a)[4], const Fetched& from) {
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      const uint32_t word = from.bytes[kStep / 2 * 2 + column];
      const float scale = column == 0 ? from.scales.x : from.scales.y;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = 8 * (kStep % 2 * 2 + i);
        const float even = looked_up(from.table, word >> (at + 4));
        const float odd = looked_up(from.table, word >> at);
        a[i * 2 + column] = rounded_pair(__fmul_rn(even, scale), __fmul_rn(odd, scale));
      }
    }
  }

 private:
  const float table_;
  uint32_t bytes_;
  uint32_t scales_;
  const ByteTransposer transpose_;
};

// A line of a stage is a stored row, one of the sum, with 64 bytes of columns, swizzled by 64
// bytes. ldmatrix transposes two bytes at a time: a lane gets two bytes of two stored rows, of
// which its warp takes one and the neighbouring warp the other.
template <>
class Decoder<false, Format::kFourBit> {
 public:
  struct Fetched {
    uint32_t bytes[8];  // of 8 of the sum each
    float2 scales[8];
    float table;
    int shift;
  };

  __device__ __forceinline__ Decoder(const Arguments& p, int consumer)
      : table_(p.codebook[threadIdx.x % 16]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % kWarpgroup / 32;
    const int chunk = consumer * (kPartColumns / 32) + warp / 2;
    bytes_ = lane * (kColumns / 2) + (chunk ^ lane / 2 % 4) * 16;
    scales_ = 4 * (consumer * kDepth + lane % 4 * 2);
    shift_ = warp % 2 * 8;
  }

  template <bool kOdd, typename Map>
  __device__ __forceinline__ void fetch(Fetched& to, const Map& at, uint32_t slot) const {
    to.table = table_;
    to.shift = shift_;
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // 32 of the sum
      uint32_t bytes[4];
      load_fragments<true>(bytes, at.packed(slot) + bytes_ + half * 32 * (kColumns / 2));
#pragma unroll
      for (int i = 0; i < 4; ++i) to.bytes[half * 4 + i] = bytes[i];
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) to.scales[i] = load_scales(at.scales(slot) + scales_ + 32 * i);
  }

  template <int kStep>
  static __device__ __forceinline__ void decode(uint32_t (&a)[4], const Fetched& from) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // 8 of the sum
      const float2 scales = from.scales[kStep * 2 + i];
      const uint32_t pair = from.bytes[kStep * 2 + i] >> from.shift;
      a[i * 2] = rounded_pair(__fmul_rn(looked_up(from.table, pair >> 4), scales.x),
                              __fmul_rn(looked_up(from.table, pair >> 20), scales.y));
      a[i * 2 + 1] = rounded_pair(__fmul_rn(looked_up(from.table, pair), scales.x),
                                  __fmul_rn(looked_up(from.table, pair >> 16), scales.y));
    }
  }

 private:
  const float table_;
  uint32_t bytes_;
  uint32_t scales_;
  int shift_;
};

}  // namespace optimizer::nf4_product
