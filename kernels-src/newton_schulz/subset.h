#pragma once
// Some matrices of a batch, chosen on the device: (1 + batch,) int32, how many, then which, in
// growing order. A null pointer means all. Kernels that take one work on those matrices and leave
// the others as they are; no host waits to learn how many there are.

#include <cstdint>

#include "common/portable.h"

namespace optimizer {

OPTIMIZER_HD int64_t matrices_in(const int32_t* subset, int64_t batch) {
  return subset == nullptr ? batch : subset[0];
}
OPTIMIZER_HD int64_t matrix_at(const int32_t* subset, int64_t place) {
  return subset == nullptr ? place : subset[1 + place];
}

}  // namespace optimizer
