#pragma once
// wgmma for fewer columns than the square products use, so that an expert with few rows costs few.

#include "newton_schulz/wgmma_sm90.cuh"

namespace optimizer::newton_schulz {

#define SUMS_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUMS_16(d, i) SUMS_4(d, i), SUMS_4(d, i + 4), SUMS_4(d, i + 8), SUMS_4(d, i + 12)
#define SUMS_32(d, i) SUMS_16(d, i), SUMS_16(d, i + 16)

#define REGISTERS_32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define REGISTERS_64 \
  REGISTERS_32       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define REGISTERS_96 \
  REGISTERS_64       \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
// TYPE: f16 or bf16; A, B, FLAG, TA, TB: numbers of the operands behind the sums. The predicate is
// false for the first product, which then overwrites the sums.
#define PRODUCT(TYPE, N, REGISTERS, A, B, FLAG, TA, TB, ...)                                   \
  asm volatile(                                                                                \
      "{\n"                                                                                    \
      ".reg .pred p;\n"                                                                        \
      "setp.ne.b32 p, %" FLAG                                                                  \
      ", 0;\n"                                                                                 \
      "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" REGISTERS "}, %" A   \
      ", %" B ", p, 1, 1, %" TA ", %" TB                                                       \
      ";\n"                                                                                    \
      "}"                                                                                      \
      : __VA_ARGS__                                                                            \
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(kTransposeA)), \
        "n"(static_cast<int>(kTransposeB)))

#define NARROW_PRODUCT(SIDE, N, REGISTERS, A, B, FLAG, TA, TB, ...)                            \
  template <typename T, bool kTransposeA, bool kTransposeB>                                    \
  struct Wgmma<T, SIDE, kTransposeA, kTransposeB> {                                            \
    static __device__ __forceinline__ void add(float (&sum)[SIDE / 2], uint64_t a, uint64_t b, \
                                               bool accumulate) {                              \
      if constexpr (std::is_same_v<T, __half>) {                                               \
        PRODUCT("f16", N, REGISTERS, A, B, FLAG, TA, TB, __VA_ARGS__);                         \
      } else {                                                                                 \
        PRODUCT("bf16", N, REGISTERS, A, B, FLAG, TA, TB, __VA_ARGS__);                        \
      }                                                                                        \
    }                                                                                          \
  }

NARROW_PRODUCT(32, "32", REGISTERS_32, "16", "17", "18", "19", "20", SUMS_16(sum, 0));
NARROW_PRODUCT(64, "64", REGISTERS_64, "32", "33", "34", "35", "36", SUMS_32(sum, 0));
NARROW_PRODUCT(96, "96", REGISTERS_96, "48", "49", "50", "51", "52", SUMS_32(sum, 0),
               SUMS_16(sum, 32));

#undef NARROW_PRODUCT
#undef PRODUCT
#undef REGISTERS_96
#undef REGISTERS_64
#undef REGISTERS_32
#undef SUMS_32
#undef SUMS_16
#undef SUMS_4

}  // namespace optimizer::newton_schulz
