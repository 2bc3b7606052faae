// CUDA backend of normalize; how matrices are cut up and scaled: normalize.h.
//
// Two launches: a short one that clears flags, and a persistent one whose blocks share the tiles of
// all matrices. On capability 9.0 the second starts early and is in place when the flags are clear.

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include "products/normalize/normalize_kernel.cuh"

namespace optimizer {
namespace {

using namespace normalization;

constexpr const char* kOp = "normalize";

// Of a block: tiles on their way, and bytes per chunk at least.
constexpr int kTilesAhead = 2;
constexpr int kChunkBytes = 16 << 10;
// With fewer, tiles would be waited for: rather fewer blocks.
constexpr int kFewestSlots = 4;

constexpr int fewest_in_chunk(int64_t element) {
  return std::max(1, kChunkBytes / static_cast<int>(kThreads * kSide * kSide * element));
}

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

int attribute_of(cudaDeviceAttr attribute, int device) {
  int value = 0;
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&value, attribute, device));
  return value;
}

// Blocks of a multiprocessor, and the tiles that each has room for.
struct Room {
  int blocks;
  int slots;
};

Room room_of(int slot_bytes, int device) {
  constexpr int kReserved = 1 << 10, kOwn = static_cast<int>(sizeof(Shared));  // of a block
  const int memory = attribute_of(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  const int most = attribute_of(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  Room room{};
  for (room.blocks = kBlocksPerSm;; --room.blocks) {
    const int bytes = std::min(memory / room.blocks - kReserved, most) - kOwn;
    room.slots = std::min(bytes / slot_bytes, kMaxSlots);
    if (room.slots >= kFewestSlots || room.blocks == 1) return room;
  }
}

template <typename T, typename Out>
void run(Problem p, int device, cudaStream_t stream) {
  const Room room = room_of(kSlotBytes<T>, device);
  p.slots = room.slots;
  p.ahead = std::min({kTilesAhead, kMaxAhead, p.slots});
  const int bytes = p.slots * kSlotBytes<T>;
  const auto kernel = normalize_kernel<T, Out>;
  STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  const int64_t resident =
      int64_t{room.blocks} * attribute_of(cudaDevAttrMultiProcessorCount, device);
  const int64_t zeros = p.matrices * p.out_rows * p.out_cols - p.x.count * p.x.rows * p.x.cols;
  const int64_t useful = std::max<int64_t>(p.tickets, quotient_up(zeros, kThreads * kSide * kSide));
  const int64_t blocks = std::clamp<int64_t>(useful, 1, resident);
  const int64_t ahead = quotient_up(p.ahead, p.tiling.chunk);
  p.first_tickets =
      static_cast<uint32_t>(std::clamp<int64_t>(quotient_up(p.tickets, blocks), 1, ahead));
  launch(kOp, kernel, blocks, kThreads, bytes, starts_early(device), stream, p);
}

template <typename T>
void run_input(const Problem& p, ScalarType out, int device, cudaStream_t stream) {
  switch (out) {
    case ScalarType::Half:
      return run<T, __half>(p, device, stream);
    case ScalarType::BFloat16:
      return run<T, __nv_bfloat16>(p, device, stream);
    case ScalarType::Float:
      return run<T, float>(p, device, stream);
    default:
      STD_TORCH_CHECK(false, "normalize: out must be float16, bfloat16 or float32");
  }
}

void dispatch(const Problem& p, ScalarType in, ScalarType out, int device, cudaStream_t stream) {
  switch (in) {
    case ScalarType::Half:
      return run_input<__half>(p, out, device, stream);
    case ScalarType::BFloat16:
      return run_input<__nv_bfloat16>(p, out, device, stream);
    case ScalarType::Float:
      return run_input<float>(p, out, device, stream);
    default:
      STD_TORCH_CHECK(false, "normalize: pieces must be float16, bfloat16 or float32");
  }
}

Problem describe(const Shape& shape, int64_t element, const Tensor& out, double prefactor) {
  Problem p{};
  p.x.rows = static_cast<int>(shape.rows);
  p.x.cols = static_cast<int>(shape.cols);
  p.out_rows = static_cast<int>(out.size(1));
  p.out_cols = static_cast<int>(out.size(2));
  p.prefactor = prefactor;
  p.tiling = tiling_of(shape.rows, shape.cols, 0);
  cut(p.tiling, std::max<int64_t>(p.tiling.chunk, fewest_in_chunk(element)));
  STD_TORCH_CHECK(shape.matrices * p.tiling.tiles <= INT32_MAX, "normalize: ", shape.matrices,
                  " x ", shape.rows, " x ", shape.cols, " are more than 2^31 - 1 tiles");
  return p;
}

void launch_clear(uint64_t* words, int64_t count, const std::optional<Tensor>& zeros, bool early,
                  cudaStream_t stream) {
  constexpr int64_t kEach = 4, kMostBlocks = 256;
  const int64_t blocks = std::clamp<int64_t>(quotient_up(count, kThreads * kEach), 1, kMostBlocks);
  int32_t* const others = zeros.has_value() ? static_cast<int32_t*>(zeros->data_ptr()) : nullptr;
  const int64_t more = zeros.has_value() ? zeros->numel() : 0;
  launch(kOp, clear_kernel, blocks, kThreads, 0, early, stream, words, count, others, more);
}

void check_zeros(const std::optional<Tensor>& zeros, const Tensor& out) {
  STD_TORCH_CHECK(!zeros.has_value() ||
                      (zeros->dim() == 1 && zeros->is_contiguous() &&
                       zeros->scalar_type() == ScalarType::Int && zeros->device() == out.device()),
                  "normalize: zeros must be (n,), contiguous, int32, on out's device");
}

// Flags and sums of a call, behind one another in `memory`; the tiles' part is not to be cleared.
class Workspace {
 public:
  Workspace(const Tensor& like, int64_t launches, int64_t matrices, const Tiling& tiling)
      : matrices_(matrices),
        counters_(launches),
        arrived_(quotient_up(matrices, 2)),
        sums_(matrices * tiling.chunks),
        memory_(allocate(like, {cleared() + quotient_up(matrices * tiling.tiles, 2)},
                         ScalarType::Long)) {}

  uint64_t* data() const { return static_cast<uint64_t*>(memory_.data_ptr()); }
  int64_t cleared() const { return counters_ + arrived_ + matrices_ + sums_; }
  // Of a launch whose first matrix is `first`
  void give(Problem& p, int64_t launch, int64_t first) const {
    p.counter = reinterpret_cast<uint32_t*>(data() + launch);
    p.arrived = reinterpret_cast<uint32_t*>(data() + counters_) + first;
    p.factors = data() + counters_ + arrived_ + first;
    p.sums = data() + counters_ + arrived_ + matrices_ + first * p.tiling.chunks;
    p.before = reinterpret_cast<uint32_t*>(data() + cleared()) + first * p.tiling.tiles;
  }

 private:
  int64_t matrices_, counters_, arrived_, sums_;
  Tensor memory_;
};

}  // namespace

void normalize_cuda(const std::vector<Tensor>& pieces, const Tensor& out, double prefactor,
                    std::optional<Tensor> zeros) {
  const Shape shape = shape_of(pieces, out);
  STD_TORCH_CHECK(prefactor > 0 && std::isfinite(prefactor),
                  "normalize: prefactor must be positive and finite, got ", prefactor);
  check_zeros(zeros, out);
  STD_TORCH_CHECK(out.numel() > 0 || !zeros.has_value() || zeros->numel() == 0,
                  "normalize: zeros go with matrices, and out is empty");
  if (out.numel() == 0) return;
  const int device = out.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  const auto on = static_cast<cudaStream_t>(stream);

  const int64_t in_bytes = pieces[0].scalar_type() == ScalarType::Float ? 4 : 2;
  Problem p = describe(shape, in_bytes, out, prefactor);
  const int64_t out_bytes = out.scalar_type() == ScalarType::Float ? 4 : 2;
  const auto out_data = static_cast<char*>(out.data_ptr());
  p.vector =
      p.out_cols % kSide == 0 && reinterpret_cast<uintptr_t>(out_data) % (kSide * out_bytes) == 0;
  const Workspace workspace(out, quotient_up(static_cast<int64_t>(pieces.size()), kPieces),
                            shape.matrices, p.tiling);
  launch_clear(workspace.data(), workspace.cleared(), zeros, starts_early(device), on);

  const int64_t total = out.size(0);
  int64_t written = 0;
  size_t next = 0;
  for (int64_t number = 0; written < total; ++number) {
    p.x.pieces = 0;
    p.x.count = 0;
    for (; next < pieces.size() && p.x.pieces < kPieces; ++next) {
      if (pieces[next].size(0) == 0) continue;
      p.x.piece[p.x.pieces++] = piece_of(pieces[next], p.x.count, in_bytes);
      p.x.count += pieces[next].size(0);
    }
    p.matrices = next == pieces.size() ? total - written : p.x.count;
    p.tickets = static_cast<uint32_t>(p.x.count * p.tiling.chunks);
    p.out = out_data + written * p.out_rows * p.out_cols * out_bytes;
    workspace.give(p, number, written);
    dispatch(p, pieces[0].scalar_type(), out.scalar_type(), device, on);
    written += p.matrices;
  }
}

}  // namespace optimizer
