#pragma once
// Where things lie in shared memory and in registers, as wgmma and TMA want them: arithmetic only,
// after the tables of the PTX ISA.
//
// Everything is made of blocks of 64 lines of 128 bytes, each the box of one TMA copy: 64 x 64
// elements of 16 bits whose 16-byte chunks are XORed with the line modulo 8 (128-byte swizzle).
// A line is a row of the operand with 64 of k (k-major), or one k with 64 rows (rows-major).

#include <cstdint>

#include "common/portable.h"

namespace optimizer::sm90 {

constexpr int kBlockSide = 64;
constexpr int kLineBytes = 2 * kBlockSide;
constexpr int kBlockBytes = kBlockSide * kLineBytes;
constexpr int kGroupBytes = 8 * kLineBytes;  // 8 lines: where the swizzle repeats
constexpr int kInstructionDepth = 16;        // k of one wgmma

// Byte offset of a 16-byte chunk (0 to 7) of a line in a block that starts on 1024 bytes.
OPTIMIZER_HD uint32_t swizzled(uint32_t line, uint32_t chunk) {
  return line * kLineBytes + (chunk ^ line % 8) * 16;
}

// The 64-bit matrix descriptor of wgmma (PTX ISA, "Matrix descriptor"): start, leading and stride
// byte offsets in units of 16 bytes in bits 0-13, 16-29, 32-45; base offset 0 in 49-51, since
// blocks start on 1024 bytes; 128-byte swizzle is 1 in bits 62-63.
//
// k-major: stride offset from 8 rows to the next 8; the leading offset is not read.
// rows-major: stride offset from 8 of k to the next 8, leading offset from 64 rows to the next 64.
OPTIMIZER_HD uint64_t matrix_descriptor(uint32_t shared_address) {
  constexpr uint64_t kLeading = kBlockBytes / 16, kStride = kGroupBytes / 16, kSwizzle128 = 1;
  return static_cast<uint64_t>((shared_address & 0x3ffff) >> 4) | kLeading << 16 | kStride << 32 |
         kSwizzle128 << 62;
}

// What instruction `step` of a stage adds to the descriptor of an operand to read its rows from
// block `block` on. A step is 32 bytes further in every line, which the hardware adds before it
// swizzles, or 16 lines further.
template <bool kRowsMajor>
OPTIMIZER_HD uint64_t descriptor_offset(int block, int step) {
  return (block * kBlockBytes + step * kInstructionDepth * (kRowsMajor ? kLineBytes : 2)) / 16;
}

// A symmetric matrix in upper storage has its blocks of kUpperSide x kUpperSide on and above the
// diagonal only. What lies below it is read as the transpose of what lies above.
constexpr int kUpperSide = 128;
OPTIMIZER_HD bool is_above_diagonal(int row, int col) {
  return col / kUpperSide >= row / kUpperSide;
}
// Stages of k, from the first on, that rows of the block of `row` find below the diagonal.
OPTIMIZER_HD int stages_below_diagonal(int row) {
  return row / kUpperSide * (kUpperSide / kBlockSide);
}

// The first register of the pair that matrix q (0 to 3, see below) has in columns [16 j, 16 j +
// 16).
OPTIMIZER_HD int fragment_register(int j, int q) { return 4 * (2 * j + q / 2) + 2 * (q % 2); }

// Thread t of the warpgroup holds, packed in pairs, its warp's 16 rows of columns [16 j, 16 j + 16)
// of the i-th 64 rows: four 8 x 8 matrices for ldmatrix and stmatrix, rows 0-7 and 8-15 of columns
// 0-7, then of columns 8-15. Lane l names line l % 8 of matrix l / 8: here, its place in a part
// that is `wide` blocks wide.
OPTIMIZER_HD uint32_t fragment_offset(int thread, int i, int j, int wide) {
  const int line = thread / 32 * 16 + thread % 16;
  return (i * wide + j / 4) * kBlockBytes + swizzled(line, j % 4 * 2 + thread % 32 / 16);
}

// The same four matrices stored as their transposes: the place in the transposed part, which is
// `tall` blocks wide. A line is a column of the part.
OPTIMIZER_HD uint32_t mirrored_offset(int thread, int i, int j, int tall) {
  const int lane = thread % 32;
  const int line = j % 4 * 16 + lane / 16 * 8 + lane % 8;
  return (j / 4 * tall + i) * kBlockBytes + swizzled(line, thread / 32 * 2 + lane / 8 % 2);
}

}  // namespace optimizer::sm90
