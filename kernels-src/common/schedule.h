#pragma once
// Which tile of which matrix the n-th unit of work is, and which stage its k. Compiled for the host
// as well, where a test checks that every tile comes exactly once.

#include <cmath>
#include <cstdint>

#include "common/portable.h"

namespace optimizer {

// Columns of squares that are walked together, so that the operands of tiles in flight stay in L2.
constexpr uint32_t kBand = 8;

struct TileOrigin {
  int64_t matrix;
  int row;
  int col;
};

// Tiles of an m x m result that reach the diagonal or lie above it, each once: a column of tiles
// needs its rows down to its last element's.
struct TriangularSchedule {
  uint32_t m;
  uint32_t wide;        // columns of tiles
  uint32_t tiles;       // of a matrix
  uint32_t height;      // of a tile
  uint32_t width;       // of a tile
  uint32_t shift;       // log2 of the height
  uint32_t first_band;  // tiles in the first kBand columns of a large matrix
  uint32_t growth;      // how many more the next kBand columns have

  // rows must be a power of two that divides kBand * cols, and m at most 2^21, so that
  // the tiles of a matrix can be counted in 29 bits.
  static OPTIMIZER_HD TriangularSchedule of(int m, int rows, int cols) {
    TriangularSchedule made{};
    made.m = static_cast<uint32_t>(m);
    made.wide = (made.m + cols - 1) / cols;
    made.height = static_cast<uint32_t>(rows);
    made.width = static_cast<uint32_t>(cols);
    while (1u << made.shift < made.height) ++made.shift;
    for (uint32_t col = 1; col <= kBand; ++col) {
      made.first_band += (col * made.width + made.height - 1) >> made.shift;
    }
    made.growth = kBand * (kBand * made.width >> made.shift);
    const uint32_t last = (made.wide - 1) / kBand;  // m > 0
    made.tiles = made.before(last);
    for (uint32_t col = last * kBand; col < made.wide; ++col) made.tiles += made.rows_in(col);
    return made;
  }

  OPTIMIZER_HD uint32_t per_matrix() const { return tiles; }

  // Bands of kBand columns from the left; in a band first the rows that all its columns have, then
  // the rest of every column.
  OPTIMIZER_HD TileOrigin locate(int64_t tile) const {
    const int64_t matrix = tile / tiles;
    const auto rest = static_cast<uint32_t>(tile - matrix * tiles);
    const uint32_t at = band_of(rest), first = at * kBand;
    const uint32_t band = wide - first < kBand ? wide - first : kBand;
    const uint32_t low = rows_in(first);
    uint32_t inside = rest - before(at), row, col;
    if (inside < low * band) {
      row = inside / band;
      col = first + inside % band;
    } else {
      inside -= low * band;
      col = first + 1;
      for (uint32_t more; inside >= (more = rows_in(col) - low); ++col) inside -= more;
      row = low + inside;
    }
    return {matrix, static_cast<int>(row * height), static_cast<int>(col * width)};
  }

 private:
  // Rows of tiles of a column.
  OPTIMIZER_HD uint32_t rows_in(uint32_t col) const {
    const uint32_t end = (col + 1) * width;
    return ((end < m ? end : m) + (1u << shift) - 1) >> shift;
  }
  OPTIMIZER_HD uint32_t before(uint32_t band) const {
    return band * first_band + band * (band - 1) / 2 * growth;
  }
  // The largest band with before(band) <= tile. The float root is off by one at most.
  OPTIMIZER_HD uint32_t band_of(uint32_t tile) const {
    const float a = 0.5f * static_cast<float>(growth), b = static_cast<float>(first_band) - a;
    auto band = static_cast<uint32_t>((sqrtf(b * b + 4.0f * a * static_cast<float>(tile)) - b) /
                                      (2.0f * a));
    while (before(band) > tile) --band;
    while (before(band + 1) <= tile) ++band;
    return band;
  }
};

// All tiles of an m x n result, in bands of kBand columns.
struct RectangularSchedule {
  uint32_t tall;  // tiles per column
  uint32_t wide;  // tiles per row
  uint32_t height;
  uint32_t width;

  static OPTIMIZER_HD RectangularSchedule of(int m, int n, int rows, int cols) {
    return {static_cast<uint32_t>((m + rows - 1) / rows),
            static_cast<uint32_t>((n + cols - 1) / cols), static_cast<uint32_t>(rows),
            static_cast<uint32_t>(cols)};
  }

  OPTIMIZER_HD uint32_t per_matrix() const { return tall * wide; }

  OPTIMIZER_HD TileOrigin locate(int64_t tile) const {
    const int64_t matrix = tile / per_matrix();
    const auto rest = static_cast<uint32_t>(tile - matrix * per_matrix());
    const uint32_t first = rest / (tall * kBand) * kBand;
    const uint32_t band = wide - first < kBand ? wide - first : kBand;
    const uint32_t inside = rest - first * tall;
    const uint32_t row = inside / band;
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

}  // namespace optimizer
