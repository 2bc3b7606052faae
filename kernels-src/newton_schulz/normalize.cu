// CUDA backend of normalize; how matrices are cut up and scaled: normalize.h.
//
// Pairs of launches. The first reads as many matrices of x as L2 holds, the second reads them again
// and writes out: sizeof(T) + sizeof(Out) bytes per element, where a matrix fits L2. A launch
// starts early on capability 9.0 and has its first elements and its place on the multiprocessors
// when the sums are there.

#include <algorithm>
#include <cmath>
#include <vector>

#include "newton_schulz/normalize_launch.cuh"

namespace optimizer {
namespace {

using namespace normalization;

// Tiles per block of the second launch: enough that the sum over a matrix's partial sums is cheap
// beside them, few where there are few.
constexpr int64_t kMaxOutputChunk = 8;
constexpr int64_t kEnoughBlocks = 512;
// Bytes of x between its two readings, well below the 50 or 60 MB of L2.
constexpr int64_t kReadAgain = 24 << 20;

struct Shape {
  int64_t matrices;
  int64_t rows;
  int64_t cols;
};

Shape shape_of(const std::vector<Tensor>& pieces, const Tensor& out) {
  STD_TORCH_CHECK(!pieces.empty(), "normalize: pieces is empty");
  Shape shape{0, pieces[0].dim() == 3 ? pieces[0].size(1) : 0,
              pieces[0].dim() == 3 ? pieces[0].size(2) : 0};
  for (size_t k = 0; k < pieces.size(); ++k) {
    const Tensor& x = pieces[k];
    STD_TORCH_CHECK(x.dim() == 3 && x.size(1) == shape.rows && x.size(2) == shape.cols,
                    "normalize: pieces[", k, "] must be (b, r, c) with the r and c of pieces[0]");
    STD_TORCH_CHECK(x.scalar_type() == pieces[0].scalar_type() && x.device() == out.device(),
                    "normalize: pieces[", k, "] must have pieces[0]'s dtype and out's device");
    shape.matrices += x.size(0);
  }
  STD_TORCH_CHECK(out.dim() == 3 && out.is_contiguous() && out.size(0) >= shape.matrices &&
                      out.size(1) >= shape.rows && out.size(2) >= shape.cols,
                  "normalize: out must be contiguous (G, R, C) with room for ", shape.matrices,
                  " x ", shape.rows, " x ", shape.cols);
  STD_TORCH_CHECK(out.size(1) <= kLargestSide && out.size(2) <= kLargestSide,
                  "normalize: R and C must be at most 2^30");
  return shape;
}

// As many matrices at a time as L2 holds until they are read again.
template <typename T, typename Out>
void run(Problem p, bool early, cudaStream_t stream) {
  const int64_t bytes = int64_t{p.rows} * p.cols * static_cast<int64_t>(sizeof(T));
  const int64_t step = std::max<int64_t>(kReadAgain / std::max<int64_t>(bytes, 1), 1);
  bool second = false;  // the very first launch waits for whatever wrote x
  for (p.base = 0; p.base < p.matrices; p.base += step) {
    const int64_t filled = std::min(step, p.filled - p.base);
    if (filled > 0 && p.input.chunks > 0) {
      launch(sum_kernel<T>, p, filled * p.input.chunks, early && second, stream);
      second = true;
    }
    const int64_t written = std::min(step, p.matrices - p.base);
    launch(scale_kernel<T, Out>, p, written * p.output.chunks, early && second, stream);
    second = true;
  }
}

template <typename T>
void run_input(const Problem& p, ScalarType out, bool early, cudaStream_t stream) {
  switch (out) {
    case ScalarType::Half:
      return run<T, __half>(p, early, stream);
    case ScalarType::BFloat16:
      return run<T, __nv_bfloat16>(p, early, stream);
    case ScalarType::Float:
      return run<T, float>(p, early, stream);
    default:
      STD_TORCH_CHECK(false, "normalize: out must be float16, bfloat16 or float32");
  }
}

void dispatch(const Problem& p, ScalarType in, ScalarType out, bool early, cudaStream_t stream) {
  switch (in) {
    case ScalarType::Half:
      return run_input<__half>(p, out, early, stream);
    case ScalarType::BFloat16:
      return run_input<__nv_bfloat16>(p, out, early, stream);
    case ScalarType::Float:
      return run_input<float>(p, out, early, stream);
    default:
      STD_TORCH_CHECK(false, "normalize: pieces must be float16, bfloat16 or float32");
  }
}

Problem describe(const Shape& shape, const Tensor& out, double prefactor) {
  Problem p{};
  p.rows = static_cast<int>(shape.rows);
  p.cols = static_cast<int>(shape.cols);
  p.out_rows = static_cast<int>(out.size(1));
  p.out_cols = static_cast<int>(out.size(2));
  p.prefactor = prefactor;
  p.input = tiling_of(shape.rows, shape.cols, 0);
  const int64_t tiles = tiling_of(out.size(1), out.size(2), 1).tiles * out.size(0);
  p.output = tiling_of(out.size(1), out.size(2),
                       std::clamp<int64_t>(tiles / kEnoughBlocks, 1, kMaxOutputChunk));
  STD_TORCH_CHECK(p.output.tiles <= INT32_MAX, "normalize: a matrix has too many elements");
  return p;
}

}  // namespace

void normalize_cuda(const std::vector<Tensor>& pieces, const Tensor& out, double prefactor) {
  const Shape shape = shape_of(pieces, out);
  STD_TORCH_CHECK(prefactor > 0 && std::isfinite(prefactor),
                  "normalize: prefactor must be positive and finite, got ", prefactor);
  if (out.numel() == 0) return;
  const int device = out.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  const bool early = starts_early(device);

  Problem p = describe(shape, out, prefactor);
  const bool wide = out.scalar_type() == ScalarType::Float;
  const int64_t in_bytes = pieces[0].scalar_type() == ScalarType::Float ? 4 : 2;
  const int64_t out_bytes = wide ? 4 : 2;
  const auto out_data = static_cast<char*>(out.data_ptr());
  p.vector =
      p.out_cols % kSide == 0 && reinterpret_cast<uintptr_t>(out_data) % (kSide * out_bytes) == 0;
  // Launches follow one another, so they may share the partial sums.
  const int64_t sums = std::max<int64_t>(shape.matrices * p.input.chunks, 1);
  Tensor partial = torch::stable::new_empty(out, {sums}, ScalarType::Double);
  p.partial = static_cast<double*>(partial.data_ptr());

  const int64_t total = out.size(0);
  int64_t written = 0;
  for (size_t next = 0; written < total;) {
    p.pieces = 0;
    p.filled = 0;
    for (; next < pieces.size() && p.pieces < kPieces; ++next) {
      if (pieces[next].size(0) == 0) continue;
      p.piece[p.pieces++] = piece_of(pieces[next], p.filled, in_bytes);
      p.filled += pieces[next].size(0);
    }
    p.matrices = next == pieces.size() ? total - written : p.filled;
    p.out = out_data + written * p.out_rows * p.out_cols * out_bytes;
    dispatch(p, pieces[0].scalar_type(), out.scalar_type(), early,
             static_cast<cudaStream_t>(stream));
    p.partial += p.filled * p.input.chunks;
    written += p.matrices;
  }
}

}  // namespace optimizer
