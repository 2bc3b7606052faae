// The kernels of nf4_product over MXFP4 and FP8, which take a compiler as long as those over NF4 do
// in nf4_product_sm90.cu.

#include "quant/nf4_launch_sm90.cuh"

namespace optimizer::nf4_product {

template void run_format<Format::kMxfp4>(const Problem& p, int device, const Launcher& launcher);
template void run_format<Format::kFp8>(const Problem& p, int device, const Launcher& launcher);

}  // namespace optimizer::nf4_product
