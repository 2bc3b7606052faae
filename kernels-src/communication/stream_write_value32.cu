// stream_write_value32: one word of a uint32 tensor becomes a value, in the order of the stream and
// behind a fence of the system (CUDA driver API, "Stream memory operations"). The stream itself
// writes it: nothing is launched. A graph records a fence and a memset instead, memset32.cu.

#include "communication/signals.h"

namespace optimizer {

void stream_write_value32_cuda(const Tensor& x, int64_t offset, int64_t value) {
  using namespace communication;
  const uint32_t word = word_of("stream_write_value32", value);
  uint32_t* const address = words_of("stream_write_value32", x, offset, 1);
  const int device = x.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(device);
  if (is_capturing(stream)) return write_words(address, word, 1, stream);
  static const auto write_value =
      driver_function<PFN_cuStreamWriteValue32_v11070>("cuStreamWriteValue32", 11070);
  check_driver("cuStreamWriteValue32", write_value(stream, reinterpret_cast<CUdeviceptr>(address),
                                                   word, CU_STREAM_WRITE_VALUE_DEFAULT));
}

}  // namespace optimizer
