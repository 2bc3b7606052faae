#pragma once
// apply_update: p <- p - decay p - rate u in float32, rounded once; rate = lr factor, decay =
// (lr or rate) weight_decay. With second moments u is scaled per row or column first (NorMuon,
// arXiv 2510.05491). Both backends share the formulas and the checks.
//
// Every product and every sum is rounded on its own, so that CPU, CUDA and the reference give the
// same bits; only the sums behind the scale of a row depend on their order.

#include <cmath>

#include "common/portable.h"
#include "common/rounding.h"
#include "common/tensor_list.h"

namespace optimizer::apply_update {

OPTIMIZER_HD float updated(float param, float update, float rate, float decay, bool cautious) {
  const float shrunk = cautious ? param * (update * param >= 0 ? 1.0f : 0.0f) : param;
  return (param - shrunk * decay) - update * rate;
}

// A row or column is scaled as if its mean square were at least this.
constexpr float kSmallest = 1e-10f;

struct Rates {
  Scalar lr;
  Scalar weight_decay;
  bool shaped_decay;
  bool cautious;
};

struct Pair {
  float rate;
  float decay;
};

OPTIMIZER_HD Pair rates_of(const Rates& rates, float factor) {
  const float lr = rates.lr.address ? *rates.lr.address : rates.lr.number;
  const float wd =
      rates.weight_decay.address ? *rates.weight_decay.address : rates.weight_decay.number;
  const float rate = lr * factor;
  return {rate, (rates.shaped_decay ? rate : lr) * wd};
}

// The (B, m, n) view of an item with a second moment.
struct Matrices {
  float* second;  // (B, kept), contiguous; null without
  int64_t batch;
  int64_t rows;
  int64_t columns;
  bool keep_rows;  // second is (B, m, 1), else (B, 1, n)

  int64_t kept() const { return keep_rows ? rows : columns; }
  int64_t reduced() const { return keep_rows ? columns : rows; }
};

enum Operands { kParam, kUpdate, kResidual, kCount };

struct Entry {
  Item<kCount> item;  // without a residual the third operand repeats the first
  Mode mode;
  float factor;
  uint32_t parameter;
  int64_t offset;
  Matrices matrices;
};

struct Problem {
  std::vector<Entry> entries;
  Rates rates;
  Noise noise;
  Average average;  // of the second moments
};

inline Matrices matrices_of(const Tensor& param, const Tensor& second, size_t index) {
  const auto shape = param.sizes();
  const auto reduced = second.sizes();
  const size_t dims = shape.size();
  STD_TORCH_CHECK(dims >= 2 && reduced.size() == dims, "apply_update: second_moments[", index,
                  "] must have as many dimensions as params[", index, "], at least two");
  Matrices found{};
  found.batch = 1;
  bool fits = second.scalar_type() == ScalarType::Float && second.is_contiguous() &&
              second.device() == param.device();
  for (size_t d = 0; d + 2 < dims; ++d) {
    found.batch *= shape[d];
    fits &= reduced[d] == shape[d];
  }
  found.rows = shape[dims - 2];
  found.columns = shape[dims - 1];
  found.keep_rows = reduced[dims - 1] == 1;
  fits &= reduced[dims - 2] == (found.keep_rows ? found.rows : 1);
  fits &= found.keep_rows || reduced[dims - 1] == found.columns;
  STD_TORCH_CHECK(fits, "apply_update: second_moments[", index,
                  "] must be contiguous float32 (..., m, 1) or (..., 1, n) for params[", index,
                  "] (..., m, n), on its device");
  found.second = static_cast<float*>(second.data_ptr());
  return found;
}

inline Problem describe(const TensorVector& params, const TensorVector& updates, double lr,
                        const std::optional<Tensor>& lr_tensor, const std::vector<double>& factors,
                        double weight_decay, const std::optional<Tensor>& weight_decay_tensor,
                        bool shaped_decay, bool cautious, const TensorVector& second_moments,
                        double beta2, int64_t seed, const std::optional<Tensor>& rounding_step,
                        const RoundingOptions& rounding, const std::optional<Tensor>& batch) {
  const char* op = "apply_update";
  STD_TORCH_CHECK(!params.empty(), "apply_update: params is empty");
  check_length(op, "updates", updates.size(), batch.has_value() ? 0 : params.size());
  std::optional<Stacked> stacked;
  if (batch.has_value()) stacked.emplace(op, "updates", *batch, params);
  check_length(op, "factors", factors.size(), params.size());
  if (!second_moments.empty()) {
    check_length(op, "second_moments", second_moments.size(), params.size());
  }
  check_rounding(op, params, rounding);
  Problem problem;
  problem.rates = {scalar(op, "lr", lr, lr_tensor, params[0]),
                   scalar(op, "weight_decay", weight_decay, weight_decay_tensor, params[0]),
                   shaped_decay, cautious};
  problem.noise = noise(op, seed, rounding_step, params[0]);
  problem.average = average_of(beta2);
  problem.entries.reserve(params.size());
  const std::array<Operand, kCount> operands{
      {{"params", true}, {"updates", false}, {"residuals", true}}};
  for (size_t k = 0; k < params.size(); ++k) {
    Entry entry{};
    entry.mode = mode_of(op, params[k], k, rounding);
    const bool moments = !second_moments.empty();
    const bool ordered = moments || entry.mode == Mode::kStochastic;
    const Tensor& third = entry.mode == Mode::kResidual ? rounding.residuals[k] : params[k];
    entry.item = describe_item<kCount>(op, {&params[k], stacked ? nullptr : &updates[k], &third},
                                       operands, k, ordered, &stacked);
    STD_TORCH_CHECK(is_float(entry.item.kind[kParam]) && is_float(entry.item.kind[kUpdate]),
                    "apply_update: entry ", k, " has an integer parameter or update");
    STD_TORCH_CHECK(params[k].device() == params[0].device(), "apply_update: params[", k,
                    "] is on another device than params[0]");
    entry.factor = static_cast<float>(factors[k]);
    if (entry.mode == Mode::kStochastic) {
      entry.parameter = static_cast<uint32_t>(rounding.parameter[k]);
      entry.offset = rounding.offset[k];
    }
    if (moments) entry.matrices = matrices_of(params[k], second_moments[k], k);
    problem.entries.push_back(entry);
  }
  return problem;
}

}  // namespace optimizer::apply_update
