#pragma once
// From a consumer's sums to the result: scalars, one rounding, the tile and its mirror image.

#include "newton_schulz/mma.cuh"
#include "newton_schulz/scalars.cuh"
#include "newton_schulz/tile_sm90.cuh"

namespace optimizer::newton_schulz {

// One consumer warpgroup's part of a tile: kPartRows x kCols elements, staged as blocks of 64 x 64,
// which leave by TMA. It cuts off what lies outside of the matrix, but in a row's last 16 bytes
// only by the whole: blocks of rows that end inside of them are written by ordinary stores.
//
// Of a symmetric result blocks above the diagonal leave twice, the second time transposed, and
// blocks below it not at all. In a block on the diagonal the lower triangle is overwritten with the
// upper one, so that the triangles are equal bit for bit even where A B^T is symmetric only up to
// rounding.
template <typename T, typename kTile, bool kSymmetric, typename Args>
class Epilogue {
 public:
  __device__ __forceinline__ Epilogue(const Args& p, const SharedMap<kTile>& at, int consumer)
      : p_(p),
        staging_(at.staging(consumer)),
        c_there_(at.c_there(consumer)),
        barrier_(1 + consumer),
        thread_(static_cast<int>(threadIdx.x) % kWarpgroup) {}

  // Starts the copy of C into the staging memory. Every thread is done with that since its last
  // warpgroup_sync; the copies out are this thread's own.
  __device__ __forceinline__ void fetch_c(const TileOrigin& origin) const {
    if (p_.reads_c && thread_ == 0) {
      copy_out_wait_read();
      int blocks = 0;
#pragma unroll 1
      for (int block = 0; block < kM * kN; ++block) blocks += leaves(origin, block);
      barrier_arrive_expecting(c_there_, blocks * kBlockBytes);
#pragma unroll 1
      for (int block = 0; block < kM * kN; ++block) {
        if (!leaves(origin, block)) continue;
        copy_in(staging_ + block * kBlockBytes, p_.c, c_there_,
                origin.col + block % kN * kBlockSide, origin.row + block / kN * kBlockSide,
                static_cast<int>(origin.matrix));
      }
    }
    __syncwarp();  // the next instructions are the whole warp's
  }

  __device__ __forceinline__ void store(const float (&sum)[kTile::kM][kTile::kCols / 2],
                                        const TileOrigin& origin) {
    if (p_.reads_c) {
      barrier_wait(c_there_, c_parity_, "C");
      c_parity_ ^= 1;
      finish<true>(sum, origin);
    } else {
      if (thread_ == 0) copy_out_wait_read();
      warpgroup_sync(barrier_);
      finish<false>(sum, origin);
    }
    if (kSymmetric && origin.col < origin.row + kTile::kPartRows) {
      warpgroup_sync(barrier_);
      fold_diagonal(origin);
    }
    publish();
    send(origin);
    // Part of some row of blocks lies above the diagonal. Its image is stored as far as it is below
    // the diagonal of a block of upper storage, or everywhere.
    if (kSymmetric && origin.col + kTile::kCols > origin.row + kBlockSide &&
        !(p_.upper_out && is_above_diagonal(origin.row, origin.col - kUpperSide))) {
      mirror(origin);
      publish();
      send_mirrored(origin);
    }
  }

  __device__ __forceinline__ void end() const {
    if (thread_ == 0) copy_out_wait();
  }

 private:
  static constexpr int kM = kTile::kM;
  static constexpr int kN = kTile::kColBlocks;
  static constexpr int kPieces = kBlockSide / 16;  // of a block, side by side
  static constexpr int kJ = kN * kPieces;

  // What this warpgroup did to the staging memory comes before what follows, also before copies.
  __device__ __forceinline__ void publish() const {
    fence_for_copies();
    warpgroup_sync(barrier_);
  }

  // Sums and, in its place, C -> rounded values in the staging memory.
  template <bool kReadsC>
  __device__ __forceinline__ void finish(const float (&sum)[kM][kTile::kCols / 2],
                                         const TileOrigin& origin) const {
    const symmetric::Scalars scalars(p_, origin.matrix, kReadsC);
    const Element first = accumulator_element(thread_, 0);  // the others lie at fixed offsets
#pragma unroll
    for (int block = 0; block < kM * kN; ++block) {
      if (!leaves(origin, block)) continue;
      const int i = block / kN;
      const bool diagonal = on_diagonal(origin, i, block % kN);
      uint32_t old[kPieces][4] = {};
#pragma unroll
      for (int piece = 0; kReadsC && piece < kPieces; ++piece) {
        symmetric::load_fragments<false>(
            old[piece], staging_ + fragment_offset(thread_, i, block % kN * kPieces + piece, kN));
      }
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        const int j = block % kN * kPieces + piece;
        uint32_t packed[4];
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          const int at = fragment_register(j, q);
          alignas(4) T c[2];
          *reinterpret_cast<uint32_t*>(c) = old[piece][q];
          float x = scalars.scaled(sum[i][at], symmetric::widened(c[0]));
          float y = scalars.scaled(sum[i][at + 1], symmetric::widened(c[1]));
          if (diagonal) {
            const Element offset = accumulator_element(0, at);
            const int here = first.row - first.col;
            x = scalars.with_diagonal(x, here == offset.col % kBlockSide - offset.row);
            y = scalars.with_diagonal(y, here == offset.col % kBlockSide + 1 - offset.row);
          }
          packed[q] = symmetric::pack(symmetric::rounded<T>(x), symmetric::rounded<T>(y));
        }
        if (diagonal && piece == thread_ / 32) {
          packed[0] = upper_mirrored(packed[0], thread_);
          packed[3] = upper_mirrored(packed[3], thread_);
        }
        store_fragments<false>(staging_ + fragment_offset(thread_, i, j, kN), packed);
      }
    }
  }

  // Whether a block of the part belongs to the result, and not to its lower triangle.
  __device__ __forceinline__ bool leaves(const TileOrigin& origin, int block) const {
    const int row = origin.row + block / kN * kBlockSide;
    const int col = origin.col + block % kN * kBlockSide;
    return row < p_.m && col < p_.n && !(kSymmetric && col < row);
  }

  // Whether block (i, block) of the part lies on the diagonal of the result.
  static __device__ __forceinline__ bool on_diagonal(const TileOrigin& origin, int i, int block) {
    return kSymmetric && origin.row + i * kBlockSide == origin.col + block * kBlockSide;
  }

  // Whether it lies above the diagonal and inside of the result.
  __device__ __forceinline__ bool mirrors(const TileOrigin& origin, int i, int block) const {
    const int row = origin.row + i * kBlockSide, col = origin.col + block * kBlockSide;
    return row < col && col < p_.n;
  }

  // The upper triangles of blocks on the diagonal over their lower ones. Matrices of 8 x 8 that the
  // diagonal crosses are symmetric already.
  __device__ __forceinline__ void fold_diagonal(const TileOrigin& origin) const {
    const int warp = thread_ / 32;
#pragma unroll 1
    for (int block = 0; block < kM * kN; ++block) {
      if (!on_diagonal(origin, block / kN, block % kN)) continue;
      const uint32_t start = staging_ + block * kBlockBytes;
#pragma unroll 1
      for (int j = warp; j < kBlockSide / 16; ++j) {
        uint32_t x[4];
        symmetric::load_fragments<false>(x, start + fragment_offset(thread_, 0, j, 1));
        if (j > warp) {
          store_fragments<true>(start + mirrored_offset(thread_, 0, j, 1), x);
        } else {
          const int lane = 16 + thread_ % 8;  // of the matrix of rows 0-7 and columns 8-15
          store_fragment_transposed(start + mirrored_offset(warp * 32 + lane, 0, j, 1), x[2]);
        }
      }
    }
  }

  // The staged part -> the transpose of what lies above the diagonal: kCols lines of kPartRows.
  __device__ __forceinline__ void mirror(const TileOrigin& origin) const {
    uint32_t x[kM][kJ][4] = {};
#pragma unroll
    for (int i = 0; i < kM; ++i) {
#pragma unroll
      for (int j = 0; j < kJ; ++j) {
        if (mirrors(origin, i, j / kPieces)) {
          symmetric::load_fragments<false>(x[i][j], staging_ + fragment_offset(thread_, i, j, kN));
        }
      }
    }
    if (thread_ == 0) copy_out_wait_read();
    warpgroup_sync(barrier_);
#pragma unroll
    for (int i = 0; i < kM; ++i) {
#pragma unroll
      for (int j = 0; j < kJ; ++j) {
        if (mirrors(origin, i, j / kPieces)) {
          store_fragments<true>(staging_ + mirrored_offset(thread_, i, j, kM), x[i][j]);
        }
      }
    }
  }

  __device__ __forceinline__ void send(const TileOrigin& origin) const {
    bool written = false;
#pragma unroll 1
    for (int block = 0; block < kM * kN; ++block) {
      const int row = origin.row + block / kN * kBlockSide;
      const int col = origin.col + block % kN * kBlockSide;
      if (!leaves(origin, block)) continue;
      const uint32_t source = staging_ + block * kBlockBytes;
      if (p_.n % 8 != 0 && col + kBlockSide > p_.n) {
        write(origin.matrix, row, col, source);
        written = true;
      } else if (thread_ == 0) {
        copy_out(p_.out, source, col, row, static_cast<int>(origin.matrix));
      }
    }
    if (thread_ == 0) copy_out_commit();
    if (written) publish();  // the next copy of C must not overtake these reads
  }

  __device__ __forceinline__ void send_mirrored(const TileOrigin& origin) const {
    if (thread_ != 0) return;
#pragma unroll 1
    for (int block = 0; block < kM * kN; ++block) {
      const int row = origin.row + block % kM * kBlockSide;
      const int col = origin.col + block / kM * kBlockSide;
      if (mirrors(origin, block % kM, block / kM)) {
        copy_out(p_.out, staging_ + block * kBlockBytes, row, col, static_cast<int>(origin.matrix));
      }
    }
    copy_out_commit();
  }

  // A staged block by ordinary stores, as far as it lies inside of the matrix.
  __device__ __forceinline__ void write(int64_t matrix, int row, int col, uint32_t source) const {
    constexpr int kChunks = kBlockSide / 8;
    T* const out = static_cast<T*>(p_.out_data) + matrix * p_.out_batch;
#pragma unroll 1
    for (int i = thread_; i < kBlockSide * kChunks; i += kWarpgroup) {
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
  }

  const Args& p_;
  uint32_t staging_;
  uint32_t c_there_;
  int barrier_;
  int thread_;
  uint32_t c_parity_ = 0;
};

}  // namespace optimizer::newton_schulz
