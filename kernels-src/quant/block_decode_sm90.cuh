#pragma once
// From a stage's bytes of MXFP4 or FP8 to wgmma's left operand in registers (sm90/wgmma.cuh), as
// nf4_decode_sm90.cuh does it for a codebook.
//
// An e2m1 code is a bfloat16 with its bits at the ends of exponent and sign, 2^126 times too small;
// a scale is an exponent. Both factors are bfloat16, and products with powers of two are those of
// float32, rounded once. e4m3 becomes float16, which holds it, by an instruction of capability 8.9.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/mma.cuh"
#include "quant/nf4_decode_sm90.cuh"

namespace optimizer::nf4_product {

__device__ __forceinline__ uint32_t times(uint32_t x, uint32_t y) {
  const __nv_bfloat162 product = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&x),
                                         *reinterpret_cast<const __nv_bfloat162*>(&y));
  return *reinterpret_cast<const uint32_t*>(&product);
}

// 2^(byte - 127) of the low bytes of both halves, whose other bytes are zero: subnormal of 0, NaN
// of 255. Both have the highest bit of the mantissa beside the bits of the byte.
__device__ __forceinline__ uint32_t powers_of_two(uint32_t bytes) {
  const uint32_t others = (bytes + 0x00010001u) & 0x00fe00feu;  // zero of 0 and of 255
  return bytes << 7 | ((0x01000100u - others) & 0x01000100u) >> 2;
}

// Codes in bits 6 to 8 and signs in bit 15 of both halves, times a pair of scales.
__device__ __forceinline__ uint32_t scaled_codes(uint32_t codes, uint32_t scales) {
  constexpr uint32_t kUnit = 0x7e807e80u;  // 2^126
  return times(times(codes, kUnit), scales);
}

__device__ __forceinline__ uint2 load_words(uint32_t address) {
  uint2 words;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
               : "=r"(words.x), "=r"(words.y)
               : "r"(address)
               : "memory");
  return words;
}

// A word of scales starts on 4 bytes, and those of 64 elements are two bytes in one of its halves:
// in which, the numbers of the row and of the 64 elements say. Rows of an expert begin on an even
// one, since N is a multiple of 8.
__device__ __forceinline__ bool rows_alternate(const Arguments& p) {
  return p.row_blocks / 2 % 2 != 0;
}

// Lines lie as those of NF4 do; the 32 elements of a half share a scale.
template <>
class Decoder<true, Format::kMxfp4> {
 public:
  struct Fetched {
    uint32_t bytes[4];   // of two neighbouring columns: half of the sum, then the column
    uint32_t scales[4];  // twice each, in the same order
  };

  __device__ __forceinline__ Decoder(const Arguments& p, int consumer)
      : alternate_(rows_alternate(p)) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % kWarpgroup / 32;
    const int first = consumer * kPartColumns;
    const int line = first + pair_column<true, Format::kMxfp4>(warp, lane % 8) + lane / 8 % 2;
    bytes_ = line * (kDepth / 2) + (lane / 16 ^ line / 4 % 2) * 16;
    scales_ = 4 * (first + pair_column<true, Format::kMxfp4>(warp, lane / 4));
  }

  template <bool kOdd, typename Map>
  __device__ __forceinline__ void fetch(Fetched& to, const Map& at, uint32_t slot) const {
    load_fragments<false>(to.bytes, at.packed(slot) + bytes_);
    const uint2 words = load_words(at.scales(slot) + scales_);
    transpose_(to.bytes[0], to.bytes[1]);
    transpose_(to.bytes[2], to.bytes[3]);
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      const bool upper = column == 0 ? kOdd : kOdd != alternate_;
      const uint32_t word = column == 0 ? words.x : words.y;
      // Both halves of the sum, each in the low byte of 16 bits
      const uint32_t pair = __byte_perm(word, 0, upper ? 0x4342 : 0x4140);
      const uint32_t scales = powers_of_two(pair);
      to.scales[column] = __byte_perm(scales, 0, 0x1010);
      to.scales[2 + column] = __byte_perm(scales, 0, 0x3232);
    }
  }

  // The 16 of the sum of a step: two bytes per column, of which the lower nibbles come first.
  template <int kStep>
  static __device__ __forceinline__ void decode(uint32_t (&a)[4], const Fetched& from) {
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      const uint32_t word = from.bytes[kStep / 2 * 2 + column];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t byte = kStep % 2 * 2 + i;
        // The byte in bits 8 to 15; shifted by a nibble in bits 24 to 31
        const uint32_t both = __byte_perm(word, word >> 4, (4 + byte) << 12 | byte << 4);
        const uint32_t codes = (both & 0x07000700u) >> 2 | (both & 0x08000800u) << 4;
        a[i * 2 + column] = scaled_codes(codes, from.scales[kStep / 2 * 2 + column]);
      }
    }
  }

 private:
  const bool alternate_;
  uint32_t bytes_;
  uint32_t scales_;
  const ByteTransposer transpose_;
};

template <>
class Decoder<false, Format::kMxfp4> {
 public:
  struct Fetched {
    uint32_t bytes[8];   // of 8 of the sum each
    uint32_t scales[8];  // of two of the sum
    int shift;
  };

  __device__ __forceinline__ Decoder(const Arguments& p, int consumer) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % kWarpgroup / 32;
    const int chunk = consumer * (kPartColumns / 32) + warp / 2;
    bytes_ = lane * (kColumns / 2) + (chunk ^ lane / 2 % 4) * 16;
    scales_ = 4 * (consumer * kDepth + lane % 4 * 2);
    shift_ = warp % 2 * 8;
    const uint32_t even = consumer % 2 * 2 + warp / 2;
    const uint32_t odd = (consumer + rows_alternate(p)) % 2 * 2 + warp / 2;
    select_ = even | (4 + odd) << 8;
  }

  template <bool kOdd, typename Map>
  __device__ __forceinline__ void fetch(Fetched& to, const Map& at, uint32_t slot) const {
    to.shift = shift_;
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // 32 of the sum
      uint32_t bytes[4];
      load_fragments<true>(bytes, at.packed(slot) + bytes_ + half * 32 * (kColumns / 2));
#pragma unroll
      for (int i = 0; i < 4; ++i) to.bytes[half * 4 + i] = bytes[i];
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint2 words = load_words(at.scales(slot) + scales_ + 32 * i);
      to.scales[i] = powers_of_two(__byte_perm(words.x, words.y, select_) & 0x00ff00ffu);
    }
  }

  // Of two bytes, whose lower nibbles are the first column.
  template <int kStep>
  static __device__ __forceinline__ void decode(uint32_t (&a)[4], const Fetched& from) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // 8 of the sum
      const uint32_t scales = from.scales[kStep * 2 + i];
      const uint32_t pair = from.bytes[kStep * 2 + i] >> from.shift;
      const uint32_t low = (pair & 0x00070007u) << 6 | (pair & 0x00080008u) << 12;
      const uint32_t high = (pair & 0x00700070u) << 2 | (pair & 0x00800080u) << 8;
      a[i * 2] = scaled_codes(low, scales);
      a[i * 2 + 1] = scaled_codes(high, scales);
    }
  }

 private:
  uint32_t bytes_;
  uint32_t scales_;
  uint32_t select_;  // a byte of the word of an even row, and one of the next
  int shift_;
};

// Two e4m3 bytes in the lower half of a word times their scales, rounded once.
__device__ __forceinline__ uint32_t scaled_bytes(uint32_t bytes, float first, float second) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(bytes)));
  const float2 values = __half22float2(*reinterpret_cast<const __half2*>(&halves));
  return rounded_pair(__fmul_rn(values.x, first), __fmul_rn(values.y, second));
}

// A line of a stage is a stored row with 64 bytes of the sum, swizzled by 64 bytes. ldmatrix gives
// lane i of four the bytes 4 i to 4 i + 3 of 16, wgmma wants the pairs i and i + 4 of 8 of these.
template <>
class Decoder<true, Format::kFp8> {
 public:
  struct Fetched {
    uint32_t bytes[8];  // of two neighbouring columns: 16 of the sum, then the column
    float2 scales;
  };

  __device__ __forceinline__ Decoder(const Arguments&, int consumer) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % kWarpgroup / 32;
    const int first = consumer * kPartColumns;
    const int line = first + pair_column<true, Format::kFp8>(warp, lane % 8) + lane / 8 % 2;
    bytes_ = line * kDepth + (lane / 16 ^ line / 2 % 4) * 16;
    scales_ = 4 * (first + pair_column<true, Format::kFp8>(warp, lane / 4));
    from_ = lane % 4 / 2;
    select_ = lane % 2 == 0 ? 0x5410 : 0x7632;
  }

  template <bool kOdd, typename Map>
  __device__ __forceinline__ void fetch(Fetched& to, const Map& at, uint32_t slot) const {
    to.scales = load_scales(at.scales(slot) + scales_);
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // 32 of the sum: chunks 0 and 1, or 2 and 3
      uint32_t bytes[4];
      load_fragments<false>(bytes, at.packed(slot) + (bytes_ ^ half * 32));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t lower = __shfl_sync(0xffffffff, bytes[i], from_, 4);
        const uint32_t upper = __shfl_sync(0xffffffff, bytes[i], 2 + from_, 4);
        to.bytes[half * 4 + i] = __byte_perm(lower, upper, select_);
      }
    }
  }

  template <int kStep>
  static __device__ __forceinline__ void decode(uint32_t (&a)[4], const Fetched& from) {
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      const uint32_t word = from.bytes[kStep * 2 + column];
      const float scale = column == 0 ? from.scales.x : from.scales.y;
      a[column] = scaled_bytes(word, scale, scale);
      a[2 + column] = scaled_bytes(word >> 16, scale, scale);
    }
  }

 private:
  uint32_t bytes_;
  uint32_t scales_;
  uint32_t select_;
  int from_;
};

// A line of a stage is a stored row, one of the sum, with 128 bytes of columns, swizzled by 128
// bytes. ldmatrix transposes two bytes at a time: a lane gets its two columns of two stored rows.
template <>
class Decoder<false, Format::kFp8> {
 public:
  struct Fetched {
    uint32_t bytes[8];  // of 8 of the sum each
    float2 scales[8];
  };

  __device__ __forceinline__ Decoder(const Arguments&, int consumer) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % kWarpgroup / 32;
    const int chunk = consumer * (kPartColumns / 16) + warp;
    bytes_ = lane * kColumns + (chunk ^ lane % 8) * 16;
    scales_ = 4 * (consumer * kDepth + lane % 4 * 2);
  }

  template <bool kOdd, typename Map>
  __device__ __forceinline__ void fetch(Fetched& to, const Map& at, uint32_t slot) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // 32 of the sum
      uint32_t bytes[4];
      load_fragments<true>(bytes, at.packed(slot) + bytes_ + half * 32 * kColumns);
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
      const uint32_t columns = __byte_perm(from.bytes[kStep * 2 + i], 0, 0x3120);
      a[i * 2] = scaled_bytes(columns, scales.x, scales.y);
      a[i * 2 + 1] = scaled_bytes(columns >> 16, scales.x, scales.y);
    }
  }

 private:
  uint32_t bytes_;
  uint32_t scales_;
};

}  // namespace optimizer::nf4_product
