#pragma once
// A launch plan: the launches of a function of tensors, recorded once, to be played again on other
// addresses. kernels/launch/launch_plan.py records and encodes it; this is what its integers mean.
//
// program   seconds                       how many streams are beside the current one, which is 0
//           buffers, {dtype, dims, size..., stride...}...
//           results, buffer...
//           steps, {kind, ...}...
// step      kAllocate buffer | kFree buffer | kWait stream awaited
//           kLaunch stream function threads shared x y z early arguments {base, value}...
//           kNf4Product stream sizes..., {base, value}... as in `read_product`
// argument  base < 0: value is its 8 bytes; else its address is that of base and so many bytes.
//           Base counts the operands of the call, then the buffers.

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "common/stable.h"
#include "launch/launch_graph.h"
#include "quant/nf4_product.h"

namespace optimizer::launch_plan {

struct Buffer {
  int32_t dtype;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
};

struct Argument {
  int32_t base;
  int64_t value;
};

enum Kind : int64_t { kAllocate, kFree, kWait, kLaunch, kNf4Product };

struct Step {
  Kind kind;
  int32_t first;   // buffer; stream
  int32_t second;  // kWait: the awaited stream
  CUfunction function;
  unsigned grid[3];
  unsigned threads;
  unsigned shared;  // bytes
  bool early;       // begins before its predecessor ended
  std::vector<Argument> arguments;
  nf4_product::Problem product;  // its addresses are the arguments
};

struct Plan {
  size_t seconds = 0;  // streams from 1 on
  std::vector<Buffer> buffers;
  std::vector<int32_t> results;
  std::vector<Step> steps;
  std::unique_ptr<Graphs> graphs = std::make_unique<Graphs>();
};

}  // namespace optimizer::launch_plan
