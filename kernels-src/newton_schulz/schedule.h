#pragma once
// Which tile of which matrix the n-th unit of work is, and which stage its k. Compiled for the host
// as well, where a test checks that every tile comes exactly once.

#include <cmath>
#include <cstdint>

#include "common/portable.h"

namespace optimizer::newton_schulz {

// Columns of squares that are walked together, so that the operands of tiles in flight stay in L2.
constexpr uint32_t kBand = 8;

struct TileOrigin {
  int64_t matrix;
  int row;
  int col;
};

OPTIMIZER_HD uint32_t triangle(uint32_t n) { return n * (n + 1) / 2; }

// Largest j with triangle(j) <= t < 2^31. The float root is off by one at most.
OPTIMIZER_HD uint32_t triangle_root(uint32_t t) {
  auto j = static_cast<uint32_t>((sqrtf(8.0f * static_cast<float>(t) + 1.0f) - 1.0f) * 0.5f);
  while (triangle(j) > t) --j;
  while (triangle(j + 1) <= t) ++j;
  return j;
}

// Squares of the tile's longer side on and above the diagonal of an m x m result, each cut into
// tiles; the tiles of a square follow each other, so that the blocks of a cluster share one.
struct TriangularSchedule {
  uint32_t squares_per_side;
  uint32_t parts;   // tiles per square
  uint32_t height;  // of a tile
  uint32_t width;

  // m is at most 2^21, so that the squares of a matrix can be counted in 28 bits.
  static OPTIMIZER_HD TriangularSchedule of(int m, int rows, int cols) {
    const int side = rows > cols ? rows : cols;
    return {static_cast<uint32_t>((m + side - 1) / side),
            static_cast<uint32_t>(side / rows * (side / cols)), static_cast<uint32_t>(rows),
            static_cast<uint32_t>(cols)};
  }

  OPTIMIZER_HD uint32_t per_matrix() const { return triangle(squares_per_side) * parts; }

  // Bands of kBand columns from the left; in a band first the rows above its triangle, then the
  // triangle itself.
  OPTIMIZER_HD TileOrigin locate(int64_t tile) const {
    const int64_t matrix = tile / per_matrix();
    const auto rest = static_cast<uint32_t>(tile - matrix * per_matrix());
    const uint32_t part = rest % parts, square = rest / parts;
    const uint32_t first = triangle_root(square) / kBand * kBand;
    const uint32_t band = squares_per_side - first < kBand ? squares_per_side - first : kBand;
    const uint32_t inside = square - triangle(first);
    uint32_t row, col;
    if (inside < first * band) {
      row = inside / band;
      col = first + inside % band;
    } else {
      const uint32_t j = triangle_root(inside - first * band);
      row = first + inside - first * band - triangle(j);
      col = first + j;
    }
    const uint32_t side = height > width ? height : width;
    return {matrix, static_cast<int>(row * side + (height < side ? part * height : 0)),
            static_cast<int>(col * side + (width < side ? part * width : 0))};
  }
};

// All tiles of an m x n result, `cluster` tiles below each other first, then bands of kBand
// columns.
struct RectangularSchedule {
  uint32_t tall;  // clusters per column
  uint32_t wide;  // tiles per row
  uint32_t cluster;
  uint32_t height;
  uint32_t width;

  static OPTIMIZER_HD RectangularSchedule of(int m, int n, int rows, int cols, int cluster) {
    return {static_cast<uint32_t>((m + rows * cluster - 1) / (rows * cluster)),
            static_cast<uint32_t>((n + cols - 1) / cols), static_cast<uint32_t>(cluster),
            static_cast<uint32_t>(rows), static_cast<uint32_t>(cols)};
  }

  OPTIMIZER_HD uint32_t per_matrix() const { return tall * wide * cluster; }

  OPTIMIZER_HD TileOrigin locate(int64_t tile) const {
    const int64_t matrix = tile / per_matrix();
    const auto rest = static_cast<uint32_t>(tile - matrix * per_matrix());
    const uint32_t part = rest % cluster, unit = rest / cluster;
    const uint32_t first = unit / (tall * kBand) * kBand;
    const uint32_t band = wide - first < kBand ? wide - first : kBand;
    const uint32_t inside = unit - first * tall;
    const uint32_t row = inside / band * cluster + part;
    return {matrix, static_cast<int>(row * height),
            static_cast<int>((first + inside % band) * width)};
  }
};

// A position in the ring, and the parity of its phase. Starts at slot 0, parity 0.
template <int kStages>
struct Ring {
  uint32_t slot = 0;
  uint32_t parity = 0;

  OPTIMIZER_HD void advance() {
    if (++slot == kStages) {
      slot = 0;
      parity ^= 1;
    }
  }
  OPTIMIZER_HD void skip(uint32_t stages) {
    slot += stages;
    parity ^= slot / kStages & 1;
    slot %= kStages;
  }
};

}  // namespace optimizer::newton_schulz
