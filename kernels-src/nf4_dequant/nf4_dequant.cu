// CUDA backend of nf4_dequant; formula, table and checks: nf4_dequant.h.
//
// Bound by its bytes: 0.5 + 4 / blocksize read and sizeof(out_t) written per element. One thread
// turns one word of packed nibbles into one 16-byte store and has kGroups such loads in flight.

#include "common/launch.cuh"
#include "nf4_dequant/nf4_dequant.cuh"

namespace optimizer {
namespace {

constexpr int kThreads = 128;

template <typename out_t, bool kAligned, bool kNested>
void run(const nf4::Problem& p, void* out, int device, cudaStream_t stream) {
  // Best of the table in docs/dev/decisions/2026-11-21-nf4-dequant-threads.md on an H200: 97% of a
  // copy's rate aligned, 89% unaligned.
  constexpr int kGroups = kAligned ? 2 : 4;
  constexpr int64_t kChunk = int64_t{kThreads} * kGroups * Vector<out_t>::kLanes;
  // An unaligned row may start up to kLanes - 1 elements behind a 16-byte boundary of the output.
  const int64_t span = kAligned ? p.numel : p.numel + Vector<out_t>::kLanes - 1;
  const int64_t chunks = (span + kChunk - 1) / kChunk;
  const int64_t grid = chunks * p.num_active;
  launch("nf4_dequant", nf4::dequant_kernel<out_t, kAligned, kNested, kThreads, kGroups>, grid,
         kThreads, 0, starts_early(device), stream, p, static_cast<out_t*>(out),
         static_cast<uint32_t>(chunks));
}

template <typename out_t>
void dispatch(const nf4::Problem& p, void* out, int device, cudaStream_t stream) {
  const bool aligned = p.numel % Vector<out_t>::kLanes == 0 && p.packed_bytes % 4 == 0 &&
                       reinterpret_cast<uintptr_t>(p.packed) % 4 == 0;
  const bool nested = p.code != nullptr;
  if (aligned) {
    nested ? run<out_t, true, true>(p, out, device, stream)
           : run<out_t, true, false>(p, out, device, stream);
  } else {
    nested ? run<out_t, false, true>(p, out, device, stream)
           : run<out_t, false, false>(p, out, device, stream);
  }
}

}  // namespace

Tensor nf4_dequant_cuda(const Tensor& packed, const Tensor& absmax, const Tensor& active_experts,
                        IntHeaderOnlyArrayRef expert_shape, int64_t blocksize, ScalarType dtype,
                        std::optional<Tensor> codebook, std::optional<Tensor> absmax_code,
                        std::optional<Tensor> absmax_scale, std::optional<Tensor> absmax_offset) {
  const nf4::Problem p = nf4::describe(packed, absmax, active_experts, expert_shape, blocksize,
                                       codebook, absmax_code, absmax_scale, absmax_offset);
  const int device = packed.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  Tensor out = nf4::empty_output(p, expert_shape, dtype, packed);
  if (p.num_active == 0) return out;
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  switch (dtype) {
    case ScalarType::BFloat16:
      dispatch<__nv_bfloat16>(p, out.data_ptr(), device, cuda_stream);
      break;
    case ScalarType::Half:
      dispatch<__half>(p, out.data_ptr(), device, cuda_stream);
      break;
    case ScalarType::Float:
      dispatch<float>(p, out.data_ptr(), device, cuda_stream);
      break;
    default:
      STD_TORCH_CHECK(false, "nf4_dequant: dtype must be bfloat16, float16 or float32");
  }
  return out;
}

}  // namespace optimizer
