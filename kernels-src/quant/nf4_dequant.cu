// CUDA backend of nf4_dequant; formula, table and checks: nf4_dequant.h.
//
// Bound by its bytes: 0.5 + 4 / blocksize read and sizeof(out_t) written per element. One thread
// turns one word of packed nibbles into one 16-byte store and has kGroups such loads in flight.

#include <cuda_runtime.h>

#include "common/launch.cuh"
#include "common/vector_io.cuh"
#include "quant/nf4_dequant.h"

namespace optimizer::nf4 {

// The kernel of nf4_dequant. Grid: one block per (active expert, chunk of its elements).
//
// Offsets inside a chunk are 32-bit, everything that places a chunk in the stack is 64-bit.

__constant__ const Codebook kNf4{};

// One chunk of one expert. Unaligned chunks start on 16-byte boundaries of the output, so the first
// one of a row hangs over its start by `lead` elements, which are never written.
struct Chunk {
  int64_t source;  // its first element in the stack, minus lead
  int64_t target;  // the same in the output
  int lead;        // elements before the row
  int limit;       // elements up to the end of the row or chunk, lead included
};

template <int kLanes, int kSize, bool kAligned>
__device__ __forceinline__ Chunk locate(const Problem& p, uint32_t slot, uint32_t chunk,
                                        int64_t expert) {
  const int overhang = kAligned ? 0 : static_cast<int>(slot * p.numel % kLanes);
  const int64_t start = static_cast<int64_t>(chunk) * kSize - overhang;
  return {expert * p.numel + start, slot * p.numel + start, chunk == 0 ? overhang : 0,
          static_cast<int>(min(p.numel - start, int64_t{kSize}))};
}

// The packed nibbles of a chunk as 32-bit words, the first element in the top bits.
template <int kLanes, bool kAligned>
struct Nibbles {
  const uint32_t* words;  // 4-byte aligned, at or before the chunk's first byte
  int phase;              // nibbles from there to the chunk's first element
  bool interior;          // whether every word of the chunk lies inside the tensor

  __device__ __forceinline__ Nibbles(const Problem& p, const Chunk& chunk) {
    const int skew = static_cast<int>(reinterpret_cast<uintptr_t>(p.packed) & 3);
    const int64_t first = chunk.source + 2 * skew;
    words = reinterpret_cast<const uint32_t*>(p.packed - skew) + (first >> 3);
    phase = static_cast<int>(first & 7);
    const int64_t last = ((first + chunk.limit - 1) >> 3) + 1;  // word behind the last element's
    interior = first >= 8 && 4 * (last + 1) - skew <= p.packed_bytes;
  }

  // Words at the ends of the tensor: bytes outside read as zero and are never touched.
  __device__ uint32_t load_edge(const Problem& p, int index) const {
    const auto* bytes = reinterpret_cast<const uint8_t*>(words + index);
    uint32_t word = 0;
    for (int i = 0; i < 4; ++i) {
      const bool inside = bytes + i >= p.packed && bytes + i < p.packed + p.packed_bytes;
      word |= (inside ? static_cast<uint32_t>(bytes[i]) : 0u) << 8 * i;
    }
    return word;
  }

  // The one or two words that hold elements [at, at + kLanes) of the chunk
  __device__ __forceinline__ uint2 load(const Problem& p, int at) const {
    const int index = (kAligned && kLanes == 8 ? at : phase + at) >> 3;
    if constexpr (kAligned) return make_uint2(load_once(words + index), 0);
    if (interior) return make_uint2(__ldg(words + index), __ldg(words + index + 1));
    return make_uint2(load_edge(p, index), load_edge(p, index + 1));
  }

  __device__ __forceinline__ uint32_t align(uint2 raw, int at) const {
    const uint32_t high = __byte_perm(raw.x, 0, 0x0123);
    if constexpr (kAligned) return kLanes == 8 ? high : high << 4 * ((phase + at) & 7);
    return __funnelshift_l(__byte_perm(raw.y, 0, 0x0123), high, 4 * ((phase + at) & 7));
  }
};

// The scales of kLanes neighbours. A block has at least 32 elements, so there is at most one
// border.
template <int kLanes, bool kAligned, bool kNested>
struct Scales {
  int64_t block;  // of the chunk's first element
  int remainder;  // elements between that block's start and the chunk's
  int last;       // last block of the stack, counted from `block`
  int first;      // first block of the stack, counted from `block`: 1 for an overhang at its start

  __device__ __forceinline__ Scales(const Problem& p, const Chunk& chunk) {
    block = chunk.source >> p.block_shift;
    remainder = static_cast<int>(chunk.source & ((int64_t{1} << p.block_shift) - 1));
    first = block < 0 ? 1 : 0;
    last = static_cast<int>(min(p.blocks - 1 - block, int64_t{INT32_MAX}));
  }

  // What is loaded for one block; nothing is computed from it before every load is under way.
  struct Raw {
    float scale;    // absmax, or code_scale when nested
    uint32_t code;  // nested only
  };

  struct Pair {
    Raw low;   // before the border
    Raw high;  // from the border on
  };

  __device__ __forceinline__ Raw load_one(const Problem& p, int index) const {
    if constexpr (kNested) {
      return {__ldg(p.code_scale + ((block + index) >> kNestedShift)),
              __ldg(static_cast<const uint8_t*>(p.absmax) + block + index)};
    } else {
      return {__ldg(static_cast<const float*>(p.absmax) + block + index), 0};
    }
  }

  __device__ __forceinline__ Pair load(const Problem& p, int at) const {
    const int low = (remainder + at) >> p.block_shift;
    if constexpr (kAligned) return {load_one(p, low), {}};
    const int high = (remainder + at + kLanes - 1) >> p.block_shift;
    return {load_one(p, min(max(low, first), last)), load_one(p, min(high, last))};
  }

  static __device__ __forceinline__ float decode(const Problem& p, Raw raw) {
    if constexpr (!kNested) return raw.scale;
    // Two roundings, as in bitsandbytes: no fused multiply-add.
    return __fadd_rn(__fmul_rn(__ldg(p.code + raw.code), raw.scale), __ldg(p.code_offset));
  }

  // Lanes before the border
  __device__ __forceinline__ int border(const Problem& p, int at) const {
    if constexpr (kAligned) return kLanes;
    const int next = ((remainder + at) >> p.block_shift) + 1;
    return (next << p.block_shift) - remainder - at;
  }
};

template <typename out_t, bool kAligned, bool kNested, int kThreads, int kGroups>
__global__ void __launch_bounds__(kThreads)
    dequant_kernel(const Problem p, out_t* __restrict__ out, uint32_t chunks) {
  constexpr int kLanes = Vector<out_t>::kLanes;
  constexpr int kStride = kThreads * kLanes;
  let_next_kernel_begin();
  wait_for_kernel_before();
  __shared__ float codebook[16];  // 16 banks: no conflict, whatever the nibbles
  if (threadIdx.x < 16) {
    codebook[threadIdx.x] =
        p.codebook != nullptr ? p.codebook[threadIdx.x] : kNf4.value[threadIdx.x];
  }
  const uint32_t slot = blockIdx.x / chunks;
  const int64_t expert = p.wide_ids ? static_cast<const int64_t*>(p.active)[slot]
                                    : static_cast<const int32_t*>(p.active)[slot];
  const bool known = expert >= 0 && expert < p.num_experts;
  const Chunk chunk = locate<kLanes, kStride * kGroups, kAligned>(
      p, slot, blockIdx.x - slot * chunks, known ? expert : 0);
  const Nibbles<kLanes, kAligned> nibbles(p, chunk);
  const Scales<kLanes, kAligned, kNested> scales(p, chunk);

  const float nan = __int_as_float(0x7fffffff);
  const int mine = static_cast<int>(threadIdx.x) * kLanes;

  // All loads before the first use, so that their latencies overlap.
  uint2 raw[kGroups] = {};
  typename Scales<kLanes, kAligned, kNested>::Pair scale[kGroups] = {};
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    const int at = mine + group * kStride;
    if (at < chunk.limit) {
      raw[group] = nibbles.load(p, at);
      scale[group] = scales.load(p, at);
    }
  }
  __syncthreads();
  out_t* const target = out + chunk.target + mine;
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    const int at = mine + group * kStride;
    if (at >= chunk.limit) break;
    const float low = known ? scales.decode(p, scale[group].low) : nan;
    const float high = kAligned ? low : known ? scales.decode(p, scale[group].high) : nan;
    const uint32_t word = nibbles.align(raw[group], at);
    const int border = scales.border(p, at);
    float value[kLanes];
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      value[lane] = codebook[word >> (28 - 4 * lane) & 15] * (lane < border ? low : high);
    }
    if (kAligned || (at >= chunk.lead && at + kLanes <= chunk.limit)) {
      __stcs(reinterpret_cast<uint4*>(target + group * kStride), Vector<out_t>::pack(value));
    } else {
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        if (at + lane >= chunk.lead && at + lane < chunk.limit) {
          target[group * kStride + lane] = Vector<out_t>::round(value[lane]);
        }
      }
    }
  }
}

}  // namespace optimizer::nf4

namespace optimizer {
namespace {

constexpr int kThreads = 128;

template <typename out_t, bool kAligned, bool kNested>
void run(const nf4::Problem& p, void* out, int device, cudaStream_t stream) {
  // Best of the table in docs/dev/decisions/2026-11-21-nf4-dequant-threads.md on an H200: 97% of a
  // copy's rate aligned, 89% unaligned.
  constexpr int kGroups = kAligned ? 2 : 4;
  constexpr int64_t kChunk = int64_t{kThreads} * kGroups * Vector<out_t>::kLanes;
  // An unaligned row may start up to kLanes - 1 elements behind a 16-byte boundary of the output.
  const int64_t span = kAligned ? p.numel : p.numel + Vector<out_t>::kLanes - 1;
  const int64_t chunks = (span + kChunk - 1) / kChunk;
  const int64_t grid = chunks * p.num_active;
  launch("nf4_dequant", nf4::dequant_kernel<out_t, kAligned, kNested, kThreads, kGroups>, grid,
         kThreads, 0, starts_early(device), stream, p, static_cast<out_t*>(out),
         static_cast<uint32_t>(chunks));
}

template <typename out_t>
void dispatch(const nf4::Problem& p, void* out, int device, cudaStream_t stream) {
  const bool aligned = p.numel % Vector<out_t>::kLanes == 0 && p.packed_bytes % 4 == 0 &&
                       reinterpret_cast<uintptr_t>(p.packed) % 4 == 0;
  const bool nested = p.code != nullptr;
  if (aligned) {
    nested ? run<out_t, true, true>(p, out, device, stream)
           : run<out_t, true, false>(p, out, device, stream);
  } else {
    nested ? run<out_t, false, true>(p, out, device, stream)
           : run<out_t, false, false>(p, out, device, stream);
  }
}

}  // namespace

Tensor nf4_dequant_cuda(const Tensor& packed, const Tensor& absmax, const Tensor& active_experts,
                        IntHeaderOnlyArrayRef expert_shape, int64_t blocksize, ScalarType dtype,
                        std::optional<Tensor> codebook, std::optional<Tensor> absmax_code,
                        std::optional<Tensor> absmax_scale, std::optional<Tensor> absmax_offset) {
  const nf4::Problem p = nf4::describe(packed, absmax, active_experts, expert_shape, blocksize,
                                       codebook, absmax_code, absmax_scale, absmax_offset);
  const int device = packed.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  Tensor out = nf4::empty_output(p, expert_shape, dtype, packed);
  if (p.num_active == 0) return out;
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  switch (dtype) {
    case ScalarType::BFloat16:
      dispatch<__nv_bfloat16>(p, out.data_ptr(), device, cuda_stream);
      break;
    case ScalarType::Half:
      dispatch<__half>(p, out.data_ptr(), device, cuda_stream);
      break;
    case ScalarType::Float:
      dispatch<float>(p, out.data_ptr(), device, cuda_stream);
      break;
    default:
      STD_TORCH_CHECK(false, "nf4_dequant: dtype must be bfloat16, float16 or float32");
  }
  return out;
}

}  // namespace optimizer
