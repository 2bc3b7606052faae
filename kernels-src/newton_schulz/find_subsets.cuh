#pragma once
// What find_well_conditioned and find_converged share: one kernel that adds up squares of Gram
// matrices, decides of each matrix, and writes subsets (subset.h), as a host that asked would have
// to wait. The last block of a matrix decides of it, the last of all matrices writes the lists.

#include "newton_schulz/norm_factors.cuh"
#include "newton_schulz/normalize_launch.cuh"
#include "newton_schulz/subset.h"

namespace optimizer::normalization {

struct FindProblem {
  SumProblem sum;
  double* traces;         // (x.count, chunks)
  const int32_t* subset;  // whose matrices are looked at, or null: all
  uint32_t* counters;     // (1 + x.count,) zeros: matrices that are done; chunks, of each
};

// Whether this block is the last of so many to come here; it sees what they wrote before. By all
// threads, of which thread 0 has written.
__device__ __forceinline__ bool comes_last(uint32_t* counter, uint32_t blocks) {
  __shared__ bool last;
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(counter, 1) == blocks - 1;
    __threadfence();
  }
  __syncthreads();
  return last;
}

// Over the chunks of a matrix, in thread 0; the same in any batch.
__device__ __forceinline__ double total_of(const double* sums, int64_t chunks) {
  double total = 0.0;
  for (int64_t k = threadIdx.x; k < chunks; k += kThreads) total += __ldcg(sums + k);
  return block_sum(total);
}

// Numbers below count whose mark is `wanted` -> subset. By the whole block.
__device__ __forceinline__ void gather_marked(const int32_t* marks, int count, int32_t wanted,
                                              int32_t* subset) {
  __shared__ int warps[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int before = 0;
  for (int first = 0; first < count; first += kThreads) {
    const int number = first + static_cast<int>(threadIdx.x);
    const bool marked = number < count && __ldcg(marks + number) == wanted;
    const uint32_t votes = __ballot_sync(~0u, marked);
    if (lane == 0) warps[warp] = __popc(votes);
    __syncthreads();
    int place = before + __popc(votes & ((1u << lane) - 1));
    for (int other = 0; other < kWarps; ++other) {
      if (other < warp) place += warps[other];
      before += warps[other];
    }
    if (marked) subset[1 + place] = number;
    __syncthreads();
  }
  if (threadIdx.x == 0) subset[0] = before;
}

// Decision: decide(matrix, squares, trace), of one thread; write_lists(), of a block.
template <typename Decision>
__global__ void __launch_bounds__(kThreads, kSumBlocks)
    find_kernel(const __grid_constant__ FindProblem p, const __grid_constant__ Decision decision) {
  let_next_kernel_begin();
  wait_for_kernel_before();
  const auto chunks = static_cast<uint32_t>(p.sum.tiling.chunks);
  const uint32_t place = blockIdx.x / chunks, chunk = blockIdx.x - place * chunks;
  // Where the lists replace the subset it gets no longer: who comes late has nothing to do, either.
  const auto matrices = static_cast<uint32_t>(matrices_in(p.subset, p.sum.x.count));
  if (matrices == 0 && blockIdx.x == 0) decision.write_lists();
  if (place >= matrices) return;
  const int64_t matrix = matrix_at(p.subset, place);
  double trace = 0.0;
  const double squares = block_sum(sum_chunk<__half, true>(p.sum, matrix, chunk, trace));
  trace = block_sum(trace);
  if (threadIdx.x == 0) {
    p.sum.sums[blockIdx.x] = squares;
    p.traces[blockIdx.x] = trace;
  }
  if (!comes_last(p.counters + 1 + place, chunks)) return;
  const int64_t first = int64_t{place} * chunks;
  const double all_squares = total_of(p.sum.sums + first, chunks);
  const double whole_trace = total_of(p.traces + first, chunks);
  if (threadIdx.x == 0) decision.decide(matrix, all_squares, whole_trace);
  if (comes_last(p.counters, matrices)) decision.write_lists();
}

inline void check_matrices(const Tensor& x, int64_t side, const char* op) {
  STD_TORCH_CHECK(x.dim() == 3 && x.size(1) == x.size(2) && has_upper_tiling(x.size(1)) &&
                      x.size(1) <= kLargestSide && x.size(0) < INT32_MAX,
                  op, ": the matrices must be (G, m, m) with m > 128");
  STD_TORCH_CHECK(side > 0 && side <= x.size(1), op, ": side must be 1 to m, got ", side);
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Half, op, ": the matrices must be float16");
}

inline void check_list(const Tensor& list, const Tensor& x, int64_t longer, const char* op) {
  STD_TORCH_CHECK(list.dim() == 1 && list.size(0) == x.size(0) + longer && list.is_contiguous() &&
                      list.scalar_type() == ScalarType::Int && list.device() == x.device(),
                  op,
                  ": found must be (G,), subsets and zeros (1 + G,), contiguous, int32, on the "
                  "matrices' device");
}

inline int32_t* list_of(const Tensor& x) { return static_cast<int32_t*>(x.data_ptr()); }

template <typename Decision>
void find(const Tensor& x, const int32_t* subset, const Tensor& zeros, const Decision& decision,
          const char* op) {
  const int device = x.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  FindProblem p{};
  p.sum.x.rows = p.sum.x.cols = static_cast<int>(x.size(1));
  p.sum.x.count = x.size(0);
  p.sum.x.pieces = 1;
  p.sum.x.piece[0] = piece_of(x, 0, sizeof(__half));
  p.sum.triangle = true;
  constexpr int64_t kBatch = kTogether<__half>;
  const int64_t chunk = tiling_of(x.size(1), x.size(1), 0).chunk;
  p.sum.tiling = upper_tiling_of(x.size(1), quotient_up(chunk, kBatch) * kBatch);
  STD_TORCH_CHECK(p.sum.tiling.tiles <= INT32_MAX, op, ": a matrix has too many elements");
  const int64_t blocks = x.size(0) * p.sum.tiling.chunks;
  if (blocks == 0) return;
  const Tensor memory = torch::stable::new_empty(x, {2 * blocks}, ScalarType::Double);
  p.sum.sums = static_cast<double*>(memory.data_ptr());
  p.traces = p.sum.sums + blocks;
  p.subset = subset;
  p.counters = reinterpret_cast<uint32_t*>(list_of(zeros));
  launch(op, find_kernel<Decision>, blocks, kThreads, 0, starts_early(device),
         static_cast<cudaStream_t>(stream), p, decision);
}

}  // namespace optimizer::normalization
