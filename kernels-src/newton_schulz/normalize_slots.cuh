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
        slots_(p.slots, p.ahead, p.each),
        work_(p.tickets, p.first_tickets) {
    asm volatile("" : "+r"(in_tile_.row), "+r"(in_tile_.col));  // not computed again and again
    if (threadIdx.x == 0) ticket_ = atomicAdd(p.counter, p.first_tickets);
  }

  __device__ __forceinline__ void run() {
    for (;; half_ ^= 1) {
      const News& news = shared_.news[half_];
      if (threadIdx.x == 0) tell();
      __syncthreads();
      if (work_.asked) work_.take(news.ticket);
      ask_for_ticket();
      publish_sum();
      if (news.complete != Work::kNone) publish_factor(p_, news.complete, shared_);
      const int ready = ready_tiles(news);
      ask_for_factor(ready);
      if (ready > 0) {
        write_out(ready);
      } else {
        give_up_if_stuck();
      }
      load();
      if (slots_.empty() && work_.exhausted() && given_up_ == Work::kNone) return;
      for (int k = 0; k < p_.each && slots_.on_the_way() > 0; ++k) {
        if (sum()) break;
      }
    }
  }

 private:
  __device__ __forceinline__ void tell() {
    const bool complete = arriving_ != Work::kNone && arrived_ + 1 == p_.tiling.chunks;
    shared_.news[half_] = {found_, wanted_, ticket_, complete ? arriving_ : Work::kNone};
    arriving_ = Work::kNone;
  }

  __device__ __forceinline__ void ask_for_ticket() {
    if (!work_.wants_ticket()) return;
    work_.asked = true;
    if (threadIdx.x == 0) ticket_ = count_one(p_.counter);
  }

  // How many of the oldest tiles, all of one matrix, are to be written out now
  __device__ __forceinline__ int ready_tiles(const News& news) {
    if (slots_.held() == 0) return 0;
    int slot = slots_.scale_at;
    const uint32_t matrix = entries_[slot].matrix;
    if (matrix != known_) {
      if (matrix != news.factor_of || !(news.factor & kThere)) return 0;
      known_ = matrix;
      factor_ = {float_from_bits(static_cast<uint32_t>(news.factor >> 32) & 0x7fffffffu),
                 float_from_bits(static_cast<uint32_t>(news.factor))};
    }
    const int most = slots_.most_ready(work_.exhausted());
    int ready = 1;
    while (ready < most && entries_[slot = slots_.after(slot)].matrix == matrix) ++ready;
    return ready;
  }

  // Asks for the factor of the tile that will be the oldest when `written` are gone.
  __device__ __forceinline__ void ask_for_factor(int written) {
    if (threadIdx.x != 0) return;
    wanted_ = Work::kNone;
    if (slots_.used() == written) return;
    const uint32_t matrix = entries_[slots_.after(slots_.scale_at, written)].matrix;
    if (matrix == known_) return;
    wanted_ = matrix;
    found_ = read_shared(p_.factors + matrix);
  }

  __device__ __forceinline__ void load() {
    while (slots_.may_load()) {
      Entry entry{};
      if (!work_.in_chunk() && work_.has_ticket()) work_.begin_chunk(p_.tiling);
      if (work_.in_chunk()) {
        entry.matrix = work_.matrix;
        entry.tile = work_.tile++;
        entry.ends_chunk = !work_.in_chunk();
      } else if (work_.exhausted() && given_up_ != Work::kNone) {
        const auto tiles = static_cast<uint32_t>(p_.tiling.tiles);
        entry.matrix = given_up_ / tiles;
        entry.tile = given_up_ - entry.matrix * tiles;
        entry.again = 1;
        given_up_ = ~__ldcg(p_.before + given_up_);
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

  // Adds the squares of the next tile, when nothing more can be asked for before. Whether a chunk
  // ended.
  __device__ __forceinline__ bool sum() {
    wait_copies<kMaxAhead - 1>(slots_.on_the_way() - 1);
    const Entry entry = entries_[slots_.sum_at];
    const Slot<T>& slot = memory_[slots_.sum_at];
    slots_.sum();
    if (entry.again) return false;
    if (entry.transposed) {
      squares_.add(slot.template mine<true>());
    } else {
      squares_.add(slot.template mine<false>());
    }
    if (!entry.ends_chunk) return false;
    const double sum = warp_sum(squares_.total());
    squares_ = {};
    if (threadIdx.x % 32 == 0) shared_.warps[half_][threadIdx.x / 32] = sum;
    added_ = entry.matrix;
    added_chunk_ = p_.tiling.by_chunk.quotient(entry.tile);
    return true;
  }

  // The sum of the chunk that ended in the round before
  __device__ __forceinline__ void publish_sum() {
    if (threadIdx.x == 0 && added_ != Work::kNone) {
      const double sum = sum_of(shared_.warps[half_ ^ 1]);
      const auto bits = static_cast<uint64_t>(__double_as_longlong(sum));
      write_shared(p_.sums + uint64_t{added_} * p_.tiling.chunks + added_chunk_, bits | kThere);
      arriving_ = added_;
      arrived_ = count_one(p_.arrived + added_);
    }
    added_ = Work::kNone;
  }

  __device__ __forceinline__ void write_out(int tiles) {
    for (; tiles > 0; --tiles) {
      const Entry entry = entries_[slots_.scale_at];
      const Slot<T>& slot = memory_[slots_.scale_at];
      const Spot at = p_.tiling.of_tile(entry.tile, in_tile_);
      if (entry.transposed) {
        write_tile<T, Out, true>(p_, entry.matrix, at, slot, factor_);
      } else {
        write_tile<T, Out, false>(p_, entry.matrix, at, slot, factor_);
      }
      slots_.scale();
    }
  }

  // Gives the oldest tile up if its factor would be waited for in vain. The slot goes to a tile
  // that is still to be loaded, so nobody follows the new link before the next barrier.
  __device__ __forceinline__ void give_up_if_stuck() {
    if (!slots_.full() || slots_.on_the_way() > 0) return;
    const Entry oldest = entries_[slots_.scale_at];
    if (!work_.has_more_of(oldest.matrix, p_.tiling)) return;
    const uint32_t number = oldest.matrix * static_cast<uint32_t>(p_.tiling.tiles) + oldest.tile;
    if (threadIdx.x == 0) p_.before[number] = ~given_up_;
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
  int half_ = 0;                     // of what is doubled in shared_
  uint32_t known_ = Work::kNone;     // the matrix of factor_
  uint32_t given_up_ = Work::kNone;  // the tile given up last
  uint32_t added_ = Work::kNone;     // the matrix of a chunk whose sum is to be published
  uint32_t added_chunk_ = 0;
  // Thread 0: what was asked for
  uint64_t found_ = 0;
  uint32_t wanted_ = Work::kNone;
  uint32_t ticket_ = 0;
  uint32_t arrived_ = 0;
  uint32_t arriving_ = Work::kNone;
};

template <typename T, typename Out>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    normalize_kernel(const __grid_constant__ Problem p) {
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ Shared shared;
  let_next_start();
  wait_for_launch_before();
  Worker<T, Out>(p, reinterpret_cast<Slot<T>*>(memory), shared).run();
  write_frame<Out>(p);
}

// What a call needs to be zero
static __global__ void __launch_bounds__(kThreads) clear_kernel(uint64_t* words, int64_t count) {
  let_next_start();
  wait_for_launch_before();
  const int64_t threads = int64_t{gridDim.x} * kThreads;
  for (int64_t k = int64_t{blockIdx.x} * kThreads + threadIdx.x; k < count; k += threads) {
    words[k] = 0;
  }
}

}  // namespace optimizer::normalization
