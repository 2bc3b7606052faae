#pragma once
// From a consumer's sums to rows of the result: bias, gate, one rounding, words of two columns.

#include "grouped_lora/nf4_decode_sm90.cuh"

namespace optimizer::nf4_product {

// What a consumer's threads need beside the sums of a tile. The slots' loads begin with the tile,
// the gates' follow before its last products have ended.
template <typename Shape>
class TileExtras {
 public:
  __device__ __forceinline__ TileExtras(const Arguments& p, const TileAt& where)
      : p_(p), where_(where), thread_(static_cast<int>(threadIdx.x) % kWarpgroup) {
    const int* slots = reinterpret_cast<const int*>(p.slots);  // int64 below 2^31
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      gate_[i] = 1.0f;
      const int row = thread_ + i * kWarpgroup;
      if (row < where.rows && (p.scatter || p.gates != nullptr || p.dots != nullptr)) {
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
  __device__ __forceinline__ void publish(const SharedMap<Shape>& at, int consumer) const {
    int *targets = at.targets(consumer), *slots = at.slots(consumer);
    float* gates = at.gates(consumer);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = thread_ + i * kWarpgroup;
      if (row >= where_.rows) continue;
      targets[row] = p_.scatter ? slot_[i] : where_.row + row;
      gates[row] = gate_[i];
      if (p_.dots != nullptr) slots[row] = slot_[i];
    }
  }

 private:
  static constexpr int kRows = (Shape::kTokens + kWarpgroup - 1) / kWarpgroup;  // per thread

  const Arguments& p_;
  const TileAt& where_;
  const int thread_;
  int slot_[kRows] = {};
  float gate_[kRows];
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

// dots = <row of the product before its gate, row of other>, over the consumer's 64 columns: over a
// thread's two, over the 8 lanes that share its rows, over the warps; in that order.
template <int kN, typename Shape>
__device__ __forceinline__ void row_dots(const Arguments& p, const SharedMap<Shape>& at,
                                         const float (&sum)[kN / 2], const float2& bias,
                                         const TileAt& where, int consumer, int column) {
  constexpr int kBatch = 4;  // loads of `other` under way, times 2
  constexpr int kTokens = Shape::kTokens;
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  const int* slots = at.slots(consumer);
  float* partial = at.partial(consumer);  // (4 warps, kTokens)
  const bool inside = column < p.columns;
  const char* other = p.other + (inside ? static_cast<int64_t>(column) * 2 : 0);
#pragma unroll
  for (int batch = 0; batch < kN / 8; batch += kBatch) {
    uint32_t pairs[kBatch][2] = {};
#pragma unroll
    for (int i = 0; i < 2 * kBatch; ++i) {
      const int row = (batch + i / 2) * 8 + thread % 4 * 2 + i % 2;
      if (batch + i / 2 >= kN / 8 || row >= where.rows || !inside) continue;
      const int64_t source = p.other_fan == 0 ? where.row + row : slots[row] / p.other_fan;
      pairs[i / 2][i % 2] = *reinterpret_cast<const uint32_t*>(other + source * p.other_row);
    }
#pragma unroll
    for (int i = 0; i < 2 * kBatch; ++i) {
      if (batch + i / 2 >= kN / 8) continue;
      const int at_sum = 4 * (batch + i / 2) + i % 2;
      const uint32_t pair = pairs[i / 2][i % 2];
      float dot = __fmul_rn(__fadd_rn(sum[at_sum], bias.x), __uint_as_float(pair << 16));
      dot = __fmaf_rn(__fadd_rn(sum[at_sum + 2], bias.y), __uint_as_float(pair & 0xffff0000u), dot);
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) {
        dot += __shfl_xor_sync(0xffffffff, dot, distance);
      }
      if (thread % 32 < 4) {
        partial[thread / 32 * kTokens + (batch + i / 2) * 8 + thread % 4 * 2 + i % 2] = dot;
      }
    }
  }
  newton_schulz::warpgroup_sync(1 + consumer);
  const int part = (where.column + consumer * kPartColumns) / kPartColumns;
  if (part * kPartColumns >= p.columns) return;
  float* dots = p.dots + static_cast<int64_t>(part) * p.rows;
  for (int row = thread; row < where.rows; row += kWarpgroup) {
    float total = partial[row];
#pragma unroll
    for (int warp = 1; warp < 4; ++warp) total += partial[warp * kTokens + row];
    dots[slots[row]] = total;
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
    if (p.dots == nullptr) continue;
    for (int i = thread; i * kPartColumns < p.columns; i += kConsumers * kWarpgroup) {
      p.dots[static_cast<int64_t>(i) * p.rows + p.slots[row]] = 0.0f;
    }
  }
}

}  // namespace optimizer::nf4_product
