// The schedules of the sm_90a products and of a chain of squares for test_tiles.py, compiled for
// the host.

#include <algorithm>
#include <vector>

#include "common/schedule.h"
#include "products/chain.h"
#include "products/tiles_sm90.h"

using namespace optimizer;
using namespace optimizer::products;

namespace {

// Every tile must come exactly once, and tile t of matrix b must be number b * per_matrix + t. A
// triangular schedule leaves out the tiles that lie wholly below the diagonal.
template <typename Schedule>
bool covers(const Schedule& schedule, int m, int n, int rows, int cols, bool triangular) {
  const int64_t each = schedule.per_matrix();
  const int wide = (n + cols - 1) / cols;
  for (int64_t matrix = 0; matrix < 2; ++matrix) {
    std::vector<int> times(static_cast<size_t>((m + rows - 1) / rows) * wide);
    for (int64_t t = 0; t < each; ++t) {
      const TileOrigin origin = schedule.locate(matrix * each + t);
      if (origin.matrix != matrix || origin.row % rows || origin.col % cols) return false;
      if (origin.row < 0 || origin.col < 0) return false;
      if (origin.row >= m || origin.col >= n) return false;
      ++times[static_cast<size_t>(origin.row / rows * wide + origin.col / cols)];
    }
    for (int row = 0; row < m; row += rows) {
      for (int col = 0; col < n; col += cols) {
        const int needed = !triangular || row < std::min(col + cols, m);
        if (times[static_cast<size_t>(row / rows * wide + col / cols)] != needed) return false;
      }
    }
  }
  return true;
}

}  // namespace

extern "C" {

// The first m that is not covered, 0 if there is none.
int triangular_gap(int largest, int rows, int cols) {
  for (int m = 1; m <= largest; ++m) {
    const auto schedule = TriangularSchedule::of(m, rows, cols);
    if (!covers(schedule, m, m, rows, cols, true)) return m;
  }
  return 0;
}

int rectangular_gap(int largest, int n, int rows, int cols) {
  for (int m = 1; m <= largest; ++m) {
    const auto schedule = RectangularSchedule::of(m, n, rows, cols);
    if (!covers(schedule, m, n, rows, cols, false)) return m;
  }
  return 0;
}

// How many tiles a symmetric result of m rows has.
int64_t tiles(int m, int rows, int cols) {
  return TriangularSchedule::of(m, rows, cols).per_matrix();
}

int most_squares() { return kMostSquares; }
int most_buffers() { return kMostBuffers; }

// Of every ticket: product, matrix, row, column. How many there are.
int64_t tickets(int m, int rows, int cols, int matrices, int groups, int products, int* found) {
  const ChainSchedule schedule{TriangularSchedule::of(m, rows, cols),
                               static_cast<uint32_t>(matrices), static_cast<uint32_t>(groups),
                               static_cast<uint32_t>(products)};
  for (uint32_t ticket = 0; found != nullptr && ticket < schedule.count(); ++ticket) {
    const ChainTile tile = schedule.locate(ticket);
    *found++ = tile.product, *found++ = tile.matrix, *found++ = tile.row, *found++ = tile.col;
  }
  return schedule.count();
}

const char* refused(const int64_t* operands, const int64_t* places, int64_t squares,
                    int64_t buffers) {
  const char* reason = chain_refusal(operands, places, squares, buffers);
  return reason == nullptr ? "" : reason;
}

// Of a symmetric or a dense product; operands in upper storage are A, B or both by their bits.
int64_t pick_tile(int symmetric, int upper, int batches, int m, int k, int n, int processors) {
  Problem p{};
  p.batches = batches, p.m = m, p.n = n, p.k = k;
  p.upper_a = upper & 1, p.upper_b = upper & 2;
  return symmetric ? pick(kSymmetricTiles, p, true, processors)
                   : pick(kMatmulAddTiles, p, false, processors);
}

}  // extern "C"
