#pragma once
// grouped_product: out[target of row] = gate (x[source of row] W_e + low[row] F_e + bias_e) for the
// rows of every expert e. What the host checks and hands to the kernel.
//
// Rows come in expert order, R of them; row i belongs to the expert whose offsets enclose it, lies
// in x at i (fan 0) or at slots[i] / fan, and goes to out at i or, scattered, at slots[i]. Every
// element is one float32 sum over growing k and then over the rank; bias and gate are applied in
// float32 and the result is rounded once. So a row's bits do not depend on the other rows.
// dots[part][slot] is a row's product with `other` before its gate, over 64 features, unrounded.

#include <cstdint>

#include "newton_schulz/product_sm90.h"

namespace optimizer::grouped_lora {

using newton_schulz::Matrices;

struct Problem {
  Matrices weight;     // (E, N, K)
  Matrices factor;     // (E, N, r); data is null without LoRA
  const void* x;       // rows of K
  const void* low;     // (R, r)
  const float* bias;   // (E, N), or null
  const float* gates;  // (R,) in slot order, or null
  const void* other;   // rows of N, or null
  float* dots;         // (ceil(N / 64), R), with other
  const int64_t* slots;
  const int64_t* offsets;
  void* out;      // (R, N)
  int64_t x_row;  // in elements
  int64_t other_row;
  int64_t experts;
  int64_t rows;  // R
  int64_t k;
  int64_t n;
  int64_t rank;
  int64_t fan;
  int64_t other_fan;
  bool scatter;
};

// Tiles by number; kernels/grouped_product.py repeats the names.
struct TileName {
  const char* name;
  int features;
  int tokens;
};
constexpr TileName kTiles[] = {{"sm90_256x128", 256, 128}, {"sm90_128x256", 128, 256}};

// Experts with this many rows on average fill wide tiles of rows.
constexpr int64_t kManyRows = 256;

inline int64_t pick(const Problem& p) { return p.rows >= kManyRows * p.experts ? 1 : 0; }

inline bool on_16_bytes(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

// Why the kernel cannot serve the problem; null if it can. Its offsets and sizes are 32-bit.
inline const char* refusal(const Problem& p, int max_experts) {
  constexpr int64_t kLargest = int64_t{1} << 30;
  if (p.k > kLargest || p.n > kLargest || p.rows > kLargest) return "a side exceeds 2^30";
  if (p.experts > max_experts) return "there are more than 512 experts";
  if (!on_16_bytes(p.x) || p.x_row % 8 != 0 || p.x_row < 0) return "rows of x start off 16 bytes";
  if (!on_16_bytes(p.out)) return "out starts off 16 bytes";
  if (p.other != nullptr &&
      (!on_16_bytes(p.other) || p.other_row % 8 != 0 || p.other_row < 0 || p.n % 8 != 0)) {
    return "rows of other start off 16 bytes";
  }
  if (!newton_schulz::fits_tensor_map(p.weight, p.n, p.k, p.experts)) {
    return "TMA cannot read weight: K or N must be contiguous, start on 16 bytes and lie a "
           "multiple "
           "of 16 bytes apart";
  }
  if (p.factor.data == nullptr) return nullptr;
  if (!on_16_bytes(p.low) || p.rank % 8 != 0) return "the rank is no multiple of 8";
  if (!newton_schulz::fits_tensor_map(p.factor, p.n, p.rank, p.experts) ||
      newton_schulz::by_rows(p.factor) != newton_schulz::by_rows(p.weight)) {
    return "factor must lie as weight does: contiguous along the rank where weight is along K, "
           "along N where weight is, on 16 bytes";
  }
  return nullptr;
}

}  // namespace optimizer::grouped_lora
