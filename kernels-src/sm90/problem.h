#pragma once
// Matrix products with the instructions of Hopper (sm_90a): what the host hands to a kernel, and
// when one may serve.

#include <cstdint>

#include "common/matrices.h"

namespace optimizer::sm90 {

// out = scale^alpha_power alpha A B^T + scale^beta_power beta C + diag I
struct Problem {
  Matrices a;          // (batch, m, k)
  Matrices b;          // (batch, n, k), read as its transpose
  Matrices c;          // (batch, m, n); data is null if beta C is absent
  Matrices out;        // (batch, m, n)
  const float* scale;  // (batch,); null means 1
  int64_t batches;
  int m;
  int n;
  int k;
  float alpha;
  float beta;
  float diag;
  int alpha_power = 1;
  int beta_power = 1;
  bool upper_a = false;  // in upper storage, see layout.h
  bool upper_b = false;
  bool upper_out = false;
};

// Tiles of a matrix are counted in 28 bits.
constexpr int kLargestSide = 1 << 20;

// Whether a tensor map can describe x (rows x cols): a contiguous side, the other stride and the
// batch's a positive multiple of 16 bytes below 2^40, the start on 16 bytes.
inline bool fits_tensor_map(const Matrices& x, int rows, int cols, int64_t batches) {
  const Layout layout = layout_of(x, batches, 8);
  if (layout == Layout::kAny) return false;
  const int64_t lines = layout == Layout::kRows ? rows : cols;
  const int64_t stride = layout == Layout::kRows ? x.row : x.col;
  const auto fits = [](int64_t count, int64_t elements) {
    return count == 1 || (elements > 0 && elements < int64_t{1} << 39);
  };
  return fits(lines, stride) && fits(batches, x.batch);
}

// Whether rows are contiguous, once the operand fits a tensor map; else columns are.
inline bool by_rows(const Matrices& x) { return x.col == 1; }

// Why no kernel of this family can serve the problem; null if one can.
inline const char* refusal(const Problem& p) {
  if (p.k == 0) return "k is 0";
  if (p.m > kLargestSide || p.n > kLargestSide) return "a side of the result exceeds 2^20";
  if (p.batches > INT32_MAX) return "the batch exceeds 2^31 - 1";
  if (!fits_tensor_map(p.a, p.m, p.k, p.batches) || !fits_tensor_map(p.b, p.n, p.k, p.batches)) {
    return "TMA cannot read an operand: rows or columns must be contiguous, start on 16 bytes and "
           "lie a multiple of 16 bytes apart";
  }
  if (!by_rows(p.out) || !fits_tensor_map(p.out, p.m, p.n, p.batches)) {
    return "TMA cannot write out: its rows must start on 16 bytes";
  }
  if (p.c.data != nullptr && (!by_rows(p.c) || !fits_tensor_map(p.c, p.m, p.n, p.batches))) {
    return "TMA cannot read C: its rows must start on 16 bytes";
  }
  return nullptr;
}

}  // namespace optimizer::sm90
