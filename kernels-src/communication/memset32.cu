// memset32: words of a uint32 tensor become a value, in the order of the stream.
//
// No kernel writes the words, so that the write happens even while a grid that waits for it fills
// the device. The fence before it is a single thread, for which a multiprocessor has room beside
// any block that leaves 32 threads and 512 registers.

#include "communication/signals.h"

namespace optimizer {
namespace communication {

// What the stream wrote before is seen by whoever sees what it writes behind.
__global__ void fence_kernel() { __threadfence_system(); }

void write_words(uint32_t* words, uint32_t value, int64_t count, cudaStream_t stream) {
  static const auto memset32 =
      driver_function<PFN_cuMemsetD32Async_v3020>("cuMemsetD32Async", 3020);
  fence_kernel<<<1, 1, 0, stream>>>();
  STD_CUDA_CHECK(cudaGetLastError());
  check_driver("cuMemsetD32Async", memset32(reinterpret_cast<CUdeviceptr>(words), value,
                                            static_cast<size_t>(count), stream));
}

}  // namespace communication

void memset32_cuda(const Tensor& x, int64_t offset, int64_t value, int64_t count) {
  using namespace communication;
  const uint32_t word = word_of("memset32", value);
  uint32_t* const words = words_of("memset32", x, offset, count);
  if (count == 0) return;
  const int device = x.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  write_words(words, word, count, current_stream(device));
}

}  // namespace optimizer
