#pragma once
// The compiled ops, one declaration per backend.
// Sources: kernels-src/<family>/.../<op>.cu and kernels-src/cpu/<op>.cpp.

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <vector>

namespace optimizer {

using torch::headeronly::IntHeaderOnlyArrayRef;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using TensorVector = std::vector<Tensor>;

Tensor momentum_cpu(const TensorVector& grads, const TensorVector& buffers, const TensorVector& out,
                    double mu, bool nesterov, bool ema, std::optional<Tensor> scale,
                    std::optional<Tensor> batch);

void apply_update_cpu(const TensorVector& params, const TensorVector& updates, double lr,
                      std::optional<Tensor> lr_tensor, const std::vector<double>& factors,
                      double weight_decay, std::optional<Tensor> weight_decay_tensor,
                      bool shaped_decay, bool cautious, const TensorVector& second_moments,
                      double beta2, const TensorVector& residuals, int64_t seed,
                      std::optional<Tensor> rounding_step, const std::vector<int64_t>& parameter,
                      const std::vector<int64_t>& offset, std::optional<Tensor> batch);

void adamw_cpu(const TensorVector& params, const TensorVector& grads, const TensorVector& exp_avgs,
               const TensorVector& exp_avg_sqs, const TensorVector& steps, double lr,
               std::optional<Tensor> lr_tensor, double beta1, std::optional<Tensor> beta1_tensor,
               double beta2, std::optional<Tensor> beta2_tensor, double eps,
               std::optional<Tensor> eps_tensor, double weight_decay,
               std::optional<Tensor> weight_decay_tensor, const TensorVector& residuals,
               int64_t seed, std::optional<Tensor> rounding_step,
               const std::vector<int64_t>& parameter, const std::vector<int64_t>& offset);

Tensor momentum_cuda(const TensorVector& grads, const TensorVector& buffers,
                     const TensorVector& out, double mu, bool nesterov, bool ema,
                     std::optional<Tensor> scale, std::optional<Tensor> batch);

void apply_update_cuda(const TensorVector& params, const TensorVector& updates, double lr,
                       std::optional<Tensor> lr_tensor, const std::vector<double>& factors,
                       double weight_decay, std::optional<Tensor> weight_decay_tensor,
                       bool shaped_decay, bool cautious, const TensorVector& second_moments,
                       double beta2, const TensorVector& residuals, int64_t seed,
                       std::optional<Tensor> rounding_step, const std::vector<int64_t>& parameter,
                       const std::vector<int64_t>& offset, std::optional<Tensor> batch);

void adamw_cuda(const TensorVector& params, const TensorVector& grads, const TensorVector& exp_avgs,
                const TensorVector& exp_avg_sqs, const TensorVector& steps, double lr,
                std::optional<Tensor> lr_tensor, double beta1, std::optional<Tensor> beta1_tensor,
                double beta2, std::optional<Tensor> beta2_tensor, double eps,
                std::optional<Tensor> eps_tensor, double weight_decay,
                std::optional<Tensor> weight_decay_tensor, const TensorVector& residuals,
                int64_t seed, std::optional<Tensor> rounding_step,
                const std::vector<int64_t>& parameter, const std::vector<int64_t>& offset);

void scale_rows_cuda(const Tensor& x, const Tensor& factors, bool to_norm_one);

void normalize_cuda(const TensorVector& pieces, const Tensor& out, double prefactor,
                    std::optional<Tensor> zeros);
void crop_cuda(const Tensor& x, const Tensor& out);
void norm_factors_cuda(const Tensor& x, const Tensor& factors, const Tensor& roots,
                       double prefactor, bool symmetric);

void symmetric_matmul_cuda(const Tensor& a, const Tensor& b, std::optional<Tensor> c,
                           const Tensor& out, double alpha, double beta, double diag, int64_t tile,
                           std::optional<Tensor> scale, int64_t alpha_power, int64_t beta_power,
                           bool upper_out);

void matmul_add_cuda(const Tensor& a, const Tensor& b, std::optional<Tensor> c, const Tensor& out,
                     double alpha, double beta, int64_t tile, std::optional<Tensor> scale,
                     int64_t upper);

void square_chain_cuda(const TensorVector& buffers, const std::vector<int64_t>& places,
                       const std::vector<int64_t>& operands, const std::vector<double>& alphas,
                       const std::vector<double>& betas, const std::vector<double>& deltas,
                       std::optional<Tensor> scale, int64_t groups, std::optional<Tensor> zeros);

void gram_polynomial_slice_cuda(const TensorVector& pieces, const Tensor& out,
                                const std::vector<int64_t>& places,
                                const std::vector<int64_t>& operands,
                                const std::vector<double>& coefficients, double start_norm,
                                double prefactor, bool chain);

void nf4_product_cuda(const Tensor& x, const Tensor& packed, const Tensor& absmax,
                      std::optional<Tensor> codebook, IntHeaderOnlyArrayRef stored,
                      int64_t blocksize, bool along, std::optional<Tensor> low,
                      std::optional<Tensor> factor, std::optional<Tensor> bias,
                      std::optional<Tensor> gates, const Tensor& slots, const Tensor& offsets,
                      const Tensor& out, int64_t fan, bool scatter, int64_t format,
                      int64_t block_rows, std::optional<Tensor> activated, bool early);

Tensor nf4_dequant_cpu(const Tensor& packed, const Tensor& absmax, const Tensor& active_experts,
                       IntHeaderOnlyArrayRef expert_shape, int64_t blocksize, ScalarType dtype,
                       std::optional<Tensor> codebook, std::optional<Tensor> absmax_code,
                       std::optional<Tensor> absmax_scale, std::optional<Tensor> absmax_offset);

Tensor nf4_dequant_cuda(const Tensor& packed, const Tensor& absmax, const Tensor& active_experts,
                        IntHeaderOnlyArrayRef expert_shape, int64_t blocksize, ScalarType dtype,
                        std::optional<Tensor> codebook, std::optional<Tensor> absmax_code,
                        std::optional<Tensor> absmax_scale, std::optional<Tensor> absmax_offset);

void nf4_quantize_cpu(const Tensor& weight, const Tensor& packed, const Tensor& absmax,
                      int64_t blocksize, bool fp4);

void nf4_quantize_cuda(const Tensor& weight, const Tensor& packed, const Tensor& absmax,
                       int64_t blocksize, bool fp4);

void push_cuda(const TensorVector& dsts, const TensorVector& srcs, int64_t blocks);
void stream_write_value32_cuda(const Tensor& x, int64_t offset, int64_t value);
void memset32_cuda(const Tensor& x, int64_t offset, int64_t value, int64_t count);
void wait_signals_cuda(const Tensor& flags, int64_t value, std::optional<Tensor> epoch,
                       int64_t timeout_ms, const Tensor& status, std::optional<Tensor> next,
                       const std::vector<Tensor>& clear);

void progress_matmul_cuda(const Tensor& a, const Tensor& b, const Tensor& out,
                          std::optional<Tensor> signals, int64_t chunks, int64_t pivot,
                          int64_t epoch, std::optional<Tensor> epochs, int64_t timeout_ms,
                          std::optional<Tensor> status, int64_t blocks, int64_t narrow);

// launch_plan(Tensor[] operands, int tag, int[] program) -> Tensor[], boxed
void launch_plan_cuda(StableIValue* stack, uint64_t arguments, uint64_t results);

}  // namespace optimizer
