// The kernels of nf4_product over MXFP4.

#include "quant/nf4_launch_sm90.cuh"

namespace optimizer::nf4_product {

template void run_format<Format::kMxfp4>(const Problem& p, int device, cudaStream_t stream);

}  // namespace optimizer::nf4_product
