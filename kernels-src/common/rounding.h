#pragma once
// How a float32 value becomes a 16-bit parameter: stochastic rounding, and rounding whose error is
// kept in 16 bits beside the parameter. Bits in, bits out; the same on the host and on the device.

#include <cstdint>

#include "common/portable.h"

#ifdef __CUDACC__
#include <cuda_fp16.h>
#endif
#ifndef __CUDA_ARCH__
#include <torch/headeronly/util/Half.h>
#endif

namespace optimizer {

OPTIMIZER_HD bool is_nan_bits(uint32_t bits) { return (bits & 0x7fffffffu) > 0x7f800000u; }

OPTIMIZER_HD uint16_t half_bits(float x) {
#ifdef __CUDA_ARCH__
  return __half_as_ushort(__float2half_rn(x));
#else
  return torch::headeronly::Half(x).x;
#endif
}

OPTIMIZER_HD float half_value(uint16_t bits) {
#ifdef __CUDA_ARCH__
  return __half2float(__ushort_as_half(bits));
#else
  return static_cast<float>(torch::headeronly::Half(bits, torch::headeronly::Half::from_bits()));
#endif
}

OPTIMIZER_HD uint16_t bfloat16_nan(uint32_t bits) {
  return static_cast<uint16_t>((bits >> 16 & 0x8000u) | 0x7fc0u);
}

// Up with a probability of exactly the 16 dropped bits over 2^16, so that the mean is x: the sum
// carries if and only if random16 is less than them.
OPTIMIZER_HD uint16_t stochastic_bfloat16(float x, uint32_t random16) {
  const uint32_t bits = float_bits(x);
  if (is_nan_bits(bits)) return bfloat16_nan(bits);
  return static_cast<uint16_t>((bits + (random16 ^ 0xffffu)) >> 16);
}

// The same for float16, which drops 13 bits, and more below 2^-14. From 2^-17 down the probability
// is cut to 16 bits, an error of the mean below 2^-40.
OPTIMIZER_HD uint16_t stochastic_half(float x, uint32_t random16) {
  const uint32_t bits = float_bits(x);
  const uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  const uint32_t exponent = magnitude >> 23;
  if (exponent >= 143) return half_bits(x);  // 2^16 and above, inf, NaN
  if (exponent >= 113) {
    const uint32_t up = random16 < (magnitude & 0x1fffu) << 3 ? 1u : 0u;
    return static_cast<uint16_t>(sign | ((magnitude >> 13) - (112u << 10) + up));
  }
  if (exponent < 87) return static_cast<uint16_t>(sign);  // below 2^-40
  const uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
  const uint32_t drop = 126u - exponent;  // 14 ... 39 bits
  const uint32_t whole = drop < 24 ? mantissa >> drop : 0u;
  const uint32_t rest = drop < 24 ? mantissa & ((1u << drop) - 1) : mantissa;
  const uint32_t fraction = drop < 16 ? rest << (16 - drop) : rest >> (drop - 16);
  return static_cast<uint16_t>(sign | (whole + (random16 < fraction ? 1u : 0u)));
}

// A parameter and what its rounding left over.
struct Kept {
  uint16_t param;
  int16_t residual;
};

// bfloat16: float32 bits = (param << 16) + residual, so that residual holds their lower half and
// param is the nearest bfloat16, ties away from zero. Every float32 number survives.
OPTIMIZER_HD Kept split_bfloat16(float x) {
  const uint32_t bits = float_bits(x);
  if (is_nan_bits(bits)) return {bfloat16_nan(bits), 0};
  return {static_cast<uint16_t>((bits + 0x8000u) >> 16), static_cast<int16_t>(bits & 0xffffu)};
}

OPTIMIZER_HD float join_bfloat16(uint16_t param, int16_t residual) {
  const uint32_t bits = static_cast<uint32_t>(param) << 16;
  return float_from_bits(bits + static_cast<uint32_t>(static_cast<int32_t>(residual)));
}

// float16: float32 bits = bits(float(param)) + residual where param is normal. Below 2^-14 the
// residual counts units of 2^-40 instead. Every float32 number from 2^-17 to 65519 survives,
// smaller ones to within 2^-41.
constexpr float kResidualUnit = 9.094947017729282e-13f;  // 2^-40

OPTIMIZER_HD bool is_small_half(uint16_t param) { return (param & 0x7c00u) == 0; }

OPTIMIZER_HD Kept split_half(float x) {
  const uint16_t param = half_bits(x);
  if ((param & 0x7c00u) == 0x7c00u) return {param, 0};  // inf, NaN
  const float rounded = half_value(param);
  if (!is_small_half(param)) {
    return {param, static_cast<int16_t>(float_bits(x) - float_bits(rounded))};
  }
  const float units = (x - rounded) * 1099511627776.0f;  // at most 2^15, exact from 2^-17 up
  const float nearest = units + (units < 0 ? -0.5f : 0.5f);
  if (nearest < 32768.0f) return {param, static_cast<int16_t>(nearest)};
  // A tie that went down: 2^15 does not fit, so the neighbour above takes -2^15.
  const auto above = static_cast<uint16_t>(x < 0 ? param - 1 : param + 1);
  if (is_small_half(above)) return {above, -32768};
  return {above, static_cast<int16_t>(float_bits(x) - float_bits(half_value(above)))};
}

OPTIMIZER_HD float join_half(uint16_t param, int16_t residual) {
  const float rounded = half_value(param);
  if (is_small_half(param)) return rounded + static_cast<float>(residual) * kResidualUnit;
  return float_from_bits(float_bits(rounded) +
                         static_cast<uint32_t>(static_cast<int32_t>(residual)));
}

// Philox4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011): random bits
// that are a pure function of key and counter, so they do not depend on who computes them.
struct Philox {
  uint32_t word[4];

  // Eight elements share one block of four words: element `lane` gets 16 bits of it. The words are
  // named, not indexed, so that they stay in registers.
  OPTIMIZER_HD uint32_t bits16(int lane) const {
    const uint32_t low = lane & 4 ? word[2] : word[0], high = lane & 4 ? word[3] : word[1];
    return (lane & 2 ? high : low) >> (16 * (lane & 1)) & 0xffffu;
  }
};

OPTIMIZER_HD Philox philox(uint64_t key, uint64_t index, uint32_t parameter, uint32_t step) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  uint32_t c0 = static_cast<uint32_t>(index), c1 = static_cast<uint32_t>(index >> 32);
  uint32_t c2 = parameter, c3 = step;
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = uint64_t{0xD2511F53u} * c0, second = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(second >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(second);
    c2 = static_cast<uint32_t>(first >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(first);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// A moving average: beta old + (1 - beta) given, as torch.lerp forms it.
//
// The change is added to the end that weighs more. From the other one a small value would be lost:
// with beta = 0, old + (given - old) is 0 for old = 4 and given = 1e-10. This way the result of two
// numbers of one sign is off by at most four roundings of it, it is exactly `old` for beta = 1 and
// exactly `given` for beta = 0, and the average of equal numbers is that number.
struct Average {
  float beta;
  float weight;  // 1 - beta
  bool slow;     // whether the old value weighs more

  OPTIMIZER_HD float of(float old, float given) const {
    const float change = given - old;
    return slow ? old + change * weight : given - change * beta;
  }
};

// 1 - beta is taken in float64 and rounded once.
OPTIMIZER_HD Average average_of(double beta) {
  return {static_cast<float>(beta), static_cast<float>(1.0 - beta), 1.0 - beta < 0.5};
}

}  // namespace optimizer
