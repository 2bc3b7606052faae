#pragma once
// How the host describes matrices to the kernels of normalize.cuh.

#include "common/launch.cuh"
#include "newton_schulz/normalize.cuh"

namespace optimizer::normalization {

// `element`: bytes. torch gives a side of one element whatever stride.
inline Piece piece_of(const Tensor& x, int64_t first, int64_t element) {
  Piece piece{x.data_ptr(), x.stride(0), x.stride(1), x.stride(2), first, Layout::kAny};
  if (x.size(0) == 1) piece.batch = 0;
  if (x.size(1) == 1) piece.row = 0;
  if (x.size(2) == 1) piece.col = 0;
  const bool aligned =
      reinterpret_cast<uintptr_t>(piece.data) % (kSide * element) == 0 && piece.batch % kSide == 0;
  if (aligned && piece.col == 1 && piece.row % kSide == 0) piece.layout = Layout::kRows;
  if (aligned && piece.row == 1 && piece.col % kSide == 0) piece.layout = Layout::kColumns;
  return piece;
}

}  // namespace optimizer::normalization
