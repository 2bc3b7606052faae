#pragma once
// From a consumer's sums to the result: scalars, one rounding, the tile and its mirror image.

#include "newton_schulz/mma.cuh"
#include "newton_schulz/scalars.cuh"
#include "newton_schulz/tile_sm90.cuh"

namespace optimizer::newton_schulz {

// One consumer warpgroup's part of a tile: kPartRows x kCols elements, staged as blocks of 64 x 64.
//
// Off the diagonal the part and its transpose leave by TMA, which cuts off what lies outside of the
// matrix, but in its last 16 bytes only by the whole: a row that ends inside of them is written by
// ordinary stores. So are parts that reach the diagonal, every element once: from the diagonal on as
// computed, below it from the transpose, so that the triangles are equal bit for bit even where
// A B^T is symmetric only up to rounding.
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
      barrier_arrive_expecting(c_there_, kTile::kStagingBytes);
#pragma unroll 1
      for (int block = 0; block < kM * kN; ++block) {
        copy_in(staging_ + block * kBlockBytes, p_.c, c_there_,
                origin.col + block % kN * kBlockSide, origin.row + block / kN * kBlockSide,
                static_cast<int>(origin.matrix));
      }
    }
    __syncwarp();  // the next instructions are the whole warp's
  }

  __device__ __forceinline__ void store(const float (&sum)[kTile::kM][kTile::kCols / 2],
                                        const TileOrigin& origin) {
    const bool above = !kSymmetric || origin.col >= origin.row + kTile::kPartRows;
    uint32_t packed[kM][kJ][4];
    if (p_.reads_c) {
      barrier_wait(c_there_, c_parity_, "C");
      c_parity_ ^= 1;
      finish<true>(packed, sum, origin, above);
    } else {
      if (thread_ == 0) copy_out_wait_read();
      warpgroup_sync(barrier_);
      finish<false>(packed, sum, origin, above);
    }
    publish();
    const bool whole_chunks = p_.n % 8 == 0 || origin.col + kTile::kCols <= p_.n;
    if (above && whole_chunks) {
      send(origin);
    } else {
      write_upper(origin);
      if (!kSymmetric) publish();  // the next copy of C must not overtake these reads
    }
    if constexpr (kSymmetric) {
      if (above && thread_ == 0) copy_out_wait_read();
      warpgroup_sync(barrier_);
      mirror(packed);
      publish();
      if (above) {
        send_mirrored(origin);
      } else {
        write_lower(origin);
        publish();  // the next copy of C must not overtake these reads
      }
    }
  }

  __device__ __forceinline__ void end() const {
    if (thread_ == 0) copy_out_wait();
  }

 private:
  static constexpr int kM = kTile::kM;
  static constexpr int kN = kTile::kColBlocks;
  static constexpr int kJ = kTile::kCols / 16;

  // What this warpgroup did to the staging memory comes before what follows, also before copies.
  __device__ __forceinline__ void publish() const {
    fence_for_copies();
    warpgroup_sync(barrier_);
  }

  // Sums and, in its place, C -> rounded values in the staging memory, and packed in registers.
  template <bool kReadsC>
  __device__ __forceinline__ void finish(uint32_t (&packed)[kM][kJ][4],
                                         const float (&sum)[kM][kTile::kCols / 2],
                                         const TileOrigin& origin, bool above) const {
    const symmetric::Scalars scalars(p_, origin.matrix, kReadsC);
    uint32_t old[2][4] = {};
    if (kReadsC)
      symmetric::load_fragments<false>(old[0], staging_ + fragment_offset(thread_, 0, 0, kN));
#pragma unroll
    for (int i = 0; i < kM; ++i) {
#pragma unroll
      for (int j = 0; j < kJ; ++j) {
        const int next = i * kJ + j + 1;
        if (kReadsC && next < kM * kJ) {
          symmetric::load_fragments<false>(
              old[next % 2], staging_ + fragment_offset(thread_, next / kJ, next % kJ, kN));
        }
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          const int at = fragment_register(j, q);
          alignas(4) T c[2];
          *reinterpret_cast<uint32_t*>(c) = old[(next + 1) % 2][q];
          float x = scalars.scaled(sum[i][at], symmetric::widened(c[0]));
          float y = scalars.scaled(sum[i][at + 1], symmetric::widened(c[1]));
          if (kSymmetric && !above) {
            const Element element = accumulator_element(thread_, at);
            const int here = origin.col + element.col - origin.row - i * 64 - element.row;
            x = scalars.with_diagonal(x, here == 0);
            y = scalars.with_diagonal(y, here == -1);
          }
          packed[i][j][q] = symmetric::pack(symmetric::rounded<T>(x), symmetric::rounded<T>(y));
        }
        store_fragments<false>(staging_ + fragment_offset(thread_, i, j, kN), packed[i][j]);
      }
    }
  }

  // The transpose into the staging memory: kCols lines of kPartRows elements.
  __device__ __forceinline__ void mirror(const uint32_t (&packed)[kM][kJ][4]) const {
#pragma unroll
    for (int i = 0; i < kM; ++i) {
#pragma unroll
      for (int j = 0; j < kJ; ++j) {
        store_fragments<true>(staging_ + mirrored_offset(thread_, i, j, kM), packed[i][j]);
      }
    }
  }

  __device__ __forceinline__ void send(const TileOrigin& origin) const {
    if (thread_ != 0) return;
#pragma unroll 1
    for (int block = 0; block < kM * kN; ++block) {
      const int row = origin.row + block / kN * kBlockSide;
      const int col = origin.col + block % kN * kBlockSide;
      if (row < p_.m && col < p_.n) {
        copy_out(p_.out, staging_ + block * kBlockBytes, col, row, static_cast<int>(origin.matrix));
      }
    }
    copy_out_commit();
  }

  __device__ __forceinline__ void send_mirrored(const TileOrigin& origin) const {
    if (thread_ != 0) return;
#pragma unroll 1
    for (int block = 0; block < kM * kN; ++block) {
      const int row = origin.row + block % kM * kBlockSide;
      const int col = origin.col + block / kM * kBlockSide;
      if (row < p_.m && col < p_.n) {
        copy_out(p_.out, staging_ + block * kBlockBytes, row, col, static_cast<int>(origin.matrix));
      }
    }
    copy_out_commit();
  }

  __device__ __forceinline__ T* row_of(int64_t matrix, int row) const {
    return static_cast<T*>(p_.out_data) + matrix * p_.out_batch + row * p_.out_row;
  }

  // Elements [from, to) of a staged chunk of 8 to `target`, which starts on 16 bytes.
  static __device__ __forceinline__ void write_chunk(T* target, uint32_t source, int from, int to) {
    if (from >= to) return;
    alignas(16) T values[8];
    uint4 bits;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                 : "r"(source)
                 : "memory");
    if (to - from == 8) {
      *reinterpret_cast<uint4*>(target) = bits;
      return;
    }
    *reinterpret_cast<uint4*>(values) = bits;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      if (e >= from && e < to) target[e] = values[e];
    }
  }

  // Columns from the diagonal on, or all
  __device__ __forceinline__ void write_upper(const TileOrigin& origin) const {
    constexpr int kChunks = kTile::kCols / 8;
#pragma unroll 1
    for (int i = thread_; i < kTile::kPartRows * kChunks; i += kWarpgroup) {
      const int r = i / kChunks, chunk = i % kChunks;
      const int row = origin.row + r, col = origin.col + chunk * 8;
      if (row >= p_.m) break;
      const uint32_t source =
          staging_ + (r / 64 * kN + chunk / 8) * kBlockBytes + swizzled(r % 64, chunk % 8);
      const int from = kSymmetric ? max(0, row - col) : 0;
      write_chunk(row_of(origin.matrix, row) + col, source, from, min(8, p_.n - col));
    }
  }

  // The transpose, up to the diagonal
  __device__ __forceinline__ void write_lower(const TileOrigin& origin) const {
    constexpr int kChunks = kTile::kPartRows / 8;
#pragma unroll 1
    for (int i = thread_; i < kTile::kCols * kChunks; i += kWarpgroup) {
      const int r = i / kChunks, chunk = i % kChunks;
      const int row = origin.col + r, col = origin.row + chunk * 8;
      if (row >= p_.n) break;
      const uint32_t source =
          staging_ + (r / 64 * kM + chunk / 8) * kBlockBytes + swizzled(r % 64, chunk % 8);
      write_chunk(row_of(origin.matrix, row) + col, source, 0, min(8, row - col));
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
