// CUDA backend of nf4_quantize; thresholds and checks: nf4_quantize.h.
//
// Bound by its bytes: sizeof(T) read, 0.5 + 4 / blocksize written per element. Not measured yet.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "quant/nf4_quantize.h"

namespace optimizer::nf4_quant {

// The kernel of nf4_quantize. One thread holds eight neighbours, which make one word of nibbles;
// a thread block covers kSpan elements, one or more whole quantisation blocks.
//
// The arithmetic is bitsandbytes': approximate reciprocal, products and maxima that flush subnormal
// numbers. Hence the PTX: whatever flags this file is compiled with, these are the instructions.

constexpr int kLanes = 8;
constexpr int kThreads = 512;
constexpr int kSpan = kThreads * kLanes;  // 4096, the largest blocksize
constexpr int kWarps = kThreads / 32;

__constant__ const Nf4Thresholds kNf4{};
__constant__ const Fp4Thresholds kFp4{};

__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float product(float x, float y) {
  float z;
  asm("mul.ftz.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

// NaN wins: a weight that is not a number must not vanish. bitsandbytes drops it.
__device__ __forceinline__ float maximum(float x, float y) {
  float z;
  asm("max.ftz.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// Elements [at, at + kLanes) of the weight; behind its end there are zeros.
template <typename T, bool kVector>
__device__ __forceinline__ void load(const Problem& p, int64_t at, float (&x)[kLanes]) {
  const T* source = static_cast<const T*>(p.weight) + at;
  if (kVector && at + kLanes <= p.numel) {
    constexpr int kWords = kLanes * sizeof(T) / sizeof(uint4);
    uint4 raw[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) raw[i] = __ldg(reinterpret_cast<const uint4*>(source) + i);
    const T* value = reinterpret_cast<const T*>(raw);
#pragma unroll
    for (int i = 0; i < kLanes; ++i) x[i] = to_float(value[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kLanes; ++i) x[i] = at + i < p.numel ? to_float(source[i]) : 0.0f;
  }
}

template <bool kFp4Type>
__device__ __forceinline__ uint32_t nibble(float x) {
  int rank = 0;
  if constexpr (kFp4Type) {
#pragma unroll
    for (int i = 0; i < 7; ++i) rank += fabsf(x) > kFp4.value[i];
    return (kFp4Order >> 4 * rank & 15) | (x < 0.0f ? 8u : 0u);
  } else {
#pragma unroll
    for (int i = 0; i < 15; ++i) rank += x > kNf4.value[i];
    return static_cast<uint32_t>(rank);
  }
}

// The maximum over the threads of a quantisation block; `scratch` has one place per warp.
__device__ __forceinline__ float block_maximum(float x, int threads_per_block, float* scratch) {
  const int lanes = min(threads_per_block, 32);
  for (int offset = lanes / 2; offset > 0; offset /= 2) {
    x = maximum(x, __shfl_xor_sync(0xffffffffu, x, offset));
  }
  if (threads_per_block <= 32) return x;  // the same for every thread of the grid
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (threadIdx.x % 32 == 0) scratch[warp] = x;
  __syncthreads();
  const int warps = threads_per_block / 32;
  const int first = warp / warps * warps;
  for (int i = 0; i < warps; ++i) x = maximum(x, scratch[first + i]);
  return x;
}

template <typename T, bool kFp4Type, bool kVector>
__global__ void __launch_bounds__(kThreads) quantize_kernel(const Problem p) {
  __shared__ float scratch[kWarps];
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kSpan + threadIdx.x * kLanes;
  float x[kLanes];
  load<T, kVector>(p, at, x);
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kLanes; ++i) largest = maximum(largest, fabsf(x[i]));
  const int threads_per_block = (1 << p.block_shift) / kLanes;
  largest = block_maximum(largest, threads_per_block, scratch);
  if (at >= p.numel) return;  // no barrier behind this line
  if (threadIdx.x % threads_per_block == 0) p.absmax[at >> p.block_shift] = largest;

  const float scale = reciprocal(largest);
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < kLanes; ++i) {
    // Byte i / 2 of the word; its high nibble is the even element.
    word |= nibble<kFp4Type>(product(x[i], scale)) << (8 * (i / 2) + (i % 2 == 0 ? 4 : 0));
  }
  uint8_t* const target = p.packed + at / 2;
  if (at + kLanes <= p.numel) {
    *reinterpret_cast<uint32_t*>(target) = word;
  } else {
    const int bytes = static_cast<int>(p.numel - at + 1) / 2;
    for (int i = 0; i < bytes; ++i) target[i] = static_cast<uint8_t>(word >> 8 * i);
  }
}

}  // namespace optimizer::nf4_quant

namespace optimizer {
namespace {

using nf4_quant::Problem;

template <typename T, bool kFp4Type>
void launch(const Problem& p, cudaStream_t stream) {
  const int64_t grid = (p.numel + nf4_quant::kSpan - 1) / nf4_quant::kSpan;
  STD_TORCH_CHECK(grid <= INT32_MAX, "nf4_quantize: ", grid, " thread blocks are more than a grid");
  const bool vector = reinterpret_cast<uintptr_t>(p.weight) % sizeof(uint4) == 0;
  const auto kernel = vector ? nf4_quant::quantize_kernel<T, kFp4Type, true>
                             : nf4_quant::quantize_kernel<T, kFp4Type, false>;
  kernel<<<static_cast<unsigned>(grid), nf4_quant::kThreads, 0, stream>>>(p);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

template <typename T>
void dispatch(const Problem& p, bool fp4, cudaStream_t stream) {
  fp4 ? launch<T, true>(p, stream) : launch<T, false>(p, stream);
}

}  // namespace

void nf4_quantize_cuda(const Tensor& weight, const Tensor& packed, const Tensor& absmax,
                       int64_t blocksize, bool fp4) {
  const Problem p = nf4_quant::describe(weight, packed, absmax, blocksize);
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(p.packed) % 4 == 0,
                  "nf4_quantize: packed must start on a 4-byte boundary");
  if (p.numel == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(weight.get_device_index());
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(weight.get_device_index(), &stream));
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  switch (weight.scalar_type()) {
    case ScalarType::BFloat16:
      return dispatch<__nv_bfloat16>(p, fp4, cuda_stream);
    case ScalarType::Half:
      return dispatch<__half>(p, fp4, cuda_stream);
    case ScalarType::Float:
      return dispatch<float>(p, fp4, cuda_stream);
    default:
      STD_TORCH_CHECK(false, "nf4_quantize: weight must be bfloat16, float16 or float32");
  }
}

}  // namespace optimizer
