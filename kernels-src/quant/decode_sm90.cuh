#pragma once
// From a stage's packed bytes to wgmma's left operand in registers (sm90/wgmma.cuh): which bytes
// and scales a thread reads depends on the direction and on an element's bits, what they say on the
// format. Every weight is what its code stands for times its block's scale, rounded once.
//
// NF4, FP4: lane l of a warp holds value l % 16 of the codebook, and a nibble names the lane to
// read: one shuffle per weight, exact in float32; product and rounding follow.
//
// MXFP4: an e2m1 code is a bfloat16 with its bits at the ends of exponent and sign, 2^126 times too
// small; a scale is an exponent. Both factors are bfloat16, and products with powers of two are
// those of float32, rounded once.
//
// FP8: e4m3 becomes float16, which holds it, by an instruction of capability 8.9.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "common/mma.cuh"
#include "quant/nf4_tile_sm90.cuh"

namespace optimizer::nf4_product {

__device__ __forceinline__ uint32_t rounded_pair(float x, float y) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ uint32_t times(uint32_t x, uint32_t y) {
  const __nv_bfloat162 product = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&x),
                                         *reinterpret_cast<const __nv_bfloat162*>(&y));
  return *reinterpret_cast<const uint32_t*>(&product);
}

__device__ __forceinline__ uint32_t load_word(uint32_t address) {
  uint32_t word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}
__device__ __forceinline__ uint4 load_four_words(uint32_t address) {
  uint4 words;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "r"(address)
               : "memory");
  return words;
}
__device__ __forceinline__ uint2 load_words(uint32_t address) {
  uint2 words;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
               : "=r"(words.x), "=r"(words.y)
               : "r"(address)
               : "memory");
  return words;
}

// The bytes of a part of a stage that a thread needs. `load` asks shared memory for them, or for
// the first two steps', and `load_last` for what is missing; `arrange` exchanges them between
// lanes, behind the loads of scales.
template <bool kAlong, int kElements, int kLineBytes>  // elements per byte
class StageBytes;

// A line of a stage is a stored row with 32 bytes of the sum or twice as many, swizzled by as many
// bytes. Lane i of four needs byte i of every word of its two columns; each loads whole words, as
// four lanes that read the same ones take no longer.
template <int kLineBytes>
class StageBytes<true, 2, kLineBytes> {
 public:
  struct Fetched {
    uint4 of[2];  // 32 of the sum of each column
    uint32_t from;
  };

  __device__ __forceinline__ explicit StageBytes(int consumer) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % kWarpgroup / 32;
    const int line = consumer * kPartColumns + pair_column<true, 2>(warp, lane / 4);
    const int swizzle = kLineBytes == 32 ? line / 4 % 2 : line / 2 % 4;  // of the next line, too
    from_ = line * kLineBytes + swizzle * 16;
  }

  __device__ __forceinline__ void load(Fetched& to, uint32_t stage, int half) const {
    to.from = stage + (from_ ^ half * 32);
    load_both(to, to.from);
  }
  __device__ __forceinline__ void load_last(Fetched& to) const { load_both(to, to.from ^ 16); }
  __device__ __forceinline__ void arrange(Fetched&) const {}
  // Of a step: its first or last 8 of the sum.
  static __device__ __forceinline__ uint32_t word(const Fetched& from, int step, int eight,
                                                  int column) {
    const uint4& of = from.of[column];
    return step % 2 == 0 ? (eight == 0 ? of.x : of.y) : (eight == 0 ? of.z : of.w);
  }

 private:
  static __device__ __forceinline__ void load_both(Fetched& to, uint32_t from) {
    to.of[0] = load_four_words(from);
    to.of[1] = load_four_words(from + kLineBytes);
  }

  uint32_t from_;
};

// 64 of the sum, stored rows of kPitch bytes.
template <int kPitch>
__device__ __forceinline__ void load_rows(uint32_t (&to)[8], uint32_t from) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t bytes[4];
    load_fragments<true>(bytes, from + half * 32 * kPitch);
#pragma unroll
    for (int i = 0; i < 4; ++i) to[half * 4 + i] = bytes[i];
  }
}

// A line of a stage is a stored row, one of the sum, with 64 bytes of all columns or 32 of a
// consumer's, swizzled by as many bytes. ldmatrix transposes two bytes at a time: a lane gets two
// bytes of two stored rows, of which its warp takes one and the neighbouring warp the other.
template <int kLineBytes>
class StageBytes<false, 2, kLineBytes> {
 public:
  using Fetched = uint32_t[8];  // of 8 of the sum each

  __device__ __forceinline__ explicit StageBytes(int consumer) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % kWarpgroup / 32;
    if constexpr (kLineBytes == 32) {
      from_ = consumer * (kDepth * kLineBytes) + lane * kLineBytes + (warp / 2 ^ lane / 4 % 2) * 16;
    } else {
      const int chunk = consumer * (kPartColumns / 32) + warp / 2;
      from_ = lane * kLineBytes + (chunk ^ lane / 2 % 4) * 16;
    }
    shift_ = warp % 2 * 8;
  }

  __device__ __forceinline__ void load(Fetched& to, uint32_t stage, int /*half*/) const {
    load_rows<kLineBytes>(to, stage + from_);
  }
  __device__ __forceinline__ void load_last(Fetched&) const {}
  __device__ __forceinline__ void arrange(Fetched&) const {}
  // This warp's byte in the low byte of both halves, the others undefined
  __device__ __forceinline__ uint32_t columns(uint32_t word) const { return word >> shift_; }

 private:
  uint32_t from_;
  int shift_;
};

// A line of a stage is a stored row with 64 bytes of the sum, swizzled by 64 bytes. ldmatrix gives
// lane i of four the bytes 4 i to 4 i + 3 of 16, wgmma wants the pairs i and i + 4 of 8 of these.
template <>
class StageBytes<true, 1, kDepth> {
 public:
  using Fetched = uint32_t[8];  // of two neighbouring columns: 16 of the sum, then the column

  __device__ __forceinline__ explicit StageBytes(int consumer) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % kWarpgroup / 32;
    const int line = consumer * kPartColumns + pair_column<true, 1>(warp, lane % 8) + lane / 8 % 2;
    from_ = line * kDepth + (lane / 16 ^ line / 2 % 4) * 16;
    // Two words at a time share the shuffles: of lane 0 its upper halves go to lane 1, of lane 1
    // the lower ones to 2, then the upper ones to 3, and so on; what a lane keeps it sends to
    // itself.
    const int place = lane % 4;
    from_first_ = 0x3102 >> 4 * place & 3;
    from_second_ = 0x1320 >> 4 * place & 3;
    send_first_ = place % 3 == 0 ? 0x7632 : 0x5410;
    send_second_ = place % 3 == 0 ? 0x5410 : 0x7632;
    keep_x_ = place % 3 == 0 ? 0x1054 : 0x5410;
    keep_y_ = place % 3 == 0 ? 0x3276 : 0x7632;
  }

  __device__ __forceinline__ void load(Fetched& to, uint32_t stage, int /*half*/) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // 32 of the sum: chunks 0 and 1, or 2 and 3
      uint32_t bytes[4];
      load_fragments<false>(bytes, stage + (from_ ^ half * 32));
#pragma unroll
      for (int i = 0; i < 4; ++i) to[half * 4 + i] = bytes[i];
    }
  }
  __device__ __forceinline__ void load_last(Fetched&) const {}
  // A word holds its pair for both eights.
  static __device__ __forceinline__ uint32_t word(const Fetched& from, int step, int /*eight*/,
                                                  int column) {
    return from[step * 2 + column];
  }
  __device__ __forceinline__ void arrange(Fetched& to) const {
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      uint32_t &x = to[i], &y = to[i + 1];
      const uint32_t first =
          __shfl_sync(0xffffffff, __byte_perm(x, y, send_first_), from_first_, 4);
      const uint32_t second =
          __shfl_sync(0xffffffff, __byte_perm(x, y, send_second_), from_second_, 4);
      x = __byte_perm(first, second, keep_x_);
      y = __byte_perm(first, second, keep_y_);
    }
  }

 private:
  uint32_t from_;
  int from_first_, from_second_;
  uint32_t send_first_, send_second_, keep_x_, keep_y_;
};

// A line of a stage is a stored row, one of the sum, with 128 bytes of columns, swizzled by 128
// bytes. ldmatrix transposes two bytes at a time: a lane gets its two columns of two stored rows.
template <>
class StageBytes<false, 1, 2 * kPartColumns> {
 public:
  using Fetched = uint32_t[8];  // of 8 of the sum each

  __device__ __forceinline__ explicit StageBytes(int consumer) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % kWarpgroup / 32;
    const int chunk = consumer * (kPartColumns / 16) + warp;
    from_ = lane * (2 * kPartColumns) + (chunk ^ lane % 8) * 16;
  }

  __device__ __forceinline__ void load(Fetched& to, uint32_t stage, int /*half*/) const {
    load_rows<2 * kPartColumns>(to, stage + from_);
  }
  __device__ __forceinline__ void load_last(Fetched&) const {}
  __device__ __forceinline__ void arrange(Fetched&) const {}
  // A column per half
  __device__ __forceinline__ uint32_t columns(uint32_t word) const {
    return __byte_perm(word, 0, 0x3120);
  }

 private:
  uint32_t from_;
};

// Where a thread's first words of scales lie in a stage: along of its two columns, across of its
// elements of the first 16 of the sum.
template <bool kAlong, int kElements>
__device__ __forceinline__ uint32_t first_scale(int consumer) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % kWarpgroup / 32;
  if constexpr (kAlong) {
    return 4 * (consumer * kPartColumns + pair_column<true, kElements>(warp, lane / 4));
  }
  return 4 * (consumer * kDepth + lane % 4 * 4);
}

// float32, one per column and stage, or per stored row and part.
template <bool kAlong>
class FloatScales {
 public:
  struct Fetched {
    float2 pair[kAlong ? 1 : 8];
  };

  __device__ __forceinline__ FloatScales(const Arguments&, int consumer)
      : from_(first_scale<kAlong, 1>(consumer)) {}

  template <bool kOdd>
  __device__ __forceinline__ void fetch(Fetched& to, uint32_t stage) const {
    if constexpr (kAlong) {
      const uint2 words = load_words(stage + from_);
      to.pair[0] = {__uint_as_float(words.x), __uint_as_float(words.y)};
    } else {
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        const uint4 words = load_four_words(stage + from_ + 32 * i);
        to.pair[i] = {__uint_as_float(words.x), __uint_as_float(words.y)};
        to.pair[i + 1] = {__uint_as_float(words.z), __uint_as_float(words.w)};
      }
    }
  }
  static __device__ __forceinline__ float of_column(const Fetched& from, int /*half*/, int column) {
    return column == 0 ? from.pair[0].x : from.pair[0].y;
  }
  static __device__ __forceinline__ float2 of_eight(const Fetched& from, int eight) {
    return from.pair[eight];
  }

 private:
  uint32_t from_;
};

// The same of a group: one per column and part, 16 bytes from a column to the next.
class GroupScales {
 public:
  struct Fetched {
    float of[2];
  };

  __device__ __forceinline__ GroupScales(const Arguments&, int consumer)
      : from_(kGroupParts * first_scale<true, 2>(consumer)) {}

  template <bool kOdd>
  __device__ __forceinline__ void fetch(Fetched& to, uint32_t part) const {
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      to.of[column] = __uint_as_float(load_word(part + from_ + 4 * kGroupParts * column));
    }
  }
  static __device__ __forceinline__ float of_column(const Fetched& from, int /*half*/, int column) {
    return from.of[column];
  }

 private:
  uint32_t from_;
};

// 2^(byte - 127) of the low bytes of both halves, whose other bytes are zero: subnormal of 0, NaN
// of 255. Both have the highest bit of the mantissa beside the bits of the byte.
__device__ __forceinline__ uint32_t powers_of_two(uint32_t bytes) {
  const uint32_t others = (bytes + 0x00010001u) & 0x00fe00feu;  // zero of 0 and of 255
  return bytes << 7 | ((0x01000100u - others) & 0x01000100u) >> 2;
}

// Exponents in bytes, of 32 elements of a stored row. A word of them starts on 4 bytes, and those
// of 64 elements are two bytes in one of its halves: in which, the numbers of the row and of the 64
// elements say. Rows of an expert begin on an even one, since N is a multiple of 8.
template <bool kAlong>
class PowerScales {
 public:
  struct Fetched {
    // Pairs of bfloat16. Along twice the same: half of the sum, then the column; across of two of
    // the sum.
    uint32_t pair[kAlong ? 4 : 8];
  };

  __device__ __forceinline__ PowerScales(const Arguments& p, int consumer)
      : alternate_(p.row_blocks / 2 % 2 != 0), from_(first_scale<kAlong, 2>(consumer)) {
    const uint32_t part = threadIdx.x % kWarpgroup / 64;
    const uint32_t even = consumer % 2 * 2 + part, odd = (consumer + alternate_) % 2 * 2 + part;
    select_ = even | (4 + odd) << 8;
  }

  template <bool kOdd>
  __device__ __forceinline__ void fetch(Fetched& to, uint32_t stage) const {
    if constexpr (kAlong) {
      const uint2 words = load_words(stage + from_);
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        const bool upper = column == 0 ? kOdd : kOdd != alternate_;
        const uint32_t word = column == 0 ? words.x : words.y;
        // Both halves of the sum, each in the low byte of 16 bits
        const uint32_t scales = powers_of_two(__byte_perm(word, 0, upper ? 0x4342 : 0x4140));
        to.pair[column] = __byte_perm(scales, 0, 0x1010);
        to.pair[2 + column] = __byte_perm(scales, 0, 0x3232);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        const uint4 words = load_four_words(stage + from_ + 32 * i);
        to.pair[i] = powers_of_two(__byte_perm(words.x, words.y, select_) & 0x00ff00ffu);
        to.pair[i + 1] = powers_of_two(__byte_perm(words.z, words.w, select_) & 0x00ff00ffu);
      }
    }
  }
  static __device__ __forceinline__ uint32_t of_column(const Fetched& from, int half, int column) {
    return from.pair[half * 2 + column];
  }
  static __device__ __forceinline__ uint32_t of_eight(const Fetched& from, int eight) {
    return from.pair[eight];
  }

 private:
  const bool alternate_;
  uint32_t from_;
  uint32_t select_;  // across: a byte of the word of an even row, and one of the next
};

// What codes stand for. `along`: two elements of the sum, from a word of each 8 of them;
// `across`: two of the sum of both columns.
template <Format kFormat>
class Values;

template <>
class Values<Format::kFourBit> {
 public:
  __device__ __forceinline__ explicit Values(const Arguments& p)
      : table_(p.codebook[threadIdx.x % 16]), shift_(threadIdx.x % 4 * 8) {}

  // Of a byte the upper nibble comes first.
  __device__ __forceinline__ uint32_t along(uint32_t word, int /*eight*/, float scale) const {
    const float even = looked_up(word >> (shift_ + 4)), odd = looked_up(word >> shift_);
    return rounded_pair(__fmul_rn(even, scale), __fmul_rn(odd, scale));
  }
  __device__ __forceinline__ void across(uint32_t& first, uint32_t& second, uint32_t columns,
                                         const float2& scales) const {
    first = rounded_pair(__fmul_rn(looked_up(columns >> 4), scales.x),
                         __fmul_rn(looked_up(columns >> 20), scales.y));
    second = rounded_pair(__fmul_rn(looked_up(columns), scales.x),
                          __fmul_rn(looked_up(columns >> 16), scales.y));
  }

 private:
  __device__ __forceinline__ float looked_up(uint32_t nibble) const {
    return __shfl_sync(0xffffffff, table_, static_cast<int>(nibble), 16);
  }

  const float table_;
  const int shift_;  // of this lane's byte
};

template <>
class Values<Format::kMxfp4> {
 public:
  __device__ __forceinline__ explicit Values(const Arguments&)
      : select_((4 + threadIdx.x % 4) << 12 | threadIdx.x % 4 << 4) {}

  // Of a byte the lower nibble comes first.
  __device__ __forceinline__ uint32_t along(uint32_t word, int /*eight*/, uint32_t scale) const {
    // This lane's byte in bits 8 to 15; shifted by a nibble in bits 24 to 31
    const uint32_t both = __byte_perm(word, word >> 4, select_);
    return scaled((both & 0x07000700u) >> 2 | (both & 0x08000800u) << 4, scale);
  }
  __device__ __forceinline__ void across(uint32_t& first, uint32_t& second, uint32_t columns,
                                         uint32_t scales) const {
    first = scaled((columns & 0x00070007u) << 6 | (columns & 0x00080008u) << 12, scales);
    second = scaled((columns & 0x00700070u) << 2 | (columns & 0x00800080u) << 8, scales);
  }

 private:
  // Codes in bits 6 to 8 and signs in bit 15 of both halves, times a pair of scales.
  static __device__ __forceinline__ uint32_t scaled(uint32_t codes, uint32_t scales) {
    constexpr uint32_t kUnit = 0x7e807e80u;  // 2^126
    return times(times(codes, kUnit), scales);
  }

  const uint32_t select_;
};

template <>
class Values<Format::kFp8> {
 public:
  __device__ __forceinline__ explicit Values(const Arguments&) {}

  __device__ __forceinline__ uint32_t along(uint32_t word, int eight, float scale) const {
    return scaled(word >> 16 * eight, scale, scale);
  }
  __device__ __forceinline__ void across(uint32_t& first, uint32_t& second, uint32_t columns,
                                         const float2& scales) const {
    first = scaled(columns, scales.x, scales.y);
    second = scaled(columns >> 16, scales.x, scales.y);
  }

 private:
  // Two bytes in the lower half of a word times their scales, rounded once.
  static __device__ __forceinline__ uint32_t scaled(uint32_t bytes, float first, float second) {
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(bytes)));
    const float2 values = __half22float2(*reinterpret_cast<const __half2*>(&halves));
    return rounded_pair(__fmul_rn(values.x, first), __fmul_rn(values.y, second));
  }
};

template <bool kAlong, Format kFormat, typename Map>
class Decoder {
 private:
  static constexpr int kElements = kPerByte<kFormat>;
  using Bytes =
      StageBytes<kAlong, kElements, (kAlong ? Map::kStageDepth : Map::kCopyColumns) / kElements>;
  using Floats = std::conditional_t<kGrouped<kAlong, kFormat>, GroupScales, FloatScales<kAlong>>;
  using Scales = std::conditional_t<kFormat == Format::kMxfp4, PowerScales<kAlong>, Floats>;

 public:
  struct Fetched {
    typename Bytes::Fetched bytes;
    typename Scales::Fetched scales;
  };

  __device__ __forceinline__ Decoder(const Arguments& p, int consumer)
      : values_(p), bytes_(consumer), scales_(p, consumer) {}

  // From the addresses of a box and of a part's scales. kOdd: whether the part's number in its tile
  // is odd, which half of its lines it has then.
  template <bool kOdd>
  __device__ __forceinline__ void fetch(Fetched& to, uint32_t packed, uint32_t scales) const {
    bytes_.load(to.bytes, packed, Map::kHalves == 2 && kOdd);
    scales_.template fetch<kOdd>(to.scales, scales);
    bytes_.arrange(to.bytes);
  }
  // Before the last two steps.
  __device__ __forceinline__ void fetch_last(Fetched& to) const { bytes_.load_last(to.bytes); }

  // The 16 of the sum of a step, 8 by 8: of two columns two elements each.
  template <int kStep>
  __device__ __forceinline__ void decode(uint32_t (&a)[4], const Fetched& from) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (kAlong) {
#pragma unroll
        for (int column = 0; column < 2; ++column) {
          const uint32_t word = Bytes::word(from.bytes, kStep, i, column);
          const auto scale = Scales::of_column(from.scales, kStep / 2, column);
          a[i * 2 + column] = values_.along(word, i, scale);
        }
      } else {
        const uint32_t columns = bytes_.columns(from.bytes[kStep * 2 + i]);
        const auto scales = Scales::of_eight(from.scales, kStep * 2 + i);
        values_.across(a[i * 2], a[i * 2 + 1], columns, scales);
      }
    }
  }

 private:
  const Values<kFormat> values_;
  const Bytes bytes_;
  const Scales scales_;
};

}  // namespace optimizer::nf4_product
