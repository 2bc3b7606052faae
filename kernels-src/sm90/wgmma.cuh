#pragma once
// wgmma of sm_90a: 64 x N += 64 x 16 times 16 x N by the four warps of a warpgroup, both operands
// in shared memory behind descriptors (layout.h), sums in registers.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace optimizer::sm90 {

// Before the first product, and wherever ordinary instructions touched the sums since the last.
__device__ __forceinline__ void products_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void products_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most kPending groups of products are under way.
template <int kPending>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// The compiler takes a sum to be ready where its instruction stands; this keeps its use behind.
template <int kM, int kSums>
__device__ __forceinline__ void pin(float (&sum)[kM][kSums]) {
#pragma unroll
  for (int i = 0; i < kM; ++i) {
#pragma unroll
    for (int j = 0; j < kSums; ++j) asm volatile("" : "+f"(sum[i][j]));
  }
}

// The registers of N / 2 sums, and the operands that they are.
#define SUMS_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUMS_8(d, i) SUMS_4(d, i), SUMS_4(d, i + 4)
#define SUMS_16(d, i) SUMS_8(d, i), SUMS_8(d, i + 8)
#define SUMS_32(d, i) SUMS_16(d, i), SUMS_16(d, i + 16)
#define SUMS_64(d, i) SUMS_32(d, i), SUMS_32(d, i + 32)

#define REGISTERS_64                                                               \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17" \
  ", %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define REGISTERS_80 \
  REGISTERS_64       \
  ", %32, %33, %34, %35, %36, %37, %38, %39"
#define REGISTERS_96 \
  REGISTERS_80       \
  ", %40, %41, %42, %43, %44, %45, %46, %47"
#define REGISTERS_128                                                           \
  REGISTERS_96                                                                  \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62" \
  ", %63"
#define REGISTERS_144 \
  REGISTERS_128       \
  ", %64, %65, %66, %67, %68, %69, %70, %71"
#define REGISTERS_160 \
  REGISTERS_144       \
  ", %72, %73, %74, %75, %76, %77, %78, %79"
#define REGISTERS_176 \
  REGISTERS_160       \
  ", %80, %81, %82, %83, %84, %85, %86, %87"
#define REGISTERS_192 \
  REGISTERS_176       \
  ", %88, %89, %90, %91, %92, %93, %94, %95"
#define REGISTERS_240                                                          \
  REGISTERS_192                                                                \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108" \
  ", %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119"
#define REGISTERS_256 \
  REGISTERS_240       \
  ", %120, %121, %122, %123, %124, %125, %126, %127"

// TYPE: f16 or bf16. The predicate is false for the first product, which then overwrites the sums.
#define PRODUCT_128(TYPE)                                                                      \
  asm volatile(                                                                                \
      "{\n"                                                                                    \
      ".reg .pred p;\n"                                                                        \
      "setp.ne.b32 p, %66, 0;\n"                                                               \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" REGISTERS_128          \
      "}, %64, %65, p, 1, 1, %67, %68;\n"                                                      \
      "}"                                                                                      \
      : SUMS_64(sum, 0)                                                                        \
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(kTransposeA)), \
        "n"(static_cast<int>(kTransposeB)))

#define PRODUCT_192(TYPE)                                                                      \
  asm volatile(                                                                                \
      "{\n"                                                                                    \
      ".reg .pred p;\n"                                                                        \
      "setp.ne.b32 p, %98, 0;\n"                                                               \
      "wgmma.mma_async.sync.aligned.m64n192k16.f32." TYPE "." TYPE " {" REGISTERS_192          \
      "}, %96, %97, p, 1, 1, %99, %100;\n"                                                     \
      "}"                                                                                      \
      : SUMS_64(sum, 0), SUMS_16(sum, 64), SUMS_16(sum, 80)                                    \
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(kTransposeA)), \
        "n"(static_cast<int>(kTransposeB)))

#define PRODUCT_256(TYPE)                                                                      \
  asm volatile(                                                                                \
      "{\n"                                                                                    \
      ".reg .pred p;\n"                                                                        \
      "setp.ne.b32 p, %130, 0;\n"                                                              \
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE " {" REGISTERS_256          \
      "}, %128, %129, p, 1, 1, %131, %132;\n"                                                  \
      "}"                                                                                      \
      : SUMS_64(sum, 0), SUMS_64(sum, 64)                                                      \
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(kTransposeA)), \
        "n"(static_cast<int>(kTransposeB)))

// kTransposeA, kTransposeB: rows-major instead of k-major operands.
template <typename T, int kN, bool kTransposeA, bool kTransposeB>
struct Wgmma;

template <typename T, bool kTransposeA, bool kTransposeB>
struct Wgmma<T, 128, kTransposeA, kTransposeB> {
  static __device__ __forceinline__ void add(float (&sum)[64], uint64_t a, uint64_t b,
                                             bool accumulate) {
    if constexpr (std::is_same_v<T, __half>) {
      PRODUCT_128("f16");
    } else {
      PRODUCT_128("bf16");
    }
  }
};

template <typename T, bool kTransposeA, bool kTransposeB>
struct Wgmma<T, 192, kTransposeA, kTransposeB> {
  static __device__ __forceinline__ void add(float (&sum)[96], uint64_t a, uint64_t b,
                                             bool accumulate) {
    if constexpr (std::is_same_v<T, __half>) {
      PRODUCT_192("f16");
    } else {
      PRODUCT_192("bf16");
    }
  }
};

template <typename T, bool kTransposeA, bool kTransposeB>
struct Wgmma<T, 256, kTransposeA, kTransposeB> {
  static __device__ __forceinline__ void add(float (&sum)[128], uint64_t a, uint64_t b,
                                             bool accumulate) {
    if constexpr (std::is_same_v<T, __half>) {
      PRODUCT_256("f16");
    } else {
      PRODUCT_256("bf16");
    }
  }
};

// wgmma with its left operand in registers: 64 x N += 64 x 16 times 16 x N. Right operand k-major
// in shared memory (layout.h).
//
// Of the left operand thread `lane` of warp w holds rows 16 w + lane / 4 and 8 further, k pairs
// lane % 4 and 4 further: a[0], a[1] are the two rows of the first pair, a[2], a[3] of the second
// (PTX ISA, "Register fragments for wgmma.mma_async.m64nNk16").

// Sums that begin at zero: every product adds.
template <int kN>
struct DecodedProduct;

// A0 to A3, B: numbers of the operands behind the sums.
#define DECODED_PRODUCT(SIDE, N, REGISTERS, A0, A1, A2, A3, B, ...)                            \
  template <>                                                                                  \
  struct DecodedProduct<SIDE> {                                                                \
    static __device__ __forceinline__ void add(float (&sum)[SIDE / 2], const uint32_t (&a)[4], \
                                               uint64_t b) {                                   \
      asm volatile(                                                                            \
          "{\n"                                                                                \
          ".reg .pred p;\n"                                                                    \
          "setp.eq.b32 p, 0, 0;\n"                                                             \
          "wgmma.mma_async.sync.aligned.m64n" N "k16.f32.bf16.bf16 {" REGISTERS "}, {%" A0     \
          ", %" A1 ", %" A2 ", %" A3 "}, %" B                                                  \
          ", p, 1, 1, 0;\n"                                                                    \
          "}"                                                                                  \
          : __VA_ARGS__                                                                        \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                               \
    }                                                                                          \
  }

DECODED_PRODUCT(64, "64", REGISTERS_64, "32", "33", "34", "35", "36", SUMS_32(sum, 0));
DECODED_PRODUCT(80, "80", REGISTERS_80, "40", "41", "42", "43", "44", SUMS_32(sum, 0),
                SUMS_8(sum, 32));
DECODED_PRODUCT(96, "96", REGISTERS_96, "48", "49", "50", "51", "52", SUMS_32(sum, 0),
                SUMS_16(sum, 32));
DECODED_PRODUCT(128, "128", REGISTERS_128, "64", "65", "66", "67", "68", SUMS_32(sum, 0),
                SUMS_32(sum, 32));
DECODED_PRODUCT(144, "144", REGISTERS_144, "72", "73", "74", "75", "76", SUMS_32(sum, 0),
                SUMS_32(sum, 32), SUMS_8(sum, 64));
DECODED_PRODUCT(160, "160", REGISTERS_160, "80", "81", "82", "83", "84", SUMS_32(sum, 0),
                SUMS_32(sum, 32), SUMS_16(sum, 64));
DECODED_PRODUCT(176, "176", REGISTERS_176, "88", "89", "90", "91", "92", SUMS_32(sum, 0),
                SUMS_32(sum, 32), SUMS_16(sum, 64), SUMS_8(sum, 80));
DECODED_PRODUCT(192, "192", REGISTERS_192, "96", "97", "98", "99", "100", SUMS_32(sum, 0),
                SUMS_32(sum, 32), SUMS_32(sum, 64));
DECODED_PRODUCT(240, "240", REGISTERS_240, "120", "121", "122", "123", "124", SUMS_32(sum, 0),
                SUMS_32(sum, 32), SUMS_32(sum, 64), SUMS_16(sum, 96), SUMS_8(sum, 112));
DECODED_PRODUCT(256, "256", REGISTERS_256, "128", "129", "130", "131", "132", SUMS_32(sum, 0),
                SUMS_32(sum, 32), SUMS_32(sum, 64), SUMS_32(sum, 96));

#undef PRODUCT_256
#undef PRODUCT_192
#undef PRODUCT_128
#undef DECODED_PRODUCT
#undef REGISTERS_256
#undef REGISTERS_240
#undef REGISTERS_192
#undef REGISTERS_176
#undef REGISTERS_160
#undef REGISTERS_144
#undef REGISTERS_128
#undef REGISTERS_96
#undef REGISTERS_80
#undef REGISTERS_64
#undef SUMS_64
#undef SUMS_32
#undef SUMS_16
#undef SUMS_8
#undef SUMS_4

}  // namespace optimizer::sm90
