// CPU backend of momentum; formulas and checks: step/momentum.h.

#include "step/momentum.h"

#include "cpu/host_blocks.h"

namespace optimizer {
namespace {

using momentum::Problem;

struct Partial {
  uint32_t amax;  // bits of the largest magnitude: NaN is larger than every number
  double squares;
};

Partial run(const Problem& p, size_t k, int64_t begin, int64_t end) {
  const auto& item = p.items[k];
  const float scale = p.scale != nullptr ? p.scale[k] : 1.0f;
  Partial partial{0, 0.0};
  float grad[kBlock], buffer[kBlock];
  for (; begin < end; begin += kBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kBlock, end - begin));
    gather(item, momentum::kGrad, begin, count, grad);
    gather(item, momentum::kBuffer, begin, count, buffer);
    for (int i = 0; i < count; ++i) {
      buffer[i] = p.rule.advance(grad[i], buffer[i]);
      grad[i] = p.rule.direction(grad[i], buffer[i]);
      partial.amax = std::max(partial.amax, float_bits(grad[i]) & 0x7fffffffu);
      partial.squares += static_cast<double>(grad[i]) * grad[i];
      grad[i] *= scale;
    }
    scatter(item, momentum::kBuffer, begin, count, buffer);
    scatter(item, momentum::kOut, begin, count, grad);
  }
  return partial;
}

}  // namespace

Tensor momentum_cpu(const TensorVector& grads, const TensorVector& buffers, const TensorVector& out,
                    double mu, bool nesterov, bool ema, std::optional<Tensor> scale,
                    std::optional<Tensor> batch) {
  const Problem p = momentum::describe(grads, buffers, out, mu, nesterov, ema, scale, batch);
  const auto count = static_cast<int64_t>(grads.size());
  Tensor stats = allocate(grads[0], {count, 2}, ScalarType::Float);
  auto* values = static_cast<float*>(stats.data_ptr());
  std::vector<Partial> partials;
  for (size_t k = 0; k < p.items.size(); ++k) {
    const int64_t numel = p.items[k].numel;
    partials.assign((numel + kTask - 1) / kTask, {});
    torch::stable::parallel_for(
        0, static_cast<int64_t>(partials.size()), 1, [&](int64_t first, int64_t last) {
          for (int64_t task = first; task < last; ++task) {
            partials[task] = run(p, k, task * kTask, std::min(numel, (task + 1) * kTask));
          }
        });
    Partial total{0, 0.0};
    for (const Partial& partial : partials) {
      total.amax = std::max(total.amax, partial.amax);
      total.squares += partial.squares;
    }
    values[2 * k] = float_from_bits(total.amax);
    values[2 * k + 1] = static_cast<float>(total.squares);
  }
  return stats;
}

}  // namespace optimizer
