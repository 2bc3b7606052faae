#pragma once
// nf4_quantize: absmax[b] = max |x| over the b-th blocksize elements of the flattened weight, and
// per element the nibble of x * (1 / absmax), high nibble = even element. Both backends share this
// file: thresholds, checks and the description of the problem.

#include <cstdint>

#include "common/stable.h"

namespace optimizer::nf4_quant {

// What bitsandbytes 0.50.2 ships in its kernels; see reference/nf4.py. The nibble of NF4
// is the number of thresholds below the scaled element.
struct Nf4Thresholds {
  float value[15] = {-0.84809643030166625977f,  -0.61063289642333984375f, -0.459995269775390625f,
                     -0.33967941999435424805f,  -0.23460739850997924805f, -0.13791173696517944336f,
                     -0.045525018125772476196f, 0.039790149778127670288f, 0.12025525420904159546f,
                     0.20352125167846679688f,   0.29201376438140869141f,  0.38931253552436828613f,
                     0.50166338682174682617f,   0.64278692007064819336f,  0.86147838830947875977f};
};

// Magnitudes of FP4 in rising order; kFp4Order holds their codes, one per nibble of the number.
struct Fp4Thresholds {
  float value[7] = {0.0026041700039058923721f, 0.0859375f,
                    0.20833332836627960205f,   0.2916666567325592041f,
                    0.4166666865348815918f,    0.58333301544189453125f,
                    0.8333333134651184082f};
};
constexpr uint32_t kFp4Order = 0x32547610u;  // rank 0 -> 0, 1 -> 1, 2 -> 6, 3 -> 7, 4 -> 4, ...

struct Problem {
  const void* weight;  // (numel,)
  uint8_t* packed;     // (ceil(numel / 2),)
  float* absmax;       // (ceil(numel / blocksize),)
  int64_t numel;
  int block_shift;  // log2 of the blocksize, 5 to 12
};

// The last line of defence: the Python function has checked the same with kinder messages.
inline Problem describe(const Tensor& weight, const Tensor& packed, const Tensor& absmax,
                        int64_t blocksize) {
  Problem p{};
  while ((int64_t{1} << p.block_shift) < blocksize) ++p.block_shift;
  STD_TORCH_CHECK(
      (int64_t{1} << p.block_shift) == blocksize && p.block_shift >= 5 && p.block_shift <= 12,
      "nf4_quantize: blocksize must be a power of two from 32 to 4096, got ", blocksize);
  STD_TORCH_CHECK(weight.is_contiguous(), "nf4_quantize: weight must be contiguous");
  p.numel = weight.numel();
  const int64_t blocks = (p.numel + blocksize - 1) / blocksize;
  STD_TORCH_CHECK(packed.scalar_type() == ScalarType::Byte && packed.is_contiguous() &&
                      packed.numel() == (p.numel + 1) / 2 && packed.device() == weight.device(),
                  "nf4_quantize: packed must be ", (p.numel + 1) / 2,
                  " contiguous uint8 values on the device of weight");
  STD_TORCH_CHECK(absmax.scalar_type() == ScalarType::Float && absmax.is_contiguous() &&
                      absmax.numel() == blocks && absmax.device() == weight.device(),
                  "nf4_quantize: absmax must be ", blocks,
                  " contiguous float32 values on the device of weight");
  p.weight = weight.data_ptr();
  p.packed = static_cast<uint8_t*>(packed.data_ptr());
  p.absmax = static_cast<float*>(absmax.data_ptr());
  return p;
}

}  // namespace optimizer::nf4_quant
