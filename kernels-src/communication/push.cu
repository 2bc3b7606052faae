// push: copies between pairs of tensors of one shape and dtype by the driver's copies, which copy
// engines serve between GPUs: no multiprocessor is taken from what computes beside them. Rows
// within a GPU, which the driver copies at half the rate of its memory, are a kernel's,
// copy_rows.cuh.
//
// A pair must be one run of bytes, or rows of equal length at one distance in each tensor. All
// pairs are checked before the first copy. Tensors of one device alone, as streams order them; a
// peer's memory is one of this device's. cudaMemcpyBatchAsync would be one call for all of them,
// but no graph can capture it.

#include <algorithm>
#include <array>
#include <vector>

#include "communication/copy_rows.cuh"
#include "communication/signals.h"

namespace optimizer {
namespace communication {
namespace {

constexpr int kMostDims = 64;
// What cudaMemcpy2DAsync takes of a pitch (cudaDevAttrMaxPitch); rows that far apart are few.
constexpr size_t kMostPitch = INT32_MAX;
constexpr int64_t kUsualBlocks = 64;
constexpr int64_t kMostBlocks = 1 << 16;

struct Side {
  int64_t size;
  int64_t to;  // strides in elements
  int64_t from;
};

// Sizes and distances in bytes; a run of bytes has one row.
struct Copy {
  void* to;
  const void* from;
  size_t width;
  size_t rows;
  size_t to_pitch;
  size_t from_pitch;
};

// Sides of more than one element, the innermost first, those merged that both tensors walk with one
// stride.
int merged_sides(const Tensor& to, const Tensor& from, std::array<Side, kMostDims + 1>& sides) {
  std::array<Side, kMostDims> found;
  int count = 0;
  const auto sizes = to.sizes(), to_strides = to.strides(), from_strides = from.strides();
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] != 1) found[count++] = {sizes[d], to_strides[d], from_strides[d]};
  }
  std::stable_sort(found.begin(), found.begin() + count,
                   [](const Side& a, const Side& b) { return a.to < b.to; });
  sides[0] = {1, 1, 1};
  int last = 0;
  for (int i = 0; i < count; ++i) {
    Side& inner = sides[last];
    if (found[i].to == inner.to * inner.size && found[i].from == inner.from * inner.size) {
      inner.size *= found[i].size;
    } else {
      sides[++last] = found[i];
    }
  }
  return last + 1;
}

Copy describe(const Tensor& to, const Tensor& from, size_t k, int device) {
  const auto sizes = to.sizes(), others = from.sizes();
  STD_TORCH_CHECK(sizes.size() == others.size() &&
                      std::equal(sizes.begin(), sizes.end(), others.begin()) &&
                      to.scalar_type() == from.scalar_type(),
                  "push: pair ", k, " must have one shape and dtype");
  STD_TORCH_CHECK(to.is_cuda() && to.get_device_index() == device && from.is_cuda() &&
                      from.get_device_index() == device,
                  "push: pair ", k, " must be on the CUDA device of srcs[0]");
  STD_TORCH_CHECK(sizes.size() <= kMostDims, "push: pair ", k, " has more than 64 dimensions");
  if (to.numel() == 0) return {};
  std::array<Side, kMostDims + 1> sides;
  const int count = merged_sides(to, from, sides);
  const size_t bytes = to.element_size();
  Copy copy{to.data_ptr(), from.data_ptr(), sides[0].size * bytes, 1, 0, 0};
  STD_TORCH_CHECK(count <= 2, "push: pair ", k, " is no run of bytes, and no rows of them");
  if (count == 2) {
    copy.rows = sides[1].size;
    copy.to_pitch = sides[1].to * bytes;
    copy.from_pitch = sides[1].from * bytes;
    STD_TORCH_CHECK(copy.to_pitch >= copy.width && copy.from_pitch >= copy.width, "push: pair ", k,
                    " has rows that overlap");
  }
  return copy;
}

void issue(const Copy& copy, cudaStream_t stream) {
  if (copy.rows > 1 && std::max(copy.to_pitch, copy.from_pitch) <= kMostPitch) {
    STD_CUDA_CHECK(cudaMemcpy2DAsync(copy.to, copy.to_pitch, copy.from, copy.from_pitch, copy.width,
                                     copy.rows, cudaMemcpyDefault, stream));
    return;
  }
  for (size_t row = 0; row < copy.rows; ++row) {
    STD_CUDA_CHECK(cudaMemcpyAsync(static_cast<char*>(copy.to) + row * copy.to_pitch,
                                   static_cast<const char*>(copy.from) + row * copy.from_pitch,
                                   copy.width, cudaMemcpyDefault, stream));
  }
}

bool is_within(const void* address, int device) {
  cudaPointerAttributes attributes{};
  STD_CUDA_CHECK(cudaPointerGetAttributes(&attributes, address));
  return attributes.type == cudaMemoryTypeDevice && attributes.device == device;
}

// Whether the rows are many, lie on 16 bytes, and neither side is a peer's: the slowest link has
// half the rate of the driver's copy.
bool is_for_kernel(const Copy& copy, int device) {
  constexpr size_t kLeastBytes = size_t{1} << 20;  // below it the launch is what takes time
  const auto addresses =
      reinterpret_cast<uintptr_t>(copy.to) | reinterpret_cast<uintptr_t>(copy.from);
  return copy.rows > 1 && copy.width * copy.rows >= kLeastBytes &&
         (addresses | copy.to_pitch | copy.from_pitch | copy.width) % 16 == 0 &&
         copy.rows <= INT32_MAX && copy.width <= INT32_MAX && is_within(copy.to, device) &&
         is_within(copy.from, device);
}

// The addresses that rows span, what lies between them included.
struct Span {
  uintptr_t first;
  uintptr_t end;

  static Span of(const void* start, size_t pitch, size_t width, size_t rows) {
    const auto first = reinterpret_cast<uintptr_t>(start);
    return {first, first + (rows - 1) * pitch + width};
  }
  bool meets(const Span& other) const { return first < other.end && other.first < end; }
};

// Whether a copy must come behind those of the list.
bool depends(const Copy& copy, const RowsList& list) {
  const Span to = Span::of(copy.to, copy.to_pitch, copy.width, copy.rows);
  const Span from = Span::of(copy.from, copy.from_pitch, copy.width, copy.rows);
  return std::any_of(list.at, list.at + list.count, [&](const Rows& x) {
    const size_t width = size_t{x.vectors} * 16;
    const Span written = Span::of(x.to, x.to_pitch, width, x.rows);
    const Span read = Span::of(x.from, x.from_pitch, width, x.rows);
    return to.meets(written) || to.meets(read) || from.meets(written);
  });
}

void launch_rows(RowsList& list, int64_t blocks, cudaStream_t stream) {
  if (list.count == 0) return;
  rows_kernel<<<static_cast<unsigned>(blocks), kRowsThreads, 0, stream>>>(list);
  STD_CUDA_CHECK(cudaGetLastError());
  list.count = 0;
}

}  // namespace
}  // namespace communication

// blocks: of the kernel, 0 for the driver's copies alone, negative for the usual number.
void push_cuda(const std::vector<Tensor>& dsts, const std::vector<Tensor>& srcs, int64_t blocks) {
  using namespace communication;
  STD_TORCH_CHECK(dsts.size() == srcs.size(), "push: ", dsts.size(), " dsts for ", srcs.size(),
                  " srcs");
  STD_TORCH_CHECK(blocks <= kMostBlocks, "push: at most 65536 blocks");
  if (srcs.empty()) return;
  const int device = srcs[0].get_device_index();
  std::vector<Copy> copies;
  copies.reserve(dsts.size());
  for (size_t k = 0; k < dsts.size(); ++k) {
    const Copy copy = describe(dsts[k], srcs[k], k, device);
    if (copy.width > 0) copies.push_back(copy);
  }
  if (copies.empty()) return;
  const torch::stable::accelerator::DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(device);
  if (blocks < 0) blocks = kUsualBlocks;
  RowsList rows;
  rows.count = 0;
  for (const Copy& copy : copies) {
    const bool for_kernel = blocks > 0 && is_for_kernel(copy, device);
    if (!for_kernel || rows.count == kMostRows || depends(copy, rows)) {
      launch_rows(rows, blocks, stream);
    }
    if (for_kernel) {
      rows.at[rows.count++] = {static_cast<char*>(copy.to),
                               static_cast<const char*>(copy.from),
                               static_cast<int64_t>(copy.to_pitch),
                               static_cast<int64_t>(copy.from_pitch),
                               static_cast<uint32_t>(copy.width / 16),
                               static_cast<uint32_t>(copy.rows)};
    } else {
      issue(copy, stream);
    }
  }
  launch_rows(rows, blocks, stream);
}

}  // namespace optimizer
