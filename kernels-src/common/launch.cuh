#pragma once
// Programmatic dependent launch: a kernel begins while the one before it in the stream ends, so
// that neither the launch nor what a block prepares without memory is waited for.

#include <cuda_runtime.h>

#include <cstdint>
#include <utility>

#include "common/stable.h"

namespace optimizer {

// The next kernel may take multiprocessors that this one has left. A hint: no result depends on it.
__device__ __forceinline__ void let_next_kernel_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Returns when the kernel before has ended and all its writes are there. Every block of a kernel
// that is launched early must call it, those with nothing to do too: a kernel that ended before
// the one before it would let the next one begin over that one's head.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// How the host launches a kernel of one-dimensional blocks.

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
