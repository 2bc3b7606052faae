// CPU backend of adamw; formulas and checks: step/adamw.h.

#include "step/adamw.h"

#include "cpu/host_blocks.h"

namespace optimizer {
namespace {

using adamw::Entry;

void run(const adamw::Problem& p, const Entry& entry, const adamw::Coefficients& coefficients,
         int64_t begin, int64_t end) {
  float param[kBlock], grad[kBlock], average[kBlock], square[kBlock];
  for (; begin < end; begin += kBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kBlock, end - begin));
    gather_param(entry.item, adamw::kResidual, entry.mode, begin, count, param);
    gather(entry.item, adamw::kGrad, begin, count, grad);
    gather(entry.item, adamw::kAverage, begin, count, average);
    gather(entry.item, adamw::kSquare, begin, count, square);
    for (int i = 0; i < count; ++i) {
      param[i] = adamw::stepped(param[i], grad[i], average[i], square[i], coefficients);
    }
    scatter(entry.item, adamw::kAverage, begin, count, average);
    scatter(entry.item, adamw::kSquare, begin, count, square);
    scatter_param(entry.item, adamw::kResidual, entry.mode, begin, count, param, p.noise,
                  entry.parameter, entry.offset + begin);
  }
}

}  // namespace

void adamw_cpu(const TensorVector& params, const TensorVector& grads, const TensorVector& exp_avgs,
               const TensorVector& exp_avg_sqs, const TensorVector& steps, double lr,
               std::optional<Tensor> lr_tensor, double beta1, std::optional<Tensor> beta1_tensor,
               double beta2, std::optional<Tensor> beta2_tensor, double eps,
               std::optional<Tensor> eps_tensor, double weight_decay,
               std::optional<Tensor> weight_decay_tensor, const TensorVector& residuals,
               int64_t seed, std::optional<Tensor> rounding_step,
               const std::vector<int64_t>& parameter, const std::vector<int64_t>& offset) {
  STD_TORCH_CHECK(!params.empty(), "adamw: params is empty");
  const Tensor& like = params[0];
  const adamw::Options options{
      scalar("adamw", "lr", lr, lr_tensor, like), scalar("adamw", "eps", eps, eps_tensor, like),
      scalar("adamw", "weight_decay", weight_decay, weight_decay_tensor, like),
      adamw::beta("betas[0]", beta1, beta1_tensor, like),
      adamw::beta("betas[1]", beta2, beta2_tensor, like)};
  const RoundingOptions rounding{residuals, parameter, offset, rounding_step.has_value()};
  const adamw::Problem p = adamw::describe(params, grads, exp_avgs, exp_avg_sqs, steps, options,
                                           seed, rounding_step, rounding);
  for (const Entry& entry : p.entries) {
    *entry.step += 1.0f;
    const adamw::Coefficients coefficients =
        adamw::coefficients_of(p.options, adamw::corrections_of(p.options, *entry.step));
    torch::stable::parallel_for(0, entry.item.numel, kTask, [&](int64_t begin, int64_t end) {
      run(p, entry, coefficients, begin, end);
    });
  }
}

}  // namespace optimizer
