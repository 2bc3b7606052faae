#pragma once
// adamw: one step of AdamW (arXiv 1711.05101) per parameter in float32, the parameter rounded once,
// its step counter advanced on the device. Both backends share the formulas and the checks.
//
// Every operation is rounded on its own, so that CPU, CUDA and the reference give the same bits.

#include <cmath>

#include "common/portable.h"
#include "common/rounding.h"
#include "common/tensor_list.h"

namespace optimizer::adamw {

// A decay rate of an average. 1 - beta is taken in float64 for a number, in float32 for a tensor.
struct Beta {
  double number;
  const float* address;

  OPTIMIZER_HD Average average() const {
    if (!address) return average_of(number);
    const float weight = 1.0f - *address;
    return {*address, weight, weight < 0.5f};
  }

  // 1 - beta^t as -expm1(t log beta), which keeps its digits at small t; float64, rounded once.
  // log1p, because glibc renewed log in 2.29 and the Hub allows 2.28.
  OPTIMIZER_HD float correction(float step) const {
    const double beta = address ? static_cast<double>(*address) : number;
    return beta > 0 ? static_cast<float>(-expm1(static_cast<double>(step) * log1p(beta - 1.0)))
                    : 1.0f;
  }
};

struct Options {
  Scalar lr;
  Scalar eps;
  Scalar weight_decay;
  Beta beta1;
  Beta beta2;
};

OPTIMIZER_HD float value_of(const Scalar& scalar) {
  return scalar.address ? *scalar.address : scalar.number;
}

// What all elements of a parameter share.
struct Coefficients {
  Average first;
  Average second;
  float eps;
  float decay;        // lr weight_decay
  float rate;         // lr / (1 - beta1^t)
  float correction2;  // 1 - beta2^t
};

// (lr / correction1, correction2) after `step` steps
struct Corrections {
  float rate;
  float correction2;
};

OPTIMIZER_HD Corrections corrections_of(const Options& options, float step) {
  return {value_of(options.lr) / options.beta1.correction(step), options.beta2.correction(step)};
}

OPTIMIZER_HD Coefficients coefficients_of(const Options& options, Corrections corrections) {
  return {options.beta1.average(), options.beta2.average(),
          value_of(options.eps),   value_of(options.lr) * value_of(options.weight_decay),
          corrections.rate,        corrections.correction2};
}

// Advances the averages and returns the parameter's new value.
OPTIMIZER_HD float stepped(float param, float grad, float& average, float& square,
                           const Coefficients& c) {
  average = c.first.of(average, grad);
  square = c.second.of(square, grad * grad);
  const float denominator = sqrtf(square / c.correction2) + c.eps;
  return (param - param * c.decay) - average / denominator * c.rate;
}

enum Operands { kParam, kGrad, kAverage, kSquare, kResidual, kCount };

struct Entry {
  Item<kCount> item;  // without a residual the fifth operand repeats the first
  Mode mode;
  float* step;
  uint32_t parameter;
  int64_t offset;
};

struct Problem {
  std::vector<Entry> entries;
  Options options;
  Noise noise;
};

inline Beta beta(const char* name, double number, const std::optional<Tensor>& tensor,
                 const Tensor& like) {
  return {number, scalar("adamw", name, number, tensor, like).address};
}

inline Problem describe(const TensorVector& params, const TensorVector& grads,
                        const TensorVector& exp_avgs, const TensorVector& exp_avg_sqs,
                        const TensorVector& steps, const Options& options, int64_t seed,
                        const std::optional<Tensor>& rounding_step,
                        const RoundingOptions& rounding) {
  const char* op = "adamw";
  check_length(op, "grads", grads.size(), params.size());
  check_length(op, "exp_avgs", exp_avgs.size(), params.size());
  check_length(op, "exp_avg_sqs", exp_avg_sqs.size(), params.size());
  check_length(op, "steps", steps.size(), params.size());
  check_rounding(op, params, rounding);
  Problem problem;
  problem.options = options;
  problem.noise = noise(op, seed, rounding_step, params[0]);
  problem.entries.reserve(params.size());
  const std::array<Operand, kCount> operands{{{"params", true},
                                              {"grads", false},
                                              {"exp_avgs", true},
                                              {"exp_avg_sqs", true},
                                              {"residuals", true}}};
  for (size_t k = 0; k < params.size(); ++k) {
    Entry entry{};
    entry.mode = mode_of(op, params[k], k, rounding);
    const Tensor& last = entry.mode == Mode::kResidual ? rounding.residuals[k] : params[k];
    entry.item =
        describe_item<kCount>(op, {&params[k], &grads[k], &exp_avgs[k], &exp_avg_sqs[k], &last},
                              operands, k, entry.mode == Mode::kStochastic);
    const Kind* kind = entry.item.kind;
    STD_TORCH_CHECK(is_float(kind[kParam]) && is_float(kind[kGrad]), "adamw: entry ", k,
                    " has an integer parameter or gradient");
    STD_TORCH_CHECK(kind[kAverage] == Kind::kFloat && kind[kSquare] == Kind::kFloat,
                    "adamw: exp_avgs[", k, "] and exp_avg_sqs[", k, "] must be float32");
    STD_TORCH_CHECK(steps[k].scalar_type() == ScalarType::Float && steps[k].numel() == 1 &&
                        steps[k].device() == params[0].device() &&
                        params[k].device() == params[0].device(),
                    "adamw: steps[", k, "] must be one float32 value, and it and params[", k,
                    "] on the device of params[0]");
    entry.step = static_cast<float*>(steps[k].data_ptr());
    if (entry.mode == Mode::kStochastic) {
      entry.parameter = static_cast<uint32_t>(rounding.parameter[k]);
      entry.offset = rounding.offset[k];
    }
    problem.entries.push_back(entry);
  }
  return problem;
}

}  // namespace optimizer::adamw
