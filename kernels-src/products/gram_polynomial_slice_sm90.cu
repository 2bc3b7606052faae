// gram_polynomial of one slice of matrices in one call of the host, for Hopper alone. Formula and
// names: orthogonalize/gram_polynomial.py. It launches the kernels of the ops that it calls, so the
// bits are theirs; what it saves is ten calls through Python and the dispatcher.

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "common/stable.h"
#include "sm90/layout.h"
#include "torch_binding.h"

namespace optimizer {

namespace {

constexpr int64_t kAutoTile = -1;

// One polynomial: M_0 = R, M_j+1 = alpha M_j M_j^T + beta M_operand + delta I, in buffer place_j.
struct Squares {
  const std::vector<int64_t>& places;
  const std::vector<int64_t>& operands;
  std::vector<double> alphas, betas, deltas;

  int64_t count() const { return static_cast<int64_t>(places.size()); }
};

// coefficients: (polynomials, squares, 3)
Squares squares_of(const std::vector<int64_t>& places, const std::vector<int64_t>& operands,
                   const std::vector<double>& coefficients, size_t polynomial) {
  const size_t count = places.size();
  std::vector<double> alphas(count), betas(count), deltas(count);
  for (size_t j = 0; j < count; ++j) {
    const double* const square = &coefficients[3 * (polynomial * count + j)];
    alphas[j] = square[0];
    betas[j] = square[1];
    deltas[j] = square[2];
  }
  return {places, operands, std::move(alphas), std::move(betas), std::move(deltas)};
}

// The last M of R (G, m, m), which is overwritten. scale (G,): M_0 is R times these. zeros: the
// counters of a chain; without them product by product.
Tensor evaluate(const Tensor& R, const Squares& squares, const std::optional<Tensor>& scale,
                const std::optional<Tensor>& zeros) {
  const int64_t last = *std::max_element(squares.places.begin(), squares.places.end());
  TensorVector buffers(last + 1, R);
  for (int64_t place = 1; place <= last; ++place) {
    buffers[place] = allocate(R, {R.size(0), R.size(1), R.size(2)}, ScalarType::Half);
  }
  if (zeros.has_value()) {
    square_chain_cuda(buffers, squares.places, squares.operands, squares.alphas, squares.betas,
                      squares.deltas, scale, 0, zeros);
    return buffers[squares.places.back()];
  }
  int64_t source = 0;
  for (int64_t j = 0; j < squares.count(); ++j) {
    const int64_t operand = squares.operands[j];
    const Tensor& M = buffers[source];
    const Tensor& added = buffers[operand == 0 ? 0 : squares.places[operand - 1]];
    const bool scaled = j == 0 || operand == 0;
    symmetric_matmul_cuda(M, M, added, buffers[squares.places[j]], squares.alphas[j],
                          squares.betas[j], squares.deltas[j], kAutoTile,
                          scaled ? scale : std::nullopt, j == 0 ? 2 : 0, operand == 0 ? 1 : 0,
                          false);
    source = squares.places[j];
  }
  return buffers[source];
}

// X X^T, or X^T X of a tall X
Tensor gram(const Tensor& x, bool tall, bool upper) {
  const int64_t matrices = x.size(0), r = x.size(1), c = x.size(2);
  const Tensor rows = tall ? viewed(x, {matrices, c, r}, {r * c, 1, c}) : x;
  const Tensor R = allocate(x, {matrices, rows.size(1), rows.size(1)}, ScalarType::Half);
  symmetric_matmul_cuda(rows, rows, std::nullopt, R, 1.0, 0.0, 0.0, kAutoTile, std::nullopt, 1, 1,
                        upper);
  return R;
}

// scale M X, or scale X M of a tall X
void apply(const Tensor& x, const Tensor& M, const Tensor& out, std::optional<Tensor> scale,
           bool tall, bool upper) {
  const int64_t storage = upper ? (tall ? 2 : 1) : 0;  // of the operand that M is
  matmul_add_cuda(tall ? x : M, tall ? M : x, std::nullopt, out, 1.0, 0.0, kAutoTile,
                  std::move(scale), storage);
}

}  // namespace

void gram_polynomial_slice_cuda(const TensorVector& pieces, const Tensor& out,
                                const std::vector<int64_t>& places,
                                const std::vector<int64_t>& operands,
                                const std::vector<double>& coefficients, double start_norm,
                                double prefactor, bool chain) {
  STD_TORCH_CHECK(out.dim() == 3 && out.scalar_type() == ScalarType::Half,
                  "gram_polynomial_slice: out must be (G, R, C), float16");
  STD_TORCH_CHECK(
      !places.empty() && places.size() == operands.size() &&
          coefficients.size() == 6 * places.size(),
      "gram_polynomial_slice: there must be a place, an operand and 2 x 3 coefficients for "
      "every square");
  for (size_t j = 0; j < places.size(); ++j) {
    STD_TORCH_CHECK(places[j] >= 0 && operands[j] >= 0 && operands[j] <= static_cast<int64_t>(j),
                    "gram_polynomial_slice: square ", j, " must add an M before it");
  }
  const int64_t matrices = out.size(0), rows = out.size(1), columns = out.size(2);
  if (out.numel() == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(out.get_device_index());
  const bool tall = rows > columns;
  const bool upper = chain && (tall ? columns : rows) > sm90::kUpperSide;
  const auto squares = static_cast<int64_t>(places.size());

  const int64_t counters = 1 + squares * matrices;  // of one chain
  std::optional<Tensor> zeros, first_zeros, second_zeros;
  if (chain) {
    zeros = allocate(out, {2 * counters}, ScalarType::Int);
    first_zeros = viewed(*zeros, {counters}, {1});
    second_zeros = viewed(*zeros, {counters}, {1}, counters);
  }
  Tensor x = allocate(out, {matrices, rows, columns}, ScalarType::Half);
  normalize_cuda(pieces, x, 1.0 / start_norm, zeros);

  Tensor M = gram(x, tall, upper);  // R = M_0
  const Tensor of_norms = allocate(out, {2 * matrices}, ScalarType::Float);
  const Tensor factors = viewed(of_norms, {matrices}, {1});
  const Tensor roots = viewed(of_norms, {matrices}, {1}, matrices);
  norm_factors_cuda(M, factors, roots, prefactor, true);
  M = evaluate(M, squares_of(places, operands, coefficients, 0), factors, first_zeros);
  {
    const Tensor next = allocate(out, {matrices, rows, columns}, ScalarType::Half);
    apply(x, M, next, roots, tall, upper);
    x = next;
  }
  M = gram(x, tall, upper);
  M = evaluate(M, squares_of(places, operands, coefficients, 1), std::nullopt, second_zeros);
  apply(x, M, out, std::nullopt, tall, upper);
}

}  // namespace optimizer
