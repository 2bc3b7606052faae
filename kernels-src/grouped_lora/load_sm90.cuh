#pragma once
// How stages are filled: weights by TMA, rows by 16-byte copies that gather and swizzle.

#include "grouped_lora/tile_sm90.cuh"
#include "newton_schulz/mma.cuh"

namespace optimizer::grouped_lora {

using newton_schulz::Ring;

// One thread loads the weights of every tile of this block, then the LoRA factor's rank as further
// stages, as far ahead as the ring allows. kRowsMajor: features are contiguous, not k.
template <typename kTile, bool kRowsMajor>
__device__ __forceinline__ void load_weights(const Arguments& p, const SharedMap<kTile>& at) {
  using namespace newton_schulz;
  const int64_t tiles = tile_count(p, at);
  Ring<kTile::kStages> ring;
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const TileAt where = locate(p, at, tile);
    const auto load = [&](const CUtensorMap& map, int depth) {
      for (int k = 0; k < depth; k += kStageDepth) {
        barrier_wait(at.empty(ring.slot), ring.parity ^ 1, "an empty stage, for weights");
        const uint32_t full = at.full(ring.slot);
        barrier_arrive_expecting(full, kTile::kWeightBytes);
#pragma unroll
        for (int i = 0; i < kTile::kFeatureBlocks; ++i) {
          const int feature = where.feature + i * kBlockSide;
          copy_in(at.weights(ring.slot) + i * kBlockBytes, map, full, kRowsMajor ? feature : k,
                  kRowsMajor ? k : feature, where.expert);
        }
        ring.advance();
      }
    };
    load(p.weight, p.k);
    load(p.factor, p.rank);
  }
}

// The row warps. Thread t of theirs copies chunk t % 8 of lines t / 8, t / 8 + 12, ...
//
// wgmma reads through the async proxy what cp.async writes through the generic one: a thread waits
// for its copies, fences, and then its warp signals the stage. It does so for the stage before the
// one that it has just begun, so that copies of two stages are under way. Lines behind a tile's
// rows keep what they held: a row of the product depends on its own line alone.
template <typename kTile>
class RowLoader {
 public:
  __device__ __forceinline__ RowLoader(const Arguments& p, const SharedMap<kTile>& at)
      : p_(p),
        at_(at),
        thread_(static_cast<int>(threadIdx.x) - (kWarpgroup - kRowThreads)),
        line_(thread_ / 8),
        chunk_(thread_ % 8) {}

  __device__ __forceinline__ void run() {
    const int64_t tiles = tile_count(p_, at_);
    int64_t tile = blockIdx.x;
    if (tile >= tiles) return;
    TileAt where = locate(p_, at_, tile);
    int found[kPerThread];
    look_up(found, where);
    for (int set = 0;; set ^= 1) {
      int* sources = at_.sources(set);
      publish(sources, found);
      const TileAt here = where;
      tile += gridDim.x;
      if (tile < tiles) {
        where = locate(p_, at_, tile);
        look_up(found, where);  // used behind this tile's stages, by when it has arrived
      }
      for (int k = 0; k < p_.k; k += kStageDepth) {
        fill(p_.x, p_.x_row, p_.k - k, k, here.rows, [&](int line) { return sources[line]; });
      }
      for (int k = 0; k < p_.rank; k += kStageDepth) {
        fill(p_.low, p_.low_row, p_.rank - k, k, here.rows,
             [&](int line) { return here.row + line; });
      }
      if (tile >= tiles) break;
    }
    symmetric::copy_wait<0>();
    signal();
  }

 private:
  static constexpr int kRowThreads = 32 * kRowWarps;
  static constexpr int kLines = kRowThreads / 8;  // that are copied at a time
  static constexpr int kBatch = 8;                // copies of a thread that begin together
  static constexpr int kPerThread = (kTile::kTokens + kRowThreads - 1) / kRowThreads;

  // Where the lines of a tile lie, before the division by the fan. slots are int64 below 2^31.
  __device__ __forceinline__ void look_up(int (&found)[kPerThread], const TileAt& where) const {
    const int* slots = reinterpret_cast<const int*>(p_.slots);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int line = thread_ + i * kRowThreads;
      found[i] = where.row + line;
      if (p_.fan != 0 && line < where.rows) found[i] = slots[2 * (where.row + line)];
    }
  }

  // The set is free: all have passed the publication of the tile before, whose set is the other.
  __device__ __forceinline__ void publish(int* sources, const int (&found)[kPerThread]) const {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int line = thread_ + i * kRowThreads;
      if (line < kTile::kTokens) sources[line] = p_.fan > 1 ? found[i] / p_.fan : found[i];
    }
    asm volatile("bar.sync %0, %1;" ::"n"(kRowBarrier), "n"(kRowThreads) : "memory");
  }

  // One stage: elements [k, k + 64) of rows, zeros from `left` elements on.
  template <typename Source>
  __device__ __forceinline__ void fill(const char* rows, int64_t pitch, int left, int k, int count,
                                       Source source) {
    newton_schulz::barrier_wait(at_.empty(ring_.slot), ring_.parity ^ 1,
                                "an empty stage, for rows");
    const int bytes = max(0, min(16, 2 * (left - chunk_ * 8)));
    const char* from = rows + (bytes > 0 ? 2 * (k + chunk_ * 8) : 0);
    const uint32_t to = at_.rows(ring_.slot);
#pragma unroll 1
    for (int first = line_; first < count; first += kBatch * kLines) {
      int at[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (first + i * kLines < count) at[i] = source(first + i * kLines);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int line = first + i * kLines;
        if (line < count) {
          symmetric::copy_async(to + newton_schulz::swizzled(line, chunk_), from + at[i] * pitch,
                                bytes);
        }
      }
    }
    symmetric::copy_commit();
    if (filled_) {
      symmetric::copy_wait<1>();
      signal();
    }
    filled_ = true;
    before_ = ring_.slot;
    ring_.advance();
  }

  // The stage before this one is whole, as far as this warp is concerned.
  __device__ __forceinline__ void signal() const {
    newton_schulz::fence_for_copies();
    __syncwarp();
    if (threadIdx.x % 32 == 0) newton_schulz::barrier_arrive(at_.full(before_));
    __syncwarp();
  }

  const Arguments& p_;
  const SharedMap<kTile>& at_;
  const int thread_;
  const int line_;
  const int chunk_;
  Ring<kTile::kStages> ring_;
  uint32_t before_ = 0;
  bool filled_ = false;
};

}  // namespace optimizer::grouped_lora
