#pragma once
// The factored second moment of apply_update: mean squares of the rows or columns of every matrix,
// their moving average, and the scale of each row or column. Two launches, sums in a fixed order.

#include "step/apply_update.h"
#include "step/multi_tensor.cuh"

namespace optimizer::apply_update {

constexpr int kWarps = kThreads / 32;
constexpr int kStrip = 128;  // rows that one block adds up for column sums

// Columns that a warp reads at a time: 16 bytes per thread.
template <typename U>
constexpr int kSpan = 32 * kLanes<U>;

struct VarianceEntry {
  Strided<1> update;
  float* second;
  float* sums;    // (B, strips, kept)
  float* scales;  // (B, kept)
  int64_t batch;
  int64_t rows;
  int64_t columns;
  uint32_t strips;  // partial sums per column; 1 for rows
  bool keep_rows;
  bool vector;  // row-major, aligned, rows of a multiple of 8 elements

  __host__ __device__ int64_t kept() const { return keep_rows ? rows : columns; }
  __host__ __device__ int64_t reduced() const { return keep_rows ? columns : rows; }
};

// Blocks of the first launch: one warp per row, or kSpan columns by kStrip rows per block.
template <typename U>
int64_t sum_blocks(const VarianceEntry& entry) {
  if (entry.keep_rows) return chunks_of(entry.batch * entry.rows, kWarps);
  return entry.batch * entry.strips * chunks_of(entry.columns, kSpan<U>);
}

// Neighbours in a row from element `index` on; zeros behind `valid`.
template <typename U, bool kVector>
__device__ __forceinline__ void load_lanes(const VarianceEntry& entry, int64_t index, int valid,
                                           float (&x)[kLanes<U>]) {
  if constexpr (kVector) {
    Pack<U, kLanes<U>> pack;
    pack.load(static_cast<const U*>(entry.update.data[0]) + index, valid);
#pragma unroll
    for (int lane = 0; lane < kLanes<U>; ++lane) x[lane] = pack.value(lane);
  } else {
    // Elements of a row never straddle a merged dimension: one stride serves them all.
    void* address[1];
    locate(entry.update, index, address);
    const int dims = entry.update.dims;
    const int64_t stride = dims > 0 ? entry.update.strides[0][dims - 1] : 0;
#pragma unroll
    for (int lane = 0; lane < kLanes<U>; ++lane) {
      x[lane] = lane < valid ? Number<U>::value(static_cast<const typename Number<U>::Bits*>(
                                   address[0])[lane * stride])
                             : 0.0f;
    }
  }
}

template <typename U, bool kVector>
__device__ __forceinline__ void row_sums(const VarianceEntry& entry, uint32_t block) {
  const int64_t row = int64_t{block} * kWarps + threadIdx.x / 32;
  if (row >= entry.batch * entry.rows) return;
  float sum = 0.0f;
#pragma unroll(kVector ? 4 : 1)
  for (int64_t column = threadIdx.x % 32 * kLanes<U>; column < entry.columns; column += kSpan<U>) {
    float x[kLanes<U>];
    const int64_t left = entry.columns - column;
    load_lanes<U, kVector>(entry, row * entry.columns + column,
                           static_cast<int>(min(left, int64_t{kLanes<U>})), x);
#pragma unroll
    for (int lane = 0; lane < kLanes<U>; lane += 4) {
      sum += (x[lane] * x[lane] + x[lane + 1] * x[lane + 1]) +
             (x[lane + 2] * x[lane + 2] + x[lane + 3] * x[lane + 3]);
    }
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(~0u, sum, distance);
  }
  if (threadIdx.x % 32 == 0) entry.sums[row] = sum;
}

template <typename U, bool kVector>
__device__ __forceinline__ void column_sums(const VarianceEntry& entry, uint32_t block) {
  const auto tiles = static_cast<uint32_t>((entry.columns + kSpan<U> - 1) / kSpan<U>);
  const int64_t column = int64_t{block % tiles} * kSpan<U> + threadIdx.x % 32 * kLanes<U>;
  const uint32_t strip = block / tiles % entry.strips;
  const int64_t matrix = block / tiles / entry.strips;
  const int64_t stop = min(entry.rows, int64_t{strip + 1} * kStrip);
  const auto valid =
      static_cast<int>(min(max(entry.columns - column, int64_t{0}), int64_t{kLanes<U>}));
  float sum[kLanes<U>] = {};
#pragma unroll(kVector ? 4 : 1)
  for (int64_t row = int64_t{strip} * kStrip + threadIdx.x / 32; row < stop; row += kWarps) {
    float x[kLanes<U>] = {};
    if (valid > 0) {
      load_lanes<U, kVector>(entry, (matrix * entry.rows + row) * entry.columns + column, valid, x);
    }
#pragma unroll
    for (int lane = 0; lane < kLanes<U>; ++lane) sum[lane] += x[lane] * x[lane];
  }
  __shared__ float warps[kWarps][kSpan<U>];
#pragma unroll
  for (int lane = 0; lane < kLanes<U>; ++lane) {
    warps[threadIdx.x / 32][threadIdx.x % 32 * kLanes<U> + lane] = sum[lane];
  }
  __syncthreads();
  const int64_t mine = int64_t{block % tiles} * kSpan<U> + threadIdx.x;
  if (threadIdx.x >= kSpan<U> || mine >= entry.columns) return;
  float total = 0.0f;
  for (int warp = 0; warp < kWarps; ++warp) total += warps[warp][threadIdx.x];
  entry.sums[(matrix * entry.strips + strip) * entry.columns + mine] = total;
}

template <typename U>
__global__ void __launch_bounds__(kThreads)
    sum_kernel(const __grid_constant__ List<VarianceEntry> list) {
  const int found = list.find(blockIdx.x);
  const VarianceEntry& entry = list.entry[found];
  const uint32_t block = blockIdx.x - list.first[found];
  if (entry.vector) {
    entry.keep_rows ? row_sums<U, true>(entry, block) : column_sums<U, true>(entry, block);
  } else {
    entry.keep_rows ? row_sums<U, false>(entry, block) : column_sums<U, false>(entry, block);
  }
}

constexpr int kFinishThreads = 1024;

// Sum over the block, the same in every thread
__device__ __forceinline__ double block_sum(double value) {
  __shared__ double all[kFinishThreads];
  __syncthreads();
  all[threadIdx.x] = value;
  for (int distance = kFinishThreads / 2; distance > 0; distance /= 2) {
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < distance) all[threadIdx.x] += all[threadIdx.x + distance];
  }
  __syncthreads();
  return all[0];
}

// One block per matrix: advance the second moment, then the scales of its rows or columns.
__global__ void __launch_bounds__(kFinishThreads)
    scale_kernel(const __grid_constant__ List<VarianceEntry> list, const Average rule) {
  const int found = list.find(blockIdx.x);
  const VarianceEntry& entry = list.entry[found];
  const int64_t matrix = blockIdx.x - list.first[found];
  const int64_t kept = entry.kept();
  const float* sums = entry.sums + matrix * entry.strips * kept;
  float* second = entry.second + matrix * kept;
  float* scales = entry.scales + matrix * kept;
  const auto reduced = static_cast<float>(entry.reduced());
  double squares = 0.0, scaled = 0.0;
  for (int64_t i = threadIdx.x; i < kept; i += kFinishThreads) {
    float sum = 0.0f;
    for (uint32_t strip = 0; strip < entry.strips; ++strip) sum += sums[strip * kept + i];
    const float average = rule.of(second[i], sum / reduced);
    second[i] = average;
    // NaN must stay, so the bound is written as a comparison that NaN passes.
    const float scale = 1.0f / sqrtf(average < kSmallest ? kSmallest : average);
    scales[i] = scale;
    squares += static_cast<double>(sum);
    scaled += static_cast<double>(sum) * scale * scale;
  }
  const double norm = sqrt(block_sum(squares)), after = sqrt(block_sum(scaled));
  const auto ratio = static_cast<float>(norm / (after < kSmallest ? double{kSmallest} : after));
  for (int64_t i = threadIdx.x; i < kept; i += kFinishThreads) scales[i] *= ratio;
}

}  // namespace optimizer::apply_update
