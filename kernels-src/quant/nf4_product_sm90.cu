// nf4_product by TMA and wgmma, for Hopper alone. When it serves: nf4_product.h.

#include <algorithm>
#include <optional>

#include "quant/nf4_product.h"
#include "quant/nf4_product_sm90.cuh"
#include "sm90/launch.cuh"

namespace optimizer {
namespace nf4_product {
namespace {

// The stack's bytes, in boxes of a stage: lines of 32 bytes along, of 64 across.
CUtensorMap packed_map(const Problem& p) {
  const auto row_bytes = static_cast<cuuint64_t>(p.k / 2), lines = static_cast<cuuint64_t>(p.n);
  const cuuint64_t dims[] = {row_bytes, lines, static_cast<cuuint64_t>(p.experts)};
  const cuuint64_t strides[] = {row_bytes, row_bytes * lines};
  const cuuint32_t along[] = {kDepth / 2, kColumns, 1}, across[] = {kColumns / 2, kDepth, 1};
  const cuuint32_t steps[] = {1, 1, 1};
  CUtensorMap map;
  const CUresult result = sm90::map_encoder()(
      &map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, const_cast<uint8_t*>(p.packed), dims, strides,
      p.along ? along : across, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      p.along ? CU_TENSOR_MAP_SWIZZLE_32B : CU_TENSOR_MAP_SWIZZLE_64B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  STD_TORCH_CHECK(result == CUDA_SUCCESS, "cuTensorMapEncodeTiled failed with error ",
                  static_cast<int>(result), " for ", p.experts, " x ", p.n, " x ", p.k, " nibbles");
  return map;
}

Arguments arguments_of(const Problem& p) {
  Arguments args{};
  args.packed = packed_map(p);
  args.absmax = p.absmax;
  args.codebook = p.codebook;
  args.x = static_cast<const char*>(p.x);
  args.low = static_cast<const char*>(p.low);
  args.factor = static_cast<const char*>(p.factor);
  args.bias = p.bias;
  args.gates = p.gates;
  args.slots = p.slots;
  args.offsets = p.offsets;
  args.out = static_cast<char*>(p.out);
  args.x_row = p.x_row * 2;
  args.low_row = p.rank * 2;
  args.factor_expert = p.factor_expert * 2;
  args.factor_rank = p.factor_rank * 2;
  args.factor_column = p.factor_column * 2;
  args.experts = static_cast<int>(p.experts);
  args.rows = static_cast<int>(p.rows);
  args.stored_rows = static_cast<int>(p.n);
  args.row_blocks = static_cast<int>(p.k >> p.shift);
  args.shift = p.shift;
  args.depth = static_cast<int>(p.depth());
  args.columns = static_cast<int>(p.columns());
  args.rank = static_cast<int>(p.rank);
  args.fan = static_cast<int>(p.fan);
  args.column_blocks = (args.columns + kColumns - 1) / kColumns;
  args.scatter = p.scatter;
  return args;
}

template <bool kAlong>
void launch(const Problem& p, int device, cudaStream_t stream) {
  const Arguments args = arguments_of(p);
  const auto kernel = nf4_product_kernel<kAlong>;
  STD_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SharedMap::kBytes));
  // Most tiles that the rows can make; how many there are is known on the device alone.
  const int64_t most = (p.rows / kTokens + std::min(p.experts, p.rows)) * args.column_blocks;
  STD_TORCH_CHECK(most < int64_t{1} << 31, "nf4_product: there are more than 2^31 tiles");
  cudaLaunchConfig_t config{};
  config.gridDim =
      dim3(static_cast<unsigned>(std::min<int64_t>(most, sm90::processors_of(device))));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = SharedMap::kBytes;
  config.stream = stream;
  STD_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, args));
}

bool has_shape(const Tensor& x, std::initializer_list<int64_t> shape) {
  if (x.dim() != static_cast<int64_t>(shape.size())) return false;
  int64_t i = 0;
  for (const int64_t side : shape) {
    if (x.size(i++) != side) return false;
  }
  return true;
}

struct Checker {
  const Tensor& x;

  bool plain(const Tensor& y, ScalarType dtype, std::initializer_list<int64_t> shape) const {
    return y.scalar_type() == dtype && y.device() == x.device() && y.is_contiguous() &&
           has_shape(y, shape);
  }
  // bfloat16 rows of so many elements, at least `rows` of them, counted `fan` times.
  bool is_rows(const Tensor& y, int64_t width, int64_t rows, int64_t fan) const {
    return y.dim() == 2 && y.size(1) == width && y.stride(1) == 1 && fan >= 0 &&
           y.scalar_type() == ScalarType::BFloat16 && y.device() == x.device() &&
           y.size(0) * (fan == 0 ? 1 : fan) >= rows;
  }
};

int64_t row_stride(const Tensor& rows) { return rows.size(0) > 1 ? rows.stride(0) : 0; }

void check_stack(const Checker& check, const Tensor& packed, const Tensor& absmax,
                 const Tensor& codebook, const Problem& p) {
  STD_TORCH_CHECK(p.experts > 0 && p.n > 0 && p.k > 0,
                  "nf4_product: stored must be (E, N, K), all positive");
  STD_TORCH_CHECK(check.plain(packed, ScalarType::Byte, {p.experts * p.n * p.k / 2}),
                  "nf4_product: packed must hold E N K / 2 contiguous bytes on x's device");
  STD_TORCH_CHECK(
      check.plain(absmax, ScalarType::Float, {p.experts * p.n * p.k >> p.shift}),
      "nf4_product: absmax must hold one contiguous float32 per block on x's device; decode nested "
      "absmax first");
  STD_TORCH_CHECK(check.plain(codebook, ScalarType::Float, {16}),
                  "nf4_product: codebook must be 16 contiguous float32 on x's device");
}

void check_lora(const Checker& check, const std::optional<Tensor>& low,
                const std::optional<Tensor>& factor, Problem& p) {
  STD_TORCH_CHECK(low.has_value() == factor.has_value(),
                  "nf4_product: low and factor come together");
  if (!factor.has_value()) return;
  STD_TORCH_CHECK(factor->dim() == 3 &&
                      has_shape(*factor, {p.experts, factor->size(1), p.columns()}) &&
                      factor->size(1) > 0 && factor->scalar_type() == ScalarType::BFloat16 &&
                      factor->device() == check.x.device(),
                  "nf4_product: factor must be (E, r, columns) of bfloat16 on x's device");
  p.rank = factor->size(1);
  STD_TORCH_CHECK(check.plain(*low, ScalarType::BFloat16, {p.rows, p.rank}),
                  "nf4_product: low must be (R, r), contiguous bfloat16");
  p.low = low->data_ptr();
  p.factor = factor->data_ptr();
  p.factor_expert = factor->stride(0);
  p.factor_rank = factor->stride(1);
  p.factor_column = factor->stride(2);
}

void check_epilogue(const Checker& check, const std::optional<Tensor>& bias,
                    const std::optional<Tensor>& gates, Problem& p) {
  STD_TORCH_CHECK(
      !bias.has_value() || check.plain(*bias, ScalarType::Float, {p.experts, p.columns()}),
      "nf4_product: bias must be (E, columns), contiguous float32");
  STD_TORCH_CHECK(!gates.has_value() || (gates->scalar_type() == ScalarType::Float &&
                                         gates->device() == check.x.device() &&
                                         gates->is_contiguous() && gates->numel() == p.rows),
                  "nf4_product: gates must be contiguous float32, one per slot");
  const auto floats = [](const std::optional<Tensor>& y) {
    return y.has_value() ? static_cast<float*>(y->data_ptr()) : nullptr;
  };
  p.bias = floats(bias);
  p.gates = floats(gates);
}

}  // namespace

void run(const Problem& p, int device, cudaStream_t stream) {
  return p.along ? launch<true>(p, device, stream) : launch<false>(p, device, stream);
}

}  // namespace nf4_product

void nf4_product_cuda(const Tensor& x, const Tensor& packed, const Tensor& absmax,
                      const Tensor& codebook, IntHeaderOnlyArrayRef stored, int64_t blocksize,
                      bool along, std::optional<Tensor> low, std::optional<Tensor> factor,
                      std::optional<Tensor> bias, std::optional<Tensor> gates, const Tensor& slots,
                      const Tensor& offsets, const Tensor& out, int64_t fan, bool scatter) {
  using namespace nf4_product;
  STD_TORCH_CHECK(stored.size() == 3 && slots.dim() == 1,
                  "nf4_product: stored must be (E, N, K), slots (R,)");
  Problem p{};
  p.experts = stored[0];
  p.n = stored[1];
  p.k = stored[2];
  p.rows = slots.size(0);
  p.fan = fan;
  p.along = along;
  p.scatter = scatter;
  while ((int64_t{1} << p.shift) < blocksize) ++p.shift;
  STD_TORCH_CHECK((int64_t{1} << p.shift) == blocksize,
                  "nf4_product: blocksize must be a power of two, got ", blocksize);
  const Checker check{x};
  check_stack(check, packed, absmax, codebook, p);
  STD_TORCH_CHECK(check.is_rows(x, p.depth(), p.rows, fan),
                  "nf4_product: x must be bfloat16 rows of the stack's summed side, as many as fan "
                  "asks for");
  STD_TORCH_CHECK(check.plain(slots, ScalarType::Long, {p.rows}) &&
                      check.plain(offsets, ScalarType::Long, {p.experts + 1}),
                  "nf4_product: slots (R,) and offsets (E + 1,) must be contiguous int64");
  STD_TORCH_CHECK(check.plain(out, ScalarType::BFloat16, {p.rows, p.columns()}),
                  "nf4_product: out must be (R, columns), contiguous bfloat16");
  check_lora(check, low, factor, p);
  check_epilogue(check, bias, gates, p);
  p.packed = static_cast<const uint8_t*>(packed.data_ptr());
  p.absmax = static_cast<const float*>(absmax.data_ptr());
  p.codebook = static_cast<const float*>(codebook.data_ptr());
  p.x = x.data_ptr();
  p.x_row = row_stride(x);
  p.slots = static_cast<const int64_t*>(slots.data_ptr());
  p.offsets = static_cast<const int64_t*>(offsets.data_ptr());
  p.out = out.data_ptr();
  if (p.rows == 0) return;
  const int device = x.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  sm90::check_sm90("nf4_product", refusal(p, kMaxExperts), device);
  run(p, device, static_cast<cudaStream_t>(stream));
}

}  // namespace optimizer
