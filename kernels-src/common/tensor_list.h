#pragma once
// Lists of tensors as the elementwise ops see them: what they check, and each item's memory layout.

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "common/stable.h"

namespace optimizer {

using TensorVector = std::vector<Tensor>;

enum class Kind : uint8_t { kFloat, kHalf, kBFloat16, kInt16 };

constexpr int kMaxDims = 6;

// The operands of one item of the lists: one shape, any strides. Neighbouring dimensions that every
// operand walks with one stride are merged; a linear item has a single one of stride 1.
template <int N>
struct Item {
  void* data[N];
  Kind kind[N];
  int dims;
  int64_t sizes[kMaxDims];
  int64_t strides[N][kMaxDims];
  int64_t numel;
  bool linear;   // element i of every operand is data[i]
  bool aligned;  // every operand starts on a 16-byte boundary
};

inline int element_size(Kind kind) { return kind == Kind::kFloat ? 4 : 2; }

inline Kind kind_of(const char* op, const char* name, const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return Kind::kFloat;
    case ScalarType::Half:
      return Kind::kHalf;
    case ScalarType::BFloat16:
      return Kind::kBFloat16;
    case ScalarType::Short:
      return Kind::kInt16;
    default:
      STD_TORCH_CHECK(false, op, ": ", name, " must be float32, float16 or bfloat16");
  }
}

inline void check_length(const char* op, const char* name, size_t length, size_t expected) {
  STD_TORCH_CHECK(length == expected, op, ": ", name, " has ", length, " entries, expected ",
                  expected);
}

// One list of the op: its name in messages, and whether the op writes it.
struct Operand {
  const char* name;
  bool written;
};

// Whether the tensor has no holes and no overlap in some order of its dimensions.
inline bool is_dense(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  std::array<std::pair<int64_t, int64_t>, 16> found;
  size_t count = 0;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] == 1) continue;
    if (count == found.size()) return false;
    found[count++] = {strides[d], sizes[d]};
  }
  std::sort(found.begin(), found.begin() + count);
  int64_t expected = 1;
  for (size_t d = 0; d < count; ++d) {
    if (found[d].first != expected) return false;
    expected *= found[d].second;
  }
  return true;
}

inline bool same_strides(const Tensor& a, const Tensor& b) {
  const auto sizes = a.sizes();
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] != 1 && a.strides()[d] != b.strides()[d]) return false;
  }
  return true;
}

// One operand of all items in a single tensor, row-major and one after another, in place of a list:
// what a list costs on the host it costs per tensor.
class Stacked {
 public:
  Stacked(const char* op, const char* name, const Tensor& tensor, const TensorVector& like)
      : kind_(kind_of(op, name, tensor)), data_(static_cast<char*>(tensor.data_ptr())) {
    int64_t expected = 0;
    for (const Tensor& one : like) expected += one.numel();
    STD_TORCH_CHECK(
        tensor.is_contiguous() && tensor.numel() == expected && tensor.device() == like[0].device(),
        op, ": ", name, " must be contiguous, with the ", expected,
        " elements of all tensors, on their device");
  }

  Kind kind() const { return kind_; }

  // Address of the next item, which has so many elements
  void* take(int64_t numel) {
    void* address = data_;
    data_ += numel * element_size(kind_);
    return address;
  }

 private:
  Kind kind_;
  char* data_;
};

// A null tensor among the operands stands for the one that is stacked.
template <int N>
void check_item(const char* op, const std::array<const Tensor*, N>& tensors,
                const std::array<Operand, N>& operands, size_t index) {
  const Tensor& first = *tensors[0];
  const auto shape = first.sizes();
  for (int n = 0; n < N; ++n) {
    if (tensors[n] == nullptr) continue;
    const Tensor& tensor = *tensors[n];
    STD_TORCH_CHECK(tensor.device() == first.device(), op, ": ", operands[n].name, "[", index,
                    "] is on another device than ", operands[0].name, "[", index, "]");
    const auto sizes = tensor.sizes();
    STD_TORCH_CHECK(std::equal(sizes.begin(), sizes.end(), shape.begin(), shape.end()), op, ": ",
                    operands[n].name, "[", index, "] has another shape than ", operands[0].name,
                    "[", index, "]");
    if (!operands[n].written) continue;
    for (size_t d = 0; d < sizes.size(); ++d) {
      STD_TORCH_CHECK(sizes[d] <= 1 || tensor.strides()[d] != 0, op, ": ", operands[n].name, "[",
                      index, "] is expanded: several elements share one address");
    }
  }
}

// Checks and describes one item. `ordered` asks for row-major element numbers. The first operand is
// never stacked.
template <int N>
Item<N> describe_item(const char* op, const std::array<const Tensor*, N>& tensors,
                      const std::array<Operand, N>& operands, size_t index, bool ordered,
                      std::optional<Stacked>* stacked = nullptr) {
  check_item<N>(op, tensors, operands, index);
  const Tensor& first = *tensors[0];
  Item<N> item{};
  item.numel = first.numel();
  item.aligned = true;
  bool row_major = true, equal = true;
  for (int n = 0; n < N; ++n) {
    if (tensors[n] == nullptr) {
      item.data[n] = (*stacked)->take(item.numel);
      item.kind[n] = (*stacked)->kind();
      equal = false;  // row-major: linear only where the others are, too
    } else {
      item.data[n] = tensors[n]->data_ptr();
      item.kind[n] = kind_of(op, operands[n].name, *tensors[n]);
      row_major &= tensors[n]->is_contiguous();
      equal &= same_strides(first, *tensors[n]);
    }
    item.aligned &= reinterpret_cast<uintptr_t>(item.data[n]) % 16 == 0;
  }
  item.linear = row_major || (!ordered && equal && is_dense(first));
  if (item.linear) {
    item.dims = 1;
    item.sizes[0] = item.numel;
    for (int n = 0; n < N; ++n) item.strides[n][0] = 1;
    return item;
  }
  const auto sizes = first.sizes();
  int64_t below = item.numel;  // elements under dimension d, the stride of a stacked operand
  const auto stride = [&](int n, size_t d) {
    return tensors[n] == nullptr ? below : tensors[n]->strides()[d];
  };
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] == 1) continue;
    if (item.numel > 0) below /= sizes[d];
    bool merge = item.dims > 0;
    for (int n = 0; n < N && merge; ++n) {
      merge = item.strides[n][item.dims - 1] == stride(n, d) * sizes[d];
    }
    STD_TORCH_CHECK(merge || item.dims < kMaxDims, op, ": ", operands[0].name, "[", index,
                    "] has more than ", kMaxDims, " dimensions that cannot be merged");
    const int at = merge ? item.dims - 1 : item.dims++;
    item.sizes[at] = merge ? item.sizes[at] * sizes[d] : sizes[d];
    for (int n = 0; n < N; ++n) item.strides[n][at] = stride(n, d);
  }
  return item;
}

inline bool is_float(Kind kind) { return kind != Kind::kInt16; }

// A scalar that is a number, or a float32 on the device that the host never reads.
struct Scalar {
  float number;
  const float* address;
};

inline Scalar scalar(const char* op, const char* name, double number,
                     const std::optional<Tensor>& tensor, const Tensor& like) {
  if (!tensor.has_value()) return {static_cast<float>(number), nullptr};
  STD_TORCH_CHECK(tensor->scalar_type() == ScalarType::Float && tensor->numel() == 1 &&
                      tensor->device() == like.device(),
                  op, ": ", name, " must be one float32 value on the device of the tensors");
  return {0.0f, static_cast<const float*>(tensor->data_ptr())};
}

// How 16-bit parameters are written.
enum class Mode : uint8_t { kNearest, kStochastic, kResidual };

// Keys of stochastic rounding that all items share.
struct Noise {
  uint64_t seed;
  const void* step;  // one int64 or float32 value
  bool float_step;
};

inline Noise noise(const char* op, int64_t seed, const std::optional<Tensor>& step,
                   const Tensor& like) {
  Noise result{static_cast<uint64_t>(seed), nullptr, false};
  if (!step.has_value()) return result;
  const ScalarType type = step->scalar_type();
  STD_TORCH_CHECK((type == ScalarType::Long || type == ScalarType::Float) && step->numel() == 1 &&
                      step->device() == like.device(),
                  op, ": rounding.step must be one int64 or float32 value on the device of params");
  result.step = step->data_ptr();
  result.float_step = type == ScalarType::Float;
  return result;
}

// The options that decide the Mode of every item, with the lists they need.
struct RoundingOptions {
  const TensorVector& residuals;          // empty, or one int16 tensor per parameter
  const std::vector<int64_t>& parameter;  // with noise: identity of each parameter
  const std::vector<int64_t>& offset;     // with noise: element number of its first element
  bool stochastic;
};

inline void check_rounding(const char* op, const TensorVector& params,
                           const RoundingOptions& options) {
  if (!options.residuals.empty()) {
    check_length(op, "residuals", options.residuals.size(), params.size());
    STD_TORCH_CHECK(!options.stochastic, op, ": give residuals or rounding, not both");
  }
  if (options.stochastic) {
    check_length(op, "rounding.parameter", options.parameter.size(), params.size());
    check_length(op, "rounding.offset", options.offset.size(), params.size());
  }
}

// The mode of one parameter; float32 has nothing to round.
inline Mode mode_of(const char* op, const Tensor& param, size_t index,
                    const RoundingOptions& options) {
  const bool wide = param.scalar_type() == ScalarType::Float;
  if (options.residuals.empty())
    return wide || !options.stochastic ? Mode::kNearest : Mode::kStochastic;
  const Tensor& residual = options.residuals[index];
  if (wide) {
    STD_TORCH_CHECK(residual.numel() == 0, op, ": residuals[", index, "] must be empty, as params[",
                    index, "] is float32");
    return Mode::kNearest;
  }
  STD_TORCH_CHECK(residual.scalar_type() == ScalarType::Short, op, ": residuals[", index,
                  "] must be int16");
  return Mode::kResidual;
}

}  // namespace optimizer
