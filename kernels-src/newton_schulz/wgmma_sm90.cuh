#pragma once
// wgmma of sm_90a: 64 x N += 64 x 16 times 16 x N by the four warps of a warpgroup, both operands
// in shared memory behind descriptors (layout_sm90.h), sums in registers.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace optimizer::newton_schulz {

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

#define SUMS_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUMS_16(d, i) SUMS_4(d, i), SUMS_4(d, i + 4), SUMS_4(d, i + 8), SUMS_4(d, i + 12)
#define SUMS_64(d, i) SUMS_16(d, i), SUMS_16(d, i + 16), SUMS_16(d, i + 32), SUMS_16(d, i + 48)

#define REGISTERS_128                                                                \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

#define REGISTERS_192                                                                \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"

#define REGISTERS_256                                                                            \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                       \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "             \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "             \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "             \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "             \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "             \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

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

#undef PRODUCT_256
#undef PRODUCT_192
#undef PRODUCT_128
#undef REGISTERS_256
#undef REGISTERS_192
#undef REGISTERS_128
#undef SUMS_64
#undef SUMS_16
#undef SUMS_4

}  // namespace optimizer::newton_schulz
