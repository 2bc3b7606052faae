// CUDA backend of nf4_dequant; formula, table and checks: nf4_dequant.h.
//
// Bound by its bytes: 0.5 + 4 / blocksize read and sizeof(out_t) written per element. One thread
// turns one word of packed nibbles into one 16-byte store and has kGroups such loads in flight.

#include "nf4_dequant/nf4_dequant.cuh"

namespace optimizer {
namespace {

constexpr int kThreads = 128;

template <typename out_t, bool kAligned, bool kNested>
void launch(const nf4::Problem& p, void* out, cudaStream_t stream) {
  // Best of the table in docs/log.md on an H200: 97% of a copy's rate aligned, 89% unaligned.
  constexpr int kGroups = kAligned ? 2 : 4;
  constexpr int64_t kChunk = int64_t{kThreads} * kGroups * Vector<out_t>::kLanes;
  // An unaligned row may start up to kLanes - 1 elements behind a 16-byte boundary of the output.
  const int64_t span = kAligned ? p.numel : p.numel + Vector<out_t>::kLanes - 1;
  const int64_t chunks = (span + kChunk - 1) / kChunk;
  const int64_t grid = chunks * p.num_active;
  STD_TORCH_CHECK(grid <= INT32_MAX, "nf4_dequant: ", grid, " thread blocks are more than a grid");
  nf4::dequant_kernel<out_t, kAligned, kNested, kThreads, kGroups>
      <<<static_cast<unsigned>(grid), kThreads, 0, stream>>>(p, static_cast<out_t*>(out),
                                                             static_cast<uint32_t>(chunks));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

template <typename out_t>
void dispatch(const nf4::Problem& p, void* out, cudaStream_t stream) {
  const bool aligned = p.numel % Vector<out_t>::kLanes == 0 && p.packed_bytes % 4 == 0 &&
                       reinterpret_cast<uintptr_t>(p.packed) % 4 == 0;
  const bool nested = p.code != nullptr;
  if (aligned) {
    nested ? launch<out_t, true, true>(p, out, stream) : launch<out_t, true, false>(p, out, stream);
  } else {
    nested ? launch<out_t, false, true>(p, out, stream)
           : launch<out_t, false, false>(p, out, stream);
  }
}

}  // namespace

Tensor nf4_dequant_cuda(const Tensor& packed, const Tensor& absmax, const Tensor& active_experts,
                        IntHeaderOnlyArrayRef expert_shape, int64_t blocksize, ScalarType dtype,
                        std::optional<Tensor> codebook, std::optional<Tensor> absmax_code,
                        std::optional<Tensor> absmax_scale, std::optional<Tensor> absmax_offset) {
  const nf4::Problem p = nf4::describe(packed, absmax, active_experts, expert_shape, blocksize,
                                       codebook, absmax_code, absmax_scale, absmax_offset);
  const torch::stable::accelerator::DeviceGuard guard(packed.get_device_index());
  Tensor out = nf4::empty_output(p, expert_shape, dtype, packed);
  if (p.num_active == 0) return out;
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(packed.get_device_index(), &stream));
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  switch (dtype) {
    case ScalarType::BFloat16:
      dispatch<__nv_bfloat16>(p, out.data_ptr(), cuda_stream);
      break;
    case ScalarType::Half:
      dispatch<__half>(p, out.data_ptr(), cuda_stream);
      break;
    case ScalarType::Float:
      dispatch<float>(p, out.data_ptr(), cuda_stream);
      break;
    default:
      STD_TORCH_CHECK(false, "nf4_dequant: dtype must be bfloat16, float16 or float32");
  }
  return out;
}

}  // namespace optimizer
