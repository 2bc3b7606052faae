// wait_signals: the stream waits until words have reached a value, or says which one was late. One
// warp waits, and neither traps nor hangs, so the context lives on.

#include <optional>
#include <vector>

#include "communication/signals.h"
#include "communication/status.h"
#include "communication/wait.cuh"

namespace optimizer {
namespace communication {

constexpr int kLanes = 32;
constexpr uint32_t kWarp = 0xffffffff;
constexpr int kMostCleared = 64;  // MOST_CLEARED of kernels/communication/signals.py

struct Bytes {
  char* start;
  int64_t count;
};

struct Wait {
  const uint32_t* flags;
  uint32_t count;
  uint32_t value;
  const uint32_t* epoch;  // the value, read when the wait begins, or null
  uint64_t nanoseconds;
  int* status;
  uint32_t* next;               // value + 1 once all flags are there, or null
  Bytes cleared[kMostCleared];  // zeros if they are not
  int clears;
};

__device__ __forceinline__ void clear_bytes(char* bytes, int64_t count) {
  int64_t done = 0;
  if (reinterpret_cast<uintptr_t>(bytes) % 16 == 0) {
    done = count / 16 * 16;
    for (int64_t i = threadIdx.x; i < count / 16; i += kLanes) {
      reinterpret_cast<uint4*>(bytes)[i] = make_uint4(0, 0, 0, 0);
    }
  }
  for (int64_t i = done + threadIdx.x; i < count; i += kLanes) bytes[i] = 0;
}

// Peers, whose memory some of it may be, see the zeros before what follows on the stream.
__device__ __forceinline__ void clear_all(const Wait& p) {
  for (int k = 0; k < p.clears; ++k) clear_bytes(p.cleared[k].start, p.cleared[k].count);
  __threadfence_system();
}

__global__ void __launch_bounds__(kLanes) wait_kernel(const __grid_constant__ Wait p) {
  const uint32_t value = p.epoch == nullptr ? p.value : load_acquire_system(p.epoch);
  // The warp decides as one: another wait may set the status between the loads of two lanes.
  if (__any_sync(kWarp, load_status(p.status) != 0)) return clear_all(p);
  const uint64_t end = global_time() + p.nanoseconds;
  uint32_t late = p.count;
  for (uint32_t i = threadIdx.x; i < p.count && late == p.count; i += kLanes) {
    if (!wait_for_signal(p.flags + i, value, end, p.status)) late = i;
  }
  late = __reduce_min_sync(kWarp, late);
  if (late < p.count) {
    if (threadIdx.x == 0) report_late(p.status, static_cast<int>(late) + 1);
    clear_all(p);
  } else if (threadIdx.x == 0 && p.next != nullptr) {
    *p.next = value + 1;
  }
}

namespace {

// A word that a kernel reads or writes beside the signals.
uint32_t* optional_word(const char* what, const std::optional<Tensor>& x, const Tensor& flags) {
  if (!x.has_value()) return nullptr;
  STD_TORCH_CHECK(x->numel() == 1 && x->device() == flags.device(), "wait_signals: ", what,
                  " must be one uint32 on the device of the flags");
  return words_of("wait_signals", *x, 0, 1);
}

}  // namespace
}  // namespace communication

void wait_signals_cuda(const Tensor& flags, int64_t value, std::optional<Tensor> epoch,
                       int64_t timeout_ms, const Tensor& status, std::optional<Tensor> next,
                       const std::vector<Tensor>& clear) {
  using namespace communication;
  check_signals("wait_signals", flags);
  STD_TORCH_CHECK(flags.numel() < INT32_MAX, "wait_signals: too many flags");
  Wait wait{static_cast<const uint32_t*>(flags.data_ptr()),
            static_cast<uint32_t>(flags.numel()),
            word_of("wait_signals", value),
            optional_word("value", epoch, flags),
            nanoseconds_of("wait_signals", timeout_ms),
            status_of("wait_signals", status, flags),
            optional_word("next", next, flags),
            {},
            static_cast<int>(clear.size())};
  STD_TORCH_CHECK(clear.size() <= kMostCleared, "wait_signals: at most 64 tensors in clear");
  for (size_t k = 0; k < clear.size(); ++k) {
    STD_TORCH_CHECK(clear[k].scalar_type() == ScalarType::Byte && clear[k].is_contiguous() &&
                        clear[k].device() == flags.device(),
                    "wait_signals: clear must be contiguous, uint8, on the device of the flags");
    wait.cleared[k] = {static_cast<char*>(clear[k].data_ptr()), clear[k].numel()};
  }
  const int device = flags.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  wait_kernel<<<1, kLanes, 0, current_stream(device)>>>(wait);
  STD_CUDA_CHECK(cudaGetLastError());
}

}  // namespace optimizer
