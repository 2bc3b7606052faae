// The address arithmetic and the schedules of the sm_90a kernels for test_layout_sm90.py, compiled
// for the host.

#include <algorithm>
#include <vector>

#include "common/schedule.h"
#include "sm90/layout.h"

using namespace optimizer;
using namespace optimizer::sm90;

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

void locate_triangular(int m, int rows, int cols, int64_t tile, int64_t* found) {
  const TileOrigin origin = TriangularSchedule::of(m, rows, cols).locate(tile);
  found[0] = origin.matrix, found[1] = origin.row, found[2] = origin.col;
}

// Position and phase after `advances` single steps and then a skip of `skipped` stages, 5 stages.
uint32_t ring(uint32_t advances, uint32_t skipped) {
  Ring<5> at;
  for (uint32_t i = 0; i < advances; ++i) at.advance();
  at.skip(skipped);
  return at.slot | at.parity << 8;
}

uint32_t swizzle(uint32_t line, uint32_t chunk) { return swizzled(line, chunk); }

uint64_t descriptor(uint32_t start, int block, int step, int rows_major) {
  return matrix_descriptor(start) + (rows_major ? descriptor_offset<true>(block, step)
                                                : descriptor_offset<false>(block, step));
}

void accumulator(int thread, int reg, int* found) {
  const Element element = accumulator_element(thread, reg);
  found[0] = element.row, found[1] = element.col;
}

int pair(int j, int q) { return fragment_register(j, q); }
uint32_t fragment(int thread, int i, int j, int wide) {
  return fragment_offset(thread, i, j, wide);
}
uint32_t mirrored(int thread, int i, int j, int tall) {
  return mirrored_offset(thread, i, j, tall);
}

// Blocks of 64 x 64 of an m x m matrix in upper storage: which one a product copies for the rows
// from `row` on and k from `k` on, and whether the instruction takes it transposed.
void upper_block(int row, int k, int stages, int* found) {
  const bool transposed = !is_above_diagonal(row, k);
  found[0] = transposed ? k : row, found[1] = transposed ? row : k, found[2] = transposed;
  found[3] = k / kBlockSide < std::min(stages, stages_below_diagonal(row));
}

}  // extern "C"
