#pragma once
// Which tile of the product over experts is where: arithmetic that the host and the device share.
//
// An expert's rows are divided evenly among as few tiles of at most kTokens rows as hold them, so
// nobody has to know on the host how many rows an expert has. Tiles are numbered expert after
// expert; inside of one, kBand tiles of rows walk the blocks of features together: the weights come
// from memory once, the band's rows stay in L2.

#include <cstdint>

#include "common/portable.h"

namespace optimizer::nf4_product {

struct RowRange {
  int first;  // of the expert's rows
  int count;
};

OPTIMIZER_HD int row_tiles(int rows, int most) { return (rows + most - 1) / most; }

// Tile `index` of `tiles` of so many rows; their sizes differ by one at most.
OPTIMIZER_HD RowRange row_range(int rows, int tiles, int index) {
  const int each = rows / tiles, longer = rows % tiles;
  return {index * each + (index < longer ? index : longer), each + (index < longer)};
}

struct Place {
  int row_tile;
  int block;  // of features
};

constexpr int kBand = 8;

// Where unit `unit` of an expert's row_tiles * blocks tiles lies.
OPTIMIZER_HD Place place_of(int64_t unit, int row_tiles, int blocks) {
  const int64_t per_band = static_cast<int64_t>(kBand) * blocks;
  const int first = static_cast<int>(unit / per_band) * kBand;
  const int band = row_tiles - first < kBand ? row_tiles - first : kBand;
  const int inside = static_cast<int>(unit % per_band);
  return {first + inside % band, inside / band};
}

// The last i in [0, count) with starts[i] <= value; starts do not decrease and starts[0] <= value.
// Of equal ones the last: an expert without tiles is never found.
OPTIMIZER_HD int last_not_above(const int* starts, int count, int value) {
  int low = 0, high = count;  // starts[low] <= value, and value < starts[high] if that exists
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (starts[middle] <= value) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace optimizer::nf4_product
