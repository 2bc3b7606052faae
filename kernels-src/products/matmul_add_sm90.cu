// matmul_add: out = scale (alpha A B + beta C) for a batch, by TMA and wgmma, for Hopper alone.
// When it serves: tiles_sm90.h. Bits depend neither on the tile nor on the batch: every element
// is one float32 sum over growing k.

#include <optional>
#include <utility>

#include "products/tiles_sm90.h"
#include "sm90/launch.cuh"

namespace optimizer {
namespace products {
namespace {

// rows x columns, stages, whether consumers take turns
using Tile128x256 = Tile<128, 256, 3, false>;
using Tile256x128 = Tile<256, 128, 3, false>;
using Tile128x128 = Tile<128, 128, 5, true>;

template <typename T, bool kARowsMajor, bool kBRowsMajor>
void launch_named(const Problem& p, int64_t tile, int device, cudaStream_t stream) {
  switch (tile) {
    case 0:
      return launch<T, Tile128x256, false, kARowsMajor, kBRowsMajor>(p, device, stream);
    case 1:
      return launch<T, Tile256x128, false, kARowsMajor, kBRowsMajor>(p, device, stream);
    case 2:
      return launch<T, Tile128x128, false, kARowsMajor, kBRowsMajor>(p, device, stream);
    default:
      STD_TORCH_CHECK(false, "matmul_add: there is no sm90 tile ", tile);
  }
}

// One operand in upper storage, float16. A tile's rows, or its columns, are then of one block.
void run_upper(const Problem& p, int64_t tile, int device, cudaStream_t stream) {
  if (p.upper_b && tile == 1) {
    return by_rows(p.a)
               ? launch<__half, Tile256x128, false, false, false, kUpperB>(p, device, stream)
               : launch<__half, Tile256x128, false, true, false, kUpperB>(p, device, stream);
  }
  if (p.upper_b) {
    return by_rows(p.a)
               ? launch<__half, Tile128x128, false, false, false, kUpperB>(p, device, stream)
               : launch<__half, Tile128x128, false, true, false, kUpperB>(p, device, stream);
  }
  if (tile == 0) {
    return by_rows(p.b)
               ? launch<__half, Tile128x256, false, false, false, kUpperA>(p, device, stream)
               : launch<__half, Tile128x256, false, false, true, kUpperA>(p, device, stream);
  }
  by_rows(p.b) ? launch<__half, Tile128x128, false, false, false, kUpperA>(p, device, stream)
               : launch<__half, Tile128x128, false, false, true, kUpperA>(p, device, stream);
}

template <typename T>
void run(const Problem& p, int64_t tile, int device, cudaStream_t stream) {
  if (by_rows(p.a)) {
    return by_rows(p.b) ? launch_named<T, false, false>(p, tile, device, stream)
                        : launch_named<T, false, true>(p, tile, device, stream);
  }
  return by_rows(p.b) ? launch_named<T, true, false>(p, tile, device, stream)
                      : launch_named<T, true, true>(p, tile, device, stream);
}

Matrices transposed(const Matrices& x) { return {x.data, x.batch, x.col, x.row}; }

// B as the kernel reads it, (batch, n, k). Columns of out that are contiguous make it the
// transposed problem B^T A^T.
Problem describe(const Tensor& a, const Tensor& b, const std::optional<Tensor>& c,
                 const Tensor& out, double alpha, double beta, const std::optional<Tensor>& scale,
                 int64_t upper) {
  STD_TORCH_CHECK(a.dim() == 3 && b.dim() == 3 && out.dim() == 3,
                  "matmul_add: a must be (batch, m, k), b (batch, k, n), out (batch, m, n)");
  const int64_t batches = a.size(0), m = a.size(1), k = a.size(2), n = b.size(2);
  const auto fits = [&](const Tensor& x, int64_t rows, int64_t cols) {
    return x.dim() == 3 && x.size(0) == batches && x.size(1) == rows && x.size(2) == cols &&
           x.scalar_type() == a.scalar_type() && x.device() == a.device();
  };
  STD_TORCH_CHECK(
      fits(b, k, n) && fits(out, m, n) && (!c.has_value() || fits(*c, m, n)),
      "matmul_add: b must be (batch, k, n), c and out (batch, m, n), of the dtype and on "
      "the device of a");
  STD_TORCH_CHECK(m <= kLargestSide && n <= kLargestSide && k <= int64_t{1} << 30,
                  "matmul_add: m and n must be at most 2^20, k at most 2^30");
  STD_TORCH_CHECK(!scale.has_value() ||
                      (scale->dim() == 1 && scale->size(0) == batches && scale->is_contiguous() &&
                       scale->scalar_type() == ScalarType::Float && scale->device() == a.device()),
                  "matmul_add: scale must be (batch,), contiguous, float32, on a's device");
  const bool reads_c = c.has_value() && beta != 0;
  Problem p{matrices_of(a),
            upper == kUpperB ? matrices_of(b) : transposed(matrices_of(b)),  // b is symmetric
            reads_c ? matrices_of(*c) : Matrices{},
            matrices_of(out),
            scale.has_value() ? static_cast<const float*>(scale->data_ptr()) : nullptr,
            batches,
            static_cast<int>(m),
            static_cast<int>(n),
            static_cast<int>(k),
            static_cast<float>(alpha),
            static_cast<float>(beta),
            0.0f};
  p.upper_a = upper == kUpperA;
  p.upper_b = upper == kUpperB;
  if (p.out.col != 1 && p.out.row == 1) {
    std::swap(p.a, p.b);
    std::swap(p.m, p.n);
    std::swap(p.upper_a, p.upper_b);
    p.c = transposed(p.c);
    p.out = transposed(p.out);
  }
  return p;
}

}  // namespace
}  // namespace products

void matmul_add_cuda(const Tensor& a, const Tensor& b, std::optional<Tensor> c, const Tensor& out,
                     double alpha, double beta, int64_t tile, std::optional<Tensor> scale,
                     int64_t upper) {
  using namespace products;
  STD_TORCH_CHECK(upper >= 0 && upper <= kUpperB, "matmul_add: upper must be 0, 1 (a) or 2 (b)");
  const Problem p = describe(a, b, c, out, alpha, beta, scale, upper);
  if (p.batches == 0 || p.m == 0 || p.n == 0) return;
  const int device = a.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  check_sm90("matmul_add", refusal(p), device);
  if (tile < 0) tile = pick(kMatmulAddTiles, p, false, processors_of(device));
  STD_TORCH_CHECK(tile >= 0, "matmul_add: no tile was measured yet; name one");
  const auto on = static_cast<cudaStream_t>(stream);
  if (upper != 0) {
    check_sm90("matmul_add", upper_refusal(p), device);
    STD_TORCH_CHECK(a.scalar_type() == ScalarType::Half,
                    "matmul_add: an operand in upper storage must be float16");
    return run_upper(p, tile, device, on);
  }
  if (a.scalar_type() == ScalarType::Half) return run<__half>(p, tile, device, on);
  STD_TORCH_CHECK(a.scalar_type() == ScalarType::BFloat16,
                  "matmul_add: the sm90 tiles need float16 or bfloat16");
  run<__nv_bfloat16>(p, tile, device, on);
}

}  // namespace optimizer
