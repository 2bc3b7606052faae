#include "torch_binding.h"

#include <torch/csrc/stable/library.h>

#include "registration.h"

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def(
      "nf4_dequant(Tensor packed, Tensor absmax, Tensor active_experts, SymInt[] expert_shape, "
      "int blocksize, ScalarType dtype, Tensor? codebook, Tensor? absmax_code, "
      "Tensor? absmax_scale, Tensor? absmax_offset) -> Tensor");
}

#if defined(CUDA_KERNEL)
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) {
  ops.impl("nf4_dequant", TORCH_BOX(&optimizer::nf4_dequant_cuda));
}
#elif defined(CPU_KERNEL)
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) {
  ops.impl("nf4_dequant", TORCH_BOX(&optimizer::nf4_dequant_cpu));
}
#endif

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
