// CPU backend of nf4_dequant; formula, table and checks: quant/nf4_dequant.h.

#include "quant/nf4_dequant.h"

#include <algorithm>

namespace optimizer {
namespace {

using nf4::Problem;

// Elements per task: large enough to hide the thread pool, small enough to balance few experts.
constexpr int64_t kGrain = 1 << 15;

float block_scale(const Problem& p, int64_t block) {
  if (p.code == nullptr) return static_cast<const float*>(p.absmax)[block];
  const uint8_t q = static_cast<const uint8_t*>(p.absmax)[block];
  // volatile: the product is rounded before the offset is added, as in bitsandbytes. GCC contracts
  // both into one FMA on targets that have it (aarch64) and ignores the FP_CONTRACT pragma in C++.
  volatile float product = p.code[q] * p.code_scale[block >> nf4::kNestedShift];
  return product + *p.code_offset;
}

// Elements [begin, end) of the stack, all of one absmax block. A block has 16 possible results:
// they are scaled and rounded once, the bytes only select.
template <typename out_t>
void decode_block(const uint8_t* packed, int64_t begin, int64_t end, const out_t (&value)[16],
                  out_t* out) {
  if (begin % 2 != 0 && begin < end) *out++ = value[packed[begin++ / 2] & 15];
  const uint8_t* byte = packed + begin / 2;
  const int64_t pairs = (end - begin) / 2;
  for (int64_t i = 0; i < pairs; ++i) {
    out[2 * i] = value[byte[i] >> 4];
    out[2 * i + 1] = value[byte[i] & 15];
  }
  if ((end - begin) % 2 != 0) out[2 * pairs] = value[byte[pairs] >> 4];
}

// Elements [begin, end) of the stack to out, block by block.
template <typename out_t>
void decode_range(const Problem& p, const float* codebook, int64_t begin, int64_t end, out_t* out) {
  while (begin < end) {
    const int64_t block = begin >> p.block_shift;
    const int64_t stop = std::min(end, (block + 1) << p.block_shift);
    const float scale = block_scale(p, block);
    out_t value[16];
    for (int i = 0; i < 16; ++i) value[i] = static_cast<out_t>(codebook[i] * scale);
    decode_block(p.packed, begin, stop, value, out);
    out += stop - begin;
    begin = stop;
  }
}

int64_t expert_id(const Problem& p, int64_t slot) {
  return p.wide_ids ? static_cast<const int64_t*>(p.active)[slot]
                    : static_cast<const int32_t*>(p.active)[slot];
}

template <typename out_t>
void decode(const Problem& p, out_t* out) {
  const nf4::Codebook table;
  const float* codebook = p.codebook != nullptr ? p.codebook : table.value;
  torch::stable::parallel_for(0, p.num_active * p.numel, kGrain, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t slot = begin / p.numel;
      const int64_t stop = std::min(end, (slot + 1) * p.numel);
      const int64_t shift = (expert_id(p, slot) - slot) * p.numel;  // output index -> stack index
      decode_range(p, codebook, begin + shift, stop + shift, out + begin);
      begin = stop;
    }
  });
}

}  // namespace

Tensor nf4_dequant_cpu(const Tensor& packed, const Tensor& absmax, const Tensor& active_experts,
                       IntHeaderOnlyArrayRef expert_shape, int64_t blocksize, ScalarType dtype,
                       std::optional<Tensor> codebook, std::optional<Tensor> absmax_code,
                       std::optional<Tensor> absmax_scale, std::optional<Tensor> absmax_offset) {
  const Problem p = nf4::describe(packed, absmax, active_experts, expert_shape, blocksize, codebook,
                                  absmax_code, absmax_scale, absmax_offset);
  for (int64_t slot = 0; slot < p.num_active; ++slot) {
    const int64_t id = expert_id(p, slot);
    STD_TORCH_CHECK(id >= 0 && id < p.num_experts, "nf4_dequant: active_experts[", slot, "] = ", id,
                    " names none of the ", p.num_experts, " experts in packed");
  }
  Tensor out = nf4::empty_output(p, expert_shape, dtype, packed);
  switch (dtype) {
    case ScalarType::BFloat16:
      decode(p, static_cast<torch::headeronly::BFloat16*>(out.data_ptr()));
      break;
    case ScalarType::Half:
      decode(p, static_cast<torch::headeronly::Half*>(out.data_ptr()));
      break;
    case ScalarType::Float:
      decode(p, static_cast<float*>(out.data_ptr()));
      break;
    default:
      STD_TORCH_CHECK(false, "nf4_dequant: dtype must be bfloat16, float16 or float32");
  }
  return out;
}

}  // namespace optimizer
