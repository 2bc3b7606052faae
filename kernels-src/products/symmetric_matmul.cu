// CUDA backend of symmetric_matmul for every GPU from sm_80 on; formula and checks:
// symmetric_matmul.h. Bits depend neither on the tile nor on strides nor on the batch: every
// element is one float32 sum over growing k. So the table of tiles below may look at anything.
// The tiles of symmetric_matmul_sm90.cu, another family of instructions, are numbered behind these.

#include <algorithm>
#include <iterator>

#include "products/mma_sync.cuh"
#include "products/simt.cuh"
#include "products/tiles_sm90.h"

namespace optimizer {
namespace {

using namespace symmetric;

// rows x columns, k per stage, stages, warp part, blocks per multiprocessor
using Tile64 = Tile<64, 64, 64, 4, 32, 32, 3>;
using Tile64x128 = Tile<64, 128, 64, 3, 32, 64, 3>;
using Tile128 = Tile<128, 128, 64, 3, 64, 64, 2>;
using TileAny = Tile<64, 64, 32, 2, 32, 32, 3>;

// Of one matrix, with what the last column has too many.
int64_t tiles_of(int m, int rows, int cols) {
  const int64_t side = (m + int64_t{cols} - 1) / cols;
  return side * (side + 1) / 2 * (cols / rows);
}

// kernel: a function (Problem, first matrix)
template <typename Kernel>
void launch(Kernel kernel, const Problem& p, int rows, int cols, int threads, int shared,
            cudaStream_t stream) {
  STD_TORCH_CHECK(tiles_of(p.m, rows, cols) <= INT32_MAX, "symmetric_matmul: m=", p.m,
                  " is too large for a grid");
  const int64_t per_matrix = TriangularSchedule::of(p.m, rows, cols).per_matrix();
  if (shared > 48 * 1024) {
    STD_CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  }
  const int64_t at_once = INT32_MAX / per_matrix;
  for (int64_t first = 0; first < p.batches; first += at_once) {
    const int64_t matrices = std::min(at_once, p.batches - first);
    kernel<<<static_cast<unsigned>(matrices * per_matrix), threads, shared, stream>>>(
        p, static_cast<uint32_t>(first));
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
}

template <typename T, typename kTile, Layout kLayout>
void launch_tile(const Problem& p, cudaStream_t stream) {
  launch(tensor_core_kernel<T, kTile, kLayout>, p, kTile::kRows, kTile::kCols, kTile::kThreads,
         kTile::kSharedBytes, stream);
}

template <typename T, Layout kLayout>
void launch_named(const Problem& p, int64_t tile, cudaStream_t stream) {
  switch (tile) {
    case 0:
      return launch_tile<T, Tile64, kLayout>(p, stream);
    case 1:
      return launch_tile<T, Tile64x128, kLayout>(p, stream);
    case 2:
      return launch_tile<T, Tile128, kLayout>(p, stream);
    default:
      STD_TORCH_CHECK(false, "symmetric_matmul: tile must be -1 to 6, got ", tile);
  }
}

Layout common_layout(const Problem& p, int64_t elements) {
  const Layout a = layout_of(p.a, p.batches, elements), b = layout_of(p.b, p.batches, elements);
  return a == b ? a : Layout::kAny;
}

struct Cost {
  int rows;
  int cols;
  int blocks;   // per multiprocessor, shared memory permitting
  int shared;   // bytes per block
  double time;  // per tile and k on a full multiprocessor, relative to the first tile
};

template <typename kTile>
constexpr Cost cost_of(double time) {
  return {kTile::kRows, kTile::kCols, kTile::kBlocksPerSm, kTile::kSharedBytes, time};
}

// From 517, 656 and 786 TFLOP/s (2 m^2 k counted) at 8192 x 8192 in float16 on an H200.
constexpr Cost kCosts[] = {cost_of<Tile64>(1.0), cost_of<Tile64x128>(1.58), cost_of<Tile128>(2.63)};
// A lone block hides no other's latency: it takes as long as this many that share a multiprocessor.
constexpr double kLoneBlock = 1.8;

int64_t attribute(cudaDeviceAttr name, int device) {
  int value = 0;
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&value, name, device));
  return value;
}

// The tile with which the busiest multiprocessor is done first.
int64_t pick_tile(const Problem& p, int device) {
  const int64_t processors = attribute(cudaDevAttrMultiProcessorCount, device);
  const int64_t shared = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  int64_t best = 0;
  double best_time = 0;
  for (int64_t tile = 0; tile < static_cast<int64_t>(std::size(kCosts)); ++tile) {
    const Cost& cost = kCosts[tile];
    const int64_t blocks = std::min<int64_t>(cost.blocks, shared / (cost.shared + 1024));
    if (blocks == 0) continue;
    const int64_t tiles = tiles_of(p.m, cost.rows, cost.cols) * p.batches;
    const int64_t busiest = (tiles + processors - 1) / processors;
    const int64_t rounds = busiest / blocks, rest = busiest % blocks;
    const double time = (rounds * std::max<double>(blocks, kLoneBlock) +
                         (rest > 0 ? std::max<double>(rest, kLoneBlock) : 0)) *
                        cost.time;
    if (best_time == 0 || time < best_time) {
      best = tile;
      best_time = time;
    }
  }
  return best;
}

products::Problem for_sm90(const Problem& p) {
  return {p.a,     p.b,    p.c,    p.out,         p.scale,      p.batches, p.m,   p.m,        p.k,
          p.alpha, p.beta, p.diag, p.alpha_power, p.beta_power, false,     false, p.upper_out};
}

// A measured sm90 tile where the device and the strides allow one, else -1. The batch has no say in
// which family of instructions runs, so it changes no bit.
int64_t pick_sm90(const Problem& p, int device) {
  if (attribute(cudaDevAttrComputeCapabilityMajor, device) != 9) return -1;
  if (attribute(cudaDevAttrComputeCapabilityMinor, device) != 0) return -1;
  const products::Problem problem = for_sm90(p);
  if (products::symmetric_refusal(problem) != nullptr) return -1;
  return products::pick(products::kSymmetricTiles, problem, true,
                        attribute(cudaDevAttrMultiProcessorCount, device));
}

template <typename T>
void run_half(const Problem& p, int64_t tile, ScalarType dtype, int device, cudaStream_t stream) {
  constexpr auto kTiles = static_cast<int64_t>(std::size(kCosts));
  const int64_t sm90 = tile < 0 ? pick_sm90(p, device) : tile - kTiles;
  if (sm90 >= 0) {
    return products::run_symmetric_sm90(for_sm90(p), dtype, sm90, device, stream);
  }
  if (tile < 0) tile = pick_tile(p, device);
  switch (common_layout(p, 8)) {
    case Layout::kRows:
      return launch_named<T, Layout::kRows>(p, tile, stream);
    case Layout::kColumns:
      return launch_named<T, Layout::kColumns>(p, tile, stream);
    case Layout::kAny:
      return launch_tile<T, TileAny, Layout::kAny>(p, stream);
  }
}

template <int kSide>
void run_side(const Problem& p, cudaStream_t stream) {
  const auto run = [&](auto kernel) {
    launch(kernel, p, kSide, kSide, kSimtThreads, SimtTile<kSide>::kSharedBytes, stream);
  };
  switch (common_layout(p, 4)) {
    case Layout::kRows:
      return run(simt_kernel<kSide, Layout::kRows>);
    case Layout::kColumns:
      return run(simt_kernel<kSide, Layout::kColumns>);
    case Layout::kAny:
      return run(simt_kernel<kSide, Layout::kAny>);
  }
}

// float32: the larger tile from three tiles per multiprocessor on.
void run_float(const Problem& p, int64_t tile, int device, cudaStream_t stream) {
  STD_TORCH_CHECK(tile < static_cast<int64_t>(std::size(kCosts)),
                  "symmetric_matmul: the sm90 tiles need float16 or bfloat16");
  const int64_t enough = 3 * attribute(cudaDevAttrMultiProcessorCount, device);
  const bool large = tile < 0 ? tiles_of(p.m, 128, 128) * p.batches >= enough : tile > 0;
  large ? run_side<128>(p, stream) : run_side<64>(p, stream);
}

}  // namespace

void symmetric_matmul_cuda(const Tensor& a, const Tensor& b, std::optional<Tensor> c,
                           const Tensor& out, double alpha, double beta, double diag, int64_t tile,
                           std::optional<Tensor> scale, int64_t alpha_power, int64_t beta_power,
                           bool upper_out) {
  Problem p = describe(a, b, c, out, alpha, beta, diag, scale, alpha_power, beta_power);
  p.upper_out = upper_out;
  if (p.batches == 0 || p.m == 0) return;
  const int device = a.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (upper_out) {
    return products::run_symmetric_upper(for_sm90(p), a.scalar_type(), device, stream);
  }
  switch (a.scalar_type()) {
    case ScalarType::BFloat16:
      return run_half<__nv_bfloat16>(p, tile, a.scalar_type(), device, cuda_stream);
    case ScalarType::Half:
      return run_half<__half>(p, tile, a.scalar_type(), device, cuda_stream);
    case ScalarType::Float:
      return run_float(p, tile, device, cuda_stream);
    default:
      STD_TORCH_CHECK(false, "symmetric_matmul: dtype must be bfloat16, float16 or float32");
  }
}

}  // namespace optimizer
