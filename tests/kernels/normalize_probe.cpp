// How normalize cuts matrices up and factors sums, for test_normalize.py, compiled for the host.

#include <vector>

#include "newton_schulz/normalize.h"

using namespace optimizer::normalization;

// Whether the threads of all chunks hold every element of a matrix exactly once, with at most
// kMaxChunks chunks if `chunk` is 0.
extern "C" bool covers(int rows, int cols, int64_t chunk) {
  const Tiling tiling = tiling_of(rows, cols, chunk);
  if (chunk == 0 && tiling.chunks > kMaxChunks) return false;
  if (tiling.last(tiling.chunks - 1) != tiling.tiles) return false;
  std::vector<int> times(static_cast<size_t>(rows) * cols);
  for (int64_t at = 0; at < tiling.chunks; ++at) {
    if (tiling.first(at) >= tiling.last(at)) return false;
    for (int64_t tile = tiling.first(at); tile < tiling.last(at); ++tile) {
      for (int thread = 0; thread < kThreads; ++thread) {
        const Spot spot = tiling.of_tile(tile, tiling.of_thread(thread));
        if (spot.row < 0 || spot.col < 0 || spot.row % kSide || spot.col % kSide) return false;
        for (int row = spot.row; row < spot.row + kSide && row < rows; ++row) {
          for (int col = spot.col; col < spot.col + kSide && col < cols; ++col) {
            ++times[static_cast<size_t>(row) * cols + col];
          }
        }
      }
    }
  }
  for (int count : times) {
    if (count != 1) return false;
  }
  return true;
}

// Threads of a tile without an element, of 256
extern "C" int idle(int rows, int cols) {
  const Tiling tiling = tiling_of(rows, cols, 0);
  int count = 0;
  for (int thread = 0; thread < kThreads; ++thread) {
    const Spot spot = tiling.of_tile(0, tiling.of_thread(thread));
    count += spot.row >= rows || spot.col >= cols;
  }
  return count;
}

// Distinct 32-byte sectors of float32 that warp `warp` of tile 0 touches, over those it needs, when
// lines (rows, or columns) of `side` elements are contiguous.
extern "C" double sectors(int rows, int cols, int warp, bool by_columns) {
  const Tiling tiling = tiling_of(rows, cols, 0);
  std::vector<char> touched(static_cast<size_t>(rows) * cols / 8 + 1);
  int elements = 0, found = 0;
  for (int lane = 0; lane < 32; ++lane) {
    const Spot spot = tiling.of_tile(0, tiling.of_thread(warp * 32 + lane));
    for (int row = spot.row; row < spot.row + kSide && row < rows; ++row) {
      for (int col = spot.col; col < spot.col + kSide && col < cols; ++col) {
        const size_t at = by_columns ? static_cast<size_t>(col) * rows + row
                                     : static_cast<size_t>(row) * cols + col;
        ++elements;
        found += !touched[at / 8];
        touched[at / 8] = 1;
      }
    }
  }
  return elements == 0 ? 1.0 : found * 8.0 / elements;
}

extern "C" void scale(double squares, double prefactor, int count, const float* x, float* out) {
  const Factor factor = factor_of(squares, prefactor);
  for (int i = 0; i < count; ++i) out[i] = x[i] * factor.power * factor.rest;
}
