#pragma once
// nf4_product: out[target of row] = gate (x[source of row] W_e + low[row] F_e + bias_e) for the
// rows of every expert e, W read from packed bytes. What the host checks and hands to the kernel.
//
// Rows come in expert order, R of them; row i belongs to the expert whose offsets enclose it, lies
// in x at i (fan 0) or at slots[i] / fan, and goes to out at i or, scattered, at slots[i]. Every
// element is one float32 sum over growing k and then over the rank; bias and gate are applied in
// float32 and the result is rounded once. So a row's bits do not depend on the other rows.
//
// The stored stack is (E, N, K). The sum runs along K (`along`; the result has N columns) or across
// the stored rows (it has K). What is multiplied is an element times the scale of its block in
// float32, rounded once to bfloat16: the number that dequantising gives.
//
// format  | elements                                        | scales of blocks
// four bit| codebook[nibble], the even one in the high half | float32 of 2^shift elements of K
// MXFP4   | e2m1, the even one in the low half of a byte    | bytes, 2^(byte - 127), 32 of K
// FP8     | e4m3 bytes                                      | float32, 2^row_shift rows x 2^shift

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <functional>

namespace optimizer::nf4_product {

enum class Format : int { kFourBit, kMxfp4, kFp8 };

struct Problem {
  const uint8_t* packed;  // (E, N, K / 2), or (E, N, K) of FP8
  const void* absmax;     // (E, scale_rows, row_blocks)
  const float* codebook;  // (16,) of four bits
  const void* x;          // rows of `depth`
  const void* low;        // (R, r), or null without LoRA
  const void* factor;     // (E, r, columns)
  const float* bias;      // (E, columns), or null
  const float* gates;     // (R,) in slot order, or null
  const int64_t* slots;
  const int64_t* offsets;
  void* out;        // (R, columns); null with `activated` where nobody reads it
  void* activated;  // (R, columns / 2): silu of the first half times the second, or null
  int64_t x_row;    // in elements
  int64_t factor_expert;
  int64_t factor_rank;
  int64_t factor_column;
  int64_t experts;
  int64_t rows;  // R
  int64_t n;     // the stored shape
  int64_t k;
  int64_t rank;
  int64_t fan;
  int shift;
  bool along;
  bool scatter;
  Format format;
  int row_shift;  // 0 but for FP8
  bool early;     // begins before the kernel before it ended, and waits; offsets are there already

  int64_t row_blocks() const { return (k + (int64_t{1} << shift) - 1) >> shift; }
  int64_t scale_rows() const { return (n + (int64_t{1} << row_shift) - 1) >> row_shift; }
  int64_t row_bytes() const { return format == Format::kFp8 ? k : k / 2; }
  int64_t depth() const { return along ? k : n; }
  int64_t columns() const { return along ? n : k; }
};

constexpr int kMinBlock = 64;  // elements per absmax: a part of the sum (64) takes one per row

inline bool on_bytes(const void* data, int bytes) {
  return reinterpret_cast<uintptr_t>(data) % bytes == 0;
}

// Why the kernel cannot serve the problem; null if it can. Its offsets and sizes are 32-bit.
// kernels/quant/packed_product.py says the same in more words.
inline const char* refusal(const Problem& p, int max_experts) {
  constexpr int64_t kLargest = int64_t{1} << 30;
  if (p.k > kLargest || p.n > kLargest || p.rows > kLargest) return "a side exceeds 2^30";
  if (p.experts > max_experts) return "there are more than 512 experts";
  if (p.k == 0 || p.n == 0) return "a side is empty";
  if (p.format == Format::kMxfp4) {
    if (p.k % kMinBlock != 0) return "K is no multiple of 64";
    if (!on_bytes(p.absmax, 4)) return "scales start off 4 bytes";
  } else if (p.shift < 6) {
    return "the blocksize is below 64";
  } else if (p.format == Format::kFp8) {
    if (p.k % 16 != 0) return "K is no multiple of 16";
  } else if (p.k % (int64_t{1} << p.shift) != 0) {
    return "blocks leave their row";
  }
  if (p.n % 8 != 0) return "N is no multiple of 8";
  if (!on_bytes(p.packed, 16)) return "packed starts off 16 bytes";
  if (!on_bytes(p.x, 16) || p.x_row % 8 != 0 || p.x_row < 0) return "rows of x start off 16 bytes";
  if (!on_bytes(p.out, 4)) return "out starts off 4 bytes";
  if (p.activated != nullptr) {
    if (p.format != Format::kFp8 || !p.along || p.scatter || p.gates != nullptr) {
      return "the activation goes with FP8 along stored rows, in expert order and without gates";
    }
    if (!on_bytes(p.activated, 4)) return "the activation's rows start off 4 bytes";
  }
  if (p.low != nullptr && (!on_bytes(p.low, 16) || p.rank % 8 != 0)) {
    return "the rank is no multiple of 8";
  }
  constexpr int64_t kUnits = int64_t{1} << 35;  // elements: 2^32 times 16 bytes
  if (p.rows * p.x_row > kUnits || p.rows * p.rank > kUnits) return "rows take more than 64 GiB";
  return nullptr;
}

struct Launch {
  const void* kernel;
  unsigned blocks;
  unsigned threads;
  unsigned shared;  // bytes
  void* argument;   // the only one
  size_t bytes;     // of it
};

using Launcher = std::function<void(const Launch&)>;

// Hand over the launch of a problem that `refusal` has nothing against.
void run(const Problem& p, int device, const Launcher& launcher);

// The same for a format that is known.
template <Format kFormat>
void run_format(const Problem& p, int device, const Launcher& launcher);

}  // namespace optimizer::nf4_product
