#pragma once
// momentum: buffer <- mu buffer + g, or the moving average of g; out <- direction * scale, rounded
// once; [amax, sum of squares] of the direction. Both backends share the formulas and the checks.
//
// Every product and every sum is rounded on its own (no fused multiply-add: build.toml says so to
// the compilers), so that CPU, CUDA and the reference give the same bits.

#include "common/portable.h"
#include "common/rounding.h"
#include "common/tensor_list.h"

namespace optimizer::momentum {

struct Rule {
  Average average;  // mu is its beta
  bool nesterov;
  bool ema;

  OPTIMIZER_HD float advance(float grad, float buffer) const {
    return ema ? average.of(buffer, grad) : buffer * average.beta + grad;
  }

  OPTIMIZER_HD float direction(float grad, float advanced) const {
    if (!nesterov) return advanced;
    return ema ? average.of(advanced, grad) : grad + advanced * average.beta;
  }
};

enum Operands { kGrad, kBuffer, kOut, kCount };

struct Problem {
  std::vector<Item<kCount>> items;
  Rule rule;
  const float* scale;  // (K,) or null
};

inline Problem describe(const TensorVector& grads, const TensorVector& buffers,
                        const TensorVector& out, double mu, bool nesterov, bool ema,
                        const std::optional<Tensor>& scale, const std::optional<Tensor>& batch) {
  const char* op = "momentum";
  STD_TORCH_CHECK(!grads.empty(), "momentum: grads is empty");
  check_length(op, "buffers", buffers.size(), grads.size());
  check_length(op, "out", out.size(), batch.has_value() ? 0 : grads.size());
  std::optional<Stacked> stacked;
  if (batch.has_value()) stacked.emplace(op, "out", *batch, grads);
  const std::array<Operand, kCount> operands{{{"grads", false}, {"buffers", true}, {"out", true}}};
  Problem problem;
  problem.rule = {average_of(mu), nesterov, ema};
  problem.items.reserve(grads.size());
  for (size_t k = 0; k < grads.size(); ++k) {
    problem.items.push_back(describe_item<kCount>(
        op, {&grads[k], &buffers[k], stacked ? nullptr : &out[k]}, operands, k, false, &stacked));
    for (Kind kind : problem.items.back().kind) {
      STD_TORCH_CHECK(is_float(kind), "momentum: entry ", k, " has an integer tensor");
    }
    STD_TORCH_CHECK(grads[k].device() == grads[0].device(), "momentum: grads[", k,
                    "] is on another device than grads[0]");
  }
  problem.scale = nullptr;
  if (scale.has_value()) {
    STD_TORCH_CHECK(scale->scalar_type() == ScalarType::Float && scale->is_contiguous() &&
                        scale->numel() == static_cast<int64_t>(grads.size()) &&
                        scale->device() == grads[0].device(),
                    "momentum: scale must be ", grads.size(),
                    " contiguous float32 values on the device of grads");
    problem.scale = static_cast<const float*>(scale->data_ptr());
  }
  return problem;
}

}  // namespace optimizer::momentum
