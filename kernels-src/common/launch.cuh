#pragma once
// How the host launches a kernel of one-dimensional blocks.

#include <cuda_runtime.h>

#include <cstdint>
#include <utility>

#include "common/early_launch.cuh"
#include "common/stable.h"

namespace optimizer {

// Whether a kernel may be launched early: machine code for 9.x waits for the kernel before, that
// for 8.0, which later GPUs translate, cannot.
inline bool starts_early(int device) {
  int major = 0;
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  return major == 9;
}

// op: for the message. early: the kernel calls wait_for_kernel_before, and the device knows how.
template <typename... Parameters, typename... Arguments>
void launch(const char* op, void (*kernel)(Parameters...), int64_t blocks, int threads,
            int shared_bytes, bool early, cudaStream_t stream, Arguments&&... arguments) {
  STD_TORCH_CHECK(blocks <= INT32_MAX, op, ": ", blocks, " thread blocks are more than a grid");
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  STD_CUDA_CHECK(cudaLaunchKernelEx(
      &config, kernel, static_cast<Parameters>(std::forward<Arguments>(arguments))...));
}

}  // namespace optimizer
