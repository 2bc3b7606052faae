#pragma once
// The persistent kernel of the grouped product. See tile_sm90.cuh for the roles.

#include "grouped_lora/load_sm90.cuh"
#include "grouped_lora/narrow_sm90.cuh"
#include "grouped_lora/store_sm90.cuh"

namespace optimizer::grouped_lora {

// sum (features x rows) = W x^T over the whole of k and of the rank, in growing order, whatever kN.
// `meanwhile` runs once, behind the third stage.
template <typename T, typename kTile, int kN, bool kRowsMajor, typename Meanwhile>
__device__ __forceinline__ void multiply(float (&sum)[kTile::kM][kN / 2],
                                         const SharedMap<kTile>& at, Ring<kTile::kStages>& ring,
                                         int first_block, int stages, Meanwhile meanwhile) {
  using namespace newton_schulz;
  using Instruction = Wgmma<T, kN, kRowsMajor, false>;
  constexpr int kSteps = kStageDepth / kInstructionDepth;
  const uint64_t a_start = matrix_descriptor(at.weights(0));
  const uint64_t b_start = matrix_descriptor(at.rows(0));
  const auto release = [&](uint32_t slot) {
    if (threadIdx.x % 32 == 0) barrier_arrive(at.empty(slot));
    __syncwarp();
  };
  const int early = min(2, stages - 1);
  uint32_t before = 0;
  for (int stage = 0; stage < stages; ++stage) {
    barrier_wait(at.full(ring.slot), ring.parity, "a full stage");
    const uint64_t offset = ring.slot * (kTile::kStageBytes / 16);
    products_begin();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint64_t b = b_start + offset + descriptor_offset<false>(0, step);
#pragma unroll
      for (int i = 0; i < kTile::kM; ++i) {
        const uint64_t a = a_start + offset + descriptor_offset<kRowsMajor>(first_block + i, step);
        Instruction::add(sum[i], a, b, true);
      }
    }
    products_commit();
    if (stage > 0) {
      products_wait<1>();
      release(before);
    }
    if (stage == early) meanwhile();
    before = ring.slot;
    ring.advance();
  }
  products_wait<0>();
  pin(sum);
  release(before);
}

// One consumer's tiles. Two sets of targets and gates: a thread may still read a tile's while
// another fills the next; between that and the one after it they meet. Slots are read before they
// meet.
template <typename T, typename kTile, bool kRowsMajor>
class Consumer {
 public:
  __device__ __forceinline__ Consumer(const Arguments& p, const SharedMap<kTile>& at, int consumer)
      : p_(p), at_(at), consumer_(consumer), stages_(stages_of(p.k) + stages_of(p.rank)) {}

  __device__ __forceinline__ void run() {
    constexpr int kQuarter = kTile::kTokens / 4;
    const int64_t tiles = tile_count(p_, at_);
    for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      const TileAt where = locate(p_, at_, tile);
      if (where.rows <= kQuarter) {
        process<kQuarter>(where);
      } else if (where.rows <= 2 * kQuarter) {
        process<2 * kQuarter>(where);
      } else if (where.rows <= 3 * kQuarter) {
        process<3 * kQuarter>(where);
      } else {
        process<4 * kQuarter>(where);
      }
      set_ ^= 1;
    }
    clear_sentinels<T>(p_, at_.offsets()[p_.experts]);
  }

 private:
  template <int kN>
  __device__ __forceinline__ void process(const TileAt& where) {
    TileExtras<kTile> extras(p_, where, consumer_);
    // Set to zero, not overwritten by the first product: what only that defines lives, for the
    // compiler, through the whole loop over tiles, every kN's sums beside each other.
    float sum[kTile::kM][kN / 2] = {};
    multiply<T, kTile, kN, kRowsMajor>(sum, at_, ring_, consumer_ * kTile::kM, stages_,
                                       [&] { extras.fetch(); });
    int *targets = at_.targets(consumer_, set_), *slots = at_.slots(consumer_);
    float* gates = at_.gates(consumer_, set_);
    const uint32_t staging = at_.staging(consumer_);
    const int feature = extras.first_feature(), barrier = 1 + consumer_;
    extras.publish(targets, gates, slots);
    newton_schulz::warpgroup_sync(barrier);  // and the staging memory has been read
    if (p_.dots != nullptr) {
      stage_other<kTile>(p_, staging, slots, where, feature);
      newton_schulz::warpgroup_sync(barrier);
      row_dots<T, kTile, kN>(p_, staging, at_.start + (staging - at_.stages), sum, extras.bias,
                             slots, where.rows, feature, barrier);
    }
    stage_rows<T, kTile, kN>(staging, sum, extras.bias, gates);
    newton_schulz::warpgroup_sync(barrier);
    write_rows<T, kTile>(p_, staging, targets, where.rows, feature);
  }

  const Arguments& p_;
  const SharedMap<kTile>& at_;
  const int consumer_;
  const int stages_;
  int set_ = 0;
  Ring<kTile::kStages> ring_;
};

// Offsets, and tiles of rows before every expert: exclusive sums by the first warp.
template <typename kTile>
__device__ __forceinline__ void make_tables(const Arguments& p, const SharedMap<kTile>& at) {
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
    const int own = e < p.experts ? row_tiles(offsets[e + 1] - offsets[e], kTile::kTokens) : 0;
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

template <typename T, typename kTile, bool kRowsMajor>
__global__ void __launch_bounds__(kThreads, 1)
    grouped_product_kernel(const __grid_constant__ Arguments p) {
  using namespace newton_schulz;
  extern __shared__ char shared[];
  const SharedMap<kTile> at(shared);
  if (threadIdx.x == 0) {
    prefetch_map(p.weight);
    if (p.rank > 0) prefetch_map(p.factor);
    for (int slot = 0; slot < kTile::kStages; ++slot) {
      barrier_init(at.full(slot), kTile::kWriters);
      barrier_init(at.empty(slot), kTile::kReaders);
    }
    barrier_init_fence();
    fence_for_copies();
  }
  make_tables(p, at);
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  if (warpgroup == 0) {
    give_registers<kLoaderRegisters>();
    if (threadIdx.x >= kWarpgroup - 32 * kRowWarps) {
      RowLoader<kTile>(p, at).run();
    } else if (threadIdx.x == 0) {
      load_weights<kTile, kRowsMajor>(p, at);
    }
    __syncwarp();
  } else {
    take_registers<kConsumerRegisters>();
    Consumer<T, kTile, kRowsMajor>(p, at, warpgroup - 1).run();
  }
}

}  // namespace optimizer::grouped_lora
