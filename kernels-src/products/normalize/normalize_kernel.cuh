#pragma once
// Tiles of normalize's kernel on their way: from memory to a slot of shared memory, from there to
// the output; and the words that blocks share.

#include "products/normalize/normalize.cuh"

namespace optimizer::normalization {

constexpr int kBlocksPerSm = 3;  // at most: 80 registers
constexpr int kMaxSlots = 24;
constexpr int kMaxAhead = 8;

template <typename T>
constexpr int kSlotBytes = kThreads * kSide * kSide * static_cast<int>(sizeof(T));

struct Problem {
  Matrices x;
  Tiling tiling;
  int out_rows;
  int out_cols;
  bool vector;       // rows of out start on words of 4 elements
  int64_t matrices;  // of out; those behind x are zero
  void* out;         // (matrices, out_rows, out_cols), contiguous
  double prefactor;

  int slots;  // of a block
  int ahead;  // tiles on their way
  uint32_t first_tickets;
  uint32_t tickets;

  // Zero at the start of a call. What is there once has its highest bit set, which no sum of
  // squares and no factor has: it is flag and value at once, so nothing must be ordered.
  uint32_t* counter;  // tickets that are taken
  uint32_t* arrived;  // (x.count,) sums that are there
  uint64_t* sums;     // (x.count, chunks)
  uint64_t* factors;  // (x.count,)
  uint32_t* before;   // (x.count, tiles) the tile that a block gave up before this one; not zeroed
};

constexpr uint64_t kThere = uint64_t{1} << 63;

__device__ __forceinline__ uint64_t read_shared(const uint64_t* address) {
  uint64_t value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}
__device__ __forceinline__ void write_shared(uint64_t* address, uint64_t value) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

template <int kBytes>
__device__ __forceinline__ void copy_line(void* to, const void* from) {
  const auto target = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(target), "l"(from) : "memory");
  }
}
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kLater>
__device__ __forceinline__ void wait_copies(int later) {
  if (later == kLater) {
    asm volatile("cp.async.wait_group %0;" ::"n"(kLater) : "memory");
  } else if constexpr (kLater > 0) {
    wait_copies<kLater - 1>(later);
  }
}

// A tile in a slot. Every warp keeps its own record of it.
struct Entry {
  uint32_t matrix;
  uint32_t tile;
  uint16_t again;  // its sum is there
  uint16_t ends_chunk;
  uint32_t transposed;
};

struct Shared {
  Entry entry[kWarps][kMaxSlots];
  double warps[kWarps];
  double factor_warps[kWarps];
  uint64_t factor;
  uint32_t ticket;
  uint32_t complete;  // a matrix whose last sum this block has added
};

template <typename T>
struct Slot {
  using Words = std::conditional_t<sizeof(T) == 4, uint4, uint2>;
  Words line[kSide][kThreads];

  template <bool kTransposed>
  __device__ __forceinline__ Neighbours<T, kTransposed> mine() const {
    Neighbours<T, kTransposed> x;
#pragma unroll
    for (int k = 0; k < kSide; ++k) {
      const Words words = line[k][threadIdx.x];
      memcpy(x.line[k].word, &words, sizeof words);
    }
    return x;
  }
};

// A thread copies what it alone will read.
template <typename T>
__device__ __forceinline__ void start_tile(const Problem& p, const Piece& piece, uint32_t matrix,
                                           Spot at, Slot<T>& slot) {
  const auto within = static_cast<uint32_t>(matrix - static_cast<uint32_t>(piece.first));
  const T* const x = static_cast<const T*>(piece.data) + within * piece.batch;
  if (whole_lines(piece, at, p.x.rows, p.x.cols)) {
    const bool by_rows = piece.layout == Layout::kRows;
    const int64_t stride = by_rows ? piece.row : piece.col;
    const T* const corner = x + (by_rows ? at.row : at.col) * stride + (by_rows ? at.col : at.row);
#pragma unroll
    for (int k = 0; k < kSide; ++k) {
      copy_line<sizeof(typename Slot<T>::Words)>(&slot.line[k][threadIdx.x], corner + k * stride);
    }
  } else {
    const T* const corner = x + at.row * piece.row + at.col * piece.col;
    Neighbours<T, false> elements;
    elements.load(corner, piece, at, p.x.rows, p.x.cols);
    const bool transposed = piece.layout == Layout::kColumns;
#pragma unroll
    for (int k = 0; k < kSide; ++k) {
      Pack<T, kSide> line;
#pragma unroll
      for (int l = 0; l < kSide; ++l) {
        line.set_bits(l, transposed ? elements.line[l].bits(k) : elements.line[k].bits(l));
      }
      store_words(&slot.line[k][threadIdx.x], line.word);
    }
  }
  commit_copies();
}

// The factor of a matrix, from the sums of its chunks in one order. Called by the block whose sum
// was the last to be counted; some of them may still be under way.
__device__ __forceinline__ void publish_factor(const Problem& p, uint32_t matrix, Shared& shared) {
  const auto chunks = static_cast<uint32_t>(p.tiling.chunks);
  const uint64_t* const sums = p.sums + uint64_t{matrix} * chunks;
  double sum = 0.0;
  for (uint32_t k = threadIdx.x; k < chunks; k += kThreads) {
    uint64_t bits;
    do {
      bits = read_shared(sums + k);
    } while (!(bits & kThere));
    sum += __longlong_as_double(static_cast<long long>(bits & ~kThere));
  }
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) shared.factor_warps[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    const Factor factor = factor_of(sum_of(shared.factor_warps), p.prefactor);
    const uint64_t bits = uint64_t{float_bits(factor.power)} << 32 | float_bits(factor.rest);
    write_shared(p.factors + matrix, bits | kThere);
  }
}

// Two neighbours at once: one by one, the compiler would convert and insert each of them.
__device__ __forceinline__ uint32_t bits_of_two(float low, float high, __half) {
  const __half2 two = __floats2half2_rn(low, high);
  uint32_t bits;
  memcpy(&bits, &two, sizeof bits);
  return bits;
}
__device__ __forceinline__ uint32_t bits_of_two(float low, float high, __nv_bfloat16) {
  const __nv_bfloat162 two = __floats2bfloat162_rn(low, high);
  uint32_t bits;
  memcpy(&bits, &two, sizeof bits);
  return bits;
}

// One store each; the compiler would split some of them.
__device__ __forceinline__ void store_line(void* address, const uint32_t (&w)[2]) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(address), "r"(w[0]), "r"(w[1]) : "memory");
}
__device__ __forceinline__ void store_line(void* address, const uint32_t (&w)[4]) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(w[0]), "r"(w[1]),
               "r"(w[2]), "r"(w[3])
               : "memory");
}

// value(i, j), rounded once, for those of 4 x 4 neighbours that lie in x.
template <typename Out, typename Value>
__device__ __forceinline__ void store(const Problem& p, uint32_t matrix, Spot at, Value value) {
  using Bits = typename Number<Out>::Bits;
  Out* const out = static_cast<Out*>(p.out) + int64_t{matrix} * p.out_rows * p.out_cols;
  Out* const corner = out + int64_t{at.row} * p.out_cols + at.col;
  if (p.vector && at.row + kSide <= p.x.rows && at.col + kSide <= p.x.cols) {
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
      Pack<Out, kSide> pack;
#pragma unroll
      for (int k = 0; k < pack.kWords; ++k) {
        if constexpr (sizeof(Out) == 4) {
          pack.set(k, value(i, k));
        } else {
          pack.word[k] = bits_of_two(value(i, 2 * k), value(i, 2 * k + 1), Out{});
        }
      }
      store_line(corner + int64_t{i} * p.out_cols, pack.word);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kSide; ++i) {
    Bits* const row = reinterpret_cast<Bits*>(corner + int64_t{i} * p.out_cols);
#pragma unroll
    for (int j = 0; j < kSide; ++j) {
      const bool inside = at.row + i < p.x.rows && at.col + j < p.x.cols;
      if (inside) row[j] = Number<Out>::bits(value(i, j));
    }
  }
}

template <typename T, typename Out, bool kTransposed>
__device__ __forceinline__ void write_tile(const Problem& p, uint32_t matrix, Spot at,
                                           const Slot<T>& slot, Factor factor) {
  const auto x = slot.template mine<kTransposed>();
  store<Out>(p, matrix, at,
             [&](int i, int j) { return x.value(i, j) * factor.power * factor.rest; });
}

// Zeros around the matrices and behind the last one. Any block may write any of them.
template <typename Out>
__device__ __forceinline__ void write_frame(const Problem& p) {
  using Bits = typename Number<Out>::Bits;
  Bits* const out = static_cast<Bits*>(p.out);
  const int64_t matrix = int64_t{p.out_rows} * p.out_cols;
  const int64_t below = int64_t{p.out_rows - p.x.rows} * p.out_cols;
  const int right = p.out_cols - p.x.cols;
  const int64_t around = below + int64_t{p.x.rows} * right;
  const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t threads = int64_t{gridDim.x} * kThreads;
  for (int64_t k = thread; k < p.x.count * around; k += threads) {
    const int64_t number = k / around, within = k - number * around;
    int64_t place = within + int64_t{p.x.rows} * p.out_cols;
    if (within >= below) {
      const int64_t row = (within - below) / right;
      place = row * p.out_cols + p.x.cols + (within - below - row * right);
    }
    out[number * matrix + place] = Bits{0};
  }
  constexpr int64_t kWord = 16 / sizeof(Bits);
  const int64_t first = p.x.count * matrix, end = p.matrices * matrix;
  const auto address = reinterpret_cast<uintptr_t>(out + first) / sizeof(Bits);
  const int64_t up = static_cast<int64_t>((kWord - address % kWord) % kWord);
  const int64_t body = first + up < end ? first + up : end;
  const int64_t words = (end - body) / kWord;
  uint4* const wide = reinterpret_cast<uint4*>(out + body);
  for (int64_t k = thread; k < words; k += threads) wide[k] = uint4{};
  for (int64_t k = first + thread; k < body; k += threads) out[k] = Bits{0};
  for (int64_t k = body + words * kWord + thread; k < end; k += threads) out[k] = Bits{0};
}

// The kernel of normalize. Blocks take chunks of matrices in order, copy their tiles to shared
// memory, publish the sums of their squares, and keep the tiles until the matrix has a factor:
// every element is read from memory once, as far as shared memory reaches (normalize.h: Slots).

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
