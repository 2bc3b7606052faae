#pragma once
// float16 and bfloat16: m16n8k16 tensor-core products fed by a ring of asynchronous copies.
//
// A stage holds kDepth of k for the tile's rows of A and its columns (rows of B). Shared memory
// keeps the layout of global memory; 16-byte chunks are XORed with the line, so that copies and
// ldmatrix (transposing for Layout::kColumns) meet no bank conflict.

#include "common/mma.cuh"
#include "common/scalars.cuh"
#include "products/symmetric_matmul.h"

namespace optimizer::symmetric {

// A finished 16-bit tile in shared memory, on its way to both triangles of the output.

__device__ __forceinline__ bool stores_vectors(const Matrices& x, int64_t batches) {
  return x.col == 1 && reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && x.row % 8 == 0 &&
         (batches == 1 || x.batch % 8 == 0);
}

// Rows are one chunk longer than the tile, and chunks are XORed with the row / 8: the fragments of
// the accumulators, whole rows, and 8 columns x 32 rows transposed all go without bank conflicts.
template <int kRows, int kCols>
struct StagedTile {
  static constexpr int kChunks = kCols / 8;
  static constexpr int kBytes = kRows * (kCols + 8) * 2;
  static_assert(kRows % 32 == 0 && kChunks % 8 == 0);

  char* shared;

  // Of the chunk of 8 columns
  static __device__ __forceinline__ int offset(int row, int chunk) {
    return (row * (kChunks + 1) + (chunk ^ (row >> 3 & 3) << 1)) * 16;
  }
  __device__ __forceinline__ uint32_t* pair(int row, int col) const {
    return reinterpret_cast<uint32_t*>(shared + offset(row, col / 8) + col % 8 * 2);
  }

  // C into shared memory. What lies outside of C is not read, and left as it is.
  template <typename T, int kThreads>
  __device__ __forceinline__ void read(const Problem& p, const TileOrigin& origin) const {
    const T* c = static_cast<const T*>(p.c.data) + origin.matrix * p.c.batch;
    const bool vectors = stores_vectors(p.c, p.batches);
    for (int i = static_cast<int>(threadIdx.x); i < kRows * kChunks; i += kThreads) {
      const int row = i / kChunks, chunk = i % kChunks;
      const int r = origin.row + row, first = origin.col + chunk * 8;
      if (r >= p.m) break;
      const T* source = c + r * p.c.row + first * p.c.col;
      char* target = shared + offset(row, chunk);
      if (vectors && first + 8 <= p.m) {
        *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(source);
      } else {
        for (int e = 0; e < 8 && first + e < p.m; ++e) {
          reinterpret_cast<T*>(target)[e] = source[e * p.c.col];
        }
      }
    }
  }

  // Columns from the diagonal on
  template <typename T, int kThreads>
  __device__ __forceinline__ void write(const Problem& p, const TileOrigin& origin) const {
    T* out = static_cast<T*>(const_cast<void*>(p.out.data)) + origin.matrix * p.out.batch;
    const bool vectors = stores_vectors(p.out, p.batches);
    for (int i = static_cast<int>(threadIdx.x); i < kRows * kChunks; i += kThreads) {
      const int row = i / kChunks, chunk = i % kChunks;
      const int r = origin.row + row, first = origin.col + chunk * 8;
      if (r >= p.m) break;
      T* target = out + r * p.out.row + first * p.out.col;
      const char* source = shared + offset(row, chunk);
      if (vectors && first >= r && first + 8 <= p.m) {
        *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(source);
      } else {
        for (int e = max(0, r - first); e < 8 && first + e < p.m; ++e) {
          target[e * p.out.col] = reinterpret_cast<const T*>(source)[e];
        }
      }
    }
  }

  // The transpose, up to the diagonal. A warp turns 8 columns x 32 rows; lane l then holds rows
  // 8 (l % 4) to 8 (l % 4) + 7 of column l / 4, because matrix i is given the row pair 2 i of every
  // group of 8.
  template <typename T, int kThreads>
  __device__ __forceinline__ void write_mirrored(const Problem& p, const TileOrigin& origin) const {
    T* out = static_cast<T*>(const_cast<void*>(p.out.data)) + origin.matrix * p.out.batch;
    const bool vectors = stores_vectors(p.out, p.batches);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int given = lane % 8 / 2 * 8 + lane / 8 * 2 + lane % 2;
    for (int i = static_cast<int>(threadIdx.x) / 32; i < kRows / 32 * kChunks; i += kThreads / 32) {
      const int block = i % (kRows / 32) * 32, chunk = i / (kRows / 32);
      uint32_t words[4];
      load_fragments<true>(words, shared_address(shared) + offset(block + given, chunk));
      const int r = origin.col + chunk * 8 + lane / 4;  // row of the mirrored tile
      const int first = origin.row + block + lane % 4 * 8;
      if (r >= p.m) continue;
      T* target = out + r * p.out.row + first * p.out.col;
      if (vectors && first + 8 <= min(r, p.m)) {
        *reinterpret_cast<uint4*>(target) = make_uint4(words[0], words[1], words[2], words[3]);
      } else {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const auto bits = static_cast<uint16_t>(words[e / 2] >> e % 2 * 16);
          if (first + e < min(r, p.m)) {
            *reinterpret_cast<uint16_t*>(target + e * p.out.col) = bits;
          }
        }
      }
    }
  }
};

// Accumulators -> rounded values, in the place of C.
template <typename T, int kM, int kN, typename Staged>
__device__ __forceinline__ void finish(const Staged& staged, const float (&sum)[kM][kN][4],
                                       const Scalars& scalars, const TileOrigin& origin, int row,
                                       int col) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int i = 0; i < kM; ++i) {
#pragma unroll
    for (int j = 0; j < kN; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = row + 16 * i + 8 * half + lane / 4, c = col + 8 * j + lane % 4 * 2;
        uint32_t* place = staged.pair(r, c);
        alignas(4) T old[2] = {};
        if (scalars.reads_c) *reinterpret_cast<uint32_t*>(old) = *place;
        const int ahead = origin.col + c - origin.row - r;  // columns beyond the diagonal
        *place = pack(rounded<T>(scalars(sum[i][j][2 * half], widened(old[0]), ahead == 0)),
                      rounded<T>(scalars(sum[i][j][2 * half + 1], widened(old[1]), ahead == -1)));
      }
    }
  }
}

template <int kRows_, int kCols_, int kDepth_, int kStages_, int kWarpRows_, int kWarpCols_,
          int kBlocksPerSm_>
struct Tile {
  static constexpr int kRows = kRows_;
  static constexpr int kCols = kCols_;
  static constexpr int kDepth = kDepth_;
  static constexpr int kStages = kStages_;
  static constexpr int kWarpRows = kWarpRows_;  // of one warp's part of the tile
  static constexpr int kWarpCols = kWarpCols_;
  static constexpr int kBlocksPerSm = kBlocksPerSm_;
  static constexpr int kThreads = 32 * (kRows / kWarpRows) * (kCols / kWarpCols);
  static constexpr int kStageBytes = (kRows + kCols) * kDepth * 2;
  static constexpr int kStagedBytes = StagedTile<kRows, kCols>::kBytes;
  static constexpr int kSharedBytes =
      kStages * kStageBytes > kStagedBytes ? kStages * kStageBytes : kStagedBytes;
};

// The kSide rows of one operand that a block needs, kDepth of k at a time.
template <typename T, Layout kLayout, int kSide, int kDepth, int kThreads>
struct Operand {
  static constexpr bool kColumns = kLayout == Layout::kColumns;
  static constexpr int kChunks = (kColumns ? kSide : kDepth) / 8;  // of a line in shared memory
  static constexpr int kStep = kThreads / kChunks;                 // lines between two copies
  static constexpr int kCopies = (kColumns ? kDepth : kSide) / kStep;
  static constexpr int kElements = kSide * kDepth / kThreads;  // per thread, Layout::kAny

  const T* source;  // this thread's first element
  int64_t line;     // stride between lines
  int64_t depth;    // stride of k
  int row;          // rows of the matrix from this thread's first one on
  uint16_t held[kLayout == Layout::kAny ? kElements : 1];

  __device__ __forceinline__ Operand(const Matrices& x, int64_t matrix, int first, int m)
      : depth(x.col) {
    const int thread = static_cast<int>(threadIdx.x);
    const T* base = static_cast<const T*>(x.data) + matrix * x.batch;
    if constexpr (kLayout == Layout::kAny) {
      source = base + first * x.row;
      line = x.row;
      row = m - first;
    } else if constexpr (kColumns) {
      line = x.col;
      row = m - first - thread % kChunks * 8;
      source = base + first + thread % kChunks * 8 + thread / kChunks * line;
    } else {
      line = x.row;
      row = m - first - thread / kChunks;
      source = base + (first + thread / kChunks) * line + thread % kChunks * 8;
    }
  }

  static __device__ __forceinline__ int swizzled(int at, int chunk) {
    static_assert(kChunks >= 8 || kChunks == 4);
    return chunk ^ (kChunks >= 8 ? at & 7 : at >> 1 & 3);
  }

  // Starts the copies of k in [from, from + kDepth).
  __device__ __forceinline__ void copy(uint32_t target, int from, int k) const {
    const int thread = static_cast<int>(threadIdx.x);
    const int chunk = thread % kChunks;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int at = thread / kChunks + i * kStep;
      const uint32_t place = target + (at * kChunks + swizzled(at, chunk)) * 16;
      if constexpr (kColumns) {
        const int bytes = from + at < k ? 2 * max(0, min(8, row)) : 0;
        copy_async(place, source + (from + i * kStep) * line, bytes);
      } else {
        const int bytes = i * kStep < row ? 2 * max(0, min(8, k - from - chunk * 8)) : 0;
        copy_async(place, source + i * kStep * line + from, bytes);
      }
    }
  }

  // Layout::kAny: element `index` of a stage. Neighbouring lanes read along the smaller stride.
  __device__ __forceinline__ int2 element(int index) const {
    const bool along_k = depth <= line;
    return along_k ? make_int2(index / kDepth, index % kDepth)
                   : make_int2(index % kSide, index / kSide);
  }

  __device__ __forceinline__ void fetch(int from, int k) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const int2 at = element(static_cast<int>(threadIdx.x) + i * kThreads);
      const bool inside = at.x < row && from + at.y < k;
      const T* address = source + at.x * line + (from + at.y) * depth;
      held[i] = inside ? *reinterpret_cast<const uint16_t*>(address) : uint16_t{0};
    }
  }

  __device__ __forceinline__ void keep(char* target) const {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const int2 at = element(static_cast<int>(threadIdx.x) + i * kThreads);
      const int chunk = swizzled(at.x, at.y / 8);
      reinterpret_cast<uint16_t*>(target)[(at.x * kChunks + chunk) * 8 + at.y % 8] = held[i];
    }
  }

  // Rows [first, first + 16) x k [16 step, 16 step + 16) of a stage as four 8 x 8 matrices: rows
  // 0-7 and 8-15 of k 0-7, then of k 8-15 (kRowsFirst); or k 0-7 and 8-15 of rows 0-7, then 8-15.
  template <bool kRowsFirst>
  static __device__ __forceinline__ void load(uint32_t (&x)[4], uint32_t stage, int first,
                                              int step) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int low = lane / 8 % 2, high = lane / 16;
    const int row_half = kRowsFirst ? low : high, k_half = kRowsFirst ? high : low;
    if constexpr (kColumns) {
      const int at = step * 16 + k_half * 8 + lane % 8;
      const int chunk = first / 8 + row_half;
      load_fragments<true>(x, stage + (at * kChunks + (chunk ^ lane % 8)) * 16);
    } else {
      const int at = first + row_half * 8 + lane % 8;
      load_fragments<false>(x, stage + (at * kChunks + swizzled(at, step * 2 + k_half)) * 16);
    }
  }
};

// A warp's part of the tile: the sums, and the operands of two steps of 16 in k.
template <typename T, typename kTile, typename A, typename B>
struct WarpTile {
  static constexpr int kM = kTile::kWarpRows / 16;
  static constexpr int kN = kTile::kWarpCols / 16;
  static constexpr int kWarpsPerRow = kTile::kCols / kTile::kWarpCols;

  int row;
  int col;
  float sum[kM][2 * kN][4];
  uint32_t a[2][kM][4];
  uint32_t b[2][kN][4];

  __device__ __forceinline__ WarpTile() : sum{} {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    row = warp / kWarpsPerRow * kTile::kWarpRows;
    col = warp % kWarpsPerRow * kTile::kWarpCols;
  }

  __device__ __forceinline__ void load(uint32_t stage, int step) {
    const uint32_t b_stage = stage + kTile::kRows * kTile::kDepth * 2;
#pragma unroll
    for (int i = 0; i < kM; ++i) A::template load<true>(a[step % 2][i], stage, row + 16 * i, step);
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      B::template load<false>(b[step % 2][j], b_stage, col + 16 * j, step);
    }
  }

  __device__ __forceinline__ void multiply(int step) {
#pragma unroll
    for (int i = 0; i < kM; ++i) {
#pragma unroll
      for (int j = 0; j < 2 * kN; ++j) {
        const uint32_t (&pair)[4] = b[step % 2][j / 2];
        multiply_add(sum[i][j], a[step % 2][i], pair[j % 2 * 2], pair[j % 2 * 2 + 1], T{});
      }
    }
  }
};

// The whole sum over k, copies running kStages - 1 stages ahead and fragments one step ahead.
template <typename kTile, typename A, typename B, typename Warp>
__device__ __forceinline__ void multiply_ahead(Warp& warp, const A& a, const B& b, uint32_t base,
                                               int k) {
  constexpr int kDepth = kTile::kDepth, kStages = kTile::kStages, kSteps = kDepth / 16;
  static_assert(kSteps % 2 == 0);  // step 0 of a stage goes where its last step's operands are not
  const int stages = (k - 1 + kDepth) / kDepth;  // 0 if k is 0
  const auto stage = [&](int slot) { return base + slot * kTile::kStageBytes; };
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    if (i < stages) {
      a.copy(stage(i), i * kDepth, k);
      b.copy(stage(i) + kTile::kRows * kDepth * 2, i * kDepth, k);
    }
    copy_commit();
  }
  copy_wait<kStages - 2>();
  __syncthreads();
  if (stages > 0) warp.load(stage(0), 0);
  int slot = 0, next = kStages - 1;
  for (int i = 0; i < stages; ++i) {
    const int from = (i + kStages - 1) * kDepth;
    const int after = slot + 1 == kStages ? 0 : slot + 1;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step + 1 < kSteps) {
        warp.load(stage(slot), step + 1);
      } else {
        // The next stage is complete, and every warp holds the last operands of this one.
        copy_wait<kStages - 2>();
        __syncthreads();
        if (i + 1 < stages) warp.load(stage(after), 0);
      }
      if (step == 0 && i + kStages - 1 < stages) a.copy(stage(next), from, k);
      if (step == 1) {
        if (i + kStages - 1 < stages) b.copy(stage(next) + kTile::kRows * kDepth * 2, from, k);
        copy_commit();
      }
      warp.multiply(step);
    }
    slot = after;
    next = next + 1 == kStages ? 0 : next + 1;
  }
  copy_wait<0>();
}

// The same for elements that are fetched one by one.
template <typename kTile, typename A, typename B, typename Warp>
__device__ __forceinline__ void multiply_fetched(Warp& warp, A& a, B& b, char* shared, int k) {
  static_assert(kTile::kStages == 2);
  for (int from = 0, slot = 0; from < k; from += kTile::kDepth, slot ^= 1) {
    char* const stage = shared + slot * kTile::kStageBytes;
    a.fetch(from, k);
    b.fetch(from, k);
    a.keep(stage);
    b.keep(stage + kTile::kRows * kTile::kDepth * 2);
    __syncthreads();  // two slots: nobody still reads the one that is written next
#pragma unroll
    for (int step = 0; step < kTile::kDepth / 16; ++step) {
      warp.load(shared_address(stage), step);
      warp.multiply(step);
    }
  }
}

template <typename T, typename kTile, Layout kLayout>
__global__ void __launch_bounds__(kTile::kThreads, kTile::kBlocksPerSm)
    tensor_core_kernel(const Problem p, uint32_t first_matrix) {
  extern __shared__ __align__(128) char shared[];
  using A = Operand<T, kLayout, kTile::kRows, kTile::kDepth, kTile::kThreads>;
  using B = Operand<T, kLayout, kTile::kCols, kTile::kDepth, kTile::kThreads>;
  TileOrigin origin = TriangularSchedule::of(p.m, kTile::kRows, kTile::kCols).locate(blockIdx.x);
  origin.matrix += first_matrix;

  A a(p.a, origin.matrix, origin.row, p.m);
  B b(p.b, origin.matrix, origin.col, p.m);
  WarpTile<T, kTile, A, B> warp;
  if constexpr (kLayout == Layout::kAny) {
    multiply_fetched<kTile>(warp, a, b, shared, p.k);
  } else {
    multiply_ahead<kTile>(warp, a, b, shared_address(shared), p.k);
  }
  __syncthreads();

  const StagedTile<kTile::kRows, kTile::kCols> staged{shared};
  const Scalars scalars(p, origin.matrix, p.c.data != nullptr);
  if (scalars.reads_c) {
    staged.template read<T, kTile::kThreads>(p, origin);
    __syncthreads();
  }
  finish<T>(staged, warp.sum, scalars, origin, warp.row, warp.col);
  __syncthreads();
  staged.template write<T, kTile::kThreads>(p, origin);
  staged.template write_mirrored<T, kTile::kThreads>(p, origin);
}

}  // namespace optimizer::symmetric
