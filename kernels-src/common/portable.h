#pragma once
// Functions that the host and the device share, and the bits of a float.

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define OPTIMIZER_HD __host__ __device__ __forceinline__
#else
#define OPTIMIZER_HD inline
#endif

namespace optimizer {

OPTIMIZER_HD uint32_t float_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

OPTIMIZER_HD float float_from_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

}  // namespace optimizer
