// CPU backend of apply_update; formulas and checks: step/apply_update.h.

#include "step/apply_update.h"

#include "cpu/host_blocks.h"

namespace optimizer {
namespace {

using apply_update::Entry;
using apply_update::Problem;

// Mean squares of the kept rows or columns of one matrix, added in the order of its elements.
void mean_squares(const Entry& entry, int64_t matrix, std::vector<double>& sums) {
  const auto& m = entry.matrices;
  sums.assign(m.kept(), 0.0);
  float block[kBlock];
  for (int64_t row = 0; row < m.rows; ++row) {
    const int64_t first = (matrix * m.rows + row) * m.columns;
    for (int64_t column = 0; column < m.columns; column += kBlock) {
      const int count = static_cast<int>(std::min<int64_t>(kBlock, m.columns - column));
      gather(entry.item, apply_update::kUpdate, first + column, count, block);
      for (int i = 0; i < count; ++i) {
        sums[m.keep_rows ? row : column + i] += static_cast<double>(block[i]) * block[i];
      }
    }
  }
  for (double& sum : sums) sum /= static_cast<double>(m.reduced());
}

// Advances the second moment of every matrix and returns the scale of each row or column, (B,
// kept).
std::vector<float> multipliers(const Entry& entry, const Average& rule) {
  const auto& m = entry.matrices;
  std::vector<float> scales(m.batch * m.kept());
  torch::stable::parallel_for(0, m.batch, 1, [&](int64_t first, int64_t last) {
    std::vector<double> means;
    for (int64_t matrix = first; matrix < last; ++matrix) {
      mean_squares(entry, matrix, means);
      float* second = m.second + matrix * m.kept();
      float* scale = scales.data() + matrix * m.kept();
      double squares = 0.0, scaled = 0.0;
      for (int64_t i = 0; i < m.kept(); ++i) {
        second[i] = rule.of(second[i], static_cast<float>(means[i]));
        // NaN must stay, so the bound is written as a comparison that NaN passes.
        const float bounded =
            second[i] < apply_update::kSmallest ? apply_update::kSmallest : second[i];
        scale[i] = 1.0f / std::sqrt(bounded);
        const double square = means[i] * static_cast<double>(m.reduced());
        squares += square;
        scaled += square * static_cast<double>(scale[i]) * scale[i];
      }
      const double norm = std::sqrt(scaled);
      const auto ratio = static_cast<float>(
          std::sqrt(squares) / (norm < apply_update::kSmallest ? apply_update::kSmallest : norm));
      for (int64_t i = 0; i < m.kept(); ++i) scale[i] *= ratio;
    }
  });
  return scales;
}

void scale_block(const Entry& entry, const std::vector<float>& scales, int64_t begin, int count,
                 float* update) {
  const auto& m = entry.matrices;
  for (int i = 0; i < count; ++i) {
    const int64_t row = (begin + i) / m.columns;  // of all matrices
    const int64_t kept = m.keep_rows ? row : row / m.rows * m.columns + (begin + i) % m.columns;
    update[i] *= scales[kept];
  }
}

void run(const Problem& p, const Entry& entry, const std::vector<float>& scales, int64_t begin,
         int64_t end) {
  const apply_update::Pair rates = apply_update::rates_of(p.rates, entry.factor);
  float param[kBlock], update[kBlock];
  for (; begin < end; begin += kBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kBlock, end - begin));
    gather_param(entry.item, apply_update::kResidual, entry.mode, begin, count, param);
    gather(entry.item, apply_update::kUpdate, begin, count, update);
    if (!scales.empty()) scale_block(entry, scales, begin, count, update);
    for (int i = 0; i < count; ++i) {
      param[i] =
          apply_update::updated(param[i], update[i], rates.rate, rates.decay, p.rates.cautious);
    }
    scatter_param(entry.item, apply_update::kResidual, entry.mode, begin, count, param, p.noise,
                  entry.parameter, entry.offset + begin);
  }
}

}  // namespace

void apply_update_cpu(const TensorVector& params, const TensorVector& updates, double lr,
                      std::optional<Tensor> lr_tensor, const std::vector<double>& factors,
                      double weight_decay, std::optional<Tensor> weight_decay_tensor,
                      bool shaped_decay, bool cautious, const TensorVector& second_moments,
                      double beta2, const TensorVector& residuals, int64_t seed,
                      std::optional<Tensor> rounding_step, const std::vector<int64_t>& parameter,
                      const std::vector<int64_t>& offset, std::optional<Tensor> batch) {
  const RoundingOptions rounding{residuals, parameter, offset, rounding_step.has_value()};
  const Problem p = apply_update::describe(
      params, updates, lr, lr_tensor, factors, weight_decay, weight_decay_tensor, shaped_decay,
      cautious, second_moments, beta2, seed, rounding_step, rounding, batch);
  for (const Entry& entry : p.entries) {
    std::vector<float> scales;
    if (entry.matrices.second != nullptr) scales = multipliers(entry, p.average);
    torch::stable::parallel_for(0, entry.item.numel, kTask, [&](int64_t begin, int64_t end) {
      run(p, entry, scales, begin, end);
    });
  }
}

}  // namespace optimizer
