#pragma once
// Shapes and shared memory of the sm_90a kernels, and what the host gives them.
//
//   producer warpgroup: one thread fills a ring of stages by TMA      full ->  <- empty
//   two consumer warpgroups: wgmma over the ring, then the epilogue through staging memory
//
// The consumers share a tile (each has half of its rows), or each has a tile of its own, so that
// one multiplies while the other stores (kTurns). The ring hands out stages in the order of the
// tiles, and a consumer looks at it only in its turn: a phase's parity tells it from the next
// phase, not from the one after that.

#include <cuda.h>

#include <cstdint>

#include "newton_schulz/async_sm90.cuh"
#include "newton_schulz/layout_sm90.h"
#include "newton_schulz/schedule.h"

namespace optimizer::newton_schulz {

constexpr int kWarpgroup = 128;  // threads
constexpr int kConsumers = 2;
constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
constexpr int kStageDepth = kBlockSide;  // k per stage
// 64 K registers: (40 + 2 * 232) * 128 = 64512
constexpr int kProducerRegisters = 40;
constexpr int kConsumerRegisters = 232;

template <int kRows_, int kCols_, int kStages_, bool kTurns_, int kCluster_ = 1>
struct Tile {
  static constexpr int kRows = kRows_;
  static constexpr int kCols = kCols_;
  static constexpr int kStages = kStages_;
  static constexpr bool kTurns = kTurns_;
  static constexpr int kCluster = kCluster_;  // blocks that share the tile's columns, read once

  static constexpr int kPartRows = kTurns ? kRows : kRows / kConsumers;  // of one consumer
  static constexpr int kM = kPartRows / 64;  // its instructions per step
  static constexpr int kRowBlocks = kRows / kBlockSide;
  static constexpr int kColBlocks = kCols / kBlockSide;
  static constexpr int kStageBytes = (kRowBlocks + kColBlocks) * kBlockBytes;
  static constexpr int kStagingBytes = kPartRows * kCols * 2;
  // Arrivals that free a stage: one per warp that reads it, of every block that it was sent to.
  static constexpr int kReaders = (kTurns ? 1 : kConsumers) * 4 * kCluster;

  static constexpr int kBarrierBytes = 8 * (2 * kStages + 2 * kConsumers);
  static constexpr int kAlignment = kGroupBytes;  // of blocks; the driver promises only 16 bytes
  static constexpr int kSharedBytes =
      2 * kAlignment + kStages * kStageBytes + kConsumers * kStagingBytes;

  static_assert(kPartRows % 64 == 0 && kCols % 64 == 0 && kM * kCols <= 256);
  static_assert(kBarrierBytes <= kAlignment && kSharedBytes <= 227 * 1024);
  static_assert(kColBlocks % kCluster == 0);
};

// Addresses in shared memory: barriers, stages (the rows' blocks, then the columns'), staging.
template <typename kTile>
struct SharedMap {
  uint32_t barriers;
  uint32_t stages;

  __device__ __forceinline__ explicit SharedMap(uint32_t start)
      : barriers(start),
        stages((start + kTile::kBarrierBytes + kTile::kAlignment - 1) / kTile::kAlignment *
               kTile::kAlignment) {}

  __device__ __forceinline__ uint32_t full(uint32_t slot) const { return barriers + 8 * slot; }
  __device__ __forceinline__ uint32_t empty(uint32_t slot) const {
    return barriers + 8 * (kTile::kStages + slot);
  }
  __device__ __forceinline__ uint32_t c_there(int consumer) const {
    return barriers + 8 * (2 * kTile::kStages + consumer);
  }
  __device__ __forceinline__ uint32_t turn(int consumer) const {
    return c_there(kConsumers + consumer);
  }
  __device__ __forceinline__ uint32_t rows(uint32_t slot) const {
    return stages + slot * kTile::kStageBytes;
  }
  __device__ __forceinline__ uint32_t cols(uint32_t slot) const {
    return rows(slot) + kTile::kRowBlocks * kBlockBytes;
  }
  __device__ __forceinline__ uint32_t staging(int consumer) const {
    return stages + kTile::kStages * kTile::kStageBytes + consumer * kTile::kStagingBytes;
  }
};

// out = scale^alpha_power alpha A B^T + scale^beta_power beta C + diag I. The maps' boxes are 64 x
// 64 elements.
template <typename Schedule>
struct Arguments {
  CUtensorMap a;
  CUtensorMap b;
  CUtensorMap c;
  CUtensorMap out;
  Schedule schedule;
  int64_t batches;
  const int32_t* subset;  // of the batch (subset.h), or null
  void* out_data;         // for blocks that are written by ordinary stores
  int64_t out_batch;      // strides in elements
  int64_t out_row;
  const float* scale;  // per matrix, or null
  int m;
  int n;
  int k;
  float alpha;
  float beta;
  float diag;
  int alpha_power;
  int beta_power;
  bool reads_c;
  bool upper_out;    // the result goes to upper storage
  bool one_operand;  // B is A, strides included
};

// Which operands are in upper storage.
constexpr int kUpperA = 1, kUpperB = 2;

}  // namespace optimizer::newton_schulz
