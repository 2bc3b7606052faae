#pragma once
// Tiles of normalize's kernel on their way: from memory to a slot of shared memory, from there to
// the output; and the words that blocks share.

#include "newton_schulz/normalize.cuh"

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

}  // namespace optimizer::normalization
