#pragma once
// The persistent kernel: tile after tile, products fed by TMA. See tile.cuh for the roles.

#include <type_traits>

#include "common/launch.cuh"
#include "sm90/epilogue.cuh"
#include "sm90/tile.cuh"
#include "sm90/wgmma.cuh"

namespace optimizer::sm90 {

// Whether the rows of a tile are among its columns, of one and the same operand, and read once.
template <typename kTile, typename Args>
__device__ __forceinline__ bool rows_in_columns(const Args& p, const TileOrigin& origin) {
  return p.one_operand && origin.row >= origin.col &&
         origin.row + kTile::kRows <= origin.col + kTile::kCols;
}

// Tiles of the launch.
template <typename Args>
__device__ __forceinline__ int64_t tiles_of(const Args& p) {
  return p.batches * p.schedule.per_matrix();
}

// One thread loads the operands of every tile of this block, as far ahead as the ring allows.
// kRowsMajor: the map's inner dimension is the operand's rows, not k. Of an operand in upper
// storage (kUpper) blocks below the diagonal are read as if it were.
template <typename kTile, bool kARowsMajor, bool kBRowsMajor, int kUpper, typename Args>
__device__ __forceinline__ void produce(const Args& p, const SharedMap<kTile>& at) {
  Ring<kTile::kStages> ring;
  const int64_t tiles = tiles_of(p);
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const TileOrigin origin = p.schedule.locate(tile);
    const auto matrix = static_cast<int>(origin.matrix);
    const bool rows_apart = !rows_in_columns<kTile>(p, origin);
    const int bytes = kTile::kStageBytes - (rows_apart ? 0 : kTile::kRowBlocks * kBlockBytes);
    for (int k = 0; k < p.k; k += kStageDepth) {
      // A fresh ring is empty: the phase before its first one has ended.
      barrier_wait(at.empty(ring.slot), ring.parity ^ 1, "an empty stage");
      const uint32_t full = at.full(ring.slot);
      if (k == 0) put_origin(at.origin(ring.slot), origin);
      barrier_arrive_expecting(full, bytes);
#pragma unroll
      for (int i = 0; rows_apart && i < kTile::kRowBlocks; ++i) {
        const int row = origin.row + i * kBlockSide;
        const bool rows_major = kUpper & kUpperA ? !is_above_diagonal(row, k) : kARowsMajor;
        copy_in(at.rows(ring.slot) + i * kBlockBytes, p.a, full, rows_major ? row : k,
                rows_major ? k : row, matrix);
      }
#pragma unroll
      for (int i = 0; i < kTile::kColBlocks; ++i) {
        const int row = origin.col + i * kBlockSide;
        const bool rows_major = kUpper & kUpperB ? !is_above_diagonal(row, k) : kBRowsMajor;
        copy_in(at.cols(ring.slot) + i * kBlockBytes, p.b, full, rows_major ? row : k,
                rows_major ? k : row, matrix);
      }
      ring.advance();
    }
  }
}

// This warp has read the stage.
template <typename kTile>
__device__ __forceinline__ void release(const SharedMap<kTile>& at, uint32_t slot) {
  if (threadIdx.x % 32 == 0) barrier_arrive(at.empty(slot));
}

// sum = A B^T over the whole of k, in growing order. `first_block`: where A's rows begin, in blocks
// from the start of a stage. `last_seen` runs once the last stage has arrived. row, col: where the
// consumer's part of the tile begins.
template <typename T, typename kTile, bool kARowsMajor, bool kBRowsMajor, int kUpper,
          typename LastSeen>
__device__ __forceinline__ void multiply(float (&sum)[kTile::kM][kTile::kCols / 2],
                                         const SharedMap<kTile>& at, Ring<kTile::kStages>& ring,
                                         int first_block, int stages, int row, int col,
                                         LastSeen last_seen) {
  constexpr int kSteps = kStageDepth / kInstructionDepth;
  // The only part that is known at run time, so that the rest is constants of the instructions.
  const uint64_t a_start = matrix_descriptor(at.rows(0) + first_block * kBlockBytes);
  const uint64_t b_start = matrix_descriptor(at.cols(0));
  uint32_t before = 0;
  int stage = 0;
  const auto until = [&](auto a_rows_major, auto b_rows_major, int end) {
    constexpr bool kA = decltype(a_rows_major)::value, kB = decltype(b_rows_major)::value;
    for (; stage < end; ++stage) {
      barrier_wait(at.full(ring.slot), ring.parity, "a full stage");
      const uint64_t offset = ring.slot * (kTile::kStageBytes / 16);
      products_begin();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const uint64_t b = b_start + offset + descriptor_offset<kB>(0, step);
#pragma unroll
        for (int i = 0; i < kTile::kM; ++i) {
          const uint64_t a = a_start + offset + descriptor_offset<kA>(i, step);
          Wgmma<T, kTile::kCols, kA, kB>::add(sum[i], a, b, stage > 0 || step > 0);
        }
      }
      products_commit();
      if (stage == stages - 1) last_seen();
      if (stage > 0) {
        products_wait<1>();
        release(at, before);
      }
      before = ring.slot;
      ring.advance();
    }
  };
  using Yes = std::true_type;
  using No = std::false_type;
  if constexpr (kUpper == (kUpperA | kUpperB)) {
    until(Yes{}, Yes{}, stages_below_diagonal(row));  // row <= col
    until(No{}, Yes{}, stages_below_diagonal(col));
    until(No{}, No{}, stages);
  } else if constexpr (kUpper == kUpperA) {
    until(Yes{}, std::bool_constant<kBRowsMajor>{}, stages_below_diagonal(row));
    until(No{}, std::bool_constant<kBRowsMajor>{}, stages);
  } else if constexpr (kUpper == kUpperB) {
    until(std::bool_constant<kARowsMajor>{}, Yes{}, stages_below_diagonal(col));
    until(std::bool_constant<kARowsMajor>{}, No{}, stages);
  } else {
    until(std::bool_constant<kARowsMajor>{}, std::bool_constant<kBRowsMajor>{}, stages);
  }
  products_wait<0>();
  pin(sum);
  release(at, before);
}

template <typename T, typename kTile, bool kSymmetric, bool kARowsMajor, bool kBRowsMajor,
          int kUpper, typename Args>
__device__ __forceinline__ void consume(const Args& p, const SharedMap<kTile>& at, int consumer) {
  const int part_row = kTile::kTurns ? 0 : consumer * kTile::kPartRows;
  const int stages = (p.k - 1 + kStageDepth) / kStageDepth;  // k > 0
  const uint32_t staging = at.staging(consumer);
  uint32_t c_parity = 0;
  Ring<kTile::kStages> ring;
  int next = 0;                          // the consumer whose tile it is
  uint32_t turn_parity = consumer == 0;  // nobody is before the first
  const int64_t tiles = tiles_of(p);
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const bool mine = !kTile::kTurns || next == consumer;
    next ^= 1;
    if (!mine) {
      ring.skip(stages);
      continue;
    }
    if constexpr (kTile::kTurns) {
      barrier_wait(at.turn(consumer), turn_parity, "the turn");
      turn_parity ^= 1;
    }
    barrier_wait(at.full(ring.slot), ring.parity, "a tile's first stage");
    TileOrigin origin = take_origin(at.origin(ring.slot));
    int first_block = part_row / kBlockSide;
    if (rows_in_columns<kTile>(p, origin)) {
      first_block += kTile::kRowBlocks + (origin.row - origin.col) / kBlockSide;
    }
    origin.row += part_row;
    const float scale = Scalars::scale_of(p, origin.matrix);  // arrives meanwhile
    float sum[kTile::kM][kTile::kCols / 2];
    const auto last_seen = [&] {
      if (kTile::kTurns && threadIdx.x % 32 == 0) barrier_arrive(at.turn(consumer ^ 1));
      __syncwarp();
    };
    multiply<T, kTile, kARowsMajor, kBRowsMajor, kUpper>(sum, at, ring, first_block, stages,
                                                         origin.row, origin.col, last_seen);
    group_sync(prepared_barrier(consumer), kHandingThreads);
    if (p.reads_c) {
      barrier_wait(at.c_there(consumer), c_parity, "C");
      c_parity ^= 1;
      const auto scalars = Scalars::with_scale(p, scale, true);
      finish<T, kTile, kSymmetric, true>(sum, scalars, staging, origin.row, origin.col);
    } else {
      const auto scalars = Scalars::with_scale(p, scale, false);
      finish<T, kTile, kSymmetric, false>(sum, scalars, staging, origin.row, origin.col);
    }
    fence_for_copies();
    group_arrive(finished_barrier(consumer), kHandingThreads);
  }
}

// One warp, for one consumer: the same tiles as its.
template <typename T, typename kTile, bool kSymmetric, typename Args>
__device__ __forceinline__ void carry(const Args& p, const SharedMap<kTile>& at, int consumer) {
  const Courier<T, kTile, kSymmetric, Args> courier(p, at, consumer);
  int next = 0;
  const int64_t tiles = tiles_of(p);
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const bool mine = !kTile::kTurns || next == consumer;
    next ^= 1;
    if (!mine) continue;
    TileOrigin origin = p.schedule.locate(tile);
    if constexpr (!kTile::kTurns) origin.row += consumer * kTile::kPartRows;
    courier.prepare(origin);
    courier.deliver(origin);
  }
  courier.end();
}

template <typename T, typename kTile, bool kSymmetric, bool kARowsMajor, bool kBRowsMajor,
          int kUpper, typename Args>
__global__ void __launch_bounds__(kThreads, 1) product_kernel(const __grid_constant__ Args p) {
  extern __shared__ char shared[];
  let_next_kernel_begin();
  const SharedMap<kTile> at(shared_offset(shared));
  if (threadIdx.x == 0) {
    prefetch_map(p.a);
    prefetch_map(p.b);
    prefetch_map(p.out);
    if (p.reads_c) prefetch_map(p.c);
    for (int slot = 0; slot < kTile::kStages; ++slot) {
      barrier_init(at.full(slot), 1);
      barrier_init(at.empty(slot), kTile::kReaders);
    }
    for (int consumer = 0; consumer < kConsumers; ++consumer) {
      barrier_init(at.c_there(consumer), 1);
      barrier_init(at.turn(consumer), kWarpgroup / 32);
    }
    barrier_init_fence();
    fence_for_copies();
  }
  __syncthreads();
  wait_for_kernel_before();
  const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0);
  const int warpgroup = warp / (kWarpgroup / 32);
  if (warpgroup == 0) {
    give_registers<kProducerRegisters>();
    if (warp == 0 && elected()) produce<kTile, kARowsMajor, kBRowsMajor, kUpper>(p, at);
    __syncwarp();
    if (warp >= 2) carry<T, kTile, kSymmetric>(p, at, warp - 2);
  } else {
    take_registers<kConsumerRegisters>();
    consume<T, kTile, kSymmetric, kARowsMajor, kBRowsMajor, kUpper>(p, at, warpgroup - 1);
  }
}

}  // namespace optimizer::sm90
