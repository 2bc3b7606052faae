// nf4_product by TMA and wgmma, for Hopper alone. When it serves: nf4_product.h. Kernels of other
// formats are compiled beside this file, in nf4_product_mxfp4_fp8_sm90.cu.

#include <optional>

#include "quant/nf4_launch_sm90.cuh"

namespace optimizer {
namespace nf4_product {
namespace {

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
                 const std::optional<Tensor>& codebook, const Problem& p) {
  STD_TORCH_CHECK(p.experts > 0 && p.n > 0 && p.k > 0,
                  "nf4_product: stored must be (E, N, K), all positive");
  STD_TORCH_CHECK(check.plain(packed, ScalarType::Byte, {p.experts * p.n * p.row_bytes()}),
                  "nf4_product: packed must hold the stack's contiguous bytes on x's device");
  const auto kind = p.format == Format::kMxfp4 ? ScalarType::Byte : ScalarType::Float;
  STD_TORCH_CHECK(
      check.plain(absmax, kind, {p.experts * p.scale_rows() * p.row_blocks()}),
      "nf4_product: absmax must hold one contiguous float32 (MXFP4: byte) per block on x's device; "
      "decode nested absmax first");
  STD_TORCH_CHECK(p.format != Format::kFourBit ||
                      (codebook.has_value() && check.plain(*codebook, ScalarType::Float, {16})),
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

extern template void run_format<Format::kMxfp4>(const Problem& p, int device,
                                                const Launcher& launcher);
extern template void run_format<Format::kFp8>(const Problem& p, int device,
                                              const Launcher& launcher);

void run(const Problem& p, int device, const Launcher& launcher) {
  switch (p.format) {
    case Format::kFourBit:
      return run_format<Format::kFourBit>(p, device, launcher);
    case Format::kMxfp4:
      return run_format<Format::kMxfp4>(p, device, launcher);
    case Format::kFp8:
      return run_format<Format::kFp8>(p, device, launcher);
  }
}

}  // namespace nf4_product

void nf4_product_cuda(const Tensor& x, const Tensor& packed, const Tensor& absmax,
                      std::optional<Tensor> codebook, IntHeaderOnlyArrayRef stored,
                      int64_t blocksize, bool along, std::optional<Tensor> low,
                      std::optional<Tensor> factor, std::optional<Tensor> bias,
                      std::optional<Tensor> gates, const Tensor& slots, const Tensor& offsets,
                      const Tensor& out, int64_t fan, bool scatter, int64_t format,
                      int64_t block_rows, std::optional<Tensor> activated, bool early) {
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
  STD_TORCH_CHECK(format >= 0 && format <= static_cast<int64_t>(Format::kFp8),
                  "nf4_product: there is no format ", format);
  p.format = static_cast<Format>(format);
  while ((int64_t{1} << p.shift) < blocksize) ++p.shift;
  while ((int64_t{1} << p.row_shift) < block_rows) ++p.row_shift;
  STD_TORCH_CHECK((int64_t{1} << p.shift) == blocksize && (int64_t{1} << p.row_shift) == block_rows,
                  "nf4_product: sides of a block must be powers of two, got ", block_rows, " x ",
                  blocksize);
  const Checker check{x};
  check_stack(check, packed, absmax, codebook, p);
  STD_TORCH_CHECK(check.is_rows(x, p.depth(), p.rows, fan),
                  "nf4_product: x must be bfloat16 rows of the stack's summed side, as many as fan "
                  "asks for");
  STD_TORCH_CHECK(check.plain(slots, ScalarType::Long, {p.rows}) &&
                      check.plain(offsets, ScalarType::Long, {p.experts + 1}),
                  "nf4_product: slots (R,) and offsets (E + 1,) must be contiguous int64");
  const auto plain = [&](const Tensor& y, int64_t rows, int64_t columns) {
    return check.plain(y, ScalarType::BFloat16, {rows, columns});
  };
  const bool stores = !activated.has_value() || out.size(0) > 0;
  STD_TORCH_CHECK(plain(out, stores ? p.rows : 0, p.columns()),
                  "nf4_product: out must be (R, columns), contiguous bfloat16");
  if (activated.has_value()) {
    STD_TORCH_CHECK(plain(*activated, p.rows, p.columns() / 2),
                    "nf4_product: activated must be (R, columns / 2), contiguous bfloat16");
    p.activated = activated->data_ptr();
  }
  check_lora(check, low, factor, p);
  check_epilogue(check, bias, gates, p);
  p.packed = static_cast<const uint8_t*>(packed.data_ptr());
  p.absmax = absmax.data_ptr();
  if (codebook.has_value()) p.codebook = static_cast<const float*>(codebook->data_ptr());
  p.x = x.data_ptr();
  p.x_row = row_stride(x);
  p.slots = static_cast<const int64_t*>(slots.data_ptr());
  p.offsets = static_cast<const int64_t*>(offsets.data_ptr());
  p.out = stores ? out.data_ptr() : nullptr;
  p.early = early;
  if (p.rows == 0) return;
  const int device = x.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  sm90::check_sm90("nf4_product", refusal(p, kMaxExperts), device);
  run(p, device, [&](const Launch& one) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(one.blocks);
    config.blockDim = dim3(one.threads);
    config.dynamicSmemBytes = one.shared;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = &attribute;
    config.numAttrs = early ? 1 : 0;
    void* arguments[] = {one.argument};
    STD_CUDA_CHECK(cudaLaunchKernelExC(&config, one.kernel, arguments));
  });
}

}  // namespace optimizer
