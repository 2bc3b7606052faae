#pragma once
// The CPU backend's view of an item: blocks of elements, gathered into float32 and scattered back.

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include "common/rounding.h"
#include "common/tensor_list.h"

namespace optimizer {

// Elements that are gathered at a time: a few kilobytes per operand.
constexpr int kBlock = 512;
// Elements per task and per partial sum: the sums must not depend on the number of threads.
constexpr int64_t kTask = 1 << 14;

// Address of element `index` of one operand and the run of elements behind it at one stride.
struct Run {
  int64_t offset;
  int64_t stride;
  int64_t length;
};

template <int N>
Run locate(const Item<N>& item, int operand, int64_t index) {
  if (item.dims == 0) return {0, 1, 1};
  const int last = item.dims - 1;
  Run run{0, item.strides[operand][last], item.sizes[last] - index % item.sizes[last]};
  for (int d = last; d >= 0; --d) {
    run.offset += index % item.sizes[d] * item.strides[operand][d];
    index /= item.sizes[d];
  }
  return run;
}

// visit(position in the block, element offset) for elements [begin, begin + count) of an operand.
template <int N, typename Visit>
void for_elements(const Item<N>& item, int operand, int64_t begin, int count, const Visit& visit) {
  int done = 0;
  while (done < count) {
    const Run run = locate(item, operand, begin + done);
    const int stop = static_cast<int>(std::min<int64_t>(count, done + run.length));
    for (int64_t offset = run.offset; done < stop; ++done, offset += run.stride) {
      visit(done, offset);
    }
  }
}

template <int N>
void gather(const Item<N>& item, int operand, int64_t begin, int count, float* block) {
  const void* data = item.data[operand];
  const auto read = [&](auto zero) {
    const auto* typed = static_cast<const decltype(zero)*>(data);
    for_elements(item, operand, begin, count,
                 [&](int i, int64_t offset) { block[i] = static_cast<float>(typed[offset]); });
  };
  switch (item.kind[operand]) {
    case Kind::kFloat:
      return read(0.0f);
    case Kind::kHalf:
      return read(torch::headeronly::Half());
    case Kind::kBFloat16:
      return read(torch::headeronly::BFloat16());
    case Kind::kInt16:
      return read(int16_t{0});
  }
}

template <int N>
void scatter(const Item<N>& item, int operand, int64_t begin, int count, const float* block) {
  void* data = item.data[operand];
  const auto write = [&](auto zero) {
    using T = decltype(zero);
    for_elements(item, operand, begin, count, [&](int i, int64_t offset) {
      static_cast<T*>(data)[offset] = static_cast<T>(block[i]);
    });
  };
  switch (item.kind[operand]) {
    case Kind::kFloat:
      return write(0.0f);
    case Kind::kHalf:
      return write(torch::headeronly::Half());
    case Kind::kBFloat16:
      return write(torch::headeronly::BFloat16());
    case Kind::kInt16:
      return write(int16_t{0});
  }
}

// 16-bit words of an operand
template <int N>
void gather_bits(const Item<N>& item, int operand, int64_t begin, int count, uint16_t* block) {
  const auto* data = static_cast<const uint16_t*>(item.data[operand]);
  for_elements(item, operand, begin, count,
               [&](int i, int64_t offset) { block[i] = data[offset]; });
}

template <int N>
void scatter_bits(const Item<N>& item, int operand, int64_t begin, int count,
                  const uint16_t* block) {
  auto* data = static_cast<uint16_t*>(item.data[operand]);
  for_elements(item, operand, begin, count,
               [&](int i, int64_t offset) { data[offset] = block[i]; });
}

inline uint32_t step_of(const Noise& noise) {
  if (noise.step == nullptr) return 0;
  return static_cast<uint32_t>(noise.float_step
                                   ? static_cast<int64_t>(*static_cast<const float*>(noise.step))
                                   : *static_cast<const int64_t*>(noise.step));
}

// Parameters in, whatever was kept of them included: exact float32 values.
template <int N>
void gather_param(const Item<N>& item, int residual, Mode mode, int64_t begin, int count,
                  float* block) {
  if (mode != Mode::kResidual) return gather(item, 0, begin, count, block);
  uint16_t param[kBlock], kept[kBlock];
  gather_bits(item, 0, begin, count, param);
  gather_bits(item, residual, begin, count, kept);
  const bool half = item.kind[0] == Kind::kHalf;
  for (int i = 0; i < count; ++i) {
    const auto rest = static_cast<int16_t>(kept[i]);
    block[i] = half ? join_half(param[i], rest) : join_bfloat16(param[i], rest);
  }
}

// Parameters out. `number` is the element number of `begin` in the whole parameter.
template <int N>
void scatter_param(const Item<N>& item, int residual, Mode mode, int64_t begin, int count,
                   const float* block, const Noise& noise, uint32_t parameter, int64_t number) {
  if (mode == Mode::kNearest) return scatter(item, 0, begin, count, block);
  const bool half = item.kind[0] == Kind::kHalf;
  uint16_t param[kBlock], kept[kBlock];
  if (mode == Mode::kResidual) {
    for (int i = 0; i < count; ++i) {
      const Kept split = half ? split_half(block[i]) : split_bfloat16(block[i]);
      param[i] = split.param;
      kept[i] = static_cast<uint16_t>(split.residual);
    }
    scatter_bits(item, residual, begin, count, kept);
  } else {
    const uint32_t step = step_of(noise);
    Philox random{};
    for (int i = 0; i < count; ++i) {
      const int64_t at = number + i;
      if (i == 0 || at % 8 == 0) random = philox(noise.seed, at / 8, parameter, step);
      const uint32_t bits = random.bits16(static_cast<int>(at % 8));
      param[i] = half ? stochastic_half(block[i], bits) : stochastic_bfloat16(block[i], bits);
    }
  }
  scatter_bits(item, 0, begin, count, param);
}

}  // namespace optimizer
