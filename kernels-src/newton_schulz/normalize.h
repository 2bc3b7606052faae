#pragma once
// normalize: out = x / (prefactor ||x||_F) for every matrix of a batch. How a matrix is cut up, and
// the factor that its sum of squares gives; compiled for the host as well, where a test checks
// both.
//
// The cut of a sum depends on the sides of the matrix alone, and every thread adds its elements in
// one order whatever their strides. So a matrix gives the same bits in any batch and any layout.

#include <cmath>
#include <cstdint>
#include <cstring>

#include "common/portable.h"

namespace optimizer::normalization {

constexpr int kThreads = 256;
constexpr int kThreadBits = 8;
constexpr int kSide = 4;  // a thread holds kSide x kSide neighbours of a tile
// Partial sums of a matrix: every block of the second launch adds them up again.
constexpr int kMaxChunks = 512;
// Positions inside a matrix are 32-bit, with room for a tile behind the last one.
constexpr int64_t kLargestSide = int64_t{1} << 30;

struct Spot {
  int row;
  int col;
};

// Tiles of 256 x (4 x 4) elements over rows x cols, in chunks of which a thread block takes one.
struct Tiling {
  int tall;    // log2 of the threads above each other
  int across;  // tiles beside each other
  int64_t tiles;
  int64_t chunk;  // tiles per chunk
  int64_t chunks;

  OPTIMIZER_HD int64_t first(int64_t at) const { return at * chunk; }
  OPTIMIZER_HD int64_t last(int64_t at) const {
    const int64_t end = (at + 1) * chunk;
    return end < tiles ? end : tiles;
  }
  // Of the first of a thread's elements in tile 0. A warp takes 16 rows of 32 columns where it can:
  // whole 32-byte sectors, be rows contiguous or columns.
  OPTIMIZER_HD Spot of_thread(int thread) const {
    const int wide = kThreadBits - tall;
    int row = thread >> wide, col = thread & ((1 << wide) - 1);
    if (tall >= 2 && wide >= 3) {
      const int outer = thread >> 5, outer_wide = wide - 3;
      col = (thread & 7) | (outer & ((1 << outer_wide) - 1)) << 3;
      row = (thread >> 3 & 3) | (outer >> outer_wide) << 2;
    }
    return {row * kSide, col * kSide};
  }
  OPTIMIZER_HD Spot of_tile(int64_t tile, Spot in_tile) const {
    const int down = static_cast<int>(static_cast<uint32_t>(tile) / static_cast<uint32_t>(across));
    const int right = static_cast<int>(tile) - down * across;
    return {(down << tall) * kSide + in_tile.row,
            (right << (kThreadBits - tall)) * kSide + in_tile.col};
  }
};

inline int64_t quotient_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int log2_up(int64_t n) {
  int bits = 0;
  while ((int64_t{1} << bits) < n) ++bits;
  return bits;
}

// 32 x 128 elements; flatter or taller for matrices that would leave threads without work.
inline int tall_of(int64_t rows, int64_t cols) {
  constexpr int kTall = 3;
  const int down = log2_up(quotient_up(rows, kSide)), right = log2_up(quotient_up(cols, kSide));
  if (down < kTall) return down;
  return right < kThreadBits - kTall ? kThreadBits - right : kTall;
}

// chunk: tiles per chunk; 0 gives as few as kMaxChunks chunks allow.
inline Tiling tiling_of(int64_t rows, int64_t cols, int64_t chunk) {
  Tiling result{};
  result.tall = tall_of(rows, cols);
  const int64_t across = quotient_up(cols, int64_t{kSide} << (kThreadBits - result.tall));
  result.across = static_cast<int>(across);
  result.tiles = across * quotient_up(rows, int64_t{kSide} << result.tall);
  result.chunk = chunk > 0 ? chunk : quotient_up(result.tiles, kMaxChunks);
  result.chunks = result.tiles == 0 ? 0 : quotient_up(result.tiles, result.chunk);
  return result;
}

// x * power * rest: `power` is a power of two that brings the largest elements near 1 and is exact
// for all but those that vanish beside them, so that norms outside of float32's range are no
// exception. A matrix and its multiples by powers of two get the same bits.
struct Factor {
  float power;
  float rest;
};

OPTIMIZER_HD Factor factor_of(double squares, double prefactor) {
  if (squares == 0.0) return {0.0f, 0.0f};
  constexpr double kLargest = 1.7976931348623157e308;
  if (!(squares <= kLargest)) return {1.0f, float_from_bits(0x7fc00000u)};  // inf, NaN
  const double factor = 1.0 / (prefactor * sqrt(squares));
  uint64_t bits;
  memcpy(&bits, &factor, sizeof bits);
  int exponent = static_cast<int>(bits >> 52 & 0x7ff) - 1023;
  exponent = exponent < -126 ? -126 : exponent > 126 ? 126 : exponent;
  const uint64_t inverse_bits = static_cast<uint64_t>(1023 - exponent) << 52;
  double inverse;
  memcpy(&inverse, &inverse_bits, sizeof inverse);
  return {float_from_bits(static_cast<uint32_t>(exponent + 127) << 23),
          static_cast<float>(factor * inverse)};
}

}  // namespace optimizer::normalization
