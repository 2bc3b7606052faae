// CUDA backend of adamw; formulas and checks: adamw.h.
//
// Bound by its bytes: 28 per element for float32. A first launch, one thread per parameter,
// advances the step counters and leaves the bias corrections in a workspace: every block of a
// tensor must see the same step.

#include "step/adamw.h"
#include "step/multi_tensor.cuh"

namespace optimizer {
namespace {

using adamw::Coefficients;
using adamw::Corrections;
using adamw::Options;
using adamw::Problem;

struct Args {
  Options options;
  Noise noise;
  const Corrections* corrections;  // (K,)
};

struct StepEntry {
  float* step;
  uint32_t index;
};

struct DenseEntry {
  void* data[adamw::kCount];
  int64_t numel;
  RoundingEntry rounding;
  uint32_t index;
};

struct StridedEntry {
  Strided<adamw::kCount> item;
  RoundingEntry rounding;
  uint32_t index;
  Mode mode;
};

__global__ void __launch_bounds__(kThreads)
    advance_kernel(const __grid_constant__ List<StepEntry> list, const Options options,
                   Corrections* corrections) {
  const int i = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (i >= list.count) return;
  const StepEntry& entry = list.entry[i];
  const float step = *entry.step + 1.0f;
  *entry.step = step;
  corrections[entry.index] = adamw::corrections_of(options, step);
}

// H200, 65536x1280 in float32: 1 group 96.1% of a copy's rate, 2 groups 93.5, 4 groups 93.4.
constexpr int kGroups = 1;
constexpr int L = 4;  // the averages are float32
constexpr int64_t kChunk = int64_t{kThreads} * kGroups * L;

template <typename P, typename G, Mode kMode>
__global__ void __launch_bounds__(kThreads)
    dense_kernel(const __grid_constant__ List<DenseEntry> list, const Args args) {
  const int found = list.find(blockIdx.x);
  const DenseEntry& entry = list.entry[found];
  const int64_t start = (blockIdx.x - list.first[found]) * kChunk;
  const int limit = static_cast<int>(min(entry.numel - start, kChunk));
  P* param = static_cast<P*>(entry.data[adamw::kParam]) + start;
  const G* grad = static_cast<const G*>(entry.data[adamw::kGrad]) + start;
  float* average = static_cast<float*>(entry.data[adamw::kAverage]) + start;
  float* square = static_cast<float*>(entry.data[adamw::kSquare]) + start;
  int16_t* residual = static_cast<int16_t*>(entry.data[adamw::kResidual]) + start;

  ParamPack<P, kMode, L> params[kGroups];
  Pack<G, L> grads[kGroups];
  Pack<float, L> averages[kGroups], squares[kGroups];
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    const int at = (group * kThreads + static_cast<int>(threadIdx.x)) * L;
    if (at < limit) {
      params[group].load(param + at, residual + at, limit - at);
      grads[group].load(grad + at, limit - at);
      averages[group].load(average + at, limit - at);
      squares[group].load(square + at, limit - at);
    }
  }
  const Coefficients coefficients =
      adamw::coefficients_of(args.options, args.corrections[entry.index]);
  const uint32_t step = kMode == Mode::kStochastic ? step_of(args.noise) : 0;
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    const int at = (group * kThreads + static_cast<int>(threadIdx.x)) * L;
    if (at >= limit) break;
    uint32_t bits[L] = {};
    if constexpr (kMode == Mode::kStochastic) {
      const Random<L> random(args.noise, step, entry.rounding.parameter,
                             entry.rounding.offset + start + at);
      random.fill(bits);
    }
#pragma unroll
    for (int lane = 0; lane < L; ++lane) {
      float m = averages[group].value(lane), v = squares[group].value(lane);
      const float p =
          adamw::stepped(params[group].value(lane), grads[group].value(lane), m, v, coefficients);
      averages[group].set(lane, m);
      squares[group].set(lane, v);
      params[group].set(lane, p, bits[lane]);
    }
    params[group].store(param + at, residual + at, limit - at);
    averages[group].store(average + at, limit - at);
    squares[group].store(square + at, limit - at);
  }
}

__global__ void __launch_bounds__(kThreads)
    strided_kernel(const __grid_constant__ List<StridedEntry> list, const Args args) {
  const int found = list.find(blockIdx.x);
  const StridedEntry& entry = list.entry[found];
  const auto& item = entry.item;
  const Coefficients coefficients =
      adamw::coefficients_of(args.options, args.corrections[entry.index]);
#pragma unroll
  for (int turn = 0; turn < kStridedTurns; ++turn) {
    const int64_t i = element_of(item, blockIdx.x - list.first[found], turn);
    if (i < 0) continue;
    void* address[adamw::kCount];
    locate(item, i, address);
    void* param = address[adamw::kParam];
    void* residual = address[adamw::kResidual];
    const Kind kind = item.kind[adamw::kParam];
    float* average = static_cast<float*>(address[adamw::kAverage]);
    float* square = static_cast<float*>(address[adamw::kSquare]);
    float m = *average, v = *square;
    const float grad = load_any(address[adamw::kGrad], item.kind[adamw::kGrad]);
    const float p =
        adamw::stepped(load_param(param, residual, kind, entry.mode), grad, m, v, coefficients);
    *average = m;
    *square = v;
    store_param(param, residual, kind, entry.mode, p, args.noise, entry.rounding, i);
  }
}

// A class of items that share a kernel: 0 for the strided one.
uint32_t class_of(const adamw::Entry& entry) {
  if (!entry.item.linear || !entry.item.aligned) return 0;
  return 1 + static_cast<uint32_t>(entry.mode) * 16 +
         static_cast<uint32_t>(entry.item.kind[adamw::kParam]) * 4 +
         static_cast<uint32_t>(entry.item.kind[adamw::kGrad]);
}

template <typename P, typename G, Mode kMode>
void launch_dense(const Problem& p, const std::vector<size_t>& members, const Args& args,
                  cudaStream_t stream) {
  auto batch = batch_of<DenseEntry>([&](const List<DenseEntry>& list, unsigned grid) {
    dense_kernel<P, G, kMode><<<grid, kThreads, 0, stream>>>(list, args);
  });
  for (size_t k : members) {
    const adamw::Entry& from = p.entries[k];
    DenseEntry entry{{}, from.item.numel, {from.offset, from.parameter}, static_cast<uint32_t>(k)};
    std::copy_n(from.item.data, +adamw::kCount, entry.data);
    batch.add(entry, chunks_of(from.item.numel, kChunk));
  }
  batch.flush();
}

void launch_class(const Problem& p, const std::vector<size_t>& members, const Args& args,
                  cudaStream_t stream) {
  const adamw::Entry& first = p.entries[members[0]];
  with_type(first.item.kind[adamw::kParam], [&](auto param) {
    using P = decltype(param);
    with_type(first.item.kind[adamw::kGrad], [&](auto grad) {
      using G = decltype(grad);
      if constexpr (sizeof(P) == 2) {
        if (first.mode == Mode::kStochastic) {
          return launch_dense<P, G, Mode::kStochastic>(p, members, args, stream);
        }
        if (first.mode == Mode::kResidual) {
          return launch_dense<P, G, Mode::kResidual>(p, members, args, stream);
        }
      }
      launch_dense<P, G, Mode::kNearest>(p, members, args, stream);
    });
  });
}

void launch_strided(const Problem& p, const std::vector<size_t>& members, const Args& args,
                    cudaStream_t stream) {
  auto batch = batch_of<StridedEntry>([&](const List<StridedEntry>& list, unsigned grid) {
    strided_kernel<<<grid, kThreads, 0, stream>>>(list, args);
  });
  for (size_t k : members) {
    const adamw::Entry& from = p.entries[k];
    batch.add(
        {strided(from.item), {from.offset, from.parameter}, static_cast<uint32_t>(k), from.mode},
        strided_chunks(from.item));
  }
  batch.flush();
}

}  // namespace

void adamw_cuda(const TensorVector& params, const TensorVector& grads, const TensorVector& exp_avgs,
                const TensorVector& exp_avg_sqs, const TensorVector& steps, double lr,
                std::optional<Tensor> lr_tensor, double beta1, std::optional<Tensor> beta1_tensor,
                double beta2, std::optional<Tensor> beta2_tensor, double eps,
                std::optional<Tensor> eps_tensor, double weight_decay,
                std::optional<Tensor> weight_decay_tensor, const TensorVector& residuals,
                int64_t seed, std::optional<Tensor> rounding_step,
                const std::vector<int64_t>& parameter, const std::vector<int64_t>& offset) {
  STD_TORCH_CHECK(!params.empty(), "adamw: params is empty");
  const Tensor& like = params[0];
  const Options options{scalar("adamw", "lr", lr, lr_tensor, like),
                        scalar("adamw", "eps", eps, eps_tensor, like),
                        scalar("adamw", "weight_decay", weight_decay, weight_decay_tensor, like),
                        adamw::beta("betas[0]", beta1, beta1_tensor, like),
                        adamw::beta("betas[1]", beta2, beta2_tensor, like)};
  const RoundingOptions rounding{residuals, parameter, offset, rounding_step.has_value()};
  const Problem p = adamw::describe(params, grads, exp_avgs, exp_avg_sqs, steps, options, seed,
                                    rounding_step, rounding);
  const torch::stable::accelerator::DeviceGuard guard(like.get_device_index());
  const cudaStream_t stream = stream_of(like);
  const auto count = static_cast<int64_t>(params.size());
  Tensor workspace = allocate(like, {count * 2}, ScalarType::Float);
  auto* corrections = static_cast<Corrections*>(workspace.data_ptr());
  auto advance = batch_of<StepEntry>([&](const List<StepEntry>& list, unsigned grid) {
    const unsigned blocks = (grid + kThreads - 1) / kThreads;
    advance_kernel<<<blocks, kThreads, 0, stream>>>(list, options, corrections);
  });
  std::vector<uint32_t> keys;
  for (size_t k = 0; k < p.entries.size(); ++k) {
    advance.add({p.entries[k].step, static_cast<uint32_t>(k)}, 1);
    keys.push_back(class_of(p.entries[k]));
  }
  advance.flush();
  const Args args{options, p.noise, corrections};
  for_classes(keys, [&](const std::vector<size_t>& members) {
    keys[members[0]] == 0 ? launch_strided(p, members, args, stream)
                          : launch_class(p, members, args, stream);
  });
}

}  // namespace optimizer
