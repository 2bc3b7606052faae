// square_chain by TMA and wgmma, for Hopper alone: chain.h has the formula, chain_sm90.cuh the
// kernel. The bits are those of symmetric_matmul product by product: every element is one float32
// sum over growing k, finished by the same operations, whatever the groups.

#include <vector>

#include "products/chain_sm90.cuh"
#include "sm90/launch.cuh"

namespace optimizer {
namespace products {
namespace {

using TensorVector = std::vector<Tensor>;
struct Chain {
  std::vector<Matrices> buffers;
  std::vector<Square> squares;
  const float* scale;
  int64_t batches;
  int m;
  int64_t groups;  // 0: group_count
};

Chain describe(const TensorVector& buffers, const std::vector<int64_t>& places,
               const std::vector<int64_t>& operands, const std::vector<double>& alphas,
               const std::vector<double>& betas, const std::vector<double>& deltas,
               const std::optional<Tensor>& scale, int64_t groups) {
  const auto squares = static_cast<int64_t>(operands.size());
  const auto held = static_cast<int64_t>(buffers.size());
  STD_TORCH_CHECK(squares >= 1 && squares <= kMostSquares,
                  "square_chain: there must be 1 to 8 squares, got ", squares);
  STD_TORCH_CHECK(places.size() == operands.size() && alphas.size() == operands.size() &&
                      betas.size() == operands.size() && deltas.size() == operands.size(),
                  "square_chain: every square needs a place, an operand, alpha, beta and delta");
  STD_TORCH_CHECK(held >= 2 && held <= kMostBuffers,
                  "square_chain: there must be 2 to 6 buffers, got ", held);
  const char* reason = chain_refusal(operands.data(), places.data(), squares, held);
  STD_TORCH_CHECK(reason == nullptr, "square_chain: ", reason == nullptr ? "" : reason);
  const Tensor& x = buffers[0];
  STD_TORCH_CHECK(x.dim() == 3 && x.size(1) == x.size(2) && x.size(1) <= kLargestSide,
                  "square_chain: buffers must be (batch, m, m), m at most 2^20");
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Half, "square_chain: buffers must be float16");
  Chain chain{{}, {}, nullptr, x.size(0), static_cast<int>(x.size(1)), groups};
  for (const Tensor& buffer : buffers) {
    STD_TORCH_CHECK(buffer.dim() == 3 && buffer.size(0) == x.size(0) &&
                        buffer.size(1) == x.size(1) && buffer.size(2) == x.size(2) &&
                        buffer.scalar_type() == x.scalar_type() && buffer.device() == x.device(),
                    "square_chain: buffers must have one shape, dtype and device");
    chain.buffers.push_back(matrices_of(buffer));
  }
  STD_TORCH_CHECK(!scale.has_value() ||
                      (scale->dim() == 1 && scale->size(0) == x.size(0) && scale->is_contiguous() &&
                       scale->scalar_type() == ScalarType::Float && scale->device() == x.device()),
                  "square_chain: scale must be (batch,), contiguous, float32, on the buffers' "
                  "device");
  if (scale.has_value()) chain.scale = static_cast<const float*>(scale->data_ptr());
  std::vector<int64_t> place_of{0};
  place_of.insert(place_of.end(), places.begin(), places.end());
  for (int64_t j = 0; j < squares; ++j) {
    chain.squares.push_back({static_cast<int>(place_of[j]), static_cast<int>(place_of[operands[j]]),
                             static_cast<int>(places[j]), static_cast<float>(alphas[j]),
                             static_cast<float>(betas[j]), static_cast<float>(deltas[j]),
                             j == 0 ? 2 : 0, operands[j] == 0 ? 1 : 0});
  }
  return chain;
}

// Why the kernel cannot serve the chain; null if it can.
const char* refusal(const Chain& chain) {
  if (chain.m % 8 != 0) return "m must be a multiple of 8";
  for (const Matrices& x : chain.buffers) {
    if (!by_rows(x) || !fits_tensor_map(x, chain.m, chain.m, chain.batches)) {
      return "TMA cannot use a buffer: its rows must be contiguous, start on 16 bytes and lie a "
             "multiple of 16 bytes apart";
    }
  }
  return nullptr;
}

ChainArguments arguments_of(const Chain& chain, int device) {
  ChainArguments args{};
  for (size_t i = 0; i < chain.buffers.size(); ++i) {
    const Matrices& x = chain.buffers[i];
    args.maps[i] = tensor_map(x, chain.m, chain.m, chain.batches, ScalarType::Half);
  }
  std::copy(chain.squares.begin(), chain.squares.end(), args.squares);
  const auto tiles = TriangularSchedule::of(chain.m, SquareTile::kRows, SquareTile::kCols);
  const auto products = static_cast<int64_t>(chain.squares.size());
  STD_TORCH_CHECK(chain.batches <= INT32_MAX / (tiles.per_matrix() * products),
                  "square_chain: ", chain.batches,
                  " matrices have too many tiles; split the batch");
  const int64_t groups = chain.groups > 0
                             ? std::min(chain.groups, chain.batches)
                             : group_count(chain.batches, tiles, processors_of(device));
  args.schedule = {tiles, static_cast<uint32_t>(chain.batches), static_cast<uint32_t>(groups),
                   static_cast<uint32_t>(products)};
  args.scale = chain.scale;
  args.buffers = static_cast<uint32_t>(chain.buffers.size());
  args.m = chain.m;
  return args;
}

// counters: (1 + squares * batch) int32, zeros if they are clear.
void launch_chain(const Chain& chain, uint32_t* counters, bool clear, int device,
                  cudaStream_t stream) {
  ChainArguments args = arguments_of(chain, device);
  args.tickets = counters;
  args.stored = counters + 1;
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;

  if (!clear) {
    const uint32_t count = 1 + args.schedule.matrices * args.schedule.products;
    config.gridDim = dim3((count + 255) / 256);
    config.blockDim = dim3(256);
    STD_CUDA_CHECK(cudaLaunchKernelEx(&config, clear_kernel, counters, count));
  }

  STD_CUDA_CHECK(cudaFuncSetAttribute(chain_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      SquareTile::kSharedBytes));
  config.gridDim = dim3(std::min<uint32_t>(args.schedule.count(), processors_of(device)));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = SquareTile::kSharedBytes;
  STD_CUDA_CHECK(cudaLaunchKernelEx(&config, chain_kernel, args));
}

}  // namespace
}  // namespace products

void square_chain_cuda(const std::vector<Tensor>& buffers, const std::vector<int64_t>& places,
                       const std::vector<int64_t>& operands, const std::vector<double>& alphas,
                       const std::vector<double>& betas, const std::vector<double>& deltas,
                       std::optional<Tensor> scale, int64_t groups, std::optional<Tensor> zeros) {
  using namespace products;
  STD_TORCH_CHECK(!buffers.empty(), "square_chain: there are no buffers");
  const Chain chain = describe(buffers, places, operands, alphas, betas, deltas, scale, groups);
  if (chain.batches == 0 || chain.m == 0) return;
  const Tensor& x = buffers[0];
  const int device = x.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  check_sm90("square_chain", refusal(chain), device);
  const auto squares = static_cast<int64_t>(chain.squares.size());
  const int64_t count = 1 + squares * chain.batches;
  STD_TORCH_CHECK(!zeros.has_value() ||
                      (zeros->dim() == 1 && zeros->size(0) == count && zeros->is_contiguous() &&
                       zeros->scalar_type() == ScalarType::Int && zeros->device() == x.device()),
                  "square_chain: zeros must be (1 + squares * batch,), contiguous, int32, on the "
                  "buffers' device");
  const Tensor counters = zeros.has_value() ? *zeros : allocate(x, {count}, ScalarType::Int);
  auto* const data = static_cast<uint32_t*>(counters.data_ptr());
  launch_chain(chain, data, zeros.has_value(), device, static_cast<cudaStream_t>(stream));
}

}  // namespace optimizer
