#pragma once
// What find_well_conditioned and find_converged share: sums of squares of Gram matrices, and one
// block that knows every matrix and writes subsets (subset.h), as a host that asked would have to
// wait.

#include "newton_schulz/norm_factors.cuh"
#include "newton_schulz/normalize_launch.cuh"

namespace optimizer::normalization {

struct Sums {
  const double* squares;  // (matrices, chunks)
  const double* traces;   // or null
  int64_t chunks;
  int count;
  int side;  // of the matrices that zeros fill up
};

// By one warp, the same in every lane and in any batch.
__device__ __forceinline__ double total_of(const double* sums, int64_t chunks, int64_t place) {
  double total = 0.0;
  for (int64_t k = threadIdx.x % 32; k < chunks; k += 32) {
    total += __ldcg(sums + place * chunks + k);
  }
  return warp_sum(total);
}

// Numbers below count whose mark is `wanted` -> subset. By the whole block, whose marks are
// written.
__device__ __forceinline__ void gather_marked(const int32_t* marks, int count, int32_t wanted,
                                              int32_t* subset) {
  __shared__ int warps[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int before = 0;
  for (int first = 0; first < count; first += kThreads) {
    const int number = first + static_cast<int>(threadIdx.x);
    const bool marked = number < count && marks[number] == wanted;
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
                  ": found must be (G,), subsets (1 + G,), contiguous, int32, on the matrices' "
                  "device");
}

// Sums of squares of the matrices of a subset, or of all and their traces.
inline Sums sum_squares(const Tensor& memory, const SumProblem& given, int side, bool early,
                        cudaStream_t stream) {
  SumProblem p = given;
  p.sums = static_cast<double*>(memory.data_ptr());
  if (p.subset == nullptr) p.traces = p.sums + p.x.count * p.tiling.chunks;
  launch(sum_kernel<__half, true>, p, p.x.count * p.tiling.chunks, 0, early, stream);
  return {p.sums, p.traces, p.tiling.chunks, static_cast<int>(p.x.count), side};
}

inline SumProblem gram_sums(const Tensor& x, const int32_t* subset) {
  SumProblem p{};
  p.x.rows = p.x.cols = static_cast<int>(x.size(1));
  p.x.count = x.size(0);
  p.x.pieces = 1;
  p.x.piece[0] = piece_of(x, 0, sizeof(__half));
  p.triangle = true;
  p.subset = subset;
  constexpr int64_t kBatch = kTogether<__half>;
  const int64_t chunk = tiling_of(p.x.rows, p.x.cols, 0).chunk;
  p.tiling = upper_tiling_of(p.x.rows, quotient_up(chunk, kBatch) * kBatch);
  STD_TORCH_CHECK(p.tiling.tiles <= INT32_MAX, "find: a matrix has too many elements");
  return p;
}

inline cudaStream_t current_stream(int device) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return static_cast<cudaStream_t>(stream);
}

inline int32_t* list_of(const Tensor& x) { return static_cast<int32_t*>(x.data_ptr()); }

}  // namespace optimizer::normalization
