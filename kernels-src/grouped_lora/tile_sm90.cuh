#pragma once
// Shapes, shared memory and arguments of the grouped product on sm_90a.
//
//   first warp        weights and LoRA factors by TMA     |  full ->   two consumer warpgroups:
//   three row warps   rows, gathered by 16-byte copies    |  <- empty  wgmma, then the epilogue
//
// Operands are swapped: features (the weights' output side) are wgmma's M, rows are its N. An
// instruction's N follows the rows of the tile, so an expert with few rows reads its weights once
// and pads little.

#include <cuda.h>

#include <cstdint>

#include "grouped_lora/row_tiles.h"
#include "newton_schulz/async_sm90.cuh"
#include "newton_schulz/layout_sm90.h"
#include "newton_schulz/schedule.h"

namespace optimizer::grouped_lora {

using newton_schulz::kBlockBytes;
using newton_schulz::kBlockSide;

constexpr int kWarpgroup = 128;  // threads
constexpr int kConsumers = 2;
constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
constexpr int kRowWarps = 3;             // of the first warpgroup
constexpr int kRowBarrier = 3;           // theirs; 1 and 2 are the consumers', 0 is __syncthreads'
constexpr int kStageDepth = kBlockSide;  // k per stage
// 64 K registers: (88 + 2 * 208) * 128 = 64512
constexpr int kLoaderRegisters = 88;
constexpr int kConsumerRegisters = 208;
constexpr int kMaxExperts = 512;  // their offsets and tiles lie in shared memory

template <int kFeatures_, int kTokens_, int kStages_>
struct Tile {
  static constexpr int kFeatures = kFeatures_;
  static constexpr int kTokens = kTokens_;  // most rows of a tile
  static constexpr int kStages = kStages_;

  static constexpr int kPartFeatures = kFeatures / kConsumers;  // of one consumer
  static constexpr int kM = kPartFeatures / 64;                 // its instructions per step
  static constexpr int kFeatureBlocks = kFeatures / kBlockSide;
  static constexpr int kTokenBlocks = kTokens / kBlockSide;
  static constexpr int kWeightBytes = kFeatureBlocks * kBlockBytes;  // per stage
  static constexpr int kStageBytes = kWeightBytes + kTokenBlocks * kBlockBytes;
  static constexpr int kStagingBytes = kPartFeatures * kTokens * 2;
  // In shared memory for every row of a tile: target and gate of two tiles and the slot, for each
  // consumer; its source in x, of two tiles.
  static constexpr int kRowBytes = 4 * kTokens;
  static constexpr int kRowTableBytes = (5 * kConsumers + 2) * kRowBytes;

  // The weight thread and the row warps fill a stage, the consumers' warps read it.
  static constexpr int kWriters = 1 + kRowWarps;
  static constexpr int kReaders = kConsumers * kWarpgroup / 32;

  static constexpr int kBarrierBytes = 16 * kStages;
  static constexpr int kTableBytes = 2 * 4 * (kMaxExperts + 1);
  static constexpr int kAlignment = newton_schulz::kGroupBytes;
  static constexpr int kSharedBytes = kAlignment + kStages * kStageBytes +
                                      kConsumers * kStagingBytes + kRowTableBytes + kBarrierBytes +
                                      kTableBytes;

  static_assert(kPartFeatures % 64 == 0 && kTokens % 64 == 0 && kM * kTokens <= 256);
  static_assert(kSharedBytes <= 227 * 1024);
};

// Addresses in shared memory: stages (the features' blocks, then the rows'), staging, tables of
// rows, barriers, tables of experts.
template <typename kTile>
struct SharedMap {
  char* start;
  uint32_t stages;  // the same for instructions that take 32-bit addresses

  __device__ __forceinline__ explicit SharedMap(char* shared) {
    const uint32_t address = newton_schulz::shared_offset(shared);
    stages = (address + kTile::kAlignment - 1) / kTile::kAlignment * kTile::kAlignment;
    start = shared + (stages - address);
  }

  __device__ __forceinline__ uint32_t weights(uint32_t slot) const {
    return stages + slot * kTile::kStageBytes;
  }
  __device__ __forceinline__ uint32_t rows(uint32_t slot) const {
    return weights(slot) + kTile::kWeightBytes;
  }
  __device__ __forceinline__ uint32_t staging(int consumer) const {
    return stages + kStaging + consumer * kTile::kStagingBytes;
  }
  __device__ __forceinline__ int* targets(int consumer, int set) const {
    return row_table(4 * consumer + 2 * set);
  }
  __device__ __forceinline__ float* gates(int consumer, int set) const {
    return reinterpret_cast<float*>(row_table(4 * consumer + 2 * set + 1));
  }
  __device__ __forceinline__ int* slots(int consumer) const {
    return row_table(4 * kConsumers + consumer);
  }
  __device__ __forceinline__ int* sources(int set) const { return row_table(5 * kConsumers + set); }
  __device__ __forceinline__ uint32_t full(uint32_t slot) const {
    return stages + kBarriers + 8 * slot;
  }
  __device__ __forceinline__ uint32_t empty(uint32_t slot) const {
    return full(kTile::kStages + slot);
  }
  __device__ __forceinline__ int* offsets() const {
    return reinterpret_cast<int*>(start + kBarriers + kTile::kBarrierBytes);
  }
  __device__ __forceinline__ int* starts() const { return offsets() + kMaxExperts + 1; }

 private:
  static constexpr uint32_t kStaging = kTile::kStages * kTile::kStageBytes;
  static constexpr uint32_t kRowTables = kStaging + kConsumers * kTile::kStagingBytes;
  static constexpr uint32_t kBarriers = kRowTables + kTile::kRowTableBytes;

  __device__ __forceinline__ int* row_table(int index) const {
    return reinterpret_cast<int*>(start + kRowTables + index * kTile::kRowBytes);
  }
};

// out[target of row] = gate (x[source of row] W_e + low[row] F_e + bias_e)
struct Arguments {
  CUtensorMap weight;  // (E, N, K), boxes of 64 x 64
  CUtensorMap factor;  // (E, N, r)
  const char* x;       // rows of K
  const char* low;     // (R, r) in expert order
  const float* bias;   // (E, N), or null
  const float* gates;  // in slot order, or null
  const char* other;   // rows of N, if dots are wanted
  float* dots;         // (blocks of 64 features, R) in slot order: <row before its gate, other>
  const int64_t* slots;
  const int64_t* offsets;  // (E + 1,)
  void* out;               // (R, N), contiguous
  int64_t x_row;           // bytes
  int64_t low_row;
  int64_t other_row;
  int experts;
  int rows;  // R
  int k;
  int n;
  int rank;  // 0: no LoRA
  int fan;   // where row i lies in x: 0: at i, f: at slots[i] / f
  int other_fan;
  int feature_blocks;
  bool scatter;  // rows go to their slots
};

// What every role knows about a tile.
struct TileAt {
  int expert;
  int feature;  // the first
  int row;      // the first, in expert order
  int rows;
};

// at.offsets(): rows before each expert; at.starts(): tiles of rows before it; (E + 1,) both.
template <typename kTile>
__device__ __forceinline__ TileAt locate(const Arguments& p, const SharedMap<kTile>& at,
                                         int64_t tile) {
  const int *offsets = at.offsets(), *starts = at.starts();
  const int expert = last_not_above(starts, p.experts, static_cast<int>(tile / p.feature_blocks));
  const int first = offsets[expert], rows = offsets[expert + 1] - first;
  const int before = starts[expert], tiles = starts[expert + 1] - before;
  const int64_t unit = tile - static_cast<int64_t>(before) * p.feature_blocks;
  const Place place = place_of(unit, tiles, p.feature_blocks);
  const RowRange range = row_range(rows, tiles, place.row_tile);
  return {expert, place.block * kTile::kFeatures, first + range.first, range.count};
}

template <typename kTile>
__device__ __forceinline__ int64_t tile_count(const Arguments& p, const SharedMap<kTile>& at) {
  return static_cast<int64_t>(at.starts()[p.experts]) * p.feature_blocks;
}

__device__ __forceinline__ int stages_of(int depth) {
  return (depth + kStageDepth - 1) / kStageDepth;
}

}  // namespace optimizer::grouped_lora
