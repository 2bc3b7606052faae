#pragma once
// Tensor maps and launches of the sm_90a kernels.

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "sm90/problem.h"
#include "sm90/product.cuh"

namespace optimizer::sm90 {

// From the driver that runs; the library does not link against it.
inline PFN_cuTensorMapEncodeTiled_v12000 map_encoder() {
  static const auto encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    STD_CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                    cudaEnableDefault, &result));
    STD_TORCH_CHECK(
        result == cudaDriverEntryPointSuccess && function != nullptr,
        "the CUDA driver has no cuTensorMapEncodeTiled; it must be of CUDA 12 or newer");
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  return encoder;
}

// A batch of rows x cols matrices for copies of 64 x 64 elements. The inner dimension is the
// contiguous one; sides of one element have whatever stride, so theirs is set to a valid one.
inline CUtensorMap tensor_map(const Matrices& x, int rows, int cols, int64_t batches,
                              ScalarType dtype) {
  const bool rows_first = by_rows(x);
  const auto inner = static_cast<cuuint64_t>(rows_first ? cols : rows);
  const auto lines = static_cast<cuuint64_t>(rows_first ? rows : cols);
  const int64_t line = rows_first ? x.row : x.col;
  const cuuint64_t dims[] = {inner, lines, static_cast<cuuint64_t>(batches)};
  const cuuint64_t line_bytes = lines == 1 ? (inner * 2 + 15) / 16 * 16 : line * 2;
  const cuuint64_t batch_bytes = batches == 1 ? line_bytes : x.batch * 2;
  const cuuint64_t strides[] = {line_bytes, batch_bytes};
  const cuuint32_t box[] = {kBlockSide, kBlockSide, 1}, steps[] = {1, 1, 1};
  CUtensorMap map;
  const CUresult result =
      map_encoder()(&map,
                    dtype == ScalarType::Half ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                              : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                    3, const_cast<void*>(x.data), dims, strides, box, steps,
                    CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                    CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  STD_TORCH_CHECK(result == CUDA_SUCCESS, "cuTensorMapEncodeTiled failed with error ",
                  static_cast<int>(result), " for ", batches, " x ", rows, " x ", cols,
                  " with strides ", x.batch, ", ", x.row, ", ", x.col);
  return map;
}

inline int processors_of(int device) {
  int count = 0;
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

// The kernels are machine code for compute capability 9.0 and nothing else.
inline bool runs_sm90(int device) {
  int major = 0, minor = 0;
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  return major == 9 && minor == 0;
}

template <typename T, typename kTile, bool kSymmetric, bool kARowsMajor, bool kBRowsMajor,
          int kUpper = 0>
void launch(const Problem& p, int device, cudaStream_t stream) {
  using Schedule = std::conditional_t<kSymmetric, TriangularSchedule, RectangularSchedule>;
  using Args = Arguments<Schedule>;
  constexpr ScalarType kDtype = std::is_same_v<T, __half> ? ScalarType::Half : ScalarType::BFloat16;
  Args args{};
  args.a = tensor_map(p.a, p.m, p.k, p.batches, kDtype);
  args.b = tensor_map(p.b, p.n, p.k, p.batches, kDtype);
  args.out = tensor_map(p.out, p.m, p.n, p.batches, kDtype);
  args.reads_c = p.c.data != nullptr;
  if (args.reads_c) args.c = tensor_map(p.c, p.m, p.n, p.batches, kDtype);
  if constexpr (kSymmetric) {
    static_assert((kTile::kRows & (kTile::kRows - 1)) == 0 &&
                  static_cast<int>(kBand) * kTile::kCols % kTile::kRows == 0);
    args.schedule = Schedule::of(p.m, kTile::kRows, kTile::kCols);
    args.one_operand = p.a.data == p.b.data && p.a.row == p.b.row && p.a.col == p.b.col &&
                       (p.a.batch == p.b.batch || p.batches == 1);
  } else {
    args.schedule = Schedule::of(p.m, p.n, kTile::kRows, kTile::kCols);
  }
  args.batches = p.batches;
  args.out_data = const_cast<void*>(p.out.data);
  args.out_batch = p.out.batch;
  args.out_row = p.out.row;
  args.scale = p.scale;
  args.m = p.m;
  args.n = p.n;
  args.k = p.k;
  args.alpha = p.alpha;
  args.beta = p.beta;
  args.diag = p.diag;
  args.alpha_power = p.alpha_power;
  args.beta_power = p.beta_power;
  args.upper_out = p.upper_out;

  const auto kernel = product_kernel<T, kTile, kSymmetric, kARowsMajor, kBRowsMajor, kUpper, Args>;
  STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      kTile::kSharedBytes));
  // The kernel begins while the one before it ends, and waits before it touches memory.
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kTile::kSharedBytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  config.gridDim = dim3(static_cast<unsigned>(
      std::min<int64_t>(args.schedule.per_matrix() * p.batches, processors_of(device))));
  STD_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, args));
}

// reason: why the kernels cannot serve the call, or null.
inline void check_sm90(const char* op, const char* reason, int device) {
  STD_TORCH_CHECK(runs_sm90(device), op, ": the sm90 tiles need a device of capability 9.0");
  STD_TORCH_CHECK(reason == nullptr, op,
                  ": the sm90 tiles cannot serve this call: ", reason == nullptr ? "" : reason);
}

}  // namespace optimizer::sm90
