// grouped_product by TMA and wgmma, for Hopper alone. When it serves: grouped_product.h.

#include <algorithm>
#include <optional>

#include "grouped_lora/grouped_product.h"
#include "grouped_lora/product_sm90.cuh"
#include "newton_schulz/launch_sm90.cuh"

namespace optimizer {
namespace grouped_lora {
namespace {

using symmetric::matrices_of;

// features x rows, stages
using Tile256x128 = Tile<256, 128, 3>;
using Tile128x256 = Tile<128, 256, 3>;

template <typename T, typename kTile, bool kRowsMajor>
void launch(const Problem& p, int device, cudaStream_t stream) {
  constexpr ScalarType kDtype = std::is_same_v<T, __half> ? ScalarType::Half : ScalarType::BFloat16;
  const auto map = [&](const Matrices& x, int64_t depth) {
    return newton_schulz::tensor_map(x, static_cast<int>(p.n), static_cast<int>(depth), p.experts,
                                     kDtype);
  };
  Arguments args{};
  args.weight = map(p.weight, p.k);
  if (p.rank > 0) args.factor = map(p.factor, p.rank);
  args.x = static_cast<const char*>(p.x);
  args.low = static_cast<const char*>(p.low);
  args.bias = p.bias;
  args.gates = p.gates;
  args.other = static_cast<const char*>(p.other);
  args.dots = p.dots;
  args.slots = p.slots;
  args.offsets = p.offsets;
  args.out = p.out;
  args.x_row = p.x_row * 2;
  args.low_row = p.rank * 2;
  args.other_row = p.other_row * 2;
  args.experts = static_cast<int>(p.experts);
  args.rows = static_cast<int>(p.rows);
  args.k = static_cast<int>(p.k);
  args.n = static_cast<int>(p.n);
  args.rank = static_cast<int>(p.rank);
  args.fan = static_cast<int>(p.fan);
  args.other_fan = static_cast<int>(p.other_fan);
  args.feature_blocks = (args.n + kTile::kFeatures - 1) / kTile::kFeatures;
  args.scatter = p.scatter;

  const auto kernel = grouped_product_kernel<T, kTile, kRowsMajor>;
  STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      kTile::kSharedBytes));
  // Most tiles that the rows can make; how many there are is known on the device alone.
  const int64_t row_tiles = p.rows / kTile::kTokens + std::min(p.experts, p.rows);
  const int64_t most = row_tiles * args.feature_blocks;
  cudaLaunchConfig_t config{};
  config.gridDim =
      dim3(static_cast<unsigned>(std::min<int64_t>(most, newton_schulz::processors_of(device))));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kTile::kSharedBytes;
  config.stream = stream;
  STD_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, args));
}

template <typename T, bool kRowsMajor>
void launch_numbered(const Problem& p, int64_t tile, int device, cudaStream_t stream) {
  switch (tile) {
    case 0:
      return launch<T, Tile256x128, kRowsMajor>(p, device, stream);
    case 1:
      return launch<T, Tile128x256, kRowsMajor>(p, device, stream);
    default:
      STD_TORCH_CHECK(false, "grouped_product: there is no sm90 tile ", tile);
  }
}

template <typename T>
void run(const Problem& p, int64_t tile, int device, cudaStream_t stream) {
  return newton_schulz::by_rows(p.weight) ? launch_numbered<T, false>(p, tile, device, stream)
                                          : launch_numbered<T, true>(p, tile, device, stream);
}

// (E, depth, N) -> its transposes, (E, N, depth)
Matrices by_features(const Tensor& x) {
  const Matrices view = matrices_of(x);
  return {view.data, view.batch, view.col, view.row};
}

bool has_shape(const Tensor& x, std::initializer_list<int64_t> shape) {
  if (x.dim() != static_cast<int64_t>(shape.size())) return false;
  int64_t i = 0;
  for (const int64_t side : shape) {
    if (x.size(i++) != side) return false;
  }
  return true;
}

void check_operands(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& low,
                    const std::optional<Tensor>& factor, const std::optional<Tensor>& bias,
                    const std::optional<Tensor>& gates, const Tensor& slots, const Tensor& offsets,
                    const Tensor& out, int64_t fan) {
  STD_TORCH_CHECK(x.dim() == 2 && weight.dim() == 3 && slots.dim() == 1 && weight.size(0) > 0,
                  "grouped_product: x must be rows of K, weight (E, K, N), slots (R,)");
  const int64_t experts = weight.size(0), k = weight.size(1), n = weight.size(2);
  const int64_t rows = slots.size(0);
  const auto like_x = [&](const Tensor& y) {
    return y.scalar_type() == x.scalar_type() && y.device() == x.device();
  };
  const auto plain = [&](const Tensor& y, ScalarType dtype) {
    return y.scalar_type() == dtype && y.device() == x.device() && y.is_contiguous();
  };
  STD_TORCH_CHECK(x.size(1) == k && like_x(weight),
                  "grouped_product: x and weight must agree in K, dtype and device");
  STD_TORCH_CHECK(fan >= 0 && (fan == 0 ? x.size(0) >= rows : x.size(0) * fan >= rows),
                  "grouped_product: x has too few rows for fan ", fan);
  STD_TORCH_CHECK(plain(slots, ScalarType::Long) && plain(offsets, ScalarType::Long) &&
                      has_shape(offsets, {experts + 1}),
                  "grouped_product: slots (R,) and offsets (E + 1,) must be contiguous int64");
  STD_TORCH_CHECK(plain(out, x.scalar_type()) && has_shape(out, {rows, n}),
                  "grouped_product: out must be (R, N), contiguous, of x's dtype");
  STD_TORCH_CHECK(low.has_value() == factor.has_value(),
                  "grouped_product: low and factor come together");
  if (factor.has_value()) {
    STD_TORCH_CHECK(factor->dim() == 3 && has_shape(*factor, {experts, factor->size(1), n}) &&
                        factor->size(1) > 0 && like_x(*factor),
                    "grouped_product: factor must be (E, r, N) of x's dtype");
    STD_TORCH_CHECK(has_shape(*low, {rows, factor->size(1)}) && plain(*low, x.scalar_type()),
                    "grouped_product: low must be (R, r), contiguous, of x's dtype");
  }
  STD_TORCH_CHECK(
      !bias.has_value() || (plain(*bias, ScalarType::Float) && has_shape(*bias, {experts, n})),
      "grouped_product: bias must be (E, N), contiguous, float32");
  STD_TORCH_CHECK(
      !gates.has_value() || (plain(*gates, ScalarType::Float) && gates->numel() == rows),
      "grouped_product: gates must be contiguous float32, one per slot");
}

void check_dots(const Tensor& x, const std::optional<Tensor>& other,
                const std::optional<Tensor>& dots, int64_t n, int64_t rows, int64_t fan) {
  STD_TORCH_CHECK(other.has_value() == dots.has_value(),
                  "grouped_product: other and dots come together");
  if (!other.has_value()) return;
  STD_TORCH_CHECK(
      other->dim() == 2 && other->size(1) == n && other->stride(1) == 1 &&
          other->scalar_type() == x.scalar_type() && other->device() == x.device() && fan >= 0 &&
          other->size(0) * (fan == 0 ? 1 : fan) >= rows,
      "grouped_product: other must be rows of N like x's, as many as other_fan asks for");
  STD_TORCH_CHECK(dots->scalar_type() == ScalarType::Float && dots->device() == x.device() &&
                      dots->is_contiguous() && has_shape(*dots, {(n + 63) / 64, rows}),
                  "grouped_product: dots must be (ceil(N / 64), R), contiguous, float32");
}

}  // namespace
}  // namespace grouped_lora

void grouped_product_cuda(const Tensor& x, const Tensor& weight, std::optional<Tensor> low,
                          std::optional<Tensor> factor, std::optional<Tensor> bias,
                          std::optional<Tensor> gates, std::optional<Tensor> other,
                          const Tensor& slots, const Tensor& offsets, const Tensor& out,
                          std::optional<Tensor> dots, int64_t fan, int64_t other_fan, bool scatter,
                          int64_t tile) {
  using namespace grouped_lora;
  check_operands(x, weight, low, factor, bias, gates, slots, offsets, out, fan);
  check_dots(x, other, dots, weight.size(2), slots.size(0), other_fan);
  const auto floats = [](const std::optional<Tensor>& y) {
    return y.has_value() ? static_cast<const float*>(y->data_ptr()) : nullptr;
  };
  const Problem p{by_features(weight),
                  factor.has_value() ? by_features(*factor) : Matrices{},
                  x.data_ptr(),
                  low.has_value() ? low->data_ptr() : nullptr,
                  floats(bias),
                  floats(gates),
                  other.has_value() ? other->data_ptr() : nullptr,
                  dots.has_value() ? static_cast<float*>(dots->data_ptr()) : nullptr,
                  static_cast<const int64_t*>(slots.data_ptr()),
                  static_cast<const int64_t*>(offsets.data_ptr()),
                  out.data_ptr(),
                  x.size(0) > 1 ? x.stride(0) : 0,
                  other.has_value() && other->size(0) > 1 ? other->stride(0) : 0,
                  weight.size(0),
                  slots.size(0),
                  weight.size(1),
                  weight.size(2),
                  factor.has_value() ? factor->size(1) : 0,
                  fan,
                  other_fan,
                  scatter};
  if (p.rows == 0 || p.n == 0) return;
  const int device = x.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  const char* reason = refusal(p, kMaxExperts);
  if (p.k == 0) reason = "K is 0";
  if (x.size(1) > 1 && x.stride(1) != 1) reason = "rows of x are not contiguous";
  newton_schulz::check_sm90("grouped_product", reason, device);
  if (tile < 0) tile = pick(p);
  const auto on = static_cast<cudaStream_t>(stream);
  if (x.scalar_type() == ScalarType::Half) return run<__half>(p, tile, device, on);
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::BFloat16,
                  "grouped_product: the sm90 tiles need float16 or bfloat16");
  run<__nv_bfloat16>(p, tile, device, on);
}

}  // namespace optimizer
