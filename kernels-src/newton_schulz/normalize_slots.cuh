#pragma once
// The kernel of normalize. Blocks take chunks of matrices in order, copy their tiles to shared
// memory, publish the sums of their squares, and keep the tiles until the matrix has a factor:
// every element is read from memory once, as far as shared memory reaches (normalize.h: Slots).

#include "newton_schulz/normalize_tiles.cuh"

namespace optimizer::normalization {

// One block of the kernel. All threads hold the same state and take the same decisions.
template <typename T, typename Out>
class Worker {
 public:
  __device__ __forceinline__ Worker(const Problem& p, Slot<T>* memory, Shared& shared)
      : p_(p),
        memory_(memory),
        shared_(shared),
        entries_(shared.entry[threadIdx.x / 32]),
        in_tile_(p.tiling.of_thread(threadIdx.x)),
        slots_(p.slots, p.ahead),
        work_(p.tickets) {
    asm volatile("" : "+r"(in_tile_.row), "+r"(in_tile_.col));  // not computed again and again
    if (threadIdx.x == 0) ticket_ = atomicAdd(p.counter, p.first_tickets);
  }

  __device__ __forceinline__ void run() {
    uint32_t count = p_.first_tickets;
    for (;;) {
      if (threadIdx.x == 0) {
        shared_.ticket = ticket_;
        shared_.complete = complete_;
        complete_ = Work::kNone;
      }
      __syncthreads();
      if (work_.asked) work_.take(shared_.ticket, count);
      count = 1;
      const uint32_t complete = shared_.complete;
      if (complete != Work::kNone) publish_factor(p_, complete, shared_);
      load();
      if (slots_.empty() && work_.exhausted() && given_up_ == Work::kNone) return;
      const bool held = slots_.held() > 0;
      const Entry oldest = entries_[slots_.scale_at];
      const bool asks = threadIdx.x == 0 && held && oldest.matrix != known_;
      const uint64_t found = asks ? read_shared(p_.factors + oldest.matrix) : 0;
      const uint32_t chunk_of = sum();
      if (threadIdx.x == 0) shared_.factor = found;
      __syncthreads();
      if (chunk_of != Work::kNone) publish_sum(chunk_of);
      if (held) finish(oldest);
    }
  }

 private:
  __device__ __forceinline__ void load() {
    while (slots_.may_load()) {
      Entry entry{};
      if (!work_.in_chunk() && work_.has_ticket()) {
        work_.begin_chunk(p_.tiling);
        if (!work_.has_ticket() && work_.ticket_end < p_.tickets) {
          work_.asked = true;
          if (threadIdx.x == 0) ticket_ = atomicAdd(p_.counter, 1u);
        }
      }
      if (work_.in_chunk()) {
        entry.matrix = work_.matrix;
        entry.tile = work_.tile++;
        entry.ends_chunk = !work_.in_chunk();
      } else if (work_.exhausted() && given_up_ != Work::kNone) {
        const auto tiles = static_cast<uint32_t>(p_.tiling.tiles);
        entry.matrix = given_up_ / tiles;
        entry.tile = given_up_ - entry.matrix * tiles;
        entry.again = 1;
        given_up_ = __ldcg(p_.before + given_up_);
      } else {
        return;
      }
      const Piece& piece = p_.x.piece_of(entry.matrix);
      entry.transposed = piece.layout == Layout::kColumns;
      start_tile(p_, piece, entry.matrix, p_.tiling.of_tile(entry.tile, in_tile_),
                 memory_[slots_.load_at]);
      __syncwarp();
      if (threadIdx.x % 32 == 0) entries_[slots_.load_at] = entry;
      __syncwarp();
      slots_.load();
    }
  }

  // Adds the squares of the next tile, when nothing more can be asked for before. The ticket (as
  // matrix x chunks + chunk) whose last tile it was, or kNone.
  __device__ __forceinline__ uint32_t sum() {
    if (slots_.on_the_way() == 0) return Work::kNone;
    wait_copies<kMaxAhead - 1>(slots_.on_the_way() - 1);
    const Entry entry = entries_[slots_.sum_at];
    const Slot<T>& slot = memory_[slots_.sum_at];
    slots_.sum();
    if (entry.again) return Work::kNone;
    if (entry.transposed) {
      squares_.add(slot.template mine<true>());
    } else {
      squares_.add(slot.template mine<false>());
    }
    if (!entry.ends_chunk) return Work::kNone;
    const double sum = warp_sum(squares_.total());
    squares_ = {};
    if (threadIdx.x % 32 == 0) shared_.warps[threadIdx.x / 32] = sum;
    return entry.matrix * static_cast<uint32_t>(p_.tiling.chunks) +
           p_.tiling.by_chunk.quotient(entry.tile);
  }

  __device__ __forceinline__ void publish_sum(uint32_t ticket) {
    if (threadIdx.x != 0) return;
    const auto chunks = static_cast<uint32_t>(p_.tiling.chunks);
    const uint32_t matrix = p_.tiling.by_chunks.quotient(ticket);
    const auto bits = static_cast<uint64_t>(__double_as_longlong(sum_of(shared_.warps)));
    write_shared(p_.sums + ticket, bits | kThere);
    if (atomicAdd(p_.arrived + matrix, 1u) + 1 == chunks) complete_ = matrix;
  }

  // The oldest tile is written out if its matrix has a factor, and given up if it would be waited
  // for in vain.
  __device__ __forceinline__ void finish(Entry oldest) {
    if (oldest.matrix != known_) {
      const uint64_t bits = shared_.factor;
      if (!(bits & kThere)) {
        const bool stuck = slots_.full() && slots_.on_the_way() == 0;
        if (stuck && work_.has_more_of(oldest.matrix, p_.tiling)) give_up(oldest);
        return;
      }
      known_ = oldest.matrix;
      factor_ = {float_from_bits(static_cast<uint32_t>(bits >> 32) & 0x7fffffffu),
                 float_from_bits(static_cast<uint32_t>(bits))};
    }
    do {
      const Slot<T>& slot = memory_[slots_.scale_at];
      const Spot at = p_.tiling.of_tile(oldest.tile, in_tile_);
      if (oldest.transposed) {
        write_tile<T, Out, true>(p_, oldest.matrix, at, slot, factor_);
      } else {
        write_tile<T, Out, false>(p_, oldest.matrix, at, slot, factor_);
      }
      slots_.scale();
      if (slots_.held() == 0) return;
      oldest = entries_[slots_.scale_at];
    } while (slots_.on_the_way() == 0 && oldest.matrix == known_);
  }

  __device__ __forceinline__ void give_up(const Entry& oldest) {
    const uint32_t number = oldest.matrix * static_cast<uint32_t>(p_.tiling.tiles) + oldest.tile;
    if (threadIdx.x == 0) p_.before[number] = given_up_;
    given_up_ = number;
    slots_.scale();
  }

  const Problem& p_;
  Slot<T>* const memory_;
  Shared& shared_;
  Entry* const entries_;
  Spot in_tile_;
  Slots slots_;
  Work work_;
  Squares squares_;
  Factor factor_{};
  uint32_t known_ = Work::kNone;     // the matrix of factor_
  uint32_t given_up_ = Work::kNone;  // the tile given up last
  uint32_t ticket_ = 0;              // thread 0: asked for
  uint32_t complete_ = Work::kNone;  // thread 0: see Shared
};

template <typename T, typename Out>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    normalize_kernel(const __grid_constant__ Problem p) {
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ Shared shared;
  let_next_kernel_begin();
  wait_for_kernel_before();
  Worker<T, Out>(p, reinterpret_cast<Slot<T>*>(memory), shared).run();
  write_frame<Out>(p);
}

// What a call needs to be zero, and what later calls do
static __global__ void __launch_bounds__(kThreads)
    clear_kernel(uint64_t* words, int64_t count, int32_t* zeros, int64_t more) {
  let_next_kernel_begin();
  wait_for_kernel_before();
  const int64_t threads = int64_t{gridDim.x} * kThreads;
  for (int64_t k = int64_t{blockIdx.x} * kThreads + threadIdx.x; k < count; k += threads) {
    words[k] = 0;
  }
  for (int64_t k = int64_t{blockIdx.x} * kThreads + threadIdx.x; k < more; k += threads) {
    zeros[k] = 0;
  }
}

}  // namespace optimizer::normalization
