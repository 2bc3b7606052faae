#pragma once
// The word in which a wait on the device says that a signal was late, and how long it waits.

#include <cuda_runtime.h>

#include <cstdint>

#include "common/stable.h"

namespace optimizer::communication {

// On the device of the signals, or in pinned memory, where the host reads it without a copy.
inline int* status_of(const char* op, const Tensor& status, const Tensor& signals) {
  STD_TORCH_CHECK(status.scalar_type() == ScalarType::Int && status.numel() == 1, op,
                  ": status must be one int32");
  void* address = status.data_ptr();
  if (status.is_cuda()) {
    STD_TORCH_CHECK(status.device() == signals.device(), op,
                    ": status must be on the device of the signals, or in pinned memory");
    return static_cast<int*>(address);
  }
  cudaPointerAttributes attributes{};
  STD_CUDA_CHECK(cudaPointerGetAttributes(&attributes, address));
  STD_TORCH_CHECK(attributes.type == cudaMemoryTypeHost && attributes.devicePointer != nullptr, op,
                  ": status must be on the device of the signals, or in pinned memory");
  return static_cast<int*>(attributes.devicePointer);
}

inline uint64_t nanoseconds_of(const char* op, int64_t timeout_ms) {
  constexpr int64_t kLongest = int64_t{1} << 40;  // 35 years
  STD_TORCH_CHECK(timeout_ms >= 0 && timeout_ms <= kLongest, op,
                  ": timeout_ms must be in [0, 2^40], got ", timeout_ms);
  return static_cast<uint64_t>(timeout_ms) * 1000000;
}

}  // namespace optimizer::communication
