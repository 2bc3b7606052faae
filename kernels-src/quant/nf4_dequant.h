#pragma once
// nf4_dequant: out[i] = codebook[nibble(g)] * absmax[g / blocksize] for the named experts of a
// stack that was quantised as one flat vector. g is the element's index in the whole stack, so
// blocks may straddle experts and an expert may start in the middle of a byte. High nibble = even
// g. Both backends share this file: the table, the checks and the description of the problem.

#include <cstdint>
#include <optional>
#include <vector>

#include "common/stable.h"

namespace optimizer::nf4 {

// NF4 of Dettmers et al., QLoRA, arXiv:2305.14314, appendix E.
struct Codebook {
  float value[16] = {-1.0f,
                     -0.6961928009986877f,
                     -0.5250730514526367f,
                     -0.39491748809814453f,
                     -0.28444138169288635f,
                     -0.18477343022823334f,
                     -0.09105003625154495f,
                     0.0f,
                     0.07958029955625534f,
                     0.16093020141124725f,
                     0.24611230194568634f,
                     0.33791524171829224f,
                     0.44070982933044434f,
                     0.5626170039176941f,
                     0.7229568362236023f,
                     1.0f};
};

// bitsandbytes quantises absmax in blocks of 256 when it nests.
constexpr int kNestedShift = 8;

struct Problem {
  const uint8_t* packed;     // (packed_bytes,)
  const void* absmax;        // (blocks,) float, or uint8 when nested
  const void* active;        // (num_active,) int64 or int32
  const float* codebook;     // (16,) or null: the NF4 table
  const float* code;         // (256,) nested only, else null
  const float* code_scale;   // (ceil(blocks / 256),) nested only
  const float* code_offset;  // (1,) nested only
  int64_t packed_bytes;
  int64_t blocks;
  int64_t num_experts;
  int64_t num_active;
  int64_t numel;  // elements of one expert
  int block_shift;
  bool wide_ids;
};

inline const float* float_data(const std::optional<Tensor>& tensor, const char* name, int64_t numel,
                               const Tensor& like) {
  if (!tensor.has_value()) return nullptr;
  STD_TORCH_CHECK(tensor->scalar_type() == ScalarType::Float && tensor->is_contiguous() &&
                      tensor->numel() == numel && tensor->device() == like.device(),
                  "nf4_dequant: ", name, " must be ", numel,
                  " contiguous float32 values on the device of packed");
  return static_cast<const float*>(tensor->data_ptr());
}

// The last line of defence: the Python function has checked the same with kinder messages.
inline Problem describe(const Tensor& packed, const Tensor& absmax, const Tensor& active,
                        IntHeaderOnlyArrayRef expert_shape, int64_t blocksize,
                        const std::optional<Tensor>& codebook, const std::optional<Tensor>& code,
                        const std::optional<Tensor>& code_scale,
                        const std::optional<Tensor>& code_offset) {
  Problem p{};
  p.numel = 1;
  for (int64_t size : expert_shape) p.numel *= size;
  STD_TORCH_CHECK(p.numel > 0, "nf4_dequant: expert_shape must have positive sizes");
  while ((int64_t{1} << p.block_shift) < blocksize) ++p.block_shift;
  STD_TORCH_CHECK(
      blocksize >= 32 && blocksize <= 4096 && (int64_t{1} << p.block_shift) == blocksize,
      "nf4_dequant: blocksize must be a power of two from 32 to 4096, got ", blocksize);

  STD_TORCH_CHECK(packed.scalar_type() == ScalarType::Byte && packed.is_contiguous(),
                  "nf4_dequant: packed must be contiguous uint8");
  p.packed_bytes = packed.numel();
  p.num_experts = 2 * p.packed_bytes / p.numel;
  const int64_t elements = p.num_experts * p.numel;
  STD_TORCH_CHECK((elements + 1) / 2 == p.packed_bytes, "nf4_dequant: ", p.packed_bytes,
                  " packed bytes hold no whole number of experts of ", p.numel, " elements");

  const bool nested = code.has_value();
  STD_TORCH_CHECK(nested == code_scale.has_value() && nested == code_offset.has_value(),
                  "nf4_dequant: give absmax_code, absmax_scale and absmax_offset, or none of them");
  p.blocks = (elements + blocksize - 1) / blocksize;
  STD_TORCH_CHECK(absmax.scalar_type() == (nested ? ScalarType::Byte : ScalarType::Float) &&
                      absmax.is_contiguous() && absmax.numel() == p.blocks &&
                      absmax.device() == packed.device(),
                  "nf4_dequant: absmax must be ", p.blocks, " contiguous ",
                  nested ? "uint8" : "float32", " values on the device of packed");

  const ScalarType id_type = active.scalar_type();
  STD_TORCH_CHECK((id_type == ScalarType::Long || id_type == ScalarType::Int) &&
                      active.dim() == 1 && active.is_contiguous() &&
                      active.device() == packed.device(),
                  "nf4_dequant: active_experts must be a contiguous int32 or int64 vector on the "
                  "device of packed");
  p.num_active = active.numel();
  STD_TORCH_CHECK(p.num_experts > 0 || p.num_active == 0,
                  "nf4_dequant: packed is empty, active_experts is not");
  p.wide_ids = id_type == ScalarType::Long;

  p.packed = static_cast<const uint8_t*>(packed.data_ptr());
  p.absmax = absmax.data_ptr();
  p.active = active.data_ptr();
  p.codebook = float_data(codebook, "codebook", 16, packed);
  p.code = float_data(code, "absmax_code", 256, packed);
  p.code_scale = float_data(code_scale, "absmax_scale",
                            (p.blocks + (1 << kNestedShift) - 1) >> kNestedShift, packed);
  p.code_offset = float_data(code_offset, "absmax_offset", 1, packed);
  return p;
}

// (num_active, *expert_shape), uninitialised
inline Tensor empty_output(const Problem& p, IntHeaderOnlyArrayRef expert_shape, ScalarType dtype,
                           const Tensor& packed) {
  std::vector<int64_t> shape{p.num_active};
  shape.insert(shape.end(), expert_shape.begin(), expert_shape.end());
  return allocate(packed, shape, dtype);
}

}  // namespace optimizer::nf4
