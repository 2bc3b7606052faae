#pragma once
// The launch of the product over packed weights: what a problem becomes for the kernel.

#include <algorithm>
#include <array>
#include <atomic>

#include "quant/nf4_product.h"
#include "quant/nf4_product_sm90.cuh"
#include "sm90/launch.cuh"

namespace optimizer::nf4_product {

// The stack's bytes, in boxes of a stage, whose lines are swizzled by their length: 32 bytes along,
// 64 across; twice that of FP8, and of a deep stage along, and half where a consumer has a box of
// its own across.
inline CUtensorMap packed_map(const Problem& p, int stage_depth, int columns) {
  const auto row_bytes = static_cast<cuuint64_t>(p.row_bytes());
  const auto lines = static_cast<cuuint64_t>(p.n);
  const cuuint64_t dims[] = {row_bytes, lines, static_cast<cuuint64_t>(p.experts)};
  const cuuint64_t strides[] = {row_bytes, row_bytes * lines};
  const cuuint32_t per_byte = p.format == Format::kFp8 ? 1 : 2;
  const cuuint32_t line = (p.along ? stage_depth : columns) / per_byte;
  const cuuint32_t box[] = {line, static_cast<cuuint32_t>(p.along ? columns : kDepth), 1};
  const auto swizzle = line == 32   ? CU_TENSOR_MAP_SWIZZLE_32B
                       : line == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                    : CU_TENSOR_MAP_SWIZZLE_128B;
  const cuuint32_t steps[] = {1, 1, 1};
  CUtensorMap map;
  const CUresult result =
      sm90::map_encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, const_cast<uint8_t*>(p.packed),
                          dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                          CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  STD_TORCH_CHECK(result == CUDA_SUCCESS, "cuTensorMapEncodeTiled failed with error ",
                  static_cast<int>(result), " for ", p.experts, " x ", p.n, " x ", p.row_bytes(),
                  " bytes");
  return map;
}

template <typename Map>
Arguments arguments_of(const Problem& p) {
  Arguments args{};
  args.packed = packed_map(p, Map::kStageDepth, Map::kCopyColumns);
  args.absmax = p.absmax;
  args.codebook = p.codebook;
  args.x = static_cast<const char*>(p.x);
  args.low = static_cast<const char*>(p.low);
  args.factor = static_cast<const char*>(p.factor);
  args.bias = p.bias;
  args.gates = p.gates;
  args.slots = p.slots;
  args.offsets = p.offsets;
  args.out = static_cast<char*>(p.out);
  args.activated = static_cast<char*>(p.activated);
  args.x_row = p.x_row * 2;
  args.low_row = p.rank * 2;
  args.factor_expert = p.factor_expert * 2;
  args.factor_rank = p.factor_rank * 2;
  args.factor_column = p.factor_column * 2;
  args.experts = static_cast<int>(p.experts);
  args.rows = static_cast<int>(p.rows);
  args.stored_rows = static_cast<int>(p.n);
  args.row_blocks = static_cast<int>(p.row_blocks());
  args.shift = p.shift;
  args.depth = static_cast<int>(p.depth());
  args.columns = static_cast<int>(p.columns());
  args.rank = static_cast<int>(p.rank);
  args.fan = static_cast<int>(p.fan);
  args.tile_columns = Map::kColumns;  // of both boxes, where a tile has two
  args.box_columns = Map::kBoxColumns;
  int width = args.columns;
  if (p.activated != nullptr) {  // the second box holds the columns that the first's go with
    width = args.box_columns = args.columns / 2;
    args.tile_columns = Map::kBoxColumns;
  }
  args.column_blocks = (width + args.tile_columns - 1) / args.tile_columns;
  args.scatter = p.scatter;
  args.row_shift = p.row_shift;
  args.scale_rows = static_cast<int>(p.scale_rows());
  return args;
}

// The multiprocessors of a device, on which a kernel may take `shared` bytes from now on. Both stay
// as they are, so `known`, which is the kernel's own, asks the driver once per device.
template <typename Kernel>
int processors_for(Kernel kernel, int shared, int device, std::array<std::atomic<int>, 64>& known) {
  const size_t place = static_cast<size_t>(device) % known.size();
  const bool has_place = static_cast<size_t>(device) == place;
  int count = has_place ? known[place].load(std::memory_order_acquire) : 0;
  if (count == 0) {
    STD_CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    count = sm90::processors_of(device);
    if (has_place) known[place].store(count, std::memory_order_release);
  }
  return count;
}

// Mean rows per expert that are few, some or many.
constexpr int64_t kFewRows = 32;
constexpr int64_t kSomeRows = 64;
constexpr int64_t kManyRows = 160;

template <bool kAlong, Format kFormat, bool kActivates, Rows kRows>
void launch(const Problem& p, int device, const Launcher& launcher) {
  using Map = SharedMap<kAlong, kFormat, kRows>;
  Arguments args = arguments_of<Map>(p);
  const auto kernel = nf4_product_kernel<kAlong, kFormat, kActivates, kRows>;
  constexpr int kShared = Map::kBytes;
  static std::array<std::atomic<int>, 64> known{};
  const int64_t processors = processors_for(kernel, kShared, device, known);
  // Most tiles that the rows can make; how many there are is known on the device alone.
  const int64_t most = (p.rows / Map::kTokens + std::min(p.experts, p.rows)) * args.column_blocks;
  STD_TORCH_CHECK(most < int64_t{1} << 31, "nf4_product: there are more than 2^31 tiles");
  const auto blocks = static_cast<unsigned>(std::min(most, processors * Map::kBlocks));
  launcher(
      {reinterpret_cast<const void*>(kernel), blocks, Map::kThreads, kShared, &args, sizeof(args)});
}

template <Format kFormat, Rows kRows>
void launch(const Problem& p, int device, const Launcher& launcher) {
  return p.along ? launch<true, kFormat, false, kRows>(p, device, launcher)
                 : launch<false, kFormat, false, kRows>(p, device, launcher);
}

template <Format kFormat>
void run_format(const Problem& p, int device, const Launcher& launcher) {
  if constexpr (kFormat == Format::kFp8) {
    if (p.activated != nullptr)
      return launch<true, kFormat, true, Rows::kMost>(p, device, launcher);
  } else if (p.rows <= kFewRows * p.experts) {
    return launch<kFormat, Rows::kFew>(p, device, launcher);
  } else if (p.rows <= kSomeRows * p.experts) {
    return launch<kFormat, Rows::kSome>(p, device, launcher);
  }
  if constexpr (kFormat == Format::kFourBit) {
    if (p.rows <= kManyRows * p.experts) return launch<kFormat, Rows::kMany>(p, device, launcher);
  }
  return launch<kFormat, Rows::kMost>(p, device, launcher);
}

}  // namespace optimizer::nf4_product
