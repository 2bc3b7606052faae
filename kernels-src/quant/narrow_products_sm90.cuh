#pragma once
// The least N that products of few rows want; the others lie in sm90/wgmma.cuh.

#include "sm90/wgmma.cuh"

namespace optimizer::sm90 {

#define SUMS_8(d, i)                                                                          \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])

template <>
struct DecodedProduct<16> {
  static __device__ __forceinline__ void add(float (&sum)[8], const uint32_t (&a)[4], uint64_t b) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.eq.b32 p, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, "
        "{%8, %9, %10, %11}, %12, p, 1, 1, 0;\n"
        "}"
        : SUMS_8(sum, 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  }
};

template <>
struct DecodedProduct<48> {
  static __device__ __forceinline__ void add(float (&sum)[24], const uint32_t (&a)[4], uint64_t b) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.eq.b32 p, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, "
        "%8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23}, {%24, "
        "%25, %26, %27}, %28, p, 1, 1, 0;\n"
        "}"
        : SUMS_8(sum, 0), SUMS_8(sum, 8), SUMS_8(sum, 16)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  }
};

#undef SUMS_8

}  // namespace optimizer::sm90
