#pragma once
// Hundreds of tensors in one launch: their pointers travel by value in the kernel's parameters, a
// thread block finds its tensor by binary search and takes one chunk of it. Items of one dtype
// combination share a launch; linear, aligned ones take the vector kernels.

#include <cuda_runtime.h>

#include <vector>

#include "common/rounding.h"
#include "common/tensor_list.h"
#include "common/vector_io.cuh"

namespace optimizer {

constexpr int kThreads = 256;

// Kernel parameters may hold 32764 bytes (CUDA 12.1 and newer); launches get dearer with them.
constexpr int kListBytes = 24 * 1024;

// Entries of one launch and the first chunk of each.
template <typename Entry>
struct List {
  static constexpr int kCapacity =
      (kListBytes - 16) / static_cast<int>(sizeof(Entry) + sizeof(uint32_t));
  int count;
  uint32_t first[kCapacity + 1];
  Entry entry[kCapacity];

  // The entry that holds a chunk
  __device__ __forceinline__ int find(uint32_t chunk) const {
    int low = 0, high = count - 1;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (first[middle] <= chunk) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }
};

// Collects entries and launches whenever the list is full.
template <typename Entry, typename Launch>
class Batch {
 public:
  explicit Batch(Launch launch) : launch_(launch) {}

  void add(const Entry& entry, int64_t chunks) {
    if (chunks == 0) return;
    if (list_.count == List<Entry>::kCapacity || chunks_ + chunks > INT32_MAX) flush();
    list_.first[list_.count] = static_cast<uint32_t>(chunks_);
    list_.entry[list_.count++] = entry;
    chunks_ += chunks;
  }

  void flush() {
    if (list_.count == 0) return;
    launch_(list_, static_cast<unsigned>(chunks_));
    STD_CUDA_KERNEL_LAUNCH_CHECK();
    list_.count = 0;
    chunks_ = 0;
  }

 private:
  Launch launch_;
  List<Entry> list_{};
  int64_t chunks_ = 0;
};

template <typename Entry, typename Launch>
Batch<Entry, Launch> batch_of(Launch launch) {
  return Batch<Entry, Launch>(launch);
}

inline int64_t chunks_of(int64_t numel, int64_t chunk) { return (numel + chunk - 1) / chunk; }

// visit(indices) for every group of equal keys, in order of first appearance.
template <typename Visit>
void for_classes(const std::vector<uint32_t>& keys, Visit visit) {
  std::vector<bool> seen(keys.size(), false);
  for (size_t i = 0; i < keys.size(); ++i) {
    if (seen[i]) continue;
    std::vector<size_t> members;
    for (size_t j = i; j < keys.size(); ++j) {
      if (keys[j] != keys[i]) continue;
      seen[j] = true;
      members.push_back(j);
    }
    visit(members);
  }
}

// visit(T{}) with the element type of a kind
template <typename Visit>
void with_type(Kind kind, Visit visit) {
  switch (kind) {
    case Kind::kFloat:
      return visit(float{});
    case Kind::kHalf:
      return visit(__half{});
    case Kind::kBFloat16:
      return visit(__nv_bfloat16{});
    case Kind::kInt16:
      STD_TORCH_CHECK(false, "an integer tensor where numbers are needed");
  }
}

inline cudaStream_t stream_of(const Tensor& tensor) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

// An item with any strides; a thread takes single elements of it. Large matrices are walked in
// tiles of 32 x 32, so that an operand whose columns are contiguous reuses its cache lines, too.
template <int N>
struct Strided {
  void* data[N];
  int64_t sizes[kMaxDims];
  int64_t strides[N][kMaxDims];
  int64_t numel;
  int dims;
  Kind kind[N];
  bool tiled;
};

constexpr int kTile = 32;
constexpr int kStridedChunk = kTile * kTile;
constexpr int kStridedTurns = kStridedChunk / kThreads;  // elements per thread

template <int N>
bool is_tiled(const Item<N>& item) {
  const int dims = item.dims;
  return dims >= 2 && item.sizes[dims - 1] >= kTile && item.sizes[dims - 2] >= kTile;
}

template <int N>
int64_t strided_chunks(const Item<N>& item) {
  if (!is_tiled(item)) return chunks_of(item.numel, kStridedChunk);
  const int64_t rows = item.sizes[item.dims - 2], columns = item.sizes[item.dims - 1];
  return item.numel / (rows * columns) * chunks_of(rows, kTile) * chunks_of(columns, kTile);
}

template <int N>
Strided<N> strided(const Item<N>& item) {
  Strided<N> result{};
  for (int n = 0; n < N; ++n) {
    result.data[n] = item.data[n];
    result.kind[n] = item.kind[n];
    for (int d = 0; d < kMaxDims; ++d) result.strides[n][d] = item.strides[n][d];
  }
  for (int d = 0; d < kMaxDims; ++d) result.sizes[d] = item.sizes[d];
  result.numel = item.numel;
  result.dims = item.dims;
  result.tiled = is_tiled(item);
  return result;
}

__device__ __forceinline__ int64_t quotient(int64_t a, int64_t b) {
  const bool narrow = ((a | b) >> 32) == 0;
  return narrow ? static_cast<uint32_t>(a) / static_cast<uint32_t>(b) : a / b;
}

// Row-major number of this thread's element in a chunk at one turn, or -1 behind the edges.
template <int N>
__device__ __forceinline__ int64_t element_of(const Strided<N>& item, uint32_t chunk, int turn) {
  if (!item.tiled) {
    const int64_t index = int64_t{chunk} * kStridedChunk + turn * kThreads + threadIdx.x;
    return index < item.numel ? index : -1;
  }
  const int64_t rows = item.sizes[item.dims - 2], columns = item.sizes[item.dims - 1];
  const int64_t across = (columns + kTile - 1) / kTile, down = (rows + kTile - 1) / kTile;
  const int64_t band = quotient(chunk, across), matrix = quotient(band, down);
  const int64_t row =
      (band - matrix * down) * kTile + threadIdx.x / kTile + turn * (kThreads / kTile);
  const int64_t column = (chunk - band * across) * kTile + threadIdx.x % kTile;
  return row < rows && column < columns ? (matrix * rows + row) * columns + column : -1;
}

// Addresses of element `index` of every operand
template <int N>
__device__ __forceinline__ void locate(const Strided<N>& item, int64_t index, void* (&address)[N]) {
  int64_t offset[N] = {};
  for (int d = item.dims - 1; d > 0; --d) {
    const int64_t next = quotient(index, item.sizes[d]);
    const int64_t rest = index - next * item.sizes[d];
#pragma unroll
    for (int n = 0; n < N; ++n) offset[n] += rest * item.strides[n][d];
    index = next;
  }
#pragma unroll
  for (int n = 0; n < N; ++n) {
    if (item.dims > 0) offset[n] += index * item.strides[n][0];
    address[n] =
        static_cast<char*>(item.data[n]) + offset[n] * (item.kind[n] == Kind::kFloat ? 4 : 2);
  }
}

__device__ __forceinline__ float load_any(const void* address, Kind kind) {
  if (kind == Kind::kFloat) return *static_cast<const float*>(address);
  const uint16_t bits = *static_cast<const uint16_t*>(address);
  return kind == Kind::kHalf ? Number<__half>::value(bits) : Number<__nv_bfloat16>::value(bits);
}

__device__ __forceinline__ void store_any(void* address, Kind kind, float x) {
  if (kind == Kind::kFloat) {
    *static_cast<float*>(address) = x;
  } else {
    *static_cast<uint16_t*>(address) =
        kind == Kind::kHalf ? Number<__half>::bits(x) : Number<__nv_bfloat16>::bits(x);
  }
}

// What rounding needs to know about a tensor; unused where it rounds to nearest.
struct RoundingEntry {
  int64_t offset;
  uint32_t parameter;
};

__device__ __forceinline__ uint32_t step_of(const Noise& noise) {
  return noise.float_step
             ? static_cast<uint32_t>(static_cast<int64_t>(*static_cast<const float*>(noise.step)))
             : static_cast<uint32_t>(*static_cast<const int64_t*>(noise.step));
}

template <typename P>
constexpr bool kIsHalf = false;
template <>
inline constexpr bool kIsHalf<__half> = true;

// Random bits of L neighbours from element `number` of a parameter on.
template <int L>
struct Random {
  Philox low, high;
  int shift;

  __device__ __forceinline__ Random(const Noise& noise, uint32_t step, uint32_t parameter,
                                    int64_t number) {
    shift = static_cast<int>(number & 7);
    low = philox(noise.seed, number >> 3, parameter, step);
    high = shift + L > 8 ? philox(noise.seed, (number >> 3) + 1, parameter, step) : low;
  }
  __device__ __forceinline__ void fill(uint32_t (&bits)[L]) const {
    // Nearly always elements start where Philox blocks do; then no lane is chosen at run time.
    if (shift == 0) {
#pragma unroll
      for (int lane = 0; lane < L; ++lane) bits[lane] = low.bits16(lane);
      return;
    }
#pragma unroll
    for (int lane = 0; lane < L; ++lane) {
      const int at = shift + lane;
      bits[lane] = at < 8 ? low.bits16(at) : high.bits16(at - 8);
    }
  }
};

// A parameter's pack and its residual's: float32 out, float32 in.
template <typename P, Mode kMode, int L>
struct ParamPack {
  Pack<P, L> param;
  Pack<int16_t, kMode == Mode::kResidual ? L : 2> residual;

  __device__ __forceinline__ void load(const P* address, const int16_t* kept, int valid) {
    param.load(address, valid);
    if constexpr (kMode == Mode::kResidual) residual.load(kept, valid);
  }
  __device__ __forceinline__ float value(int lane) const {
    if constexpr (kMode == Mode::kResidual) {
      const auto rest = static_cast<int16_t>(residual.bits(lane));
      return kIsHalf<P> ? join_half(param.bits(lane), rest) : join_bfloat16(param.bits(lane), rest);
    }
    return param.value(lane);
  }
  __device__ __forceinline__ void set(int lane, float x, uint32_t random16) {
    if constexpr (kMode == Mode::kNearest) {
      param.set(lane, x);
    } else if constexpr (kMode == Mode::kStochastic) {
      param.set_bits(lane,
                     kIsHalf<P> ? stochastic_half(x, random16) : stochastic_bfloat16(x, random16));
    } else {
      const Kept kept = kIsHalf<P> ? split_half(x) : split_bfloat16(x);
      param.set_bits(lane, kept.param);
      residual.set_bits(lane, static_cast<uint16_t>(kept.residual));
    }
  }
  __device__ __forceinline__ void store(P* address, int16_t* kept, int valid) const {
    param.store(address, valid);
    if constexpr (kMode == Mode::kResidual) residual.store(kept, valid);
  }
};

// The same for one element of any kind
__device__ __forceinline__ float load_param(const void* param, const void* residual, Kind kind,
                                            Mode mode) {
  if (mode != Mode::kResidual) return load_any(param, kind);
  const uint16_t bits = *static_cast<const uint16_t*>(param);
  const int16_t rest = *static_cast<const int16_t*>(residual);
  return kind == Kind::kHalf ? join_half(bits, rest) : join_bfloat16(bits, rest);
}

__device__ __forceinline__ void store_param(void* param, void* residual, Kind kind, Mode mode,
                                            float x, const Noise& noise,
                                            const RoundingEntry& rounding, int64_t index) {
  if (mode == Mode::kNearest) return store_any(param, kind, x);
  const bool half = kind == Kind::kHalf;
  if (mode == Mode::kResidual) {
    const Kept kept = half ? split_half(x) : split_bfloat16(x);
    *static_cast<uint16_t*>(param) = kept.param;
    *static_cast<int16_t*>(residual) = kept.residual;
    return;
  }
  uint32_t bits[1];
  Random<1>(noise, step_of(noise), rounding.parameter, rounding.offset + index).fill(bits);
  *static_cast<uint16_t*>(param) =
      half ? stochastic_half(x, bits[0]) : stochastic_bfloat16(x, bits[0]);
}

}  // namespace optimizer
