#pragma once
// A chain of symmetric squares of a batch of matrices in one launch:
//
//   M_0 = scale X;  M_j+1 = alpha_j M_j M_j^T + beta_j M_i + delta_j I,  i <= j
//
// Which tile the n-th ticket is, and which buffers may hold which M. Compiled for the host as well,
// where tests check both.

#include <algorithm>
#include <cstdint>

#include "common/schedule.h"

namespace optimizer::products {

constexpr int kMostSquares = 8;
constexpr int kMostBuffers = 6;

// One product. Its M_j, M_i and M_j+1 lie in the buffers `source`, `added` and `target`.
struct Square {
  int source;
  int added;
  int target;
  float alpha;
  float beta;
  float delta;
  int alpha_power;  // of the scale; M_0 is scale X
  int beta_power;
};

// product < 0: there are no more tiles.
struct ChainTile {
  int product;
  int matrix;
  int row;
  int col;
};

// Group after group of matrices; in a group product after product, in a product matrix after
// matrix, of which the tiles on and above the diagonal. So a tile depends on earlier tickets only,
// about a group's tiles of one product before it, and a group stays in L2 until its chain is done.
struct ChainSchedule {
  TriangularSchedule tiles;  // of one result
  uint32_t matrices;
  uint32_t groups;  // as equal as can be: the first ones have one matrix more
  uint32_t products;

  OPTIMIZER_HD uint32_t per_matrix() const { return tiles.per_matrix() * products; }
  OPTIMIZER_HD uint32_t count() const { return per_matrix() * matrices; }

  OPTIMIZER_HD ChainTile locate(uint32_t ticket) const {
    const uint32_t each = tiles.per_matrix(), share = matrices / groups, more = matrices % groups;
    const uint32_t matrix = ticket / per_matrix();  // in the same group as the ticket's own
    const bool larger = matrix < more * (share + 1);
    const uint32_t size = larger ? share + 1 : share;
    const uint32_t first =
        larger ? matrix / size * size : matrix - (matrix - more * (share + 1)) % size;
    const uint32_t inside = ticket - first * per_matrix();
    const uint32_t product = inside / (size * each), rest = inside % (size * each);
    const TileOrigin origin = tiles.locate(rest % each);
    return {static_cast<int>(product), static_cast<int>(first + rest / each), origin.row,
            origin.col};
  }
};

// Groups that the matrices go through the chain in: as small as leaves every multiprocessor a tile
// while others are under way, so that a group stays in L2. The longer a tile takes, the more tiles
// wait for its last one, and the less its bytes matter: 2 tiles per multiprocessor and one more for
// every 256 rows.
inline int64_t group_count(int64_t matrices, const TriangularSchedule& tiles, int64_t processors) {
  const int64_t count = matrices * tiles.per_matrix();
  const int64_t group = processors * (4 + tiles.wide) / 2;
  return std::max<int64_t>(std::min((count + group / 2) / group, matrices), 1);
}

// Why M_target may not be put where places says; null if it may. places[j]: the buffer of M_j+1;
// M_0 lies in buffer 0. When product j runs on a matrix, products 0 to j - 1 are done with it: what
// they alone read may be overwritten, what product j or a later one reads may not.
inline const char* chain_refusal(const int64_t* operands, const int64_t* places, int64_t squares,
                                 int64_t buffers) {
  int held[kMostBuffers];  // which M a buffer holds
  for (int& term : held) term = -1;
  held[0] = 0;
  for (int64_t j = 0; j < squares; ++j) {
    if (operands[j] < 0 || operands[j] > j) return "operand j must be one of M_0 to M_j";
    if (places[j] < 0 || places[j] >= buffers) return "a place is no buffer";
    const int old = held[places[j]];
    bool needed = old == j;
    for (int64_t later = j; later < squares; ++later) needed |= operands[later] == old;
    if (old >= 0 && needed) return "a place holds what this product or a later one reads";
    held[places[j]] = static_cast<int>(j + 1);
  }
  return nullptr;
}

}  // namespace optimizer::products
