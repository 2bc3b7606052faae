#pragma once
// From a consumer's sums to rows of the result: bias, gate, one rounding, whole 16-byte stores.

#include "grouped_lora/tile_sm90.cuh"
#include "newton_schulz/mma.cuh"
#include "newton_schulz/scalars.cuh"

namespace optimizer::grouped_lora {

// What a consumer's threads need beside the sums of a tile. The loads begin early: rows' slots with
// the tile, gates and biases behind its first stages.
template <typename kTile>
class TileExtras {
 public:
  __device__ __forceinline__ TileExtras(const Arguments& p, const TileAt& where, int consumer)
      : p_(p), where_(where), feature_(where.feature + consumer * kTile::kPartFeatures) {
    const int* slots = reinterpret_cast<const int*>(p.slots);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = thread() + i * kWarpgroup;
      target_[i] = where.row + row;
      gate_[i] = 1.0f;
      if (row < where.rows && (p.scatter || p.gates != nullptr || p.dots != nullptr)) {
        slot_[i] = slots[2 * target_[i]];
      }
    }
  }

  // Behind the first stages: the slots have arrived.
  __device__ __forceinline__ void fetch() {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (thread() + i * kWarpgroup >= where_.rows) continue;
      if (p_.gates != nullptr) gate_[i] = p_.gates[slot_[i]];
      if (p_.scatter) target_[i] = slot_[i];
    }
#pragma unroll
    for (int i = 0; i < 2 * kTile::kM; ++i) {
      const int feature =
          feature_ + i / 2 * 64 + thread() / 32 * 16 + i % 2 * 8 + thread() % 32 / 4;
      const bool reads = p_.bias != nullptr && feature < p_.n;
      bias[i] = reads ? p_.bias[static_cast<int64_t>(where_.expert) * p_.n + feature] : 0.0f;
    }
  }

  // To the set of the tile; a warpgroup_sync later everybody sees it.
  __device__ __forceinline__ void publish(int* targets, float* gates, int* slots) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = thread() + i * kWarpgroup;
      targets[row] = target_[i];
      gates[row] = gate_[i];
      if (p_.dots != nullptr) slots[row] = slot_[i];
    }
  }

  __device__ __forceinline__ int first_feature() const { return feature_; }

  float bias[2 * kTile::kM];  // of the features that the thread's sums belong to

 private:
  static constexpr int kRows = kTile::kTokens / kWarpgroup;  // per thread

  static __device__ __forceinline__ int thread() {
    return static_cast<int>(threadIdx.x) % kWarpgroup;
  }

  const Arguments& p_;
  const TileAt& where_;
  const int feature_;
  int slot_[kRows];
  int target_[kRows];
  float gate_[kRows];
};

// Sums of 64 kM features x kN rows -> staged lines of 64 features, a line per row.
template <typename T, typename kTile, int kN>
__device__ __forceinline__ void stage_rows(uint32_t staging, const float (&sum)[kTile::kM][kN / 2],
                                           const float (&bias)[2 * kTile::kM], const float* gates) {
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
#pragma unroll
  for (int j = 0; j < kN / 16; ++j) {
    const auto* pairs = reinterpret_cast<const float2*>(gates + j * 16) + thread % 4;
    const float2 gate[2] = {pairs[0], pairs[4]};
#pragma unroll
    for (int i = 0; i < kTile::kM; ++i) {
      uint32_t packed[4];
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const int at = newton_schulz::fragment_register(j, q);
        const float b = bias[2 * i + q % 2];
        const float x = __fmul_rn(__fadd_rn(sum[i][at], b), gate[q / 2].x);
        const float y = __fmul_rn(__fadd_rn(sum[i][at + 1], b), gate[q / 2].y);
        packed[q] = symmetric::pack(symmetric::rounded<T>(x), symmetric::rounded<T>(y));
      }
      newton_schulz::store_fragments<true>(
          staging + newton_schulz::mirrored_offset(thread, i, j, kTile::kM), packed);
    }
  }
}

// Staged lines -> their rows of the result; 8 threads store 128 contiguous bytes.
template <typename T, typename kTile>
__device__ __forceinline__ void write_rows(const Arguments& p, uint32_t staging, const int* targets,
                                           int rows, int first_feature) {
  constexpr int kChunks = kTile::kPartFeatures / 8;
  T* out = static_cast<T*>(p.out);
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x) % kWarpgroup; i < rows * kChunks; i += kWarpgroup) {
    const int row = i / kChunks, chunk = i % kChunks;
    const int feature = first_feature + chunk * 8;
    if (feature >= p.n) continue;
    const uint32_t source = staging + (row / 64 * kTile::kM + chunk / 8) * kBlockBytes +
                            newton_schulz::swizzled(row % 64, chunk % 8);
    uint4 bits;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                 : "r"(source)
                 : "memory");
    T* target = out + static_cast<int64_t>(targets[row]) * p.n + feature;
    if (p.n % 8 == 0) {
      *reinterpret_cast<uint4*>(target) = bits;
    } else {
      alignas(16) T values[8];
      *reinterpret_cast<uint4*>(values) = bits;
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (feature + e < p.n) target[e] = values[e];
      }
    }
  }
}

// Rows of `other` -> staged lines, in the places of the result's.
template <typename kTile>
__device__ __forceinline__ void stage_other(const Arguments& p, uint32_t staging, const int* slots,
                                            const TileAt& where, int first_feature) {
  constexpr int kChunks = kTile::kPartFeatures / 8;
  const int end = where.rows * kChunks;
#pragma unroll 2
  for (int i = static_cast<int>(threadIdx.x) % kWarpgroup; i < end; i += kWarpgroup) {
    const int row = i / kChunks, chunk = i % kChunks;
    const int feature = first_feature + chunk * 8;
    const int64_t source = p.other_fan == 0 ? where.row + row : slots[row] / p.other_fan;
    uint4 bits{};
    if (feature < p.n) {
      bits = *reinterpret_cast<const uint4*>(p.other + source * p.other_row + 2 * feature);
    }
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(
                     staging + (row / 64 * kTile::kM + chunk / 8) * kBlockBytes +
                     newton_schulz::swizzled(row % 64, chunk % 8)),
                 "r"(bits.x), "r"(bits.y), "r"(bits.z), "r"(bits.w)
                 : "memory");
  }
}

// dots = <row of the product before its gate, row of other>, per 64 features: over a thread's two,
// over the 8 lanes that share its rows, over the warps; in that order, whatever the tile. Uses the
// staging memory, and leaves it free.
template <typename T, typename kTile, int kN>
__device__ __forceinline__ void row_dots(const Arguments& p, uint32_t staging, char* staged,
                                         const float (&sum)[kTile::kM][kN / 2],
                                         const float (&bias)[2 * kTile::kM], const int* slots,
                                         int rows, int first_feature, int barrier) {
  constexpr int kGroups = (kN / 16 + 7) / 8;  // a lane keeps the rows of every eighth j
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup, lane = thread % 32;
  float mine[kTile::kM][kGroups][4];
#pragma unroll
  for (int i = 0; i < kTile::kM; ++i) {
#pragma unroll
    for (int j = 0; j < kN / 16; ++j) {
      uint32_t old[4];
      symmetric::load_fragments<true>(
          old, staging + newton_schulz::mirrored_offset(thread, i, j, kTile::kM));
      float dot[4] = {};
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        alignas(4) T pair[2];
        *reinterpret_cast<uint32_t*>(pair) = old[q];
        const int at = newton_schulz::fragment_register(j, q);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float value = __fadd_rn(sum[i][at + e], bias[2 * i + q % 2]);
          float& total = dot[q / 2 * 2 + e];
          total = __fmaf_rn(value, symmetric::widened(pair[e]), total);
        }
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) {
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) {
          dot[c] += __shfl_xor_sync(0xffffffff, dot[c], distance);
        }
        if (lane / 4 == j % 8) mine[i][j / 8][c] = dot[c];
      }
    }
  }
  newton_schulz::warpgroup_sync(barrier);
  auto* partial = reinterpret_cast<float*>(staged);  // (kM, 4 warps, kTokens)
#pragma unroll
  for (int i = 0; i < kTile::kM; ++i) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const int j = group * 8 + lane / 4;
      if (j >= kN / 16) continue;
      float* to = partial + (i * 4 + thread / 32) * kTile::kTokens + j * 16 + lane % 4 * 2;
#pragma unroll
      for (int c = 0; c < 4; ++c) to[c / 2 * 8 + c % 2] = mine[i][group][c];
    }
  }
  newton_schulz::warpgroup_sync(barrier);
#pragma unroll
  for (int i = 0; i < kTile::kM; ++i) {
    if (first_feature + i * 64 >= p.n) continue;
    float* dots = p.dots + static_cast<int64_t>(first_feature / 64 + i) * p.rows;
    for (int row = thread; row < rows; row += kWarpgroup) {
      const float* from = partial + i * 4 * kTile::kTokens + row;
      float total = from[0];
#pragma unroll
      for (int warp = 1; warp < 4; ++warp) total += from[warp * kTile::kTokens];
      dots[slots[row]] = total;
    }
  }
  newton_schulz::warpgroup_sync(barrier);
}

// Rows of sentinels, behind the experts' rows, are zero.
template <typename T>
__device__ __forceinline__ void clear_sentinels(const Arguments& p, int first) {
  const int thread = static_cast<int>(threadIdx.x) % (kConsumers * kWarpgroup);
  for (int row = first + static_cast<int>(blockIdx.x); row < p.rows;
       row += static_cast<int>(gridDim.x)) {
    const int64_t target = p.scatter ? p.slots[row] : row;
    T* out = static_cast<T*>(p.out) + target * p.n;
    for (int i = thread; i < p.n; i += kConsumers * kWarpgroup) out[i] = T(0.0f);
    if (p.dots == nullptr) continue;
    for (int i = thread; i * 64 < p.n; i += kConsumers * kWarpgroup) {
      p.dots[static_cast<int64_t>(i) * p.rows + p.slots[row]] = 0.0f;
    }
  }
}

}  // namespace optimizer::grouped_lora
