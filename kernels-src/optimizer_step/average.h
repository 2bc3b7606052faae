#pragma once
// A moving average: beta old + (1 - beta) given, as torch.lerp forms it.
//
// The change is added to the end that weighs more. From the other one a small value would be lost:
// with beta = 0, old + (given - old) is 0 for old = 4 and given = 1e-10. This way the result of two
// numbers of one sign is off by at most four roundings of it, it is exactly `old` for beta = 1 and
// exactly `given` for beta = 0, and the average of equal numbers is that number.

#include "common/portable.h"

namespace optimizer {

struct Average {
  float beta;
  float weight;  // 1 - beta
  bool slow;     // whether the old value weighs more

  OPTIMIZER_HD float of(float old, float given) const {
    const float change = given - old;
    return slow ? old + change * weight : given - change * beta;
  }
};

// 1 - beta is taken in float64 and rounded once.
OPTIMIZER_HD Average average_of(double beta) {
  return {static_cast<float>(beta), static_cast<float>(1.0 - beta), 1.0 - beta < 0.5};
}

}  // namespace optimizer
