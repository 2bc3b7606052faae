#pragma once
// How the host describes a batch of matrices to a kernel of products.

#include <cstdint>

#include "common/stable.h"

namespace optimizer {

// One batch of matrices; strides in elements.
struct Matrices {
  const void* data;
  int64_t batch;
  int64_t row;
  int64_t col;
};

// How an operand's strides let it be read.
enum class Layout {
  kRows,     // k is contiguous, every row starts on 16 bytes
  kColumns,  // m is contiguous, every column starts on 16 bytes
  kAny,      // element by element
};

inline bool on_16_bytes(const Matrices& x, int64_t leading, int64_t batches, int64_t elements) {
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && leading % elements == 0 &&
         (batches == 1 || x.batch % elements == 0);
}

// `elements` of the dtype fill 16 bytes.
inline Layout layout_of(const Matrices& x, int64_t batches, int64_t elements) {
  if (x.col == 1 && on_16_bytes(x, x.row, batches, elements)) return Layout::kRows;
  if (x.row == 1 && on_16_bytes(x, x.col, batches, elements)) return Layout::kColumns;
  return Layout::kAny;
}

// torch gives a side of one element whatever stride; here it gets one that leaves lines contiguous
// and on 16 bytes, so that a view of one row has the layout of the tensor it was taken from.
inline Matrices matrices_of(const Tensor& x) {
  const auto padded = [](int64_t side) { return (side + 7) / 8 * 8; };
  Matrices view{x.data_ptr(), x.stride(0), x.stride(1), x.stride(2)};
  if (x.size(1) == 1) view.row = view.col == 1 ? padded(x.size(2)) : 1;
  if (x.size(2) == 1) view.col = view.row == 1 ? padded(x.size(1)) : 1;
  return view;
}

}  // namespace optimizer
