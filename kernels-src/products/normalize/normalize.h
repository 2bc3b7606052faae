#pragma once
// normalize: out = x / (prefactor ||x||_F) for every matrix of a batch. How a matrix is cut up, and
// the factor that its sum of squares gives; compiled for the host as well, where a test checks
// both.
//
// The cut of a sum depends on the sides of the matrix alone, and every thread adds its elements in
// one order whatever their strides. So a matrix gives the same bits in any batch and any layout.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "common/portable.h"

namespace optimizer::normalization {

constexpr int kThreads = 256;
constexpr int kThreadBits = 8;
constexpr int kSide = 4;  // a thread holds kSide x kSide neighbours of a tile
// Partial sums of a matrix, all added up by one block.
constexpr int kMaxChunks = 4096;
// Positions inside a matrix are 32-bit, with room for a tile behind the last one.
constexpr int64_t kLargestSide = int64_t{1} << 30;

struct Spot {
  int row;
  int col;
};

// Quotients of numbers below 2^31 without a division: 2^(31 + shift) / divisor, rounded up, is off
// by too little to matter.
struct Divider {
  uint32_t multiplier;
  int shift;

  OPTIMIZER_HD uint32_t quotient(uint32_t n) const {
    return static_cast<uint32_t>(uint64_t{n} * multiplier >> shift);
  }
};

inline Divider divider_of(int64_t divisor) {
  int shift = 31;
  while ((int64_t{1} << (shift - 31)) < divisor) ++shift;
  return {static_cast<uint32_t>(((uint64_t{1} << shift) + divisor - 1) / divisor), shift};
}

// Tiles of 256 x (4 x 4) elements over rows x cols, in chunks of which a thread block takes one.
struct Tiling {
  int tall;    // log2 of the threads above each other
  int across;  // tiles beside each other
  int64_t tiles;
  int64_t chunk;  // tiles per chunk
  int64_t chunks;
  Divider by_across, by_chunk, by_chunks;

  OPTIMIZER_HD int64_t first(int64_t at) const { return at * chunk; }
  OPTIMIZER_HD int64_t last(int64_t at) const {
    const int64_t end = (at + 1) * chunk;
    return end < tiles ? end : tiles;
  }
  // Of the first of a thread's elements in tile 0. A warp takes 16 rows of 32 columns where it can:
  // whole 32-byte sectors, be rows contiguous or columns.
  OPTIMIZER_HD Spot of_thread(int thread) const {
    const int wide = kThreadBits - tall;
    int row = thread >> wide, col = thread & ((1 << wide) - 1);
    if (tall >= 2 && wide >= 3) {
      const int outer = thread >> 5, outer_wide = wide - 3;
      col = (thread & 7) | (outer & ((1 << outer_wide) - 1)) << 3;
      row = (thread >> 3 & 3) | (outer >> outer_wide) << 2;
    }
    return {row * kSide, col * kSide};
  }
  OPTIMIZER_HD Spot of_tile(int64_t tile, Spot in_tile) const {
    const int down = static_cast<int>(by_across.quotient(static_cast<uint32_t>(tile)));
    const int right = static_cast<int>(tile) - down * across;
    return {(down << tall) * kSide + in_tile.row,
            (right << (kThreadBits - tall)) * kSide + in_tile.col};
  }
  // The same in the order of upper_tiling_of: by columns of tiles, each as far as the diagonal.
  OPTIMIZER_HD Spot of_upper_tile(int64_t tile, Spot in_tile) const {
    const auto number = static_cast<int>(tile);
    int right = static_cast<int>((sqrtf(1.0f + 2.0f * static_cast<float>(number)) - 1.0f) / 2.0f);
    while (right > 0 && upper_before(right) > number) --right;
    while (right + 1 < across && upper_before(right + 1) <= number) ++right;
    const int down = number - static_cast<int>(upper_before(right));
    return {(down << tall) * kSide + in_tile.row,
            (right << (kThreadBits - tall)) * kSide + in_tile.col};
  }
  // Tiles of 32 x 128 that reach or exceed the diagonal in the first `right` columns of tiles
  OPTIMIZER_HD static int64_t upper_before(int64_t right) { return 2 * right * (right + 1); }
};

inline int64_t quotient_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int log2_up(int64_t n) {
  int bits = 0;
  while ((int64_t{1} << bits) < n) ++bits;
  return bits;
}

// 32 x 128 elements; flatter or taller for matrices that would leave threads without work.
inline int tall_of(int64_t rows, int64_t cols) {
  constexpr int kTall = 3;
  const int down = log2_up(quotient_up(rows, kSide)), right = log2_up(quotient_up(cols, kSide));
  if (down < kTall) return down;
  return right < kThreadBits - kTall ? kThreadBits - right : kTall;
}

// Into chunks of so many tiles
inline void cut(Tiling& tiling, int64_t chunk) {
  tiling.chunk = chunk;
  tiling.chunks = quotient_up(tiling.tiles, chunk);
  tiling.by_chunk = divider_of(chunk);
  tiling.by_chunks = divider_of(std::max<int64_t>(tiling.chunks, 1));
}

// chunk: tiles per chunk; 0 gives as few as kMaxChunks chunks allow.
inline Tiling tiling_of(int64_t rows, int64_t cols, int64_t chunk) {
  Tiling result{};
  result.tall = tall_of(rows, cols);
  const int64_t across = quotient_up(cols, int64_t{kSide} << (kThreadBits - result.tall));
  result.across = static_cast<int>(across);
  result.tiles = across * quotient_up(rows, int64_t{kSide} << result.tall);
  result.by_across = divider_of(std::max<int64_t>(across, 1));
  cut(result, chunk > 0 ? chunk : std::max<int64_t>(quotient_up(result.tiles, kMaxChunks), 1));
  return result;
}

// Whether the tiles above the diagonal of a side x side matrix are fewer than all.
inline bool has_upper_tiling(int64_t side) { return tall_of(side, side) == 3 && side > 128; }

// Tiles of a square matrix that reach its diagonal or lie above it, in chunks of at least `chunk`.
inline Tiling upper_tiling_of(int64_t side, int64_t chunk) {
  Tiling result = tiling_of(side, side, chunk);
  const int64_t down = quotient_up(side, int64_t{kSide} << result.tall);
  result.tiles = Tiling::upper_before(result.across - 1) + down;
  cut(result, chunk);
  return result;
}

// x * power * rest: `power` is a power of two that brings the largest elements near 1 and is exact
// for all but those that vanish beside them, so that norms outside of float32's range are no
// exception. A matrix and its multiples by powers of two get the same bits.
struct Factor {
  float power;
  float rest;
};

OPTIMIZER_HD Factor factor_of(double squares, double prefactor) {
  if (squares == 0.0) return {0.0f, 0.0f};
  constexpr double kLargest = 1.7976931348623157e308;
  if (!(squares <= kLargest)) return {1.0f, float_from_bits(0x7fc00000u)};  // inf, NaN
  const double factor = 1.0 / (prefactor * sqrt(squares));
  uint64_t bits;
  memcpy(&bits, &factor, sizeof bits);
  int exponent = static_cast<int>(bits >> 52 & 0x7ff) - 1023;
  exponent = exponent < -126 ? -126 : exponent > 126 ? 126 : exponent;
  const uint64_t inverse_bits = static_cast<uint64_t>(1023 - exponent) << 52;
  double inverse;
  memcpy(&inverse, &inverse_bits, sizeof inverse);
  return {float_from_bits(static_cast<uint32_t>(exponent + 127) << 23),
          static_cast<float>(factor * inverse)};
}

// What a block of the kernel has in shared memory: tiles, each in a slot, in the order in which
// they were asked for. A tile is on its way, then held until its matrix has a factor, then written
// out.
//
//     [scaled, summed) are held, [summed, loaded) on their way
struct Slots {
  int count;  // slots
  int ahead;  // most tiles on their way
  uint32_t loaded = 0;
  uint32_t summed = 0;
  uint32_t scaled = 0;
  int load_at = 0;  // slots of the next tile to be loaded, summed, scaled
  int sum_at = 0;
  int scale_at = 0;

  OPTIMIZER_HD Slots(int count, int ahead) : count(count), ahead(ahead) {}
  OPTIMIZER_HD int on_the_way() const { return static_cast<int>(loaded - summed); }
  OPTIMIZER_HD int held() const { return static_cast<int>(summed - scaled); }
  OPTIMIZER_HD bool full() const { return static_cast<int>(loaded - scaled) == count; }
  OPTIMIZER_HD bool empty() const { return loaded == scaled; }
  OPTIMIZER_HD bool may_load() const { return on_the_way() < ahead && !full(); }
  OPTIMIZER_HD int after(int slot) const { return slot + 1 == count ? 0 : slot + 1; }
  OPTIMIZER_HD void load() { ++loaded, load_at = after(load_at); }
  OPTIMIZER_HD void sum() { ++summed, sum_at = after(sum_at); }
  OPTIMIZER_HD void scale() { ++scaled, scale_at = after(scale_at); }
};

// What a block has taken and not yet loaded. Tickets are chunks of all matrices in order; blocks
// take them from one counter. A block may wait for the factor of a matrix only while all of its own
// work belongs to later ones: then all tickets of that matrix are taken, and whoever took them has
// added them up or is about to, since what he waits for is earlier still. Otherwise it gives its
// oldest tile up, and reads it again when there are no more tickets. So blocks need not run at the
// same time for all to end.
struct Work {
  static constexpr uint32_t kNone = ~0u;
  uint32_t tickets;  // of the launch
  uint32_t ticket = 0;
  uint32_t ticket_end = 0;
  bool asked = true;  // for more tickets
  uint32_t matrix = 0;
  uint32_t tile = 0;  // of the chunk that was begun
  uint32_t tile_end = 0;

  OPTIMIZER_HD explicit Work(uint32_t tickets) : tickets(tickets) {}
  OPTIMIZER_HD void take(uint32_t first, uint32_t count) {
    const uint32_t begin = first < tickets ? first : tickets, room = tickets - begin;
    ticket = begin;
    ticket_end = begin + (count < room ? count : room);
    asked = false;
  }
  OPTIMIZER_HD bool in_chunk() const { return tile < tile_end; }
  OPTIMIZER_HD bool has_ticket() const { return ticket < ticket_end; }
  OPTIMIZER_HD bool exhausted() const { return !asked && ticket_end == tickets && !has_ticket(); }
  OPTIMIZER_HD void begin_chunk(const Tiling& tiling) {
    const auto tiles = static_cast<uint32_t>(tiling.tiles);
    const auto chunk = static_cast<uint32_t>(tiling.chunk);
    matrix = tiling.by_chunks.quotient(ticket);
    tile = (ticket - matrix * static_cast<uint32_t>(tiling.chunks)) * chunk;
    tile_end = tile + chunk < tiles ? tile + chunk : tiles;
    ++ticket;
  }
  // Whether a tile of this matrix is still to be loaded by this block.
  OPTIMIZER_HD bool has_more_of(uint32_t other, const Tiling& tiling) const {
    if (in_chunk()) return matrix == other;
    return has_ticket() && tiling.by_chunks.quotient(ticket) == other;
  }
};

}  // namespace optimizer::normalization
