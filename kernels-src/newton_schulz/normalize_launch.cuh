#pragma once
// How the host describes matrices to the kernels of normalize.cuh, and launches them.

#include "common/stable.h"
#include "newton_schulz/normalize.cuh"

namespace optimizer::normalization {

// `element`: bytes. torch gives a side of one element whatever stride.
inline Piece piece_of(const Tensor& x, int64_t first, int64_t element) {
  Piece piece{x.data_ptr(), x.stride(0), x.stride(1), x.stride(2), first, Layout::kAny};
  if (x.size(0) == 1) piece.batch = 0;
  if (x.size(1) == 1) piece.row = 0;
  if (x.size(2) == 1) piece.col = 0;
  const bool aligned =
      reinterpret_cast<uintptr_t>(piece.data) % (kSide * element) == 0 && piece.batch % kSide == 0;
  if (aligned && piece.col == 1 && piece.row % kSide == 0) piece.layout = Layout::kRows;
  if (aligned && piece.row == 1 && piece.col % kSide == 0) piece.layout = Layout::kColumns;
  return piece;
}

template <typename Kernel, typename Arguments, typename... Rest>
void launch(Kernel kernel, const Arguments& p, int64_t blocks, int shared_bytes, bool early,
            cudaStream_t stream, Rest... rest) {
  STD_TORCH_CHECK(blocks <= INT32_MAX, "normalize: ", blocks, " thread blocks exceed a grid");
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  STD_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, p, rest...));
}

// Machine code for 9.x waits for the first launch; that for 8.0, which later GPUs translate,
// cannot.
inline bool starts_early(int device) {
  int major = 0;
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  return major == 9;
}

}  // namespace optimizer::normalization
