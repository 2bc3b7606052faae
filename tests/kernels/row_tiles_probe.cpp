// The tile arithmetic of nf4_product for test_layout_sm90.py, compiled for the host.

#include <vector>

#include "quant/row_tiles.h"

using namespace optimizer::nf4_product;

extern "C" {

// How often each (row, block of features) is covered by the tiles that the kernel would visit, into
// covered (rows, blocks); returns the largest number of rows of a tile, or -1 for an empty one.
int cover(const int* counts, int experts, int most, int blocks, int* covered) {
  std::vector<int> offsets(1, 0), starts(1, 0);
  for (int e = 0; e < experts; ++e) {
    offsets.push_back(offsets.back() + counts[e]);
    starts.push_back(starts.back() + row_tiles(counts[e], most));
  }
  int largest = 0;
  const int64_t tiles = static_cast<int64_t>(starts[experts]) * blocks;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int e = last_not_above(starts.data(), experts, static_cast<int>(tile / blocks));
    const int own = starts[e + 1] - starts[e];
    const Place place = place_of(tile - static_cast<int64_t>(starts[e]) * blocks, own, blocks);
    const RowRange range = row_range(counts[e], own, place.row_tile);
    if (range.count <= 0) return -1;
    if (range.count > largest) largest = range.count;
    for (int row = 0; row < range.count; ++row) {
      ++covered[static_cast<int64_t>(offsets[e] + range.first + row) * blocks + place.block];
    }
  }
  return largest;
}

// Rows of each of an expert's tiles, into heights; returns how many tiles there are.
int heights(int rows, int most, int* found) {
  const int tiles = row_tiles(rows, most);
  for (int i = 0; i < tiles; ++i) found[i] = row_range(rows, tiles, i).count;
  return tiles;
}

// The row tile and the block of an expert's unit.
void place(int64_t unit, int row_tiles, int blocks, int* found) {
  const Place at = place_of(unit, row_tiles, blocks);
  found[0] = at.row_tile, found[1] = at.block;
}

}  // extern "C"
