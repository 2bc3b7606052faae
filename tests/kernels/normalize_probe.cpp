// How normalize cuts matrices up and factors sums, for test_normalize.py, compiled for the host.

#include <deque>
#include <random>
#include <vector>

#include "products/normalize/normalize.h"

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

// The same of a symmetric matrix, its diagonal and what lies above.
extern "C" bool covers_upper(int side, int chunk) {
  if (!has_upper_tiling(side)) return false;
  const Tiling tiling = upper_tiling_of(side, chunk);
  std::vector<int> times(static_cast<size_t>(side) * side);
  for (int64_t tile = 0; tile < tiling.last(tiling.chunks - 1); ++tile) {
    for (int thread = 0; thread < kThreads; ++thread) {
      const Spot spot = tiling.of_upper_tile(tile, tiling.of_thread(thread));
      for (int row = spot.row; row < spot.row + kSide && row < side; ++row) {
        for (int col = spot.col; col < spot.col + kSide && col < side; ++col) {
          ++times[static_cast<size_t>(row) * side + col];
        }
      }
    }
  }
  for (int row = 0; row < side; ++row) {
    for (int col = row; col < side; ++col) {
      if (times[static_cast<size_t>(row) * side + col] != 1) return false;
    }
  }
  return true;
}

extern "C" uint32_t quotient(uint32_t n, uint32_t divisor) {
  return divider_of(divisor).quotient(n);
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

namespace {

// A block of the kernel, without elements: the same decisions from the same Slots and Work.
struct Block {
  struct Tile {
    uint32_t matrix, tile;
    bool again, ends_chunk;
  };
  Slots slots;
  Work work;
  std::deque<Tile> held, on_the_way;
  std::vector<Tile> given_up;
  uint32_t asked_for;
  bool done = false;
};

// The tasks of all blocks and what they have seen of one another.
struct Launch {
  Tiling tiling;
  uint32_t tickets, counter = 0;
  std::vector<uint32_t> arrived, summed, written;
  std::vector<char> factor;
  long again = 0;

  // One round of the kernel's loop; false if a rule is broken.
  bool round(Block& b, uint32_t count) {
    if (b.work.asked) b.work.take(b.asked_for, count);
    if (!load(b)) return false;
    if (b.slots.empty() && b.work.exhausted() && b.given_up.empty()) return b.done = true;
    const bool held = b.slots.held() > 0;
    const bool found = held && factor[b.held.front().matrix];
    if (b.slots.on_the_way() > 0) {
      const Block::Tile tile = b.on_the_way.front();
      b.on_the_way.pop_front();
      b.held.push_back(tile);
      b.slots.sum();
      if (!tile.again) {
        ++summed[tile.matrix * tiling.tiles + tile.tile];
        if (tile.ends_chunk && ++arrived[tile.matrix] == tiling.chunks) factor[tile.matrix] = 1;
      }
    }
    if (!held) return true;
    const Block::Tile oldest = b.held.front();
    if (found) {
      ++written[oldest.matrix * tiling.tiles + oldest.tile];
    } else {
      const bool stuck = b.slots.full() && b.slots.on_the_way() == 0;
      if (!stuck || !b.work.has_more_of(oldest.matrix, tiling)) return true;
      b.given_up.push_back({oldest.matrix, oldest.tile, true, false});
      ++again;
    }
    b.held.pop_front();
    b.slots.scale();
    return true;
  }

  bool load(Block& b) {
    while (b.slots.may_load()) {
      Block::Tile tile{};
      if (!b.work.in_chunk() && b.work.has_ticket()) {
        b.work.begin_chunk(tiling);
        if (!b.work.has_ticket() && b.work.ticket_end < tickets) {
          b.work.asked = true;
          b.asked_for = counter++;
        }
      }
      if (b.work.in_chunk()) {
        tile.matrix = b.work.matrix;
        tile.tile = b.work.tile++;
        tile.ends_chunk = !b.work.in_chunk();
      } else if (b.work.exhausted() && !b.given_up.empty()) {
        tile = b.given_up.back();
        b.given_up.pop_back();
      } else {
        return true;
      }
      b.on_the_way.push_back(tile);
      b.slots.load();
      if (b.slots.loaded - b.slots.scaled > static_cast<uint32_t>(b.slots.count)) return false;
    }
    return true;
  }
};

}  // namespace

// Runs `blocks` blocks, of which only `resident` exist at a time: the next begins where one ends.
// `seed` picks who goes next; with uneven != 0 the first block goes a thousand times as often.
// Returns how many tiles were given up, or -1 if a tile is not summed and written exactly once, -2
// if the blocks wait for each other.
extern "C" long simulate(int rows, int cols, int64_t chunk, int matrices, int blocks, int resident,
                         int slots, int ahead, int first, int uneven, unsigned seed) {
  Launch launch{tiling_of(rows, cols, chunk), 0};
  launch.tickets = static_cast<uint32_t>(launch.tiling.chunks * matrices);
  launch.arrived.assign(matrices, 0);
  launch.factor.assign(matrices, 0);
  launch.summed.assign(matrices * launch.tiling.tiles, 0);
  launch.written = launch.summed;
  std::vector<Block> running;
  std::vector<uint32_t> counts;
  int started = 0;
  const auto start = [&] {
    running.push_back({Slots(slots, ahead), Work(launch.tickets), {}, {}, {}, launch.counter});
    counts.push_back(static_cast<uint32_t>(first));
    launch.counter += static_cast<uint32_t>(first);
    ++started;
  };
  while (started < blocks && started < resident) start();
  std::mt19937 random(seed);
  const long most = 1000L * blocks + 200L * matrices * launch.tiling.tiles * (uneven ? 1000 : 1);
  for (long k = 0; !running.empty(); ++k) {
    if (k > most) return -2;
    size_t next = random() % running.size();
    if (uneven && random() % 1000) next = 0;
    Block& block = running[next];
    const bool asked = block.work.asked;
    if (!launch.round(block, counts[next])) return -1;
    if (asked) counts[next] = 1;
    if (!block.done) continue;
    running.erase(running.begin() + static_cast<long>(next));
    counts.erase(counts.begin() + static_cast<long>(next));
    if (started < blocks) start();
  }
  for (uint32_t times : launch.summed) {
    if (times != 1) return -1;
  }
  for (uint32_t times : launch.written) {
    if (times != 1) return -1;
  }
  return launch.again;
}
