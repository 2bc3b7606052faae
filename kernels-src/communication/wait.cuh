#pragma once
// Waiting for signals on the device, up to a point in time, and saying which one did not come.

#include <cstdint>

namespace optimizer::communication {

// What the writer did before it wrote the word comes before what this thread does behind the load.
__device__ __forceinline__ uint32_t load_acquire_system(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

// Nanoseconds, the same clock on every multiprocessor.
__device__ __forceinline__ uint64_t global_time() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  return now;
}

// Epochs only grow, and begin again at 0 behind 2^32 - 1: at most 2^31 lie between two of them.
__device__ __forceinline__ bool has_reached(uint32_t word, uint32_t epoch) {
  return static_cast<int32_t>(word - epoch) >= 0;
}

__device__ __forceinline__ int load_status(const int* status) {
  return *static_cast<const volatile int*>(status);
}

// Whether the word reached the epoch. Gives up behind `end`, or once another wait has failed.
__device__ __forceinline__ bool wait_for_signal(const uint32_t* word, uint32_t epoch, uint64_t end,
                                                const int* status) {
  constexpr uint32_t kLook = 64;  // tries between two looks at the clock
  for (uint32_t tries = 1; !has_reached(load_acquire_system(word), epoch); ++tries) {
    __nanosleep(32);
    if (tries % kLook == 0 && (global_time() > end || load_status(status) != 0)) return false;
  }
  return true;
}

// The first failure stays until the host clears the word, which may lie in its own memory.
__device__ __forceinline__ void report_late(int* status, int number) {
  if (load_status(status) != 0) return;
  *static_cast<volatile int*>(status) = number;
  __threadfence_system();
}

}  // namespace optimizer::communication
