// CPU backend of nf4_quantize; thresholds and checks: quant/nf4_quantize.h.

#include "quant/nf4_quantize.h"

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cfloat>
#include <cmath>

namespace optimizer {
namespace {

using nf4_quant::Problem;

constexpr int kLargestBlock = 4096;
// Elements per task: large enough to hide the thread pool.
constexpr int64_t kGrain = 1 << 15;

// Subnormal numbers to zero, as bitsandbytes' kernels are compiled. NaN stays.
float flush(float x) { return std::fabs(x) < FLT_MIN ? 0.0f : x; }

const nf4_quant::Nf4Thresholds kNf4;
const nf4_quant::Fp4Thresholds kFp4;

// NaN exceeds no threshold: it gives nibble 0, and so does a block of zeros.
uint8_t nf4_nibble(float x) {
  int count = 0;
  for (float threshold : kNf4.value) count += x > threshold;
  return static_cast<uint8_t>(count);
}

uint8_t fp4_nibble(float x) {
  int rank = 0;
  for (float threshold : kFp4.value) rank += std::fabs(x) > threshold;
  return static_cast<uint8_t>((nf4_quant::kFp4Order >> 4 * rank & 15) | (x < 0 ? 8 : 0));
}

// One block of `count` elements, in float32 in `x`; x[count] is zero where count is odd.
template <bool kFp4Type>
void quantize_block(float* x, int count, uint8_t* packed, float* absmax) {
  float largest = 0.0f;
  bool poisoned = false;
  for (int i = 0; i < count; ++i) {
    x[i] = flush(x[i]);
    largest = std::max(largest, std::fabs(x[i]));
    poisoned |= x[i] != x[i];
  }
  if (poisoned) largest = NAN;
  *absmax = largest;
  const float reciprocal = 1.0f / largest;
  for (int i = 0; i < count; i += 2) {
    uint8_t nibble[2];
    for (int j = 0; j < 2; ++j) {
      const float scaled = flush(x[i + j] * reciprocal);
      nibble[j] = kFp4Type ? fp4_nibble(scaled) : nf4_nibble(scaled);
    }
    packed[i / 2] = static_cast<uint8_t>(nibble[0] << 4 | nibble[1]);
  }
}

template <bool kFp4Type, typename T>
void quantize(const Problem& p) {
  const auto* weight = static_cast<const T*>(p.weight);
  const int64_t blocks = (p.numel + (int64_t{1} << p.block_shift) - 1) >> p.block_shift;
  const int64_t grain = std::max<int64_t>(1, kGrain >> p.block_shift);
  torch::stable::parallel_for(0, blocks, grain, [&](int64_t first, int64_t last) {
    float x[kLargestBlock + 1];
    for (int64_t block = first; block < last; ++block) {
      const int64_t begin = block << p.block_shift;
      const int count =
          static_cast<int>(std::min<int64_t>(p.numel - begin, int64_t{1} << p.block_shift));
      for (int i = 0; i < count; ++i) x[i] = static_cast<float>(weight[begin + i]);
      x[count] = 0.0f;
      quantize_block<kFp4Type>(x, count, p.packed + begin / 2, p.absmax + block);
    }
  });
}

template <typename T>
void dispatch(const Problem& p, bool fp4) {
  fp4 ? quantize<true, T>(p) : quantize<false, T>(p);
}

}  // namespace

void nf4_quantize_cpu(const Tensor& weight, const Tensor& packed, const Tensor& absmax,
                      int64_t blocksize, bool fp4) {
  const Problem p = nf4_quant::describe(weight, packed, absmax, blocksize);
  switch (weight.scalar_type()) {
    case ScalarType::BFloat16:
      return dispatch<torch::headeronly::BFloat16>(p, fp4);
    case ScalarType::Half:
      return dispatch<torch::headeronly::Half>(p, fp4);
    case ScalarType::Float:
      return dispatch<float>(p, fp4);
    default:
      STD_TORCH_CHECK(false, "nf4_quantize: weight must be bfloat16, float16 or float32");
  }
}

}  // namespace optimizer
