#pragma once
// How stages are filled: packed bytes by TMA, scales and gathered rows by asynchronous copies.

#include "common/mma.cuh"
#include "quant/nf4_tile_sm90.cuh"

namespace optimizer::nf4_product {

// 4 bytes, or zeros.
__device__ __forceinline__ void copy_word_async(uint32_t target, const void* source, bool reads) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(target), "l"(source),
               "r"(reads ? 4 : 0)
               : "memory");
}
// Arrives for this thread once all its copies so far have landed; nobody waits for them here, so
// that every free stage is under way.
__device__ __forceinline__ void barrier_arrive_behind_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Where the word lies that holds the scale of a thread's row in a stage of the sum: of all of its
// columns along; across of a part's, from `column` on. Of MXFP4 it holds two scales, of 64 columns,
// in one of its halves, and starts on 4 bytes.
template <bool kAlong, Format kFormat>
class ScaleSource {
 public:
  __device__ __forceinline__ ScaleSource(const Arguments& p, int expert, int row, int column)
      : p_(p), row_(row) {
    int64_t line = static_cast<int64_t>(expert) * p.stored_rows + row;
    if constexpr (kFormat == Format::kFp8) {
      line = static_cast<int64_t>(expert) * p.scale_rows + (kAlong ? row >> p.row_shift : 0);
    }
    from_ =
        static_cast<const char*>(p.absmax) + (line * p.row_blocks + (column >> p.shift)) * kEach;
  }

  __device__ __forceinline__ const char* at(int k) const {
    int64_t further = static_cast<int64_t>(k) * p_.row_blocks;
    if constexpr (kAlong) {
      further = k >> p_.shift;
    } else if constexpr (kFormat == Format::kFp8) {
      further = static_cast<int64_t>((row_ + k) >> p_.row_shift) * p_.row_blocks;
    }
    const char* found = from_ + further * kEach;
    if constexpr (kFormat == Format::kMxfp4) {
      found = reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(found) & ~uintptr_t{3});
    }
    return found;
  }

 private:
  static constexpr int kEach = kFormat == Format::kMxfp4 ? 1 : 4;  // bytes

  const Arguments& p_;
  const char* from_;
  const int row_;
};

// Thread t of the loader copies chunk t % 8 of lines t / 8, t / 8 + 16, ... of the rows and scales
// t and t + 128 of a part, or of the four of a group; thread 0 also asks for the packed bytes. What
// a thread's copies of a tile have in common is computed once per tile: with addresses computed for
// each copy the loader, not the tensor cores, set the pace. Lines behind a tile's rows, up to a
// multiple of 16, hold its last row again: a row of the product depends on its own line alone.
template <bool kAlong, Format kFormat, Rows kRows>
class Loader {
 public:
  using Map = SharedMap<kAlong, kFormat, kRows>;

  __device__ __forceinline__ Loader(const Arguments& p, const Map& at)
      : p_(p),
        at_(at),
        thread_(static_cast<int>(threadIdx.x)),
        line_(thread_ / 8),
        chunk_(thread_ % 8),
        scale_place_(
            4 * (kAlong ? thread_ : thread_ / kDepth * kDepth + place_across(thread_ % kDepth))),
        whole_groups_(p.shift == 6 && p.row_blocks % kGroupParts == 0 &&
                      reinterpret_cast<uintptr_t>(p.absmax) % 16 == 0) {}

  __device__ __forceinline__ void run() {
    const int tiles = tile_count(p_, at_);
    int tile = dealt_tile(0);
    if (tile >= tiles) return;
    TileAt where = locate(p_, at_, tile);
    int found[kPerThread];
    look_up(found, where);
    for (int round = 1;; ++round) {
      int* sources = at_.sources(round % 2);
      publish(sources, found);
      const TileAt here = where;
      tile = dealt_tile(round);
      if (tile < tiles) {
        where = locate(p_, at_, tile);
        look_up(found, where);  // used behind this tile's stages, by when it has arrived
      }
      load_tile(here, sources);
      if (tile >= tiles) break;
    }
    copy_wait<0>();
  }

 private:
  static constexpr int kLines = kWarpgroup / 8;  // that are copied at a time
  static constexpr int kCopies = Map::kTokens / kLines;
  // Copies of a thread between two looks at the number of rows
  static constexpr int kBatch = kCopies % 4 == 0 ? 4 : kCopies % 3 == 0 ? 3 : 1;
  static_assert(kCopies % kBatch == 0);
  static constexpr int kPerThread = (Map::kTokens + kWarpgroup - 1) / kWarpgroup;

  // Where the lines of a tile lie, before the division by the fan. slots are int64 below 2^31.
  __device__ __forceinline__ void look_up(int (&found)[kPerThread], const TileAt& where) const {
    const int* slots = reinterpret_cast<const int*>(p_.slots);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int row = where.row + min(thread_ + i * kWarpgroup, where.rows - 1);
      found[i] = p_.fan != 0 ? slots[2 * row] : row;
    }
  }

  // The set is free: all have passed the publication of the tile before, whose set is the other.
  __device__ __forceinline__ void publish(int* sources, const int (&found)[kPerThread]) const {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int line = thread_ + i * kWarpgroup;
      if (line < Map::kTokens) sources[line] = p_.fan > 1 ? found[i] / p_.fan : found[i];
    }
    sm90::warpgroup_sync(kLoaderBarrier);
  }

  __device__ __forceinline__ void load_tile(const TileAt& here, const int* sources) {
    uint32_t units[kCopies];  // where lines lie, in 16 bytes
    const auto x_units = static_cast<uint32_t>(p_.x_row / 16);
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      units[i] = static_cast<uint32_t>(sources[line_ + i * kLines]) * x_units;
    }
    const int row = kAlong ? here.column + thread_ : thread_ % kDepth;
    const int column = kAlong ? 0 : here.column + thread_ / kDepth * kPartColumns;
    const ScaleSource<kAlong, kFormat> scales(p_, here.expert, row, column);
    const int to_last = Map::kBoxes == 1 ? 0 : p_.box_columns;
    const ScaleSource<kAlong, kFormat> last_scales(p_, here.expert, row + (kAlong ? to_last : 0),
                                                   column + (kAlong ? 0 : to_last));
    const bool has_third = Map::kConsumers == 3 && thread_ < kPartColumns;
    const int third_row = row + (kAlong ? kWarpgroup : 0),
              third_column = column + (kAlong ? 0 : kWarpgroup);
    const ScaleSource<kAlong, kFormat> third_scales(p_, here.expert, third_row, third_column);
    for (int k = 0; k < p_.depth; k += Map::kStageDepth) {
      const uint32_t full = wait_for_empty();
      if (k == 0 && thread_ == 0) {
        *at_.place(ring_.slot) = {here.expert, here.column, here.row, here.rows};
      }
      fetch_packed(here, k, full);
      if constexpr (kGrouped<kAlong, kFormat>) {
        if (k % (kGroupParts * kDepth) == 0) {
          copy_group(0, scales, k, row < p_.stored_rows);
          if (has_third) copy_group(kWarpgroup, third_scales, k, third_row < p_.stored_rows);
          group_ = group_ + 1 == Map::kStages ? 0 : group_ + 1;
        }
      } else {
#pragma unroll
        for (int part = 0; part < Map::kParts; ++part) {
          const int further = part % Map::kBoxes * p_.box_columns,
                    deep = k + part / Map::kBoxes * kDepth;
          const bool inside = kAlong ? row + further < p_.stored_rows && deep < p_.depth
                                     : row + deep < p_.stored_rows && column + further < p_.columns;
          const auto& source = part % Map::kBoxes == 0 ? scales : last_scales;
          copy_word_async(at_.scales(ring_.slot, part) + scale_place_,
                          inside ? source.at(deep) : p_.absmax, inside);
        }
        if (has_third) {
          const bool inside = row + k < p_.stored_rows && third_column < p_.columns;
          copy_word_async(at_.scales(ring_.slot, 0) + scale_place_ + 4 * kWarpgroup,
                          inside ? third_scales.at(k) : p_.absmax, inside);
        }
      }
#pragma unroll
      for (int half = 0; half < Map::kHalves; ++half) {
        const int deep = k + half * kDepth;
        if (deep + kDepth <= p_.depth) {
          gather<true>(half, p_.x + 2 * deep, units, here.rows, 16);
        } else {
          gather<false>(half, p_.x + 2 * min(deep, p_.depth), units, here.rows,
                        2 * (p_.depth - deep));
        }
      }
      finish(full);
    }
    if (p_.rank == 0) return;
    const int rank_units = p_.rank / 8;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int line = min(line_ + i * kLines, here.rows - 1);
      units[i] = static_cast<uint32_t>(here.row + line) * rank_units;
    }
    for (int k = 0; k < p_.rank; k += kDepth) {
      const uint32_t full = wait_for_empty();
      if (thread_ == 0) sm90::barrier_arrive(full);
      gather<false>(0, p_.low + 2 * k, units, here.rows, 2 * (p_.rank - k));
      finish(full);
    }
  }

  // The scales of this thread's column, or of one `further`, for 4 parts from k on.
  __device__ __forceinline__ void copy_group(int further,
                                             const ScaleSource<kAlong, kFormat>& source, int k,
                                             bool inside) const {
    const uint32_t to = at_.scales(group_, 0) + 16 * (thread_ + further);
    const int parts = inside ? min(kGroupParts, (p_.depth - k + kDepth - 1) / kDepth) : 0;
    if (whole_groups_) {
      copy_async(to, parts > 0 ? source.at(k) : static_cast<const char*>(p_.absmax), 4 * parts);
      return;
    }
#pragma unroll
    for (int part = 0; part < kGroupParts; ++part) {
      const bool reads = part < parts;
      copy_word_async(to + 4 * part, reads ? source.at(k + part * kDepth) : p_.absmax, reads);
    }
  }

  __device__ __forceinline__ uint32_t wait_for_empty() const {
    sm90::barrier_wait(at_.empty(ring_.slot), ring_.parity ^ 1, "an empty stage");
    return at_.full(ring_.slot);
  }

  // Behind the last stored row and the last column packed bytes are zero (TMA), scales too: what is
  // decoded there is finite, and meets zeros or is not stored.
  __device__ __forceinline__ void fetch_packed(const TileAt& where, int k, uint32_t full) const {
    if (thread_ != 0) return;
    sm90::barrier_arrive_expecting(full, Map::kParts * Map::kBoxBytes);
#pragma unroll
    for (int box = 0; box < Map::kBoxes; ++box) {
#pragma unroll
      for (int copy = 0; copy < Map::kBoxColumns; copy += Map::kCopyColumns) {
        const int column = where.column + box * p_.box_columns + copy;
        sm90::copy_in(at_.packed(ring_.slot, box) + copy * kDepth / kPerByte<kFormat>, p_.packed,
                      full, (kAlong ? k : column) / kPerByte<kFormat>, kAlong ? column : k,
                      where.expert);
      }
    }
  }

  // This thread's chunks of 64 elements of rows, of which `left` bytes exist; zeros behind.
  template <bool kWhole>
  __device__ __forceinline__ void gather(int half, const char* from,
                                         const uint32_t (&units)[kCopies], int count,
                                         int left) const {
    const int bytes = kWhole ? 16 : max(0, min(16, left - chunk_ * 16));
    if (bytes > 0) from += chunk_ * 16;
    asm volatile("" : "+l"(from));  // one address that the compiler does not take apart again
    // Lines lie kLines apart, a multiple of 8: their chunk has the same place.
    const uint32_t to =
        at_.rows(ring_.slot) + half * Map::kHalfBytes + sm90::swizzled(line_, chunk_);
#pragma unroll
    for (int first = 0; first < kCopies; first += kBatch) {
      if (first * kLines >= count) break;
#pragma unroll
      for (int i = first; i < first + kBatch; ++i) {
        if (i * kLines < count) {
          copy_async(to + i * kLines * sm90::kLineBytes,
                     from + static_cast<uint64_t>(units[i]) * 16, bytes);
        }
      }
    }
  }

  __device__ __forceinline__ void finish(uint32_t full) {
    barrier_arrive_behind_copies(full);
    ring_.advance();
  }

  const Arguments& p_;
  const Map& at_;
  const int thread_;
  const int line_;
  const int chunk_;
  const int scale_place_;    // in bytes
  const bool whole_groups_;  // scales of a group are 16 bytes that begin on 16
  Ring<Map::kStages> ring_;
  int group_ = 0;  // where the next group of scales goes
};

}  // namespace optimizer::nf4_product
