#pragma once
// Philox4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011): random bits
// that are a pure function of key and counter, so they do not depend on who computes them.

#include <cstdint>

#include "common/portable.h"

namespace optimizer {

struct Philox {
  uint32_t word[4];

  // Eight elements share one block of four words: element `lane` gets 16 bits of it. The words are
  // named, not indexed, so that they stay in registers.
  OPTIMIZER_HD uint32_t bits16(int lane) const {
    const uint32_t low = lane & 4 ? word[2] : word[0], high = lane & 4 ? word[3] : word[1];
    return (lane & 2 ? high : low) >> (16 * (lane & 1)) & 0xffffu;
  }
};

OPTIMIZER_HD Philox philox(uint64_t key, uint64_t index, uint32_t parameter, uint32_t step) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  uint32_t c0 = static_cast<uint32_t>(index), c1 = static_cast<uint32_t>(index >> 32);
  uint32_t c2 = parameter, c3 = step;
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = uint64_t{0xD2511F53u} * c0, second = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(second >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(second);
    c2 = static_cast<uint32_t>(first >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(first);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

}  // namespace optimizer
