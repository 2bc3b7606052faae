#pragma once
// The persistent kernel of the product over 4-bit weights. See nf4_tile_sm90.cuh for the roles.

#include "grouped_lora/nf4_load_sm90.cuh"
#include "grouped_lora/nf4_store_sm90.cuh"
#include "grouped_lora/nf4_wgmma_sm90.cuh"

namespace optimizer::nf4_product {

// One consumer's tiles.
template <bool kAlong>
class Consumer {
 public:
  __device__ __forceinline__ Consumer(const Arguments& p, const SharedMap& at, int consumer)
      : p_(p),
        at_(at),
        consumer_(consumer),
        stages_((p.depth + kDepth - 1) / kDepth),
        rows_start_(newton_schulz::matrix_descriptor(at.rows(0))),
        decode_(p.codebook[threadIdx.x % 16], consumer) {}

  __device__ __forceinline__ void run() {
    const int64_t tiles = tile_count(p_, at_);
    for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      const TileAt where = locate(p_, at_, tile);
      if (where.rows <= 64) {
        process<64>(where);
      } else if (where.rows <= 96) {
        process<96>(where);
      } else if (where.rows <= 128) {
        process<128>(where);
      } else if (where.rows <= 160) {
        process<160>(where);
      } else if (where.rows <= 192) {
        process<192>(where);
      } else {
        process<256>(where);
      }
    }
    clear_sentinels(p_, at_.offsets()[p_.experts]);
  }

 private:
  template <int kN>
  __device__ __forceinline__ void process(const TileAt& where) {
    const TileExtras extras(p_, where);
    const int warp = threadIdx.x % kWarpgroup / 32, group = threadIdx.x % 32 / 4;
    const int column = where.column + consumer_ * kPartColumns + pair_column<kAlong>(warp, group);
    // Set to zero, not overwritten by the first product: what only that defines lives, for the
    // compiler, through the whole loop over tiles, every kN's sums beside each other.
    float sum[kN / 2] = {};
    multiply<kN>(sum);
    add_low_rank<kN>(sum, where, column);
    newton_schulz::products_wait<0>();
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) asm volatile("" : "+f"(sum[i]));
    release(before_);

    newton_schulz::warpgroup_sync(1 + consumer_);
    extras.publish(at_, consumer_);
    newton_schulz::warpgroup_sync(1 + consumer_);
    float2 bias{};
    if (p_.bias != nullptr && column < p_.columns) {
      const float* from = p_.bias + static_cast<int64_t>(where.expert) * p_.columns + column;
      bias = {from[0], from[1]};
    }
    if (p_.dots != nullptr) row_dots<kN>(p_, at_, sum, bias, where, consumer_, column);
    if (column < p_.columns) {
      write_rows<kN>(p_, sum, bias, at_.targets(consumer_), at_.gates(consumer_), where.rows,
                     column);
    }
  }

  // sum (64 columns x rows) = W x^T. A stage is decoded while the products of the stage before run.
  template <int kN>
  __device__ __forceinline__ void multiply(float (&sum)[kN / 2]) {
    uint32_t even[kSteps][4], odd[kSteps][4];
    fetch(even);
    int stage = 0;
    while (true) {
      add_stage<kN>(sum, even, odd, stage++);
      if (stage == stages_) break;
      add_stage<kN>(sum, odd, even, stage++);
      if (stage == stages_) break;
    }
  }

  template <int kN>
  __device__ __forceinline__ void add_stage(float (&sum)[kN / 2], const uint32_t (&a)[kSteps][4],
                                            uint32_t (&next)[kSteps][4], int stage) {
    using namespace newton_schulz;
    const uint64_t b = rows_start_ + ring_.slot * (kRowBytes / 16);
    products_begin();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      DecodedProduct<kN>::add(sum, a[step], b + descriptor_offset<false>(0, step));
    }
    products_commit();
    if (stage > 0) {  // `next` and the stage before are free when its products have ended
      products_wait<1>();
      release(before_);
    }
    before_ = ring_.slot;
    ring_.advance();
    if (stage + 1 < stages_) fetch(next);
  }

  // The left operand of the stage that the ring has come to. wgmma reads through the async proxy
  // what cp.async has written through the generic one: hence the fence, behind the barrier.
  __device__ __forceinline__ void fetch(uint32_t (&a)[kSteps][4]) const {
    newton_schulz::barrier_wait(at_.full(ring_.slot), ring_.parity, "a full stage");
    newton_schulz::fence_for_copies();
    decode_(a, at_, ring_.slot);
  }

  // sum += F low^T, 64 of the rank at a time; the factor comes straight from global memory.
  template <int kN>
  __device__ __forceinline__ void add_low_rank(float (&sum)[kN / 2], const TileAt& where,
                                               int column) {
    using namespace newton_schulz;
    for (int k = 0; k < p_.rank; k += kDepth) {
      uint32_t a[kSteps][4];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) load_factor(a[step], where, column, k + 16 * step);
      barrier_wait(at_.full(ring_.slot), ring_.parity, "a full stage of the rank");
      fence_for_copies();
      const uint64_t b = rows_start_ + ring_.slot * (kRowBytes / 16);
      products_begin();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        DecodedProduct<kN>::add(sum, a[step], b + descriptor_offset<false>(0, step));
      }
      products_commit();
      products_wait<0>();
      release(before_);
      before_ = ring_.slot;
      ring_.advance();
    }
  }

  // Ranks [k, k + 16) of columns `column` and the next, zeros from the rank on.
  __device__ __forceinline__ void load_factor(uint32_t (&a)[4], const TileAt& where, int column,
                                              int k) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int rank = k + i / 2 * 8 + threadIdx.x % 4 * 2;
      a[i] = 0;
      if (rank >= p_.rank || column >= p_.columns) continue;
      const char* from = p_.factor + where.expert * p_.factor_expert + rank * p_.factor_rank +
                         (column + i % 2) * p_.factor_column;
      a[i] = *reinterpret_cast<const uint16_t*>(from) |
             static_cast<uint32_t>(*reinterpret_cast<const uint16_t*>(from + p_.factor_rank)) << 16;
    }
  }

  // This warp is done with a stage.
  __device__ __forceinline__ void release(uint32_t slot) const {
    if (threadIdx.x % 32 == 0) newton_schulz::barrier_arrive(at_.empty(slot));
    __syncwarp();
  }

  const Arguments& p_;
  const SharedMap& at_;
  const int consumer_;
  const int stages_;
  const uint64_t rows_start_;
  const Decoder<kAlong> decode_;
  Ring<kStages> ring_;
  uint32_t before_ = 0;
};

// Offsets, and tiles of rows before every expert: exclusive sums by the first warp.
__device__ __forceinline__ void make_tables(const Arguments& p, const SharedMap& at) {
  int *offsets = at.offsets(), *starts = at.starts();
  for (int e = static_cast<int>(threadIdx.x); e <= p.experts; e += kThreads) {
    offsets[e] = static_cast<int>(p.offsets[e]);
  }
  __syncthreads();
  if (threadIdx.x >= 32) return;
  const int lane = static_cast<int>(threadIdx.x);
  int before = 0;
  for (int first = 0; first < p.experts; first += 32) {
    const int e = first + lane;
    const int own = e < p.experts ? row_tiles(offsets[e + 1] - offsets[e], kTokens) : 0;
    int sum = own;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int left = __shfl_up_sync(0xffffffff, sum, distance);
      if (lane >= distance) sum += left;
    }
    if (e < p.experts) starts[e] = before + sum - own;
    before += __shfl_sync(0xffffffff, sum, 31);
  }
  if (lane == 0) starts[p.experts] = before;
}

template <bool kAlong>
__global__ void __launch_bounds__(kThreads, 1)
    nf4_product_kernel(const __grid_constant__ Arguments p) {
  using namespace newton_schulz;
  extern __shared__ char shared[];
  const SharedMap at(shared);
  if (threadIdx.x == 0) {
    prefetch_map(p.packed);
    for (int slot = 0; slot < kStages; ++slot) {
      barrier_init(at.full(slot), kWriters);
      barrier_init(at.empty(slot), kReaders);
    }
    barrier_init_fence();
    fence_for_copies();
  }
  make_tables(p, at);
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  if (warpgroup == 0) {
    give_registers<kLoaderRegisters>();
    Loader<kAlong>(p, at).run();
  } else {
    take_registers<kConsumerRegisters>();
    Consumer<kAlong>(p, at, warpgroup - 1).run();
  }
}

}  // namespace optimizer::nf4_product
