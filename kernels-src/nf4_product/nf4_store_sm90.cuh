#pragma once
// From a consumer's sums to rows of the result: bias, gate, one rounding, words of two columns.

#include "nf4_product/nf4_decode_sm90.cuh"

namespace optimizer::nf4_product {

// What a consumer's threads need beside the sums of a tile. The slots' loads begin with the tile,
// the gates' follow before its last products have ended.
class TileExtras {
 public:
  __device__ __forceinline__ TileExtras(const Arguments& p, const TileAt& where)
      : p_(p), where_(where), thread_(static_cast<int>(threadIdx.x) % kWarpgroup) {
    const int* slots = reinterpret_cast<const int*>(p.slots);  // int64 below 2^31
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = thread_ + i * kWarpgroup;
      if (row < where.rows && (p.scatter || p.gates != nullptr)) {
        slot_[i] = slots[2 * (where.row + row)];
      }
    }
  }

  __device__ __forceinline__ void load_gates() {
    if (p_.gates == nullptr) return;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (thread_ + i * kWarpgroup < where_.rows) gate_[i] = p_.gates[slot_[i]];
    }
  }

  // A warpgroup_sync before, nobody reads the tables; one later everybody sees them.
  __device__ __forceinline__ void publish(const SharedMap& at, int consumer) const {
    int* targets = at.targets(consumer);
    float* gates = at.gates(consumer);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = thread_ + i * kWarpgroup;
      if (row >= where_.rows) continue;
      targets[row] = p_.scatter ? slot_[i] : where_.row + row;
      gates[row] = gate_[i];
    }
  }

 private:
  static constexpr int kRows = kTokens / kWarpgroup;  // per thread
  static_assert(kRows == 2);

  const Arguments& p_;
  const TileAt& where_;
  const int thread_;
  int slot_[kRows] = {};
  float gate_[kRows] = {1.0f, 1.0f};
};

// Bias and gate for the columns `column` and the next; rows of the result, 32 bytes of 4 at a time
// (along), or two halves of 64 bytes by neighbouring warps (across).
template <int kN>
__device__ __forceinline__ void write_rows(const Arguments& p, const float (&sum)[kN / 2],
                                           const float2& bias, const int* targets,
                                           const float* gates, int rows, int column) {
  char* out = p.out + static_cast<int64_t>(column) * 2;
  const int64_t pitch = static_cast<int64_t>(p.columns) * 2;
  const int first = threadIdx.x % 4 * 2;
  const bool gated = p.gates != nullptr;
#pragma unroll
  for (int j = 0; j < kN / 8; ++j) {
    const int row = j * 8 + first;  // and the next; behind the rows tables hold what they held
    if (row >= rows) break;
    const int2 target = *reinterpret_cast<const int2*>(targets + row);
    const float2 gate = gated ? *reinterpret_cast<const float2*>(gates + row) : float2{1.0f, 1.0f};
    const uint32_t pair = rounded_pair(__fmul_rn(__fadd_rn(sum[4 * j], bias.x), gate.x),
                                       __fmul_rn(__fadd_rn(sum[4 * j + 2], bias.y), gate.x));
    *reinterpret_cast<uint32_t*>(out + target.x * pitch) = pair;
    if (row + 1 < rows) {
      const uint32_t next = rounded_pair(__fmul_rn(__fadd_rn(sum[4 * j + 1], bias.x), gate.y),
                                         __fmul_rn(__fadd_rn(sum[4 * j + 3], bias.y), gate.y));
      *reinterpret_cast<uint32_t*>(out + target.y * pitch) = next;
    }
  }
}

// Rows of sentinels, behind the experts' rows, are zero.
__device__ __forceinline__ void clear_sentinels(const Arguments& p, int first) {
  const int thread = static_cast<int>(threadIdx.x) - kWarpgroup;
  for (int row = first + static_cast<int>(blockIdx.x); row < p.rows;
       row += static_cast<int>(gridDim.x)) {
    const int64_t target = p.scatter ? p.slots[row] : row;
    auto* out = reinterpret_cast<uint32_t*>(p.out + target * p.columns * 2);
    for (int i = thread; i < p.columns / 2; i += kConsumers * kWarpgroup) out[i] = 0;
  }
}

}  // namespace optimizer::nf4_product
