// The schedule of a chain of squares for test_square_chain.py, compiled for the host.

#include "products/chain.h"

using namespace optimizer;
using namespace optimizer::products;

extern "C" {

int most_squares() { return kMostSquares; }
int most_buffers() { return kMostBuffers; }

int64_t groups(int64_t matrices, int m, int64_t processors) {
  return group_count(matrices, TriangularSchedule::of(m, 128, 128), processors);
}

// Of every ticket: product, matrix, row, column. How many there are.
int64_t tickets(int m, int rows, int cols, int matrices, int groups, int products, int* found) {
  const ChainSchedule schedule{TriangularSchedule::of(m, rows, cols),
                               static_cast<uint32_t>(matrices), static_cast<uint32_t>(groups),
                               static_cast<uint32_t>(products)};
  for (uint32_t ticket = 0; found != nullptr && ticket < schedule.count(); ++ticket) {
    const ChainTile tile = schedule.locate(ticket);
    *found++ = tile.product, *found++ = tile.matrix, *found++ = tile.row, *found++ = tile.col;
  }
  return schedule.count();
}

const char* refused(const int64_t* operands, const int64_t* places, int64_t squares,
                    int64_t buffers) {
  const char* reason = chain_refusal(operands, places, squares, buffers);
  return reason == nullptr ? "" : reason;
}

}  // extern "C"
