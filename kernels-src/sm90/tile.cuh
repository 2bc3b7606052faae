#pragma once
// Shapes and shared memory of the sm_90a kernels, and what the host gives them.
//
//   producer, one thread      fills a ring of stages by TMA           full ->  <- empty
//   two consumer warpgroups   wgmma over the ring, then scalars and rounding in staging memory
//   two couriers, a warp      C into the staging memory of one consumer, and what it has finished
//   each                      out of there, by TMA                    prepared ->  <- finished
//
// So a consumer is back at its next products as soon as its last value is rounded: it waits for no
// copy but that of C, which has the main loop to come. Producer and couriers are warps of one
// warpgroup.
//
// The consumers share a tile (each has half of its rows), or each has a tile of its own, so that
// one multiplies while the other stores (kTurns). The ring hands out stages in the order of the
// tiles, and a consumer looks at it only in its turn: a phase's parity tells it from the next
// phase, not from the one after that.

#include <cuda.h>

#include <cstdint>

#include "common/schedule.h"
#include "sm90/layout.h"
#include "sm90/ptx.cuh"

namespace optimizer::sm90 {

constexpr int kWarpgroup = 128;  // threads
constexpr int kConsumers = 2;
constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
constexpr int kStageDepth = kBlockSide;  // k per stage
// 64 K registers: (40 + 2 * 232) * 128 = 64512
constexpr int kProducerRegisters = 40;
constexpr int kConsumerRegisters = 232;

// Named barriers by which a consumer and its courier hand the staging memory to each other; 0 is
// __syncthreads'. Not mbarriers, as all their threads have accesses to it that must be in order.
constexpr int kHandingThreads = kWarpgroup + 32;
__device__ __forceinline__ int prepared_barrier(int consumer) { return 1 + consumer; }
__device__ __forceinline__ int finished_barrier(int consumer) { return 1 + kConsumers + consumer; }

template <int kRows_, int kCols_, int kStages_, bool kTurns_>
struct Tile {
  static constexpr int kRows = kRows_;
  static constexpr int kCols = kCols_;
  static constexpr int kStages = kStages_;
  static constexpr bool kTurns = kTurns_;

  static constexpr int kPartRows = kTurns ? kRows : kRows / kConsumers;  // of one consumer
  static constexpr int kM = kPartRows / 64;  // its instructions per step
  static constexpr int kRowBlocks = kRows / kBlockSide;
  static constexpr int kColBlocks = kCols / kBlockSide;
  static constexpr int kStageBytes = (kRowBlocks + kColBlocks) * kBlockBytes;
  static constexpr int kStagingBytes = kPartRows * kCols * 2;
  // Arrivals that free a stage: one per warp that reads it.
  static constexpr int kReaders = (kTurns ? 1 : kConsumers) * 4;

  static constexpr int kOriginBytes = 16;
  static constexpr int kBarrierBytes = 8 * (2 * kStages + 2 * kConsumers) + kOriginBytes * kStages;
  static constexpr int kAlignment = kGroupBytes;  // of blocks; the driver promises only 16 bytes
  static constexpr int kSharedBytes =
      2 * kAlignment + kStages * kStageBytes + kConsumers * kStagingBytes;

  static_assert(kPartRows % 64 == 0 && kCols % 64 == 0 && kM * kCols <= 256);
  static_assert(kBarrierBytes <= kAlignment && kSharedBytes <= 227 * 1024);
};

// Addresses in shared memory: barriers, for every stage the tile that begins with it, stages (the
// rows' blocks, then the columns'), staging.
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
  __device__ __forceinline__ uint32_t origin(uint32_t slot) const {
    return turn(kConsumers) + slot * kTile::kOriginBytes;
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

// To know a tile is half a microsecond of divisions and a root. The producer has it anyway, so it
// leaves it with the tile's first stage, before that is full; a consumer's warp takes it before it
// releases that stage. One lane reads, so that the one that signals is the one that has read.
__device__ __forceinline__ void put_origin(uint32_t address, const TileOrigin& origin) {
  asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, 0};" ::"r"(address),
               "r"(static_cast<int>(origin.matrix)), "r"(origin.row), "r"(origin.col)
               : "memory");
}
__device__ __forceinline__ TileOrigin take_origin(uint32_t address) {
  int matrix = 0, row = 0, col = 0;
  if (threadIdx.x % 32 == 0) {
    asm volatile(
        "{\n"
        ".reg .s32 unused;\n"
        "ld.shared.v4.s32 {%0, %1, %2, unused}, [%3];\n"
        "}"
        : "=r"(matrix), "=r"(row), "=r"(col)
        : "r"(address)
        : "memory");
  }
  constexpr uint32_t kWarp = 0xffffffff;
  return {__shfl_sync(kWarp, matrix, 0), __shfl_sync(kWarp, row, 0), __shfl_sync(kWarp, col, 0)};
}

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
  void* out_data;     // for blocks that are written by ordinary stores
  int64_t out_batch;  // strides in elements
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

}  // namespace optimizer::sm90
