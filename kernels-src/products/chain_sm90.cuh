#pragma once
// The persistent kernel of a chain of squares (chain.h): the main loop of sm90/product.cuh, fed
// with tiles of several products that depend on each other. All matrices are float16 in upper
// storage (layout.h).
//
//   dealer, one thread:     a ticket -> its tile -> wait until the operand is stored -> mailbox
//   producer, one thread:   mailbox -> ring of stages, by TMA
//   two consumers:          mailbox, every second tile -> wgmma -> finish in the staging memory
//   two couriers, a thread  mailbox -> C into the staging memory of one consumer; the finished tile
//   each:                   out of it, by TMA -> wait until it is written -> count it as stored
//
// So a consumer is back at its next products as soon as its last value is rounded: it waits for no
// copy but that of C, which has its other half's main loop to come.
//
// Blocks draw tickets from one counter. Whoever holds the smallest unfinished one waits for nobody:
// what it depends on has smaller tickets, and so have the tiles before it in its block. So the
// chain ends whatever else the device runs, and however few of its blocks are resident. A courier
// counts a tile before it looks at the next one, so no signal depends on a tile to come.

#include "common/scalars.cuh"
#include "products/chain.h"
#include "sm90/product.cuh"

namespace optimizer::products {

using namespace sm90;

// Of kUpperSide rows and columns, so that an operand's rows are in one block of upper storage.
using SquareTile = Tile<128, 128, 5, true>;
static_assert(SquareTile::kRows == kUpperSide && SquareTile::kCols == kUpperSide);
constexpr int kTileBlocks = SquareTile::kRowBlocks * SquareTile::kColBlocks;

struct ChainArguments {
  CUtensorMap maps[kMostBuffers];
  Square squares[kMostSquares];
  ChainSchedule schedule;
  const float* scale;  // per matrix, or null
  uint32_t* tickets;   // the next one
  uint32_t* stored;    // [product][matrix]: tiles
  uint32_t buffers;
  int m;
};

// Two slots, one per consumer, since they take turns; read by the producer, the consumer's warps
// and its courier. Beside it, how consumer and courier hand the staging memory to each other.
struct Mailbox {
  static constexpr int kSlotBytes = sizeof(ChainTile);
  static constexpr int kBytes = kConsumers * (kSlotBytes + 4 * 8);
  static constexpr int kWarps = kWarpgroup / 32;  // of a consumer
  static constexpr int kReaders = 1 + kWarps + 1;

  uint32_t start;

  __device__ __forceinline__ uint32_t dealt(uint32_t slot) const { return barrier(0, slot); }
  __device__ __forceinline__ uint32_t taken(uint32_t slot) const { return barrier(1, slot); }
  // The staging memory holds C, or nothing that is needed.
  __device__ __forceinline__ uint32_t prepared(uint32_t slot) const { return barrier(2, slot); }
  __device__ __forceinline__ uint32_t finished(uint32_t slot) const { return barrier(3, slot); }

  __device__ __forceinline__ void init() const {
    for (int slot = 0; slot < kConsumers; ++slot) {
      barrier_init(dealt(slot), 1);
      barrier_init(taken(slot), kReaders);
      barrier_init(prepared(slot), 1);
      barrier_init(finished(slot), kWarps);
    }
  }
  __device__ __forceinline__ void put(uint32_t slot, const ChainTile& tile) const {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(start + slot * kSlotBytes),
                 "r"(tile.product), "r"(tile.matrix), "r"(tile.row), "r"(tile.col)
                 : "memory");
  }
  // parity: of the slot's messages. One thread's; the slot is free once its readers have all seen
  // it.
  __device__ __forceinline__ ChainTile take(uint32_t slot, uint32_t parity) const {
    barrier_wait(dealt(slot), parity, "a tile");
    ChainTile tile;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(tile.product), "=r"(tile.matrix), "=r"(tile.row), "=r"(tile.col)
                 : "r"(start + slot * kSlotBytes)
                 : "memory");
    barrier_arrive(taken(slot));
    return tile;
  }

 private:
  __device__ __forceinline__ uint32_t barrier(uint32_t which, uint32_t slot) const {
    return start + kConsumers * kSlotBytes + 8 * (which * kConsumers + slot);
  }
};

__device__ __forceinline__ uint32_t draw_ticket(uint32_t* tickets) {
  uint32_t ticket;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;"
               : "=r"(ticket)
               : "l"(tickets)
               : "memory");
  return ticket;
}
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* count) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(count) : "memory");
  return value;
}
// What this thread did, or saw done by others behind a barrier, comes before the count.
__device__ __forceinline__ void count_released(uint32_t* count) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(count) : "memory");
}

// Until all tiles of a matrix are stored. Copies behind it, by any thread of this block that hears
// of it, see them: the fence passes from ordinary accesses to those of the copy engine.
__device__ __forceinline__ void wait_stored(const uint32_t* stored, uint32_t tiles) {
#ifdef OPTIMIZER_BOUNDED_WAITS
  for (uint32_t tries = 0; load_acquire(stored) != tiles; ++tries) {
    if (tries == 1u << 22) {
      printf("wait for an operand does not end: block %u, %u of %u tiles\n", blockIdx.x,
             load_acquire(stored), tiles);
      asm volatile("trap;");
    }
  }
#else
  while (load_acquire(stored) != tiles) {
  }
#endif
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// M_i was stored before any tile of M_j was begun, so the count of M_j speaks for both.
__device__ __forceinline__ void deal(const ChainArguments& p, const Mailbox& mail) {
  const ChainSchedule& schedule = p.schedule;
  const uint32_t tickets = schedule.count(), tiles = schedule.tiles.per_matrix();
  Ring<kConsumers> slots;
  int last = 0;  // of the messages that there are no more tiles: one per consumer
  while (last < kConsumers) {
    const uint32_t ticket = draw_ticket(p.tickets);
    ChainTile tile{-1, 0, 0, 0};
    if (ticket < tickets) {
      tile = schedule.locate(ticket);
      const auto operand = static_cast<int64_t>(tile.product - 1) * schedule.matrices;
      if (tile.product > 0) wait_stored(p.stored + operand + tile.matrix, tiles);
    } else {
      ++last;
    }
    barrier_wait(mail.taken(slots.slot), slots.parity ^ 1, "a free slot of the mailbox");
    mail.put(slots.slot, tile);
    barrier_arrive(mail.dealt(slots.slot));
    slots.advance();
  }
}

// A tile on the diagonal reads one operand: its stages hold the columns alone, which are the rows.
struct DiagonalTile : SquareTile {
  static constexpr int kRowBlocks = 0;
};

__device__ __forceinline__ void produce_chain(const ChainArguments& p,
                                              const SharedMap<SquareTile>& at,
                                              const Mailbox& mail) {
  Ring<SquareTile::kStages> ring;
  Ring<kConsumers> slots;
  for (;;) {
    const ChainTile tile = mail.take(slots.slot, slots.parity);
    slots.advance();
    if (tile.product < 0) return;
    const CUtensorMap& map = p.maps[p.squares[tile.product].source];
    for (int k = 0; k < p.m; k += kStageDepth) {
      // A fresh ring is empty: the phase before its first one has ended.
      barrier_wait(at.empty(ring.slot), ring.parity ^ 1, "an empty stage");
      const uint32_t full = at.full(ring.slot);
      uint32_t target = at.rows(ring.slot);
      const auto copy_operand = [&](int row, int blocks) {
        const bool above = is_above_diagonal(row, k);
        for (int i = 0; i < blocks; ++i, row += kBlockSide, target += kBlockBytes) {
          copy_in(target, map, full, above ? k : row, above ? row : k, tile.matrix);
        }
      };
      const int row_blocks = tile.row == tile.col ? 0 : SquareTile::kRowBlocks;
      barrier_arrive_expecting(full, (row_blocks + SquareTile::kColBlocks) * kBlockBytes);
      copy_operand(tile.row, row_blocks);
      copy_operand(tile.col, SquareTile::kColBlocks);
      ring.advance();
    }
  }
}

// Everything that one consumer's tiles bring to or from global memory beside their operands.
__device__ __forceinline__ void carry(const ChainArguments& p, const SharedMap<SquareTile>& at,
                                      const Mailbox& mail, int consumer) {
  const uint32_t staging = at.staging(consumer);
  for (uint32_t parity = 0;; parity ^= 1) {
    const ChainTile tile = mail.take(consumer, parity);
    if (tile.product < 0) return;
    const Square& square = p.squares[tile.product];
    const uint32_t prepared = mail.prepared(consumer);
    if (square.beta != 0.0f) {
      barrier_arrive_expecting(prepared, SquareTile::kStagingBytes);
#pragma unroll 1
      for (int block = 0; block < kTileBlocks; ++block) {
        copy_in(staging + block * kBlockBytes, p.maps[square.added], prepared,
                tile.col + block % 2 * kBlockSide, tile.row + block / 2 * kBlockSide, tile.matrix);
      }
    } else {
      barrier_arrive(prepared);
    }
    barrier_wait(mail.finished(consumer), parity, "a finished tile");
#pragma unroll 1
    for (int block = 0; block < kTileBlocks; ++block) {
      const int row = tile.row + block / 2 * kBlockSide, col = tile.col + block % 2 * kBlockSide;
      if (row >= p.m || col >= p.m) continue;
      copy_out(p.maps[square.target], staging + block * kBlockBytes, col, row, tile.matrix);
    }
    copy_out_commit();
    copy_out_wait();
    count_released(p.stored + static_cast<int64_t>(tile.product) * p.schedule.matrices +
                   tile.matrix);
  }
}

// What Scalars reads, of one product.
struct ChainScalars {
  const float* scale;
  float alpha;
  float beta;
  float diag;
  int alpha_power;
  int beta_power;
};

__device__ __forceinline__ void consume_chain(const ChainArguments& p,
                                              const SharedMap<SquareTile>& at, const Mailbox& mail,
                                              int consumer) {
  static_assert(SquareTile::kTurns, "the mailbox has a slot per consumer");
  const int stages = (p.m - 1 + kStageDepth) / kStageDepth;  // m > 0
  const bool speaks = threadIdx.x % 32 == 0;                 // for its warp
  const SharedMap<DiagonalTile> at_diagonal(at.barriers);
  Ring<SquareTile::kStages> ring;
  if (consumer > 0) ring.skip(stages);
  uint32_t turn_parity = consumer == 0;  // nobody is before the first
  for (uint32_t parity = 0;; parity ^= 1, turn_parity ^= 1) {
    ChainTile tile;
    if (speaks) tile = mail.take(consumer, parity);
    tile.product = __shfl_sync(0xffffffff, tile.product, 0);
    tile.matrix = __shfl_sync(0xffffffff, tile.matrix, 0);
    tile.row = __shfl_sync(0xffffffff, tile.row, 0);
    tile.col = __shfl_sync(0xffffffff, tile.col, 0);
    if (tile.product < 0) return;
    const Square& square = p.squares[tile.product];
    const bool reads_c = square.beta != 0.0f, on_diagonal = tile.row == tile.col;
    const ChainScalars given{p.scale,      square.alpha,       square.beta,
                             square.delta, square.alpha_power, square.beta_power};
    // Before the products, as they load.
    const Scalars with_c(given, tile.matrix, true), without(given, tile.matrix, false);
    barrier_wait(at.turn(consumer), turn_parity, "the turn");
    float sum[SquareTile::kM][SquareTile::kCols / 2];
    const auto last_seen = [&] {
      if (speaks) barrier_arrive(at.turn(consumer ^ 1));
      __syncwarp();
    };
    constexpr int kUpper = kUpperA | kUpperB;
    if (on_diagonal) {
      multiply<__half, DiagonalTile, false, false, kUpper>(sum, at_diagonal, ring, 0, stages,
                                                           tile.row, tile.col, last_seen);
    } else {
      multiply<__half, SquareTile, false, false, kUpper>(sum, at, ring, 0, stages, tile.row,
                                                         tile.col, last_seen);
    }
    barrier_wait(mail.prepared(consumer), parity, "C");
    // A A^T is symmetric to the bit, so a tile on the diagonal is stored as it is.
    if (reads_c) {
      finish<__half, SquareTile, true, true>(sum, with_c, at.staging(consumer), tile.row, tile.col);
    } else {
      finish<__half, SquareTile, true, false>(sum, without, at.staging(consumer), tile.row,
                                              tile.col);
    }
    fence_for_copies();
    __syncwarp();
    if (speaks) barrier_arrive(mail.finished(consumer));
    ring.skip(stages);
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    chain_kernel(const __grid_constant__ ChainArguments p) {
  static_assert(Mailbox::kBytes + SquareTile::kBarrierBytes <= SquareTile::kAlignment);
  extern __shared__ char shared[];
  let_next_kernel_begin();
  const Mailbox mail{shared_offset(shared)};
  const SharedMap<SquareTile> at(mail.start + Mailbox::kBytes);
  if (threadIdx.x < p.buffers) prefetch_map(p.maps[threadIdx.x]);
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < SquareTile::kStages; ++slot) {
      barrier_init(at.full(slot), 1);
      barrier_init(at.empty(slot), SquareTile::kReaders);
    }
    for (int consumer = 0; consumer < kConsumers; ++consumer) {
      barrier_init(at.turn(consumer), Mailbox::kWarps);
    }
    mail.init();
    barrier_init_fence();
    fence_for_copies();
  }
  __syncthreads();
  wait_for_kernel_before();
  const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0);
  const int warpgroup = warp / (kWarpgroup / 32);
  if (warpgroup == 0) {
    give_registers<kProducerRegisters>();
    if (threadIdx.x % 32 == 0) {
      if (warp == 0) produce_chain(p, at, mail);
      if (warp == 1) deal(p, mail);
      if (warp >= 2) carry(p, at, mail, warp - 2);
    }
    __syncwarp();
  } else {
    take_registers<kConsumerRegisters>();
    consume_chain(p, at, mail, warpgroup - 1);
  }
}

// Before a chain whose caller has no zeros: no ticket drawn, no tile stored.
__global__ void __launch_bounds__(256) clear_kernel(uint32_t* counters, uint32_t count) {
  let_next_kernel_begin();
  wait_for_kernel_before();  // whoever had this memory before is done with it
  const uint32_t at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at < count) counters[at] = 0;
}

}  // namespace optimizer::products
