#pragma once
// The tiles of a product whose rows arrive in chunks: chunk after chunk from the first one that is
// there, and in a chunk bands of columns, so that the operands of tiles in flight stay in L2.
// Compiled for the host as well, which picks the widths, and where a test checks that every tile
// comes exactly once.
//
// A row of tiles is some wide ones, then some narrow ones. One width alone often leaves the last
// round of the multiprocessors nearly empty: 4096 x 3584 are 448 wide tiles, 3.4 rounds of 132, or
// 512 of both widths by halves, 3.9 shorter rounds.

#include <cstdint>
#include <vector>

#include "common/portable.h"
#include "common/schedule.h"

namespace optimizer::communication {

constexpr int kTileRows = 128;
constexpr int kWideCols = 256;
constexpr int kNarrowCols = 192;
// With sides of at most 2^20 tiles are counted in 26 bits, and a pick takes milliseconds at most.
constexpr int kMostChunks = 1024;

struct ProgressSchedule {
  uint32_t chunks;
  uint32_t pivot;   // the chunk to begin with
  uint32_t tall;    // rows of tiles of a chunk
  uint32_t wide;    // columns of wide tiles
  uint32_t narrow;  // columns of narrow tiles, right of the wide ones
  uint32_t blocks;  // of the grid; tile t is block t mod blocks's

  // narrow: (narrow - 1) * kNarrowCols must be less than n, so that no column of tiles is empty.
  static OPTIMIZER_HD ProgressSchedule of(int chunks, int pivot, int chunk_rows, int n, int narrow,
                                          uint32_t blocks) {
    const int rest = n - narrow * kNarrowCols;
    const int wide = rest > 0 ? (rest + kWideCols - 1) / kWideCols : 0;
    return {static_cast<uint32_t>(chunks),
            static_cast<uint32_t>(pivot),
            static_cast<uint32_t>((chunk_rows + kTileRows - 1) / kTileRows),
            static_cast<uint32_t>(wide),
            static_cast<uint32_t>(narrow),
            blocks};
  }

  OPTIMIZER_HD uint32_t per_chunk() const { return tall * (wide + narrow); }
  OPTIMIZER_HD uint32_t count() const { return chunks * per_chunk(); }
  OPTIMIZER_HD bool is_narrow(int col) const { return col >= static_cast<int>(wide) * kWideCols; }

  // Chunks that begin in every second round of the blocks have their narrow tiles first, so that a
  // block gets both widths by turns.
  OPTIMIZER_HD bool narrow_first(uint32_t turn) const {
    return turn * per_chunk() / blocks % 2 == 1;
  }

  // `matrix` is the chunk, `row` counts within it.
  OPTIMIZER_HD TileOrigin locate(uint32_t tile) const {
    const uint32_t turn = tile / per_chunk(), inside = tile - turn * per_chunk();
    const bool narrow_first = this->narrow_first(turn);
    const uint32_t head = tall * (narrow_first ? narrow : wide);
    const bool in_narrow = (inside < head) == narrow_first;
    const uint32_t rest = inside < head ? inside : inside - head;
    const uint32_t columns = in_narrow ? narrow : wide;
    const uint32_t first = rest / (tall * kBand) * kBand;
    const uint32_t band = columns - first < kBand ? columns - first : kBand;
    const uint32_t within = rest - first * tall;
    const auto row = static_cast<int>(within / band);
    const auto col = static_cast<int>(first + within % band);
    const int start = static_cast<int>(wide) * kWideCols;
    return {static_cast<int64_t>((pivot + turn) % chunks), row * kTileRows,
            in_narrow ? start + col * kNarrowCols : col * kWideCols};
  }
};

// Microseconds of a multiprocessor per 64 of k, and per tile beside them.
struct WidthCost {
  double block_time;
  double tile_time;
};
constexpr WidthCost kWideCost = {0.7223, 1.70};
constexpr WidthCost kNarrowCost = {0.5700, 1.60};

// When the busiest block is done. The narrow tiles of a chunk are one run of tiles, so a block gets
// whole rounds of them, and one more if it lies in the rest, a run of blocks round the end.
inline double predicted_time(const ProgressSchedule& schedule, int k) {
  const double depth = (k + 63) / 64;
  const double wide = depth * kWideCost.block_time + kWideCost.tile_time;
  const double narrow = depth * kNarrowCost.block_time + kNarrowCost.tile_time;
  const uint32_t blocks = schedule.blocks, tiles = schedule.count();
  const uint32_t run = schedule.tall * schedule.narrow;  // narrow tiles of a chunk
  int64_t shared = 0;                                    // narrow tiles that every block has
  std::vector<int64_t> change(blocks + 1);               // of a block's more than the one before's
  for (uint32_t turn = 0; turn < schedule.chunks; ++turn) {
    uint32_t first = turn * schedule.per_chunk();
    if (!schedule.narrow_first(turn)) first += schedule.tall * schedule.wide;
    shared += run / blocks;
    const uint32_t from = first % blocks, to = from + run % blocks;
    ++change[from];
    --change[to < blocks ? to : blocks];
    if (to > blocks) {
      ++change[0];
      --change[to - blocks];
    }
  }
  double longest = 0;
  int64_t more = 0;
  for (uint32_t block = 0; block < blocks && block < tiles; ++block) {
    more += change[block];
    const int64_t all = (tiles - block - 1) / blocks + 1, narrows = shared + more;
    const double time = (all - narrows) * wide + narrows * narrow;
    if (time > longest) longest = time;
  }
  return longest;
}

// The schedule with which the busiest block is done first; of several that with the fewest narrow
// columns, then that of all blocks. The other number of blocks is the least one that gives none
// another tile: 4 chunks of 1024 x 3584 are 4 rounds of 128 tiles, so that every one of 128 blocks
// has two tiles of each width, where of 132 blocks 52 have three wide ones.
inline ProgressSchedule pick_schedule(int chunks, int chunk_rows, int n, int k, uint32_t blocks) {
  ProgressSchedule best{};
  double best_time = 0;
  for (int narrow = 0; (narrow - 1) * kNarrowCols < n; ++narrow) {
    auto schedule = ProgressSchedule::of(chunks, 0, chunk_rows, n, narrow, blocks);
    const uint32_t tiles = schedule.count(), rounds = (tiles + blocks - 1) / blocks;
    for (const uint32_t used : {blocks, (tiles + rounds - 1) / rounds}) {
      schedule.blocks = used;
      const double time = predicted_time(schedule, k);
      if (best_time == 0 || time < best_time) {
        best = schedule;
        best_time = time;
      }
    }
  }
  return best;
}

}  // namespace optimizer::communication
