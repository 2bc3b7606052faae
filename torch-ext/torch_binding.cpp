#include "torch_binding.h"

#include <torch/csrc/stable/library.h>

#include "registration.h"

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def(
      "momentum(Tensor[] grads, Tensor(a!)[] buffers, Tensor(b!)[] out, float mu, bool nesterov, "
      "bool ema, Tensor? scale, Tensor(c!)? batch=None) -> Tensor");
  ops.def(
      "apply_update(Tensor(a!)[] params, Tensor[] updates, float lr, Tensor? lr_tensor, "
      "float[] factors, float weight_decay, Tensor? weight_decay_tensor, bool shaped_decay, "
      "bool cautious, Tensor(b!)[] second_moments, float beta2, Tensor(c!)[] residuals, int seed, "
      "Tensor? rounding_step, int[] parameter, int[] offset, Tensor? batch=None) -> ()");
  ops.def(
      "adamw(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
      "Tensor(d!)[] steps, float lr, Tensor? lr_tensor, float beta1, Tensor? beta1_tensor, "
      "float beta2, Tensor? beta2_tensor, float eps, Tensor? eps_tensor, float weight_decay, "
      "Tensor? weight_decay_tensor, Tensor(e!)[] residuals, int seed, Tensor? rounding_step, "
      "int[] parameter, int[] offset) -> ()");
  ops.def("scale_rows(Tensor(a!) x, Tensor factors, bool to_norm_one) -> ()");
  ops.def(
      "normalize(Tensor[] pieces, Tensor(a!) out, float prefactor, Tensor(b!)? zeros=None) -> ()");
  ops.def("crop(Tensor x, Tensor(a!) out) -> ()");
  ops.def(
      "norm_factors(Tensor x, Tensor(a!) factors, Tensor(b!) roots, float prefactor, "
      "bool symmetric=False) -> ()");
  ops.def(
      "symmetric_matmul(Tensor a, Tensor b, Tensor? c, Tensor(a!) out, float alpha, float beta, "
      "float diag, int tile, Tensor? scale=None, int alpha_power=1, int beta_power=1, "
      "bool upper_out=False) -> ()");
  ops.def(
      "matmul_add(Tensor a, Tensor b, Tensor? c, Tensor(a!) out, float alpha, float beta, int "
      "tile, Tensor? scale=None, int upper=0) -> ()");
  ops.def(
      "square_chain(Tensor(a!)[] buffers, int[] places, int[] operands, float[] alphas, "
      "float[] betas, float[] deltas, Tensor? scale, int groups, "
      "Tensor(b!)? zeros=None) -> ()");
  ops.def(
      "gram_polynomial_slice(Tensor[] pieces, Tensor(a!) out, int[] places, int[] operands, "
      "float[] coefficients, float start_norm, float prefactor, bool chain) -> ()");
  ops.def(
      "nf4_product(Tensor x, Tensor packed, Tensor absmax, Tensor? codebook, int[] stored, "
      "int blocksize, bool along, Tensor? low, Tensor? factor, Tensor? bias, Tensor? gates, "
      "Tensor slots, Tensor offsets, Tensor(a!) out, int fan, bool scatter, int format, "
      "int block_rows, Tensor(b!)? activated, bool early) -> ()");
  ops.def(
      "nf4_dequant(Tensor packed, Tensor absmax, Tensor active_experts, SymInt[] expert_shape, "
      "int blocksize, ScalarType dtype, Tensor? codebook, Tensor? absmax_code, "
      "Tensor? absmax_scale, Tensor? absmax_offset) -> Tensor");
  ops.def(
      "nf4_quantize(Tensor weight, Tensor(a!) packed, Tensor(b!) absmax, int blocksize, bool fp4) "
      "-> ()");
  ops.def("push(Tensor(a!)[] dsts, Tensor[] srcs, int blocks=-1) -> ()");
  ops.def("stream_write_value32(Tensor(a!) x, int offset, int value) -> ()");
  ops.def("memset32(Tensor(a!) x, int offset, int value, int count) -> ()");
  ops.def(
      "wait_signals(Tensor flags, int value, Tensor? epoch, int timeout_ms, Tensor(a!) status, "
      "Tensor(b!)? next, Tensor(c!)[] clear) -> ()");
  ops.def(
      "progress_matmul(Tensor a, Tensor b, Tensor(a!) out, Tensor? signals, int chunks, int pivot, "
      "int epoch, Tensor? epochs, int timeout_ms, Tensor(b!)? status, int blocks=0, "
      "int narrow=-1) -> ()");
  ops.def("launch_plan(Tensor[] operands, int tag, int[] program) -> Tensor[]");
}

#if defined(CUDA_KERNEL)
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) {
  ops.impl("momentum", TORCH_BOX(&optimizer::momentum_cuda));
  ops.impl("apply_update", TORCH_BOX(&optimizer::apply_update_cuda));
  ops.impl("adamw", TORCH_BOX(&optimizer::adamw_cuda));
  ops.impl("scale_rows", TORCH_BOX(&optimizer::scale_rows_cuda));
  ops.impl("normalize", TORCH_BOX(&optimizer::normalize_cuda));
  ops.impl("crop", TORCH_BOX(&optimizer::crop_cuda));
  ops.impl("norm_factors", TORCH_BOX(&optimizer::norm_factors_cuda));
  ops.impl("symmetric_matmul", TORCH_BOX(&optimizer::symmetric_matmul_cuda));
  ops.impl("matmul_add", TORCH_BOX(&optimizer::matmul_add_cuda));
  ops.impl("square_chain", TORCH_BOX(&optimizer::square_chain_cuda));
  ops.impl("gram_polynomial_slice", TORCH_BOX(&optimizer::gram_polynomial_slice_cuda));
  ops.impl("nf4_product", TORCH_BOX(&optimizer::nf4_product_cuda));
  ops.impl("nf4_dequant", TORCH_BOX(&optimizer::nf4_dequant_cuda));
  ops.impl("nf4_quantize", TORCH_BOX(&optimizer::nf4_quantize_cuda));
  ops.impl("push", TORCH_BOX(&optimizer::push_cuda));
  ops.impl("stream_write_value32", TORCH_BOX(&optimizer::stream_write_value32_cuda));
  ops.impl("memset32", TORCH_BOX(&optimizer::memset32_cuda));
  ops.impl("wait_signals", TORCH_BOX(&optimizer::wait_signals_cuda));
  ops.impl("progress_matmul", TORCH_BOX(&optimizer::progress_matmul_cuda));
  ops.impl("launch_plan", &optimizer::launch_plan_cuda);
}
#elif defined(CPU_KERNEL)
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) {
  ops.impl("momentum", TORCH_BOX(&optimizer::momentum_cpu));
  ops.impl("apply_update", TORCH_BOX(&optimizer::apply_update_cpu));
  ops.impl("adamw", TORCH_BOX(&optimizer::adamw_cpu));
  ops.impl("nf4_dequant", TORCH_BOX(&optimizer::nf4_dequant_cpu));
  ops.impl("nf4_quantize", TORCH_BOX(&optimizer::nf4_quantize_cpu));
}
#endif

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
