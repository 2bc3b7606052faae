// CUDA backend of find_well_conditioned: the Gram matrices that a short polynomial may serve, and
// the factors that all of them need.

#include "newton_schulz/find_subsets.cuh"

namespace optimizer {
namespace {

using namespace normalization;

constexpr int kFactors = 4;  // per matrix

// Eigenvalues of mean t and relative variance v are taken to lie within t (1 -+ sqrt(v))^2, as
// those of X X^T do for independent elements (Marchenko and Pastur 1967, v = m / n). Whoever relies
// on it checks the result: find_converged.
struct WellConditioned {
  double prefactor;
  double spread;
  int side;  // of the matrices that zeros fill up
  int count;
  float* factors;  // (kFactors, count)
  int32_t* found;
  int32_t* subset;

  __device__ __forceinline__ void decide(int64_t matrix, double squares, double trace) const {
    const Factor factor = factor_of(squares, prefactor);
    const double general = static_cast<double>(factor.power) * factor.rest;
    const double mean = trace / side;
    const double variance = squares / (side * mean * mean) - 1.0;
    const double root = sqrt(fmax(variance, 0.0));
    const double largest = mean * (1.0 + root) * (1.0 + root);
    const bool well = variance > -1.0 && root <= spread && mean > 0.0;  // false for NaN
    const double narrow = well ? 1.0 / largest : 0.0;
    factors[matrix] = static_cast<float>(general);
    factors[count + matrix] = static_cast<float>(sqrt(general));
    factors[2 * count + matrix] = static_cast<float>(narrow);
    factors[3 * count + matrix] = static_cast<float>(sqrt(narrow));
    found[matrix] = well;
  }
  __device__ __forceinline__ void write_lists() const { gather_marked(found, count, 1, subset); }
};

}  // namespace

void find_well_conditioned_cuda(const Tensor& r, double prefactor, double spread, int64_t side,
                                const Tensor& factors, const Tensor& found, const Tensor& subset,
                                const Tensor& zeros) {
  constexpr const char* kOp = "find_well_conditioned";
  check_matrices(r, side, kOp);
  check_list(found, r, 0, kOp);
  check_list(subset, r, 1, kOp);
  check_list(zeros, r, 1, kOp);
  STD_TORCH_CHECK(factors.dim() == 2 && factors.size(0) == kFactors &&
                      factors.size(1) == r.size(0) && factors.is_contiguous() &&
                      factors.scalar_type() == ScalarType::Float && factors.device() == r.device(),
                  kOp, ": factors must be (4, G), contiguous, float32, on r's device");
  STD_TORCH_CHECK(prefactor > 0, kOp, ": prefactor must be positive");
  const WellConditioned decision{prefactor,
                                 spread,
                                 static_cast<int>(side),
                                 static_cast<int>(r.size(0)),
                                 static_cast<float*>(factors.data_ptr()),
                                 list_of(found),
                                 list_of(subset)};
  find(r, nullptr, zeros, decision, kOp);
}

}  // namespace optimizer
