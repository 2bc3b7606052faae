#pragma once
// The tiles of symmetric_matmul and matmul_add for Hopper, what they cost, and which one is taken.

#include <algorithm>
#include <cstdint>
#include <iterator>

#include "common/schedule.h"
#include "sm90/layout.h"
#include "sm90/problem.h"

namespace optimizer::products {

using namespace sm90;

// One tile shape. Its consumers are two warpgroups, which share a tile or take turns.
// block_time, tile_time: microseconds of a multiprocessor per 64 of k, and per tile beside them,
// fitted to times on an H200; 0 means not measured, and `auto` takes no such tile.
struct TileCost {
  const char* name;
  int rows;
  int cols;
  double block_time;
  double tile_time;
};

// The positions are the numbers of the tiles; kernels/products/symmetric_matmul.py and
// kernels/products/matmul_add.py repeat the names.
//
// Least squares of relative errors, as in tools/tune.py, with 2 us of a launch beside the tiles.
// Symmetric tiles: 16 shapes of one operand, m from 512 to 4096, k to 8192, with and without C;
// each is met to 15 %, three quarters of them to 5 %. Then moved by at most 2.3 %, so that `auto`
// takes the fastest tile of 15 of them, and of the 16th one that takes 0.2 % longer. Dense tiles: 9
// shapes, m from 512 to 4096, each met to 10 %; `auto` takes the fastest tile of all.
constexpr TileCost kSymmetricTiles[] = {{"sm90_128x256", 128, 256, 0.6652, 4.556},
                                        {"sm90_128x128", 128, 128, 0.3906, 2.271},
                                        {"sm90_64x128", 64, 128, 0.2963, 0.703},
                                        {"sm90_128x192", 128, 192, 0.5592, 2.495}};
constexpr TileCost kMatmulAddTiles[] = {{"sm90_128x256", 128, 256, 0.7223, 1.701},
                                        {"sm90_256x128", 256, 128, 0.7839, 1.455},
                                        {"sm90_128x128", 128, 128, 0.3955, 0.967}};

// symmetric_matmul has no kernel for one operand by rows and one by columns.
inline const char* symmetric_refusal(const Problem& p) {
  if (const char* reason = refusal(p)) return reason;
  return by_rows(p.a) == by_rows(p.b) ? nullptr
                                      : "a and b must be contiguous along the same dimension";
}

// Upper storage is read and written by rows, and of square matrices alone.
inline const char* upper_refusal(const Problem& p) {
  const bool square = (!p.upper_a || p.m == p.k) && (!p.upper_b || p.n == p.k);
  const bool rows = (!p.upper_a || by_rows(p.a)) && (!p.upper_b || by_rows(p.b));
  return square && rows ? nullptr
                        : "an operand in upper storage must be square, with "
                          "contiguous rows";
}

// Whether a tile's rows, or its columns, are of one block of an operand in upper storage.
inline bool meets_upper(const Problem& p, const TileCost& tile) {
  return (!p.upper_a || tile.rows == kUpperSide) && (!p.upper_b || tile.cols == kUpperSide);
}

inline int64_t tiles_of(const Problem& p, const TileCost& tile, bool symmetric) {
  const int64_t per_matrix =
      symmetric ? TriangularSchedule::of(p.m, tile.rows, tile.cols).per_matrix()
                : RectangularSchedule::of(p.m, p.n, tile.rows, tile.cols).per_matrix();
  return per_matrix * p.batches;
}

// The measured tile with which the busiest of `processors` multiprocessors is done first; -1 if
// none was measured. Whether there is one does not depend on the problem, so no batch changes from
// one family of instructions to the other.
template <int kCount>
int64_t pick(const TileCost (&tiles)[kCount], const Problem& p, bool symmetric,
             int64_t processors) {
  const int64_t blocks = (p.k + 63) / 64;
  int64_t best = -1;
  double best_time = 0;
  for (int64_t i = 0; i < kCount; ++i) {
    const TileCost& tile = tiles[i];
    if (tile.block_time == 0 || !meets_upper(p, tile)) continue;
    const int64_t busiest = (tiles_of(p, tile, symmetric) + processors - 1) / processors;
    const double time = busiest * (blocks * tile.block_time + tile.tile_time);
    if (best < 0 || time < best_time) {
      best = i;
      best_time = time;
    }
  }
  return best;
}

// symmetric_matmul_sm90.cu: `tile` counts in kSymmetricTiles; checks the device and the strides.
void run_symmetric_sm90(const Problem& p, ScalarType dtype, int64_t tile, int device, void* stream);
// In float16, to upper storage: by the tile of kUpperSide rows and columns.
void run_symmetric_upper(const Problem& p, ScalarType dtype, int device, void* stream);

}  // namespace optimizer::products
