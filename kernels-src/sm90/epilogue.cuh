#pragma once
// From a consumer's sums to the result: scalars, one rounding, the tile and its mirror image. A
// consumer does the first two (`finish`), its courier all that is copies (`Courier`).

#include "common/mma.cuh"
#include "common/scalars.cuh"
#include "sm90/tile.cuh"

namespace optimizer::sm90 {

// Pieces of 16 x 16, which a warp loads and stores at once, side by side in a block.
constexpr int kPieces = kBlockSide / 16;

// Sums and, in its place, C -> rounded values in the staging memory, 16 x 64 of a warp at a time:
// the next ones are under way from shared memory meanwhile. row, col: where the consumer's part of
// the tile begins. No branch: what does not belong to the result is finished too, and left behind.
template <typename T, typename kTile, bool kSymmetric, bool kReadsC>
__device__ __forceinline__ void finish(const float (&sum)[kTile::kM][kTile::kCols / 2],
                                       const Scalars& scalars, uint32_t staging, int row, int col) {
  constexpr int kWide = kTile::kColBlocks, kBlocks = kTile::kM * kWide;
  // Such parts meet the diagonal with their own, or not at all.
  constexpr bool kSquare = kTile::kPartRows == kTile::kCols;
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup, lane = thread % 32;
  const uint32_t start = staging + fragment_offset(thread, 0, 0, kWide);
  // 16 columns further is two chunks further, which no other bit of the swizzle meets.
  const auto place = [&](int block, int j) { return (start ^ j * 32) + block * kBlockBytes; };
  // Columns minus rows, in pieces, where this warp's rows meet the diagonal. There this thread has
  // one diagonal element of each of two 8 x 8 matrices, or none.
  const int meets = (row - col) / 16 + thread / 32;
  const int offset = lane / 4 - lane % 4 * 2;  // row - column
  uint32_t x[2][kPieces][4] = {};
  if constexpr (kReadsC) {
#pragma unroll
    for (int j = 0; j < kPieces; ++j) load_fragments<false>(x[0][j], place(0, j));
  }
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    const int i = block / kWide, wide = block % kWide;
    auto& here = x[block % 2];
    if (kReadsC && block + 1 < kBlocks) {
#pragma unroll
      for (int j = 0; j < kPieces; ++j) {
        load_fragments<false>(x[(block + 1) % 2][j], place(block + 1, j));
      }
    }
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const bool diagonal = meets == (wide - i) * kPieces + j;
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const float* const values = &sum[i][fragment_register(wide * kPieces + j, q)];
        const T* const c = reinterpret_cast<const T*>(&here[j][q]);
        float y[2] = {scalars.scaled(values[0], widened(c[0])),
                      scalars.scaled(values[1], widened(c[1]))};
        if (kSymmetric && (!kSquare || i == wide) && (q == 0 || q == 3)) {
          y[0] = scalars.with_diagonal(y[0], diagonal && offset == 0);
          y[1] = scalars.with_diagonal(y[1], diagonal && offset == 1);
        }
        here[j][q] = pack(rounded<T>(y[0]), rounded<T>(y[1]));
      }
    }
#pragma unroll
    for (int j = 0; j < kPieces; ++j) store_fragments<false>(place(block, j), here[j]);
  }
}

// One warp: what the tiles of one consumer bring to or from global memory beside their operands.
// The consumer's part of a tile, kPartRows x kCols elements, is staged as blocks of 64 x 64, which
// come and leave by TMA. It cuts off what lies outside of the matrix, but in a row's last 16 bytes
// only by the whole: blocks of rows that end inside of them are written by ordinary stores.
//
// Of a symmetric result blocks above the diagonal leave twice, the second time transposed, and
// blocks below it not at all. In a block on the diagonal the lower triangle is overwritten with the
// upper one, so that the triangles are equal bit for bit even where A B^T is symmetric only up to
// rounding.
template <typename T, typename kTile, bool kSymmetric, typename Args>
class Courier {
 public:
  __device__ __forceinline__ Courier(const Args& p, const SharedMap<kTile>& at, int consumer)
      : p_(p),
        staging_(at.staging(consumer)),
        c_there_(at.c_there(consumer)),
        consumer_(consumer),
        lane_(static_cast<int>(threadIdx.x) % 32) {}

  // Hands the staging memory to the consumer, C on its way there.
  __device__ __forceinline__ void prepare(const TileOrigin& origin) const {
    if (lane_ == 0) {
      copy_out_wait_read();
      if (p_.reads_c) fetch_c(origin);
    }
    __syncwarp();
    group_arrive(prepared_barrier(consumer_), kHandingThreads);
  }

  // Sends what the consumer has finished.
  __device__ __forceinline__ void deliver(const TileOrigin& origin) const {
    group_sync(finished_barrier(consumer_), kHandingThreads);
    if (kSymmetric && origin.col < origin.row + kTile::kPartRows) {
      fold_diagonal(origin);
      publish();
    }
    send(origin);
    // Part of some row of blocks lies above the diagonal. Its image is stored as far as it is below
    // the diagonal of a block of upper storage, or everywhere.
    if (kSymmetric && origin.col + kTile::kCols > origin.row + kBlockSide &&
        !(p_.upper_out && is_above_diagonal(origin.row, origin.col - kUpperSide))) {
      if (lane_ == 0) copy_out_wait_read();
      __syncwarp();
      mirror(origin);
      publish();
      send_mirrored(origin);
    }
  }

  __device__ __forceinline__ void end() const {
    if (lane_ == 0) copy_out_wait();
  }

 private:
  static constexpr int kWide = kTile::kColBlocks;
  static constexpr int kBlocks = kTile::kM * kWide;
  static constexpr int kPieceBytes = 16 * kLineBytes;  // from its first line to the next piece's

  // What this warp did to the staging memory comes before its copies.
  __device__ __forceinline__ void publish() const {
    fence_for_copies();
    __syncwarp();
  }

  __device__ __forceinline__ int row_of(const TileOrigin& origin, int block) const {
    return origin.row + block / kWide * kBlockSide;
  }
  __device__ __forceinline__ int col_of(const TileOrigin& origin, int block) const {
    return origin.col + block % kWide * kBlockSide;
  }

  // Whether a block of the part belongs to the result, and not to its lower triangle.
  __device__ __forceinline__ bool leaves(int row, int col) const {
    return row < p_.m && col < p_.n && !(kSymmetric && col < row);
  }
  // Whether it lies above the diagonal and inside of the result.
  __device__ __forceinline__ bool mirrors(int row, int col) const {
    return row < col && col < p_.n;
  }

  // One thread.
  __device__ __forceinline__ void fetch_c(const TileOrigin& origin) const {
    int blocks = 0;
#pragma unroll 1
    for (int block = 0; block < kBlocks; ++block) {
      blocks += leaves(row_of(origin, block), col_of(origin, block));
    }
    barrier_arrive_expecting(c_there_, blocks * kBlockBytes);
#pragma unroll 1
    for (int block = 0; block < kBlocks; ++block) {
      const int row = row_of(origin, block), col = col_of(origin, block);
      if (!leaves(row, col)) continue;
      copy_in(staging_ + block * kBlockBytes, p_.c, c_there_, col, row,
              static_cast<int>(origin.matrix));
    }
  }

  // The upper triangles of blocks on the diagonal over their lower ones.
  __device__ __forceinline__ void fold_diagonal(const TileOrigin& origin) const {
#pragma unroll 1
    for (int block = 0; block < kBlocks; ++block) {
      if (row_of(origin, block) != col_of(origin, block)) continue;
      const uint32_t start = staging_ + block * kBlockBytes;
#pragma unroll 1
      for (int r = 0; r < kPieces; ++r) {
        uint32_t x[4];
        load_fragments<false>(x, piece(start, r, r));
        x[0] = upper_mirrored(x[0], lane_);
        x[1] = transposed_fragment(x[2]);
        x[3] = upper_mirrored(x[3], lane_);
        store_fragments<false>(piece(start, r, r), x);
#pragma unroll 1
        for (int c = r + 1; c < kPieces; ++c) {
          load_fragments<false>(x, piece(start, r, c));
          store_fragments<true>(mirrored_piece(start, r, c), x);
        }
      }
    }
  }

  // Blocks above the diagonal -> their transposes, in place: pieces r, r ^ g and r ^ g, r change
  // places.
  __device__ __forceinline__ void mirror(const TileOrigin& origin) const {
#pragma unroll 1
    for (int block = 0; block < kBlocks; ++block) {
      if (!mirrors(row_of(origin, block), col_of(origin, block))) continue;
      const uint32_t start = staging_ + block * kBlockBytes;
#pragma unroll 1
      for (int g = 0; g < kPieces; ++g) {
        uint32_t x[kPieces][4];
#pragma unroll
        for (int r = 0; r < kPieces; ++r) {
          load_fragments<false>(x[r], piece(start, r, r ^ g));
        }
#pragma unroll
        for (int r = 0; r < kPieces; ++r) {
          store_fragments<true>(mirrored_piece(start, r, r ^ g), x[r]);
        }
      }
    }
  }

  // Where this lane reads or writes the piece in row r and column c of a block, and where as its
  // transpose: that of piece 0, 0, and two chunks further for 16 columns.
  __device__ __forceinline__ uint32_t piece(uint32_t start, int r, int c) const {
    return start + r * kPieceBytes + (fragment_offset(lane_, 0, 0, 1) ^ c * 32);
  }
  __device__ __forceinline__ uint32_t mirrored_piece(uint32_t start, int r, int c) const {
    return start + c * kPieceBytes + (mirrored_offset(lane_, 0, 0, 1) ^ r * 32);
  }

  __device__ __forceinline__ void send(const TileOrigin& origin) const {
    bool written = false;
#pragma unroll 1
    for (int block = 0; block < kBlocks; ++block) {
      const int row = row_of(origin, block), col = col_of(origin, block);
      if (!leaves(row, col)) continue;
      const uint32_t source = staging_ + block * kBlockBytes;
      if (p_.n % 8 != 0 && col + kBlockSide > p_.n) {
        write(origin.matrix, row, col, source);
        written = true;
      } else if (lane_ == 0) {
        copy_out(p_.out, source, col, row, static_cast<int>(origin.matrix));
      }
    }
    if (lane_ == 0) copy_out_commit();
    if (written) publish();  // the next copy of C must not overtake these reads
  }

  __device__ __forceinline__ void send_mirrored(const TileOrigin& origin) const {
    if (lane_ == 0) {
#pragma unroll 1
      for (int block = 0; block < kBlocks; ++block) {
        const int row = row_of(origin, block), col = col_of(origin, block);
        if (!mirrors(row, col)) continue;
        copy_out(p_.out, staging_ + block * kBlockBytes, row, col, static_cast<int>(origin.matrix));
      }
      copy_out_commit();
    }
    __syncwarp();
  }

  // A staged block by ordinary stores, as far as it lies inside of the matrix.
  __device__ __forceinline__ void write(int64_t matrix, int row, int col, uint32_t source) const {
    constexpr int kChunks = kBlockSide / 8;
    T* const out = static_cast<T*>(p_.out_data) + matrix * p_.out_batch;
#pragma unroll 1
    for (int i = lane_; i < kBlockSide * kChunks; i += 32) {
      const int line = i / kChunks, chunk = i % kChunks;
      if (row + line >= p_.m) break;
      alignas(16) T values[8];
      uint4& bits = *reinterpret_cast<uint4*>(values);
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                   : "r"(source + swizzled(line, chunk))
                   : "memory");
      T* const target = out + (row + line) * p_.out_row + col + chunk * 8;
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (col + chunk * 8 + e < p_.n) target[e] = values[e];
      }
    }
    __syncwarp();
  }

  const Args& p_;
  uint32_t staging_;
  uint32_t c_there_;
  int consumer_;
  int lane_;
};

}  // namespace optimizer::sm90
