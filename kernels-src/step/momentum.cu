// CUDA backend of momentum; formulas and checks: momentum.h.
//
// Bound by its bytes: gradient and buffer read, buffer and direction written, 14 per element for
// float32 with a float16 direction. Each block leaves its chunk's amax and sum of squares in a
// workspace; a second launch adds them in order.

#include "step/momentum.h"
#include "step/multi_tensor.cuh"

namespace optimizer {
namespace {

using momentum::Problem;
using momentum::Rule;

struct Partial {
  uint32_t amax;  // bits of the largest magnitude: NaN is larger than every number
  float squares;
};

struct Args {
  Rule rule;
  const float* scale;
  Partial* partials;
};

struct Entry {
  void* data[momentum::kCount];
  int64_t numel;
  uint32_t index;
  uint32_t partial;  // of the tensor's first chunk
};

struct StridedEntry {
  Strided<momentum::kCount> item;
  uint32_t index;
  uint32_t partial;
};

__device__ __forceinline__ void add(Partial& partial, float direction) {
  partial.amax = max(partial.amax, __float_as_uint(direction) & 0x7fffffffu);
  partial.squares += direction * direction;
}

// The block's partial, added as a tree whose shape is fixed; thread 0 writes it.
__device__ __forceinline__ void reduce(Partial partial, Partial* target) {
  __shared__ Partial warps[kThreads / 32];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    partial.amax = max(partial.amax, __shfl_xor_sync(~0u, partial.amax, distance));
    partial.squares += __shfl_xor_sync(~0u, partial.squares, distance);
  }
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = partial;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int warp = 1; warp < kThreads / 32; ++warp) {
    partial.amax = max(partial.amax, warps[warp].amax);
    partial.squares += warps[warp].squares;
  }
  *target = partial;
}

// H200, 24x1280x5120 in float32: 2, 4 and 8 groups reach 92.0, 92.0 and 91.9% of a copy's rate.
constexpr int kGroups = 2;

template <typename G, typename B, typename O>
constexpr int64_t kChunk = int64_t{kThreads} * kGroups * kLanes<G, B, O>;

template <typename G, typename B, typename O>
__global__ void __launch_bounds__(kThreads)
    dense_kernel(const __grid_constant__ List<Entry> list, const Args args) {
  constexpr int L = kLanes<G, B, O>;
  const int found = list.find(blockIdx.x);
  const Entry& entry = list.entry[found];
  const uint32_t chunk = blockIdx.x - list.first[found];
  const int64_t start = chunk * kChunk<G, B, O>;
  const int limit = static_cast<int>(min(entry.numel - start, kChunk<G, B, O>));
  const G* grad = static_cast<const G*>(entry.data[momentum::kGrad]) + start;
  B* buffer = static_cast<B*>(entry.data[momentum::kBuffer]) + start;
  O* out = static_cast<O*>(entry.data[momentum::kOut]) + start;
  const float scale = args.scale != nullptr ? args.scale[entry.index] : 1.0f;

  Pack<G, L> grads[kGroups];
  Pack<B, L> buffers[kGroups];
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    const int at = (group * kThreads + static_cast<int>(threadIdx.x)) * L;
    if (at < limit) {
      grads[group].load(grad + at, limit - at);
      buffers[group].load(buffer + at, limit - at);
    }
  }
  Partial partial{0, 0.0f};
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    const int at = (group * kThreads + static_cast<int>(threadIdx.x)) * L;
    if (at >= limit) break;
    Pack<O, L> directions;
#pragma unroll
    for (int lane = 0; lane < L; ++lane) {
      const float g = grads[group].value(lane);
      const float advanced = args.rule.advance(g, buffers[group].value(lane));
      const float direction = args.rule.direction(g, advanced);
      buffers[group].set(lane, advanced);
      directions.set(lane, direction * scale);
      if (at + lane < limit) add(partial, direction);
    }
    buffers[group].store(buffer + at, limit - at);
    directions.store(out + at, limit - at);
  }
  reduce(partial, args.partials + entry.partial + chunk);
}

__global__ void __launch_bounds__(kThreads)
    strided_kernel(const __grid_constant__ List<StridedEntry> list, const Args args) {
  const int found = list.find(blockIdx.x);
  const StridedEntry& entry = list.entry[found];
  const auto& item = entry.item;
  const uint32_t chunk = blockIdx.x - list.first[found];
  const float scale = args.scale != nullptr ? args.scale[entry.index] : 1.0f;
  Partial partial{0, 0.0f};
#pragma unroll
  for (int turn = 0; turn < kStridedTurns; ++turn) {
    const int64_t i = element_of(item, chunk, turn);
    if (i < 0) continue;
    void* address[momentum::kCount];
    locate(item, i, address);
    const float g = load_any(address[momentum::kGrad], item.kind[momentum::kGrad]);
    const float old = load_any(address[momentum::kBuffer], item.kind[momentum::kBuffer]);
    const float advanced = args.rule.advance(g, old);
    const float direction = args.rule.direction(g, advanced);
    store_any(address[momentum::kBuffer], item.kind[momentum::kBuffer], advanced);
    store_any(address[momentum::kOut], item.kind[momentum::kOut], direction * scale);
    add(partial, direction);
  }
  reduce(partial, args.partials + entry.partial + chunk);
}

struct Range {
  uint32_t first;
  uint32_t count;
  uint32_t index;
};

// One block per tensor; float64 sums over a fixed tree.
__global__ void __launch_bounds__(kThreads)
    finish_kernel(const __grid_constant__ List<Range> list, const Partial* partials, float* stats) {
  const Range& range = list.entry[blockIdx.x];
  uint32_t amax = 0;
  double squares = 0.0;
  for (uint32_t i = threadIdx.x; i < range.count; i += kThreads) {
    const Partial partial = partials[range.first + i];
    amax = max(amax, partial.amax);
    squares += static_cast<double>(partial.squares);
  }
  __shared__ uint32_t all_amax[kThreads];
  __shared__ double all_squares[kThreads];
  all_amax[threadIdx.x] = amax;
  all_squares[threadIdx.x] = squares;
  for (int distance = kThreads / 2; distance > 0; distance /= 2) {
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < distance) {
      all_amax[threadIdx.x] = max(all_amax[threadIdx.x], all_amax[threadIdx.x + distance]);
      all_squares[threadIdx.x] += all_squares[threadIdx.x + distance];
    }
  }
  if (threadIdx.x == 0) {
    stats[2 * range.index] = __uint_as_float(all_amax[0]);
    stats[2 * range.index + 1] = static_cast<float>(all_squares[0]);
  }
}

// A class of items that share a kernel: 0 for the strided one.
uint32_t class_of(const Item<momentum::kCount>& item) {
  const bool vector = item.linear && item.aligned && item.kind[momentum::kBuffer] == Kind::kFloat;
  if (!vector) return 0;
  return 1 + static_cast<uint32_t>(item.kind[momentum::kGrad]) * 4 +
         static_cast<uint32_t>(item.kind[momentum::kOut]);
}

int64_t chunks_in(const Item<momentum::kCount>& item) {
  if (class_of(item) == 0) return strided_chunks(item);
  // The buffer is float32, so there are always 4 lanes.
  return chunks_of(item.numel, kChunk<float, float, float>);
}

void launch_dense(const Problem& p, const std::vector<size_t>& members,
                  const std::vector<Range>& ranges, const Args& args, cudaStream_t stream) {
  const auto& kind = p.items[members[0]].kind;
  with_type(kind[momentum::kGrad], [&](auto g) {
    with_type(kind[momentum::kOut], [&](auto o) {
      auto batch = batch_of<Entry>([&](const List<Entry>& list, unsigned grid) {
        dense_kernel<decltype(g), float, decltype(o)><<<grid, kThreads, 0, stream>>>(list, args);
      });
      for (size_t k : members) {
        Entry entry{{}, p.items[k].numel, static_cast<uint32_t>(k), ranges[k].first};
        std::copy_n(p.items[k].data, +momentum::kCount, entry.data);
        batch.add(entry, ranges[k].count);
      }
      batch.flush();
    });
  });
}

void launch_strided(const Problem& p, const std::vector<size_t>& members,
                    const std::vector<Range>& ranges, const Args& args, cudaStream_t stream) {
  auto batch = batch_of<StridedEntry>([&](const List<StridedEntry>& list, unsigned grid) {
    strided_kernel<<<grid, kThreads, 0, stream>>>(list, args);
  });
  for (size_t k : members) {
    batch.add({strided(p.items[k]), static_cast<uint32_t>(k), ranges[k].first}, ranges[k].count);
  }
  batch.flush();
}

}  // namespace

Tensor momentum_cuda(const TensorVector& grads, const TensorVector& buffers,
                     const TensorVector& out, double mu, bool nesterov, bool ema,
                     std::optional<Tensor> scale, std::optional<Tensor> batch) {
  const Problem p = momentum::describe(grads, buffers, out, mu, nesterov, ema, scale, batch);
  const torch::stable::accelerator::DeviceGuard guard(grads[0].get_device_index());
  const cudaStream_t stream = stream_of(grads[0]);
  const auto count = static_cast<int64_t>(grads.size());
  Tensor stats = allocate(grads[0], {count, 2}, ScalarType::Float);
  std::vector<Range> ranges;
  std::vector<uint32_t> keys;
  int64_t total = 0;
  for (size_t k = 0; k < p.items.size(); ++k) {
    const int64_t chunks = chunks_in(p.items[k]);
    ranges.push_back(
        {static_cast<uint32_t>(total), static_cast<uint32_t>(chunks), static_cast<uint32_t>(k)});
    keys.push_back(class_of(p.items[k]));
    total += chunks;
  }
  STD_TORCH_CHECK(total <= UINT32_MAX, "momentum: ", total, " chunks are too many for one call");
  Tensor workspace = allocate(grads[0], {std::max<int64_t>(total, 1) * 2}, ScalarType::Float);
  auto* partials = static_cast<Partial*>(workspace.data_ptr());
  const Args args{p.rule, p.scale, partials};
  for_classes(keys, [&](const std::vector<size_t>& members) {
    keys[members[0]] == 0 ? launch_strided(p, members, ranges, args, stream)
                          : launch_dense(p, members, ranges, args, stream);
  });
  auto* values = static_cast<float*>(stats.data_ptr());
  auto finish = batch_of<Range>([&](const List<Range>& list, unsigned grid) {
    finish_kernel<<<grid, kThreads, 0, stream>>>(list, partials, values);
  });
  for (const Range& range : ranges) finish.add(range, 1);
  finish.flush();
  return stats;
}

}  // namespace optimizer
