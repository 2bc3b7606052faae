#pragma once
// From a stage's packed bytes to wgmma's left operand in registers (nf4_wgmma_sm90.cuh).
//
// Lane l of a warp holds value l % 16 of the codebook and a nibble names the lane to read: one
// shuffle per weight, exact in float32. Then one product with the block's absmax and one rounding,
// of two weights at a time.

#include <cuda_bf16.h>

#include "grouped_lora/nf4_tile_sm90.cuh"
#include "newton_schulz/mma.cuh"

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

template <bool kAlong>
class Decoder;

// A line of a stage is a stored row with 32 bytes of the sum, swizzled by 32 bytes. ldmatrix gives
// a lane of four the four bytes of 8 elements; wgmma wants one byte of every 8, hence the
// transposer.
template <>
class Decoder<true> {
 public:
  __device__ __forceinline__ Decoder(float table, int consumer) : table_(table) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % kWarpgroup / 32;
    const int first = consumer * kPartColumns;
    const int line = first + pair_column<true>(warp, lane % 8) + lane / 8 % 2;
    bytes_ = line * (kDepth / 2) + (lane / 16 ^ line / 4 % 2) * 16;
    scales_ = 4 * (first + pair_column<true>(warp, lane / 4));
  }

  __device__ __forceinline__ void operator()(uint32_t (&a)[kSteps][4], const SharedMap& at,
                                             uint32_t slot) const {
    uint32_t bytes[4];
    symmetric::load_fragments<false>(bytes, at.packed(slot) + bytes_);
    const float2 scales = load_scales(at.scales(slot) + scales_);
    transpose_(bytes[0], bytes[1]);
    transpose_(bytes[2], bytes[3]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // half of the sum, then the column of the pair
      const float scale = i % 2 == 0 ? scales.x : scales.y;
#pragma unroll
      for (int j = 0; j < 4; ++j) {  // 8 of the sum
        const float even = looked_up(table_, bytes[i] >> (8 * j + 4));
        const float odd = looked_up(table_, bytes[i] >> (8 * j));
        a[i / 2 * 2 + j / 2][j % 2 * 2 + i % 2] =
            rounded_pair(__fmul_rn(even, scale), __fmul_rn(odd, scale));
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
class Decoder<false> {
 public:
  __device__ __forceinline__ Decoder(float table, int consumer) : table_(table) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % kWarpgroup / 32;
    const int chunk = consumer * (kPartColumns / 32) + warp / 2;
    bytes_ = lane * (kColumns / 2) + (chunk ^ lane / 2 % 4) * 16;
    scales_ = 4 * (consumer * kDepth + lane % 4 * 2);
    shift_ = warp % 2 * 8;
  }

  __device__ __forceinline__ void operator()(uint32_t (&a)[kSteps][4], const SharedMap& at,
                                             uint32_t slot) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // 32 of the sum
      uint32_t bytes[4];
      symmetric::load_fragments<true>(bytes, at.packed(slot) + bytes_ + half * 32 * (kColumns / 2));
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // 8 of the sum
        const float2 scales = load_scales(at.scales(slot) + scales_ + 4 * (half * 32 + i * 8));
        const uint32_t pair = bytes[i] >> shift_;
        uint32_t (&step)[4] = a[half * 2 + i / 2];
        step[i % 2 * 2] = rounded_pair(__fmul_rn(looked_up(table_, pair >> 4), scales.x),
                                       __fmul_rn(looked_up(table_, pair >> 20), scales.y));
        step[i % 2 * 2 + 1] = rounded_pair(__fmul_rn(looked_up(table_, pair), scales.x),
                                           __fmul_rn(looked_up(table_, pair >> 16), scales.y));
      }
    }
  }

 private:
  const float table_;
  uint32_t bytes_;
  uint32_t scales_;
  int shift_;
};

}  // namespace optimizer::nf4_product
