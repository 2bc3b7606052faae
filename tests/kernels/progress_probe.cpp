// The order of tiles of progress_matmul, for test_progress_matmul.py.

#include "communication/progress_schedule.h"

using namespace optimizer::communication;

extern "C" {

// For every tile: chunk, row, col, whether it is narrow. Returns the number of tiles.
int tiles(int chunks, int pivot, int chunk_rows, int n, int narrow, int blocks, int* out) {
  const auto schedule =
      ProgressSchedule::of(chunks, pivot, chunk_rows, n, narrow, static_cast<uint32_t>(blocks));
  for (uint32_t tile = 0; out != nullptr && tile < schedule.count(); ++tile) {
    const auto origin = schedule.locate(tile);
    *out++ = static_cast<int>(origin.matrix);
    *out++ = origin.row;
    *out++ = origin.col;
    *out++ = schedule.is_narrow(origin.col);
  }
  return static_cast<int>(schedule.count());
}

// Columns of narrow tiles, and how many of the blocks work.
void pick(int chunks, int chunk_rows, int n, int k, int blocks, int* out) {
  const auto schedule = pick_schedule(chunks, chunk_rows, n, k, static_cast<uint32_t>(blocks));
  out[0] = static_cast<int>(schedule.narrow);
  out[1] = static_cast<int>(schedule.blocks);
}

double time_of(int chunks, int chunk_rows, int n, int k, int narrow, int blocks) {
  return predicted_time(
      ProgressSchedule::of(chunks, 0, chunk_rows, n, narrow, static_cast<uint32_t>(blocks)), k);
}
}
