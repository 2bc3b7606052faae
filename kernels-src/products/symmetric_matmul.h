#pragma once
// symmetric_matmul: out = scale (alpha A B^T + beta C) + diag I for a batch of m x k operands whose
// product is symmetric. What the host checks and hands to a kernel.
//
// Only tiles on and above the diagonal are computed; each is stored twice, the second time
// transposed. Products are summed in float32 in steps of growing k whatever the tile, the strides
// or the batch; scale, alpha, beta C and diag are applied in float32 and the result is rounded
// once.

#include <cstdint>
#include <optional>

#include "common/matrices.h"
#include "common/schedule.h"
#include "common/stable.h"

namespace optimizer::symmetric {

struct Problem {
  Matrices a;          // (batch, m, k)
  Matrices b;          // (batch, m, k), read as its transpose
  Matrices c;          // (batch, m, m); data is null if beta C is absent
  Matrices out;        // (batch, m, m)
  const float* scale;  // (batch,); null means 1
  int64_t batches;
  int m;
  int k;
  float alpha;
  float beta;
  float diag;
  int alpha_power;         // of the scale that multiplies alpha A B^T
  int beta_power;          // and beta C
  bool upper_out = false;  // in upper storage, see layout.h
};

// Positions inside a matrix are 32-bit, with room for a tile behind the last one.
constexpr int64_t kLargestSide = int64_t{1} << 30;

// A symmetric matrix equals its transpose, so the contiguous side may always be the rows.
inline Matrices symmetric_view(const Tensor& x) {
  const Matrices view = matrices_of(x);
  if (view.row != 1) return view;
  return {view.data, view.batch, view.col, view.row};
}

inline Problem describe(const Tensor& a, const Tensor& b, const std::optional<Tensor>& c,
                        const Tensor& out, double alpha, double beta, double diag,
                        const std::optional<Tensor>& scale, int64_t alpha_power,
                        int64_t beta_power) {
  STD_TORCH_CHECK(a.dim() == 3 && b.dim() == 3 && out.dim() == 3,
                  "symmetric_matmul: a and b must be (batch, m, k), out (batch, m, m)");
  const int64_t batches = a.size(0), m = a.size(1), k = a.size(2);
  STD_TORCH_CHECK(b.size(0) == batches && b.size(1) == m && b.size(2) == k,
                  "symmetric_matmul: b must have the shape of a");
  STD_TORCH_CHECK(m <= kLargestSide && k <= kLargestSide,
                  "symmetric_matmul: m and k must be at most 2^30");
  const auto check_square = [&](const Tensor& x, const char* name) {
    STD_TORCH_CHECK(x.dim() == 3 && x.size(0) == batches && x.size(1) == m && x.size(2) == m &&
                        x.scalar_type() == a.scalar_type() && x.device() == a.device(),
                    "symmetric_matmul: ", name,
                    " must be (batch, m, m) of the dtype and on the device of a");
  };
  check_square(out, "out");
  if (c.has_value()) check_square(*c, "c");
  STD_TORCH_CHECK(b.scalar_type() == a.scalar_type() && b.device() == a.device(),
                  "symmetric_matmul: b must have the dtype and the device of a");

  STD_TORCH_CHECK(!scale.has_value() ||
                      (scale->dim() == 1 && scale->size(0) == batches && scale->is_contiguous() &&
                       scale->scalar_type() == ScalarType::Float && scale->device() == a.device()),
                  "symmetric_matmul: scale must be (batch,), contiguous, float32, on a's device");

  for (const int64_t power : {alpha_power, beta_power}) {
    STD_TORCH_CHECK(power >= 0 && power <= 2, "symmetric_matmul: a power must be 0, 1 or 2, got ",
                    power);
  }
  const bool reads_c = c.has_value() && beta != 0;
  return {matrices_of(a),
          matrices_of(b),
          reads_c ? symmetric_view(*c) : Matrices{},
          symmetric_view(out),
          scale.has_value() ? static_cast<const float*>(scale->data_ptr()) : nullptr,
          batches,
          static_cast<int>(m),
          static_cast<int>(k),
          static_cast<float>(alpha),
          static_cast<float>(beta),
          static_cast<float>(diag),
          static_cast<int>(alpha_power),
          static_cast<int>(beta_power)};
}

}  // namespace optimizer::symmetric
