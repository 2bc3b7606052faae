#pragma once
// Rows of bytes at equal distances, copied within a device by a few multiprocessors, 16 bytes per
// thread and access.
//
// The driver's copy of 4096 rows of 8 KB, 16 KB apart, runs at 0.44 of a contiguous copy's rate.
// Here a thread has four loads under way, a block 64 KB, and a multiprocessor carries some 47 GB/s
// each way, so that 48 of them are near the rate of a contiguous copy, 1.8 TB/s on an H200, and 64
// reach it. Bulk copies of TMA need as many, and lose most of it where rows are short.

#include <cuda_runtime.h>

#include <cstdint>

#include "common/vector_io.cuh"

namespace optimizer::communication {

constexpr int kRowsThreads = 1024;
constexpr uint32_t kRowsUnroll = 4;
constexpr uint32_t kRowsTile = kRowsThreads * kRowsUnroll;  // vectors

// Addresses and distances are multiples of 16 bytes.
struct Rows {
  char* to;
  const char* from;
  int64_t to_pitch;
  int64_t from_pitch;
  uint32_t vectors;  // of 16 bytes, of a row
  uint32_t rows;
};

// In the parameters of a launch, 4 KB. No pair reads or writes what another one writes.
constexpr int kMostRows = 64;
struct RowsList {
  int count;
  Rows at[kMostRows];
};

// A vector of a pair, and the one that the thread takes next.
struct RowsPlace {
  uint32_t row;
  uint32_t col;

  __device__ __forceinline__ void advance(uint32_t vectors, uint32_t down, uint32_t right) {
    row += down;
    col += right;
    if (col >= vectors) {
      col -= vectors;
      ++row;
    }
  }
};

__device__ __forceinline__ void copy_tile(const Rows& x, uint32_t tile) {
  const uint64_t first = uint64_t{tile} * kRowsTile;
  RowsPlace at;
  at.row = static_cast<uint32_t>(first / x.vectors);
  at.col = static_cast<uint32_t>(first - uint64_t{at.row} * x.vectors) + threadIdx.x;
  at.row += at.col / x.vectors;
  at.col %= x.vectors;
  const uint32_t down = kRowsThreads / x.vectors, right = kRowsThreads % x.vectors;
  uint32_t words[kRowsUnroll][4];
  RowsPlace from = at;
#pragma unroll
  for (uint32_t i = 0; i < kRowsUnroll; ++i, from.advance(x.vectors, down, right)) {
    if (from.row < x.rows) {
      load_words(x.from + from.row * x.from_pitch + from.col * int64_t{16}, words[i]);
    }
  }
#pragma unroll
  for (uint32_t i = 0; i < kRowsUnroll; ++i, at.advance(x.vectors, down, right)) {
    if (at.row < x.rows) {
      store_words(x.to + at.row * x.to_pitch + at.col * int64_t{16}, words[i]);
    }
  }
}

// Tiles of all pairs go round the blocks. The fence is of the system: who sees a signal that is
// written behind the kernel, a peer included, sees the rows.
__global__ void __launch_bounds__(kRowsThreads) rows_kernel(const __grid_constant__ RowsList list) {
  uint32_t turn = blockIdx.x;  // of this block in the pair
  for (int k = 0; k < list.count; ++k) {
    const Rows& x = list.at[k];
    const auto tiles = static_cast<uint32_t>((uint64_t{x.vectors} * x.rows - 1) / kRowsTile + 1);
    for (; turn < tiles; turn += gridDim.x) copy_tile(x, turn);
    turn -= tiles;
  }
  __threadfence_system();
}

}  // namespace optimizer::communication
