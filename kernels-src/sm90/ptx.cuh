#pragma once
// PTX of sm_90 around the products: mbarriers, tensor copies, fences, registers.

#include <cuda.h>

#include <cstdint>
#ifdef OPTIMIZER_BOUNDED_WAITS
#include <cstdio>
#endif

namespace optimizer::sm90 {

__device__ __forceinline__ uint32_t shared_offset(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// mbarriers: addresses in shared memory. A phase ends when all arrivals and all bytes came.
__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes the initialized barriers visible to the copy engine.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive_expecting(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// True for one thread of the warp, all of whose threads ask. What that thread alone does, the
// compiler knows to be of one thread: it hands coordinates to copies without a loop over the values
// that other threads might have, which cost four instructions in a row for every copy.
__device__ __forceinline__ bool elected() {
  uint32_t chosen;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(chosen));
  return chosen != 0;
}

// Whether the phase of this parity has ended; the hardware may suspend the thread for a while.
__device__ __forceinline__ bool barrier_try(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// A fresh barrier is in phase 0; a wait for parity 1 returns at once. With OPTIMIZER_BOUNDED_WAITS
// a wait that never ends says where and stops the kernel; `who` is for that message.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity,
                                             [[maybe_unused]] const char* who) {
#ifdef OPTIMIZER_BOUNDED_WAITS
  for (uint32_t tries = 0; !barrier_try(barrier, parity); ++tries) {
    if (tries == 1u << 20) {
      printf("wait for %s does not end: block %u, thread %u, barrier at %u, parity %u\n", who,
             blockIdx.x, threadIdx.x, barrier, parity);
      asm volatile("trap;");
    }
  }
#else
  while (!barrier_try(barrier, parity)) {
  }
#endif
}

// A block of 64 lines of 128 bytes of a batch of matrices at (inner, line, matrix). What lies
// outside arrives as zeros, and is counted as bytes.
__device__ __forceinline__ void copy_in(uint32_t target, const CUtensorMap& map, uint32_t barrier,
                                        int inner, int line, int matrix) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(target),
      "l"(&map), "r"(barrier), "r"(inner), "r"(line), "r"(matrix)
      : "memory");
}
// What lies outside of the matrix is not written.
__device__ __forceinline__ void copy_out(const CUtensorMap& map, uint32_t source, int inner,
                                         int line, int matrix) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(
          &map),
      "r"(source), "r"(inner), "r"(line), "r"(matrix)
      : "memory");
}
__device__ __forceinline__ void copy_out_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until this thread's copies out have read shared memory.
__device__ __forceinline__ void copy_out_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
// Until they have written global memory, too.
__device__ __forceinline__ void copy_out_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Ordinary accesses to shared memory before it come before copies after it, also those of other
// threads behind a barrier.
__device__ __forceinline__ void fence_for_copies() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The 128 threads of a warpgroup; barrier 0 is __syncthreads'.
__device__ __forceinline__ void warpgroup_sync(int id) {
  asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory");
}
// Some whole warps, of which some only arrive: what any of them did before comes before what those
// that wait do next.
__device__ __forceinline__ void group_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void group_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Four 8 x 8 matrices of 16-bit elements from registers; lane l gives the address of a line of
// matrix l / 8. kTransposed writes each matrix's columns as lines.
template <bool kTransposed>
__device__ __forceinline__ void store_fragments(uint32_t address, const uint32_t (&x)[4]) {
  if constexpr (kTransposed) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
        "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
        : "memory");
  } else {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
  }
}

// A thread's pair of the transpose of an 8 x 8 matrix.
__device__ __forceinline__ uint32_t transposed_fragment(uint32_t pair) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
  return transposed;
}

// A thread's pair of a symmetric 8 x 8 matrix, of which only the upper triangle is to count.
__device__ __forceinline__ uint32_t upper_mirrored(uint32_t pair, int thread) {
  const uint32_t transposed = transposed_fragment(pair);
  const int row = thread % 32 / 4, col = thread % 4 * 2;
  const uint32_t lower = (row > col ? 0x0000ffffu : 0u) | (row > col + 1 ? 0xffff0000u : 0u);
  return (transposed & lower) | (pair & ~lower);
}

}  // namespace optimizer::sm90
