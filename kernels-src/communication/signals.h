#pragma once
// Signals: uint32 words that tell another stream, process or GPU that data have arrived. What the
// host checks of them, and the driver's calls that write them.

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "common/stable.h"

namespace optimizer::communication {

inline cudaStream_t current_stream(int device) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return static_cast<cudaStream_t>(stream);
}

inline bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status{};
  STD_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}

// A function of the driver that runs; the library does not link against it.
template <typename Function>
Function driver_function(const char* name, unsigned version) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result{};
  STD_CUDA_CHECK(
      cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &result));
  STD_TORCH_CHECK(result == cudaDriverEntryPointSuccess && function != nullptr,
                  "the CUDA driver has no ", name, "; it must be of CUDA 12 or newer");
  return reinterpret_cast<Function>(function);
}

inline void check_driver(const char* name, CUresult result) {
  STD_TORCH_CHECK(result == CUDA_SUCCESS, name, " failed with error ", static_cast<int>(result));
}

inline void check_signals(const char* op, const Tensor& x) {
  STD_TORCH_CHECK(
      x.scalar_type() == ScalarType::UInt32 && x.dim() == 1 && x.is_contiguous() && x.is_cuda(), op,
      ": signals must be flat, contiguous, uint32, on a CUDA device");
}

// The address of `count` words from `offset` on, all of them inside of the tensor.
inline uint32_t* words_of(const char* op, const Tensor& x, int64_t offset, int64_t count) {
  check_signals(op, x);
  STD_TORCH_CHECK(offset >= 0 && count >= 0 && offset <= x.numel() && count <= x.numel() - offset,
                  op, ": words ", offset, " to ", offset + count, " lie outside of ", x.numel());
  return static_cast<uint32_t*>(x.data_ptr()) + offset;
}

inline uint32_t word_of(const char* op, int64_t value) {
  STD_TORCH_CHECK(value >= 0 && value <= UINT32_MAX, op, ": value must be in [0, 2^32), got ",
                  value);
  return static_cast<uint32_t>(value);
}

// memset32.cu: every system sees what the stream did before, then the words.
void write_words(uint32_t* words, uint32_t value, int64_t count, cudaStream_t stream);

}  // namespace optimizer::communication
