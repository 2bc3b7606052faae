// CUDA backend of nf4_quantize; thresholds and checks: nf4_quantize.h.
//
// Bound by its bytes: sizeof(T) read, 0.5 + 4 / blocksize written per element. Not measured yet.

#include "nf4_quantize/nf4_quantize.cuh"

namespace optimizer {
namespace {

using nf4_quant::Problem;

template <typename T, bool kFp4Type>
void launch(const Problem& p, cudaStream_t stream) {
  const int64_t grid = (p.numel + nf4_quant::kSpan - 1) / nf4_quant::kSpan;
  STD_TORCH_CHECK(grid <= INT32_MAX, "nf4_quantize: ", grid, " thread blocks are more than a grid");
  const bool vector = reinterpret_cast<uintptr_t>(p.weight) % sizeof(uint4) == 0;
  const auto kernel = vector ? nf4_quant::quantize_kernel<T, kFp4Type, true>
                             : nf4_quant::quantize_kernel<T, kFp4Type, false>;
  kernel<<<static_cast<unsigned>(grid), nf4_quant::kThreads, 0, stream>>>(p);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

template <typename T>
void dispatch(const Problem& p, bool fp4, cudaStream_t stream) {
  fp4 ? launch<T, true>(p, stream) : launch<T, false>(p, stream);
}

}  // namespace

void nf4_quantize_cuda(const Tensor& weight, const Tensor& packed, const Tensor& absmax,
                       int64_t blocksize, bool fp4) {
  const Problem p = nf4_quant::describe(weight, packed, absmax, blocksize);
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(p.packed) % 4 == 0,
                  "nf4_quantize: packed must start on a 4-byte boundary");
  if (p.numel == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(weight.get_device_index());
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(weight.get_device_index(), &stream));
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  switch (weight.scalar_type()) {
    case ScalarType::BFloat16:
      return dispatch<__nv_bfloat16>(p, fp4, cuda_stream);
    case ScalarType::Half:
      return dispatch<__half>(p, fp4, cuda_stream);
    case ScalarType::Float:
      return dispatch<float>(p, fp4, cuda_stream);
    default:
      STD_TORCH_CHECK(false, "nf4_quantize: weight must be bfloat16, float16 or float32");
  }
}

}  // namespace optimizer
