#pragma once
// Shapes, shared memory and arguments of the product over packed weights on sm_90a.
//
//   loader warpgroup, packed weights by TMA,      |  full ->   2 or 3 consumer warpgroups,
//   scales and gathered rows by cp.async          |  <- empty  decode, wgmma, epilogue
//
// Columns of the result are wgmma's M: a consumer decodes 64 of them in registers, where wgmma
// takes its left operand. Rows are its N, up to 256 (FP8: 144), so that few experts have
// more than one tile and a weight is decoded about once. Decoding of a step overlaps with the
// products of the step before.
//
// Shared memory is what limits the kernel. Per 16 of k and 64 columns, in cycles of its 128 bytes:
// wgmma reads N / 4, the lookups are 32 shuffles, filling takes N / 8, fetching packed bytes about
// 10; the tensor cores take N / 2. Global memory is read 36 KB per 1024 cycles of tensor cores at
// N = 256, with up to four stages under way.

#include <cuda.h>

#include <cstdint>

#include "common/schedule.h"
#include "quant/nf4_product.h"
#include "quant/row_tiles.h"
#include "sm90/layout.h"
#include "sm90/ptx.cuh"

namespace optimizer::nf4_product {

constexpr int kWarpgroup = 128;           // threads
constexpr int kPartColumns = 64;          // of one consumer
constexpr int kHeightStep = 16;           // of the instructions' N
constexpr int kDepth = sm90::kBlockSide;  // of the sum, per stage
constexpr int kSteps = kDepth / sm90::kInstructionDepth;
constexpr int kLoaderBarrier = 4;  // 1 to 3 are the consumers', 0 is __syncthreads'
constexpr int kMaxExperts = 512;   // their offsets and tiles lie in shared memory

// How many an expert has on average. The bits of the result do not depend on it.
enum class Rows { kFew, kSome, kMany, kMost };

// What depends on the format and on how many rows experts have. A consumer of FP8 takes 64 columns
// of each of two boxes, decoding one beside the products of the other: rows of x are read and
// stages waited for half as often, and the sums of fewer rows leave the registers for it. Where
// experts have fewer rows a stage is a chain of latencies, from its bytes to its products, that one
// block does not fill the time of: tiles are lower and two blocks share a multiprocessor. Along, a
// stage is twice as deep there, since TMA copies line by line. Many rows leave registers for three
// consumers, most rows for two.
template <bool kAlong, Format kFormat, Rows kRows>
struct TileShape {
  static constexpr bool kWide = kFormat == Format::kFp8;
  static constexpr bool kLow = kRows == Rows::kFew || kRows == Rows::kSome;
  static_assert(!kWide || kRows == Rows::kMost);
  // MXFP4's scales across begin on an even number of 64 columns, which tiles of 192 do not.
  static_assert(kRows != Rows::kMany || kFormat == Format::kFourBit);
  static constexpr int kConsumers = kRows == Rows::kMany ? 3 : 2;
  static constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
  static constexpr int kReaders = kConsumers * kWarpgroup / 32;  // warps that read a stage
  static constexpr int kBlocks = kLow ? 2 : 1;                   // per multiprocessor
  static constexpr int kBoxes = kWide ? 2 : 1;
  static constexpr int kHalves = kLow && kAlong ? 2 : 1;  // of kDepth each
  static constexpr int kParts = kBoxes * kHalves;         // of a stage, decoded one by one
  static constexpr int kStageDepth = kHalves * kDepth;
  static constexpr int kBoxColumns = kConsumers * kPartColumns;
  static constexpr int kColumns = kBoxes * kBoxColumns;
  // Of what TMA copies at a time, of which lines across are powers of two
  static constexpr int kCopyColumns = !kAlong && kConsumers == 3 ? kPartColumns : kBoxColumns;
  static constexpr int kTokens = kRows == Rows::kFew    ? 48
                                 : kRows == Rows::kSome ? 80
                                 : kRows == Rows::kMany ? 160
                                 : kWide                ? 144
                                                        : 256;  // most rows
  static constexpr int kHeightClasses = kTokens / kHeightStep + 1;
  static constexpr int kStages = kRows == Rows::kFew    ? 8 / kHalves
                                 : kRows == Rows::kSome ? 6 / kHalves
                                 : kRows == Rows::kMany ? 7
                                 : kWide                ? 6
                                                        : 5;
  static constexpr int kHalfBytes = kTokens * sm90::kLineBytes;  // of x
  static constexpr int kRowBytes = kHalves * kHalfBytes;         // per stage
  // Of the 168 * 384 that the kernel starts with, 80 * 384, or 128 * 512
  static constexpr int kLoaderRegisters = kLow ? 32 : kWide ? 40 : 56;
  static constexpr int kConsumerRegisters = kLow ? 104 : kConsumers == 3 ? 152 : kWide ? 232 : 224;
  static_assert(kLoaderRegisters + kConsumers * kConsumerRegisters == (kLow              ? 240
                                                                       : kConsumers == 3 ? 512
                                                                                         : 504));
};

template <Format kFormat>
constexpr int kPerByte = kFormat == Format::kFp8 ? 1 : 2;  // elements
static_assert(kPartColumns == kDepth);  // a consumer has as many scales along as across
// Across, lane i of four reads the scales of rows 2 i and 2 i + 1 of each 8, of 16 rows at a time:
// where in its part the scale of a row lies.
__device__ __forceinline__ int place_across(int row) {
  return row / 16 * 16 + row % 8 / 2 * 4 + row / 8 % 2 * 2 + row % 2;
}
// Four-bit scales along come for 4 parts of the sum at once: a copy of 16 bytes occupies shared
// memory no longer than one of 4, as the lines of a warp's columns lie apart.
constexpr int kGroupParts = 4;
template <bool kAlong, Format kFormat>
constexpr bool kGrouped = kAlong && kFormat == Format::kFourBit;

// The loader's threads and the thread that announces TMA's bytes fill a stage.
constexpr int kWriters = kWarpgroup + 1;

// Addresses in shared memory: stages of rows, of packed bytes and of scales; tables; barriers.
template <bool kAlong, Format kFormat, Rows kRows>
struct SharedMap : TileShape<kAlong, kFormat, kRows> {
  using Shape = TileShape<kAlong, kFormat, kRows>;
  using Shape::kBoxColumns, Shape::kConsumers, Shape::kParts, Shape::kRowBytes, Shape::kStages;

  static constexpr int kBoxBytes = kBoxColumns * kDepth / kPerByte<kFormat>;
  // Words of scales of a part. Along: one per column; across: kDepth per consumer.
  static constexpr int kScaleBytes = 4 * kBoxColumns;

  static constexpr int kAlignment = sm90::kGroupBytes;
  static constexpr uint32_t kTableBytes = 4 * Shape::kTokens;
  static constexpr uint32_t kPacked = kStages * kRowBytes;
  static constexpr uint32_t kScales = kPacked + kStages * kParts * kBoxBytes;
  // Each group has at least one stage, so none is read any more when the stage is filled that
  // begins the group kStages further on.
  static constexpr int kScaleSets = kGrouped<kAlong, kFormat> ? kGroupParts : kParts;  // per stage
  static constexpr uint32_t kTables = kScales + kStages * kScaleSets * kScaleBytes;
  // Sources of two tiles; targets and gates of each consumer.
  static constexpr uint32_t kPlaces = kTables + (2 + 2 * kConsumers) * kTableBytes;
  static constexpr uint32_t kBarriers = kPlaces + 16 * kStages;
  static constexpr uint32_t kExperts = kBarriers + 16 * kStages;
  static constexpr uint32_t kBytes = kAlignment + kExperts + 3 * 4 * (kMaxExperts + 1);

  char* start;
  uint32_t base;  // the same for instructions that take 32-bit addresses

  __device__ __forceinline__ explicit SharedMap(char* shared) {
    const uint32_t address = sm90::shared_offset(shared);
    base = (address + kAlignment - 1) / kAlignment * kAlignment;
    start = shared + (base - address);
  }

  __device__ __forceinline__ uint32_t rows(uint32_t slot) const { return base + slot * kRowBytes; }
  // Of a box; two halves share one, whose lines hold both.
  __device__ __forceinline__ uint32_t packed(uint32_t slot, int box) const {
    return base + kPacked + (slot * kParts + box) * kBoxBytes;
  }
  // Of a part of a stage; of a group, 16 bytes per column, part 0.
  __device__ __forceinline__ uint32_t scales(uint32_t slot, int part) const {
    return base + kScales + (slot * kScaleSets + part) * kScaleBytes;
  }
  __device__ __forceinline__ int* sources(int set) const { return table<int>(set); }
  __device__ __forceinline__ int* targets(int consumer) const {
    return table<int>(2 + 2 * consumer);
  }
  __device__ __forceinline__ float* gates(int consumer) const {
    return table<float>(3 + 2 * consumer);
  }
  // Of the tile that begins with a stage: its loader knows, consumers need not find out again.
  __device__ __forceinline__ int4* place(uint32_t slot) const {
    return reinterpret_cast<int4*>(start + kPlaces) + slot;
  }
  __device__ __forceinline__ uint32_t full(uint32_t slot) const {
    return base + kBarriers + 8 * slot;
  }
  __device__ __forceinline__ uint32_t empty(uint32_t slot) const { return full(kStages + slot); }
  __device__ __forceinline__ int* offsets() const {
    return reinterpret_cast<int*>(start + kExperts);
  }
  __device__ __forceinline__ int* starts() const { return offsets() + kMaxExperts + 1; }
  __device__ __forceinline__ int* order() const { return starts() + kMaxExperts + 1; }

 private:
  template <typename T>
  __device__ __forceinline__ T* table(int index) const {
    return reinterpret_cast<T*>(start + kTables + index * kTableBytes);
  }
};
template <bool kAlong, Format kFormat, Rows kRows, typename Map = SharedMap<kAlong, kFormat, kRows>>
constexpr bool kFits = Map::kBlocks * (Map::kBytes + 1024) <= 228 * 1024 &&
                       Map::kHalfBytes % 1024 == 0 && Map::kBoxBytes % 1024 == 0;
static_assert(kFits<true, Format::kFp8, Rows::kMost> && kFits<true, Format::kFourBit, Rows::kMost>);
static_assert(kFits<true, Format::kFourBit, Rows::kMany> &&
              kFits<false, Format::kFourBit, Rows::kMany>);
static_assert(kFits<true, Format::kFourBit, Rows::kSome> &&
              kFits<false, Format::kFourBit, Rows::kSome>);
static_assert(kFits<true, Format::kFourBit, Rows::kFew> &&
              kFits<false, Format::kFourBit, Rows::kFew>);

struct Arguments {
  // (E, N, bytes), boxes of kBoxColumns rows x 64 of K (along; low 128) or 64 rows x kCopyColumns
  // of K
  CUtensorMap packed;
  const void* absmax;  // scales of blocks
  const float* codebook;
  const char* x;       // rows of `depth`
  const char* low;     // (R, r) in expert order
  const char* factor;  // (E, r, columns), any strides
  const float* bias;
  const float* gates;  // in slot order
  const int64_t* slots;
  const int64_t* offsets;  // (E + 1,)
  char* out;               // (R, columns), contiguous
  char* activated;         // (R, columns / 2), contiguous
  int64_t x_row;           // bytes
  int64_t low_row;
  int64_t factor_expert;
  int64_t factor_rank;
  int64_t factor_column;
  int experts;
  int rows;  // R
  int stored_rows;
  int row_blocks;  // scales per stored row
  int shift;
  int depth;
  int columns;
  int rank;  // 0: no LoRA
  int fan;   // where row i lies in x: 0: at i, f: at slots[i] / f
  int column_blocks;
  bool scatter;    // rows go to their slots
  int row_shift;   // log2 of a block's rows
  int scale_rows;  // rows of scales of an expert
  // Of a wide tile: columns from a tile to the next, and from its first box to the second
  int tile_columns;
  int box_columns;
};

// What every role knows about a tile.
struct TileAt {
  int expert;
  int column;  // the first
  int row;     // the first, in expert order
  int rows;
};

// Tiles are numbered from the tallest experts' to the smallest's, and dealt to the blocks to and
// fro, so that all have about as much to do. Behind a block's first missing tile all are missing.
__device__ __forceinline__ int dealt_tile(int round) {
  const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
  return round * blocks + (round % 2 == 0 ? block : blocks - 1 - block);
}

// There are fewer than 2^31 tiles: each writes 256 bytes of its own.
template <typename Map>
__device__ __forceinline__ TileAt locate(const Arguments& p, const Map& at, int tile) {
  const int *offsets = at.offsets(), *starts = at.starts();
  const int index = last_not_above(starts, p.experts, tile / p.column_blocks);
  const int expert = at.order()[index];
  const int first = offsets[expert], rows = offsets[expert + 1] - first;
  const int before = starts[index], tiles = starts[index + 1] - before;
  const int unit = tile - before * p.column_blocks;
  // One band of row tiles needs no division of 64 bits.
  const Place place =
      tiles <= kBand ? Place{unit % tiles, unit / tiles} : place_of(unit, tiles, p.column_blocks);
  const RowRange range = row_range(rows, tiles, place.row_tile);
  const int columns = Map::kBoxes == 1 ? Map::kColumns : p.tile_columns;
  return {expert, place.block * columns, first + range.first, range.count};
}

template <typename Map>
__device__ __forceinline__ int tile_count(const Arguments& p, const Map& at) {
  return at.starts()[p.experts] * p.column_blocks;
}

// Which column of a consumer's 64 wgmma's rows `16 warp + group` and 8 further hold: this one and
// the next. They are neighbours so that a thread's sums make words of the result. Across, they are
// the nibbles of a byte, and two warps share what one ldmatrix fetches, or two bytes, which a warp
// has to itself (decode_sm90.cuh).
template <bool kAlong, int kElements>  // per byte
__device__ __forceinline__ int pair_column(int warp, int group) {
  return kAlong || kElements == 1 ? 16 * warp + 2 * group
                                  : warp / 2 * 32 + 4 * group + warp % 2 * 2;
}

}  // namespace optimizer::nf4_product
