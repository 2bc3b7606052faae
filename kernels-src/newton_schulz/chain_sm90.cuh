#pragma once
// The persistent kernel of a chain of squares (chain.h): the main loop and the epilogue of
// product_sm90.cuh, fed with tiles of several products that depend on each other. All matrices are
// float16 in upper storage (layout_sm90.h).
//
//   dealer, one thread:   a ticket -> its tile -> wait until the operand is stored -> mailbox
//   producer, one thread: mailbox -> ring of stages, by TMA
//   two consumers:        mailbox, every second tile -> wgmma -> epilogue -> count the tile as
//   stored
//
// Blocks draw tickets from one counter. Whoever holds the smallest unfinished one waits for nobody:
// what it depends on has smaller tickets, and so have the tiles before it in its block. So the
// chain ends whatever else the device runs, and however few of its blocks are resident.
//
// A tile counts as stored when its writes are done (not only read from shared memory); the thread
// that issued them waits for that behind its own tile, so no signal depends on a tile to come.

#include "newton_schulz/chain.h"
#include "newton_schulz/product_sm90.cuh"

namespace optimizer::newton_schulz {

// Of kUpperSide rows and columns, so that an operand's rows are in one block of upper storage.
using SquareTile = Tile<128, 128, 5, true>;
static_assert(SquareTile::kRows == kUpperSide && SquareTile::kCols == kUpperSide);

struct ChainBuffer {
  void* data;
  int64_t batch;  // strides in elements
  int64_t row;
};

struct ChainArguments {
  CUtensorMap maps[kMostBuffers];
  ChainBuffer buffers[kMostBuffers];
  Square squares[kMostSquares];
  ChainSchedule schedule;
  const float* scale;  // per matrix, or null
  uint32_t* tickets;   // the next one
  uint32_t* stored;    // [product][matrix]: tiles
  int m;
};

// Two slots, one per consumer, since they take turns; read by the consumer and the producer.
struct Mailbox {
  static constexpr int kSlotBytes = sizeof(ChainTile);
  static constexpr int kBytes = kConsumers * (kSlotBytes + 16);
  static constexpr int kReaders = 1 + kWarpgroup / 32;

  uint32_t start;

  __device__ __forceinline__ uint32_t dealt(uint32_t slot) const { return barriers() + 8 * slot; }
  __device__ __forceinline__ uint32_t taken(uint32_t slot) const {
    return barriers() + 8 * (kConsumers + slot);
  }
  __device__ __forceinline__ void put(uint32_t slot, const ChainTile& tile) const {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(start + slot * kSlotBytes),
                 "r"(tile.product), "r"(tile.matrix), "r"(tile.row), "r"(tile.col)
                 : "memory");
  }
  __device__ __forceinline__ ChainTile look(uint32_t slot) const {
    ChainTile tile;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(tile.product), "=r"(tile.matrix), "=r"(tile.row), "=r"(tile.col)
                 : "r"(start + slot * kSlotBytes)
                 : "memory");
    return tile;
  }

 private:
  __device__ __forceinline__ uint32_t barriers() const { return start + kConsumers * kSlotBytes; }
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
  const uint32_t tickets = p.schedule.count(), tiles = p.schedule.tiles.per_matrix();
  Ring<kConsumers> slots;
  int last = 0;  // of the messages that there are no more tiles: one per consumer
  while (last < kConsumers) {
    const uint32_t ticket = draw_ticket(p.tickets);
    ChainTile tile{-1, 0, 0, 0};
    if (ticket < tickets) {
      tile = p.schedule.locate(ticket);
      const auto operand = static_cast<int64_t>(tile.product - 1) * p.schedule.matrices;
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
    barrier_wait(mail.dealt(slots.slot), slots.parity, "a tile to load");
    const ChainTile tile = mail.look(slots.slot);
    barrier_arrive(mail.taken(slots.slot));
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

// A tensor map that can be exchanged for another.
struct MapChoice {
  const CUtensorMap* map;
  __device__ __forceinline__ operator const CUtensorMap&() const { return *map; }
};

// The product of a tile as the epilogue wants to see it.
struct ChainView {
  MapChoice c;
  MapChoice out;
  void* out_data;
  int64_t out_batch;
  int64_t out_row;
  const float* scale;
  int m;
  int n;
  float alpha;
  float beta;
  float diag;
  int alpha_power;
  int beta_power;
  bool reads_c;
  bool upper_out = true;

  __device__ __forceinline__ explicit ChainView(const ChainArguments& p)
      : scale(p.scale), m(p.m), n(p.m) {}

  __device__ __forceinline__ void take(const ChainArguments& p, int product) {
    const Square& square = p.squares[product];
    const ChainBuffer& target = p.buffers[square.target];
    c.map = &p.maps[square.added];
    out.map = &p.maps[square.target];
    out_data = target.data;
    out_batch = target.batch;
    out_row = target.row;
    alpha = square.alpha;
    beta = square.beta;
    diag = square.delta;
    alpha_power = square.alpha_power;
    beta_power = square.beta_power;
    reads_c = square.beta != 0.0f;
  }
};

__device__ __forceinline__ void consume_chain(const ChainArguments& p,
                                              const SharedMap<SquareTile>& at, const Mailbox& mail,
                                              int consumer) {
  static_assert(SquareTile::kTurns, "the mailbox has a slot per consumer");
  const int stages = (p.m - 1 + kStageDepth) / kStageDepth;  // m > 0
  ChainView view(p);
  Epilogue<__half, SquareTile, true, ChainView> epilogue(view, at, consumer);
  const SharedMap<DiagonalTile> at_diagonal(at.barriers);
  Ring<SquareTile::kStages> ring;
  if (consumer > 0) ring.skip(stages);
  uint32_t mail_parity = 0, turn_parity = consumer == 0;  // nobody is before the first
  for (;;) {
    barrier_wait(mail.dealt(consumer), mail_parity, "a tile");
    mail_parity ^= 1;
    const ChainTile tile = mail.look(consumer);
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(mail.taken(consumer));
    if (tile.product < 0) return;
    view.take(p, tile.product);
    const TileOrigin origin{tile.matrix, tile.row, tile.col};
    barrier_wait(at.turn(consumer), turn_parity, "the turn");
    turn_parity ^= 1;
    float sum[SquareTile::kM][SquareTile::kCols / 2];
    const auto meanwhile = [&] { epilogue.fetch_c(origin); };
    const auto last_seen = [&] {
      if (threadIdx.x % 32 == 0) barrier_arrive(at.turn(consumer ^ 1));
      __syncwarp();
    };
    constexpr int kUpper = kUpperA | kUpperB;
    if (tile.row == tile.col) {
      multiply<__half, DiagonalTile, false, false, kUpper>(
          sum, at_diagonal, ring, 0, stages, tile.row, tile.col, meanwhile, last_seen);
    } else {
      multiply<__half, SquareTile, false, false, kUpper>(sum, at, ring, 0, stages, tile.row,
                                                         tile.col, meanwhile, last_seen);
    }
    epilogue.store(sum, origin);
    if (threadIdx.x % kWarpgroup == 0) {
      copy_out_wait();
      count_released(p.stored + static_cast<int64_t>(tile.product) * p.schedule.matrices +
                     tile.matrix);
    }
    __syncwarp();
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
  if (threadIdx.x < kMostBuffers && p.buffers[threadIdx.x].data != nullptr) {
    prefetch_map(p.maps[threadIdx.x]);
  }
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < SquareTile::kStages; ++slot) {
      barrier_init(at.full(slot), 1);
      barrier_init(at.empty(slot), SquareTile::kReaders);
    }
    for (int consumer = 0; consumer < kConsumers; ++consumer) {
      barrier_init(at.c_there(consumer), 1);
      barrier_init(at.turn(consumer), kWarpgroup / 32);
      barrier_init(mail.dealt(consumer), 1);
      barrier_init(mail.taken(consumer), Mailbox::kReaders);
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
    if (threadIdx.x == 0) produce_chain(p, at, mail);
    if (threadIdx.x == 32) deal(p, mail);
    __syncwarp();
  } else {
    take_registers<kConsumerRegisters>();
    consume_chain(p, at, mail, warpgroup - 1);
  }
}

// Before every chain: no ticket drawn, no tile stored.
__global__ void __launch_bounds__(256) clear_kernel(uint32_t* counters, uint32_t count) {
  let_next_kernel_begin();
  wait_for_kernel_before();  // whoever had this memory before is done with it
  const uint32_t at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at < count) counters[at] = 0;
}

}  // namespace optimizer::newton_schulz
