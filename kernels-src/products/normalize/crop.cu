// CUDA backend of crop: out = x[:, :r, :c] of 16-bit matrices. Rows of x start on 16 bytes, those
// of out anywhere, so that words of 16 bytes of out are parts of two words of x. A warp takes a
// row.

#include <cstdint>

#include "products/normalize/normalize.cuh"

namespace optimizer {
namespace {

using namespace normalization;

constexpr int kWord = 8;   // elements in 16 bytes
constexpr int kAhead = 4;  // words that a thread has on their way

struct CropProblem {
  const uint16_t* x;
  uint16_t* out;
  int64_t x_batch, x_row;
  int64_t out_batch, out_row;
  int64_t lines;  // rows of all matrices
  int rows;
  int cols;
};

// Elements [start, start + 8) of the 16 that `low` and `high` hold; start is 0 to 8.
__device__ __forceinline__ uint4 part_of(const uint4& low, const uint4& high, int start) {
  uint32_t word[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) word[i] = start & 8 ? word[i + 4] : word[i];
#pragma unroll
  for (int i = 0; i < 6; ++i) word[i] = start & 4 ? word[i + 2] : word[i];
#pragma unroll
  for (int i = 0; i < 5; ++i) word[i] = start & 2 ? word[i + 1] : word[i];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    word[i] = start & 1 ? __funnelshift_r(word[i], word[i + 1], 16) : word[i];
  }
  return {word[0], word[1], word[2], word[3]};
}

__device__ __forceinline__ void store_part(uint16_t* target, const uint4& word, int first,
                                           int last) {
  if (first <= 0 && last >= kWord) {
    *reinterpret_cast<uint4*>(target) = word;
    return;
  }
  const uint32_t half[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
  for (int e = 0; e < kWord; ++e) {
    const auto element = static_cast<uint16_t>(half[e / 2] >> (e % 2 * 16));
    if (e >= first && e < last) target[e] = element;
  }
}

__global__ void __launch_bounds__(kThreads) crop_kernel(const CropProblem p) {
  let_next_kernel_begin();
  wait_for_kernel_before();
  const int64_t line = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (line >= p.lines) return;
  const int64_t matrix = line / p.rows, row = line - matrix * p.rows;
  const uint16_t* const x = p.x + matrix * p.x_batch + row * p.x_row;
  uint16_t* const out = p.out + matrix * p.out_batch + row * p.out_row;
  // Word k of out's row begins at element 8 k - before, in words k - 1 and k of x's.
  const auto before = static_cast<int>(reinterpret_cast<uintptr_t>(out) / 2 % kWord);
  const int words = (before + p.cols + kWord - 1) / kWord;
  const int held = (p.cols + kWord - 1) / kWord;  // words of x's row that are needed
  const auto* const source = reinterpret_cast<const uint4*>(x);
  for (int first = threadIdx.x % 32; first < words; first += 32 * kAhead) {
    uint4 low[kAhead], high[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int k = first + 32 * i;
      low[i] = before > 0 && k > 0 && k - 1 < held ? source[k - 1] : uint4{};
      high[i] = k < held ? source[k] : uint4{};
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int k = first + 32 * i, start = k * kWord - before;
      if (k >= words) break;
      store_part(out + start, part_of(low[i], high[i], kWord - before), -start, p.cols - start);
    }
  }
}

}  // namespace

void crop_cuda(const Tensor& x, const Tensor& out) {
  STD_TORCH_CHECK(x.dim() == 3 && out.dim() == 3 && x.size(0) == out.size(0) &&
                      x.size(1) >= out.size(1) && x.size(2) >= out.size(2),
                  "crop: x must be (G, R, C), out (G, r, c), r <= R, c <= C");
  STD_TORCH_CHECK(
      x.scalar_type() == out.scalar_type() && x.device() == out.device() &&
          (x.scalar_type() == ScalarType::Half || x.scalar_type() == ScalarType::BFloat16),
      "crop: x and out must be of one dtype, float16 or bfloat16, on one device");
  STD_TORCH_CHECK(out.size(1) <= kLargestSide && out.size(2) <= kLargestSide,
                  "crop: r and c must be at most 2^30");
  if (out.numel() == 0) return;
  STD_TORCH_CHECK(out.size(2) == 1 || out.stride(2) == 1, "crop: rows of out must be contiguous");
  STD_TORCH_CHECK(x.is_contiguous() && x.size(2) % kWord == 0 &&
                      reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0,
                  "crop: x must be contiguous, start on 16 bytes, and C be a multiple of 8");
  const int device = out.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  const CropProblem p{static_cast<const uint16_t*>(x.data_ptr()),
                      static_cast<uint16_t*>(out.data_ptr()),
                      x.stride(0),
                      x.stride(1),
                      out.stride(0),
                      out.stride(1),
                      out.size(0) * out.size(1),
                      static_cast<int>(out.size(1)),
                      static_cast<int>(out.size(2))};
  launch("crop", crop_kernel, quotient_up(p.lines, kWarps), kThreads, 0, starts_early(device),
         static_cast<cudaStream_t>(stream), p);
}

}  // namespace optimizer
