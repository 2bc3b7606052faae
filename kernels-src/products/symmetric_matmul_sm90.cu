// symmetric_matmul by TMA and wgmma, for Hopper alone. Formula: symmetric_matmul.h; when it serves:
// tiles_sm90.h. Bits depend neither on the tile nor on the batch: every element is one float32
// sum over growing k.

#include "products/tiles_sm90.h"
#include "sm90/launch.cuh"

namespace optimizer::products {
namespace {

// rows x columns, stages, whether consumers take turns
using Tile128x256 = Tile<128, 256, 3, false>;
using Tile128x128 = Tile<128, 128, 5, true>;
using Tile64x128 = Tile<64, 128, 7, true>;
using Tile128x192 = Tile<128, 192, 4, false>;

template <typename T, bool kRowsMajor>
void launch_named(const Problem& p, int64_t tile, int device, cudaStream_t stream) {
  switch (tile) {
    case 0:
      return launch<T, Tile128x256, true, kRowsMajor, kRowsMajor>(p, device, stream);
    case 1:
      return launch<T, Tile128x128, true, kRowsMajor, kRowsMajor>(p, device, stream);
    case 2:
      return launch<T, Tile64x128, true, kRowsMajor, kRowsMajor>(p, device, stream);
    case 3:
      return launch<T, Tile128x192, true, kRowsMajor, kRowsMajor>(p, device, stream);
    default:
      STD_TORCH_CHECK(false, "symmetric_matmul: there is no sm90 tile ", tile);
  }
}

template <typename T>
void run(const Problem& p, int64_t tile, int device, cudaStream_t stream) {
  if (by_rows(p.a)) return launch_named<T, false>(p, tile, device, stream);
  return launch_named<T, true>(p, tile, device, stream);
}

}  // namespace

void run_symmetric_sm90(const Problem& p, ScalarType dtype, int64_t tile, int device,
                        void* stream) {
  check_sm90("symmetric_matmul", symmetric_refusal(p), device);
  const auto on = static_cast<cudaStream_t>(stream);
  if (dtype == ScalarType::Half) return run<__half>(p, tile, device, on);
  STD_TORCH_CHECK(dtype == ScalarType::BFloat16,
                  "symmetric_matmul: the sm90 tiles need float16 or bfloat16");
  run<__nv_bfloat16>(p, tile, device, on);
}

void run_symmetric_upper(const Problem& p, ScalarType dtype, int device, void* stream) {
  check_sm90("symmetric_matmul", symmetric_refusal(p), device);
  STD_TORCH_CHECK(dtype == ScalarType::Half, "symmetric_matmul: upper storage needs float16");
  const auto on = static_cast<cudaStream_t>(stream);
  by_rows(p.a) ? launch<__half, Tile128x128, true, false, false>(p, device, on)
               : launch<__half, Tile128x128, true, true, true>(p, device, on);
}

}  // namespace optimizer::products
