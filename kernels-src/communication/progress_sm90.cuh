#pragma once
// The persistent kernel of a product whose rows arrive while it runs: the ring, consumers and
// couriers of sm90/product.cuh, a producer that waits for a chunk's signal before it loads the
// chunk's first rows, and tiles of two widths (progress_schedule.h).
//
// A copy engine or a peer writes rows, then the signal. The producer acquires the signal at the
// scope of the system; the fence behind it passes that on to the copies of TMA, which the same
// thread issues. A chunk that is late makes the producer load what is there and report it: nothing
// traps or hangs, and the result is worthless.
//
// The rows of A and of the result are a batch of chunks to the maps, so that a chunk ends where its
// rows end. Every block takes its tiles in one order, so a block that waits holds up nobody.

#include "common/scalars.cuh"
#include "communication/progress_schedule.h"
#include "communication/wait.cuh"
#include "sm90/product.cuh"

namespace optimizer::communication {

using namespace sm90;

using WideTile = Tile<kTileRows, kWideCols, 3, false>;
// In the ring and the staging memory of wide tiles.
struct NarrowTile : WideTile {
  static constexpr int kCols = kNarrowCols;
  static constexpr int kColBlocks = kNarrowCols / kBlockSide;
};
static_assert(WideTile::kRows == kTileRows && kWideCols % kBlockSide == 0 &&
              kNarrowCols % kBlockSide == 0);

struct ProgressArguments {
  CUtensorMap a;    // (chunks, chunk rows, k)
  CUtensorMap b;    // (1, n, k)
  CUtensorMap c;    // unused, as `scale` and the like: what the couriers and Scalars read
  CUtensorMap out;  // (chunks, chunk rows, n)
  ProgressSchedule schedule;
  const uint32_t* signals;  // one per chunk; null: nothing is waited for
  const uint32_t* epochs;   // one word, read when the kernel begins, or null: `epoch`
  uint32_t epoch;
  uint64_t nanoseconds;
  int* status;
  void* out_data;
  int64_t out_batch;  // strides in elements
  int64_t out_row;
  const float* scale;
  int m;  // of a chunk
  int n;
  int k;
  float alpha;
  float beta;
  float diag;
  int alpha_power;
  int beta_power;
  bool reads_c;
  bool upper_out;
};

// Until the chunk's rows are there, or the time is over.
__device__ __forceinline__ void wait_for_chunk(const ProgressArguments& p, int chunk,
                                               uint32_t epoch) {
  const uint64_t end = global_time() + p.nanoseconds;
  if (!wait_for_signal(p.signals + chunk, epoch, end, p.status)) report_late(p.status, chunk + 1);
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// One thread. kBRowsMajor: the map's inner dimension is n, not k.
template <bool kBRowsMajor>
__device__ __forceinline__ void produce_chunks(const ProgressArguments& p,
                                               const SharedMap<WideTile>& at) {
  Ring<WideTile::kStages> ring;
  const uint32_t epoch = p.epochs == nullptr ? p.epoch : load_acquire_system(p.epochs);
  int there = -1;  // the chunk that was waited for
  for (uint32_t tile = blockIdx.x; tile < p.schedule.count(); tile += gridDim.x) {
    const TileOrigin origin = p.schedule.locate(tile);
    const auto chunk = static_cast<int>(origin.matrix);
    if (p.signals != nullptr && chunk != there) {
      wait_for_chunk(p, chunk, epoch);
      there = chunk;
    }
    const int col_blocks =
        p.schedule.is_narrow(origin.col) ? NarrowTile::kColBlocks : WideTile::kColBlocks;
    for (int k = 0; k < p.k; k += kStageDepth) {
      // A fresh ring is empty: the phase before its first one has ended.
      barrier_wait(at.empty(ring.slot), ring.parity ^ 1, "an empty stage");
      const uint32_t full = at.full(ring.slot);
      if (k == 0) put_origin(at.origin(ring.slot), origin);
      barrier_arrive_expecting(full, (WideTile::kRowBlocks + col_blocks) * kBlockBytes);
#pragma unroll
      for (int i = 0; i < WideTile::kRowBlocks; ++i) {
        copy_in(at.rows(ring.slot) + i * kBlockBytes, p.a, full, k, origin.row + i * kBlockSide,
                chunk);
      }
#pragma unroll
      for (int i = 0; i < WideTile::kColBlocks; ++i) {
        if (i >= col_blocks) break;
        const int col = origin.col + i * kBlockSide;
        copy_in(at.cols(ring.slot) + i * kBlockBytes, p.b, full, kBRowsMajor ? col : k,
                kBRowsMajor ? k : col, 0);
      }
      ring.advance();
    }
  }
}

// The sums of one consumer, in one array for both widths: with an array each, both would be live
// around the loop over tiles, as the first product of a tile reads sums that nothing has written.
using Sums = float[1][kWideCols / 2];
static_assert(WideTile::kM == 1);

// A consumer's half of one tile, from the first stage to the staging memory.
template <typename T, typename kTile, bool kBRowsMajor>
__device__ __forceinline__ void consume_tile(const ProgressArguments& p, uint32_t start,
                                             Ring<WideTile::kStages>& ring, Sums& sums,
                                             int consumer, int stages, int row, int col) {
  const SharedMap<kTile> at(start);
  const int first_block = consumer * (kTile::kPartRows / kBlockSide);
  auto& sum = reinterpret_cast<float (&)[1][kTile::kCols / 2]>(sums);
  multiply<T, kTile, false, kBRowsMajor, 0>(sum, at, ring, first_block, stages, row, col, [] {});
  group_sync(prepared_barrier(consumer), kHandingThreads);
  finish<T, kTile, false, false>(sum, Scalars::with_scale(p, 1.0f, false), at.staging(consumer),
                                 row, col);
  fence_for_copies();
  group_arrive(finished_barrier(consumer), kHandingThreads);
}

template <typename T, bool kBRowsMajor>
__device__ __forceinline__ void consume_chunks(const ProgressArguments& p, uint32_t start,
                                               int consumer) {
  const SharedMap<WideTile> at(start);
  const int stages = (p.k - 1 + kStageDepth) / kStageDepth;  // k > 0
  Ring<WideTile::kStages> ring;
  Sums sums;
  for (uint32_t tile = blockIdx.x; tile < p.schedule.count(); tile += gridDim.x) {
    barrier_wait(at.full(ring.slot), ring.parity, "a tile's first stage");
    const TileOrigin origin = take_origin(at.origin(ring.slot));
    const int row = origin.row + consumer * WideTile::kPartRows;
    if (p.schedule.is_narrow(origin.col)) {
      consume_tile<T, NarrowTile, kBRowsMajor>(p, start, ring, sums, consumer, stages, row,
                                               origin.col);
    } else {
      consume_tile<T, WideTile, kBRowsMajor>(p, start, ring, sums, consumer, stages, row,
                                             origin.col);
    }
  }
}

// One warp, for one consumer: the same tiles as its.
template <typename T>
__device__ __forceinline__ void carry_chunks(const ProgressArguments& p, uint32_t start,
                                             int consumer) {
  using Args = ProgressArguments;
  const Courier<T, WideTile, false, Args> wide(p, SharedMap<WideTile>(start), consumer);
  const Courier<T, NarrowTile, false, Args> narrow(p, SharedMap<NarrowTile>(start), consumer);
  for (uint32_t tile = blockIdx.x; tile < p.schedule.count(); tile += gridDim.x) {
    TileOrigin origin = p.schedule.locate(tile);
    origin.row += consumer * WideTile::kPartRows;
    wide.prepare(origin);  // there is no C: both couriers do the same
    if (p.schedule.is_narrow(origin.col)) {
      narrow.deliver(origin);
    } else {
      wide.deliver(origin);
    }
  }
  wide.end();
}

template <typename T, bool kBRowsMajor>
__global__ void __launch_bounds__(kThreads, 1)
    progress_kernel(const __grid_constant__ ProgressArguments p) {
  extern __shared__ char shared[];
  const uint32_t start = shared_offset(shared);
  const SharedMap<WideTile> at(start);
  if (threadIdx.x == 0) {
    prefetch_map(p.a);
    prefetch_map(p.b);
    prefetch_map(p.out);
    for (int slot = 0; slot < WideTile::kStages; ++slot) {
      barrier_init(at.full(slot), 1);
      barrier_init(at.empty(slot), WideTile::kReaders);
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
    if (warp == 0 && elected()) produce_chunks<kBRowsMajor>(p, at);
    __syncwarp();
    if (warp >= 2) carry_chunks<T>(p, start, warp - 2);
  } else {
    take_registers<kConsumerRegisters>();
    consume_chunks<T, kBRowsMajor>(p, start, warpgroup - 1);
  }
}

}  // namespace optimizer::communication
