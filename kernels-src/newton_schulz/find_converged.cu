// CUDA backend of find_converged: of the matrices that a short polynomial was tried for, those that
// it served, by the residuals; and all others.

#include "newton_schulz/find_subsets.cuh"

namespace optimizer {
namespace {

using namespace normalization;

struct Converged {
  double bound;   // of the squares
  double filled;  // rows of zeros, which hold -1 on the diagonal
  int count;
  int32_t* found;
  int32_t* subset;
  int32_t* rest;

  __device__ __forceinline__ void decide(int64_t matrix, double squares, double) const {
    found[matrix] = squares - filled <= bound;
  }
  __device__ __forceinline__ void write_lists() const {
    gather_marked(found, count, 1, subset);
    gather_marked(found, count, 0, rest);
  }
};

}  // namespace

void find_converged_cuda(const Tensor& residual, double bound, int64_t side, const Tensor& found,
                         const Tensor& subset, const Tensor& rest, const Tensor& zeros) {
  constexpr const char* kOp = "find_converged";
  check_matrices(residual, side, kOp);
  check_list(found, residual, 0, kOp);
  check_list(subset, residual, 1, kOp);
  check_list(rest, residual, 1, kOp);
  check_list(zeros, residual, 1, kOp);
  const Converged decision{bound * static_cast<double>(side),
                           static_cast<double>(residual.size(1) - side),
                           static_cast<int>(residual.size(0)),
                           list_of(found),
                           list_of(subset),
                           list_of(rest)};
  find(residual, list_of(subset), zeros, decision, kOp);
}

}  // namespace optimizer
