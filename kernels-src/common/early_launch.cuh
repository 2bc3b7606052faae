#pragma once
// Programmatic dependent launch: a kernel begins while the one before it in the stream ends, so
// that neither the launch nor what a block prepares without memory is waited for.

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

}  // namespace optimizer
