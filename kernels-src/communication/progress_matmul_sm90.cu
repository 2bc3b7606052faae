// progress_matmul: A B for rows of A that arrive in chunks while the kernel runs, by TMA and wgmma,
// for Hopper alone. Every element is one float32 sum over growing k, rounded once, whatever the
// chunks, their order and the widths of the tiles.

#include <map>
#include <mutex>
#include <optional>
#include <tuple>

#include "communication/progress_sm90.cuh"
#include "communication/status.h"
#include "sm90/launch.cuh"

namespace optimizer {
namespace communication {
namespace {

using OptionalTensor = std::optional<Tensor>;

// A pick is some 1e5 additions at most for N of 2^17, so shapes that come again do not repeat it.
ProgressSchedule picked_schedule(int chunks, int chunk_rows, int n, int k, uint32_t blocks) {
  constexpr size_t kMostShapes = 1024;
  static std::mutex guard;
  static std::map<std::tuple<int, int, int, int, uint32_t>, ProgressSchedule> picked;
  const std::lock_guard<std::mutex> lock(guard);
  if (picked.size() >= kMostShapes) picked.clear();
  const auto [found, is_new] =
      picked.try_emplace({chunks, chunk_rows, n, k, blocks}, ProgressSchedule{});
  if (is_new) found->second = pick_schedule(chunks, chunk_rows, n, k, blocks);
  return found->second;
}

const uint32_t* words_of(const char* what, const OptionalTensor& x, int64_t count,
                         const Tensor& a) {
  if (!x.has_value()) return nullptr;
  STD_TORCH_CHECK(x->scalar_type() == ScalarType::UInt32 && x->dim() == 1 && x->numel() == count &&
                      x->is_contiguous() && x->device() == a.device(),
                  "progress_matmul: ", what, " must be (", count,
                  ",), contiguous, uint32, on a's device");
  return static_cast<const uint32_t*>(x->data_ptr());
}

// a (M, K), b (K, N), out (M, N) as the kernel reads them: chunks of rows, and b as (1, N, K).
struct Operands {
  Matrices a;
  Matrices b;
  Matrices out;
  int chunks;
  int m;  // of a chunk
  int n;
  int k;
};

Matrices matrix_of(const Tensor& x, int64_t batch) {
  Matrices view{x.data_ptr(), batch, x.stride(0), x.stride(1)};
  const auto padded = [](int64_t side) { return (side + 7) / 8 * 8; };
  if (x.size(0) == 1) view.row = view.col == 1 ? padded(x.size(1)) : 1;
  if (x.size(1) == 1) view.col = view.row == 1 ? padded(x.size(0)) : 1;
  return view;
}

Operands describe(const Tensor& a, const Tensor& b, const Tensor& out, int64_t chunks) {
  STD_TORCH_CHECK(a.dim() == 2 && b.dim() == 2 && out.dim() == 2,
                  "progress_matmul: a must be (M, K), b (K, N), out (M, N)");
  const int64_t m = a.size(0), k = a.size(1), n = b.size(1);
  const auto fits = [&](const Tensor& x, int64_t rows, int64_t cols) {
    return x.size(0) == rows && x.size(1) == cols && x.scalar_type() == a.scalar_type() &&
           x.device() == a.device();
  };
  STD_TORCH_CHECK(fits(b, k, n) && fits(out, m, n),
                  "progress_matmul: b must be (K, N), out (M, N), of the dtype and on the device "
                  "of a");
  STD_TORCH_CHECK(m <= kLargestSide && n <= kLargestSide && k <= int64_t{1} << 30,
                  "progress_matmul: M and N must be at most 2^20, K at most 2^30");
  STD_TORCH_CHECK(chunks > 0 && m % chunks == 0, "progress_matmul: ", m, " rows are not ", chunks,
                  " chunks");
  STD_TORCH_CHECK(chunks <= kMostChunks, "progress_matmul: at most 1024 chunks");
  const int64_t rows = m / chunks;
  const Matrices right = matrix_of(b, 0);
  Operands x{matrix_of(a, rows * a.stride(0)),
             {right.data, 0, right.col, right.row},
             matrix_of(out, rows * out.stride(0)),
             static_cast<int>(chunks),
             static_cast<int>(rows),
             static_cast<int>(n),
             static_cast<int>(k)};
  return x;
}

const char* refusal(const Operands& x) {
  if (x.k == 0) return "K is 0";
  if (!by_rows(x.a) || !fits_tensor_map(x.a, x.m, x.k, x.chunks)) {
    return "TMA cannot read a: its rows must be contiguous and start on 16 bytes";
  }
  if (!fits_tensor_map(x.b, x.n, x.k, 1)) {
    return "TMA cannot read b: its rows or columns must be contiguous, start on 16 bytes and lie a "
           "multiple of 16 bytes apart";
  }
  if (!by_rows(x.out) || !fits_tensor_map(x.out, x.m, x.n, x.chunks)) {
    return "TMA cannot write out: its rows must start on 16 bytes";
  }
  return nullptr;
}

template <typename T, bool kBRowsMajor>
void launch_kernel(const ProgressArguments& args, uint32_t blocks, cudaStream_t stream) {
  const auto kernel = progress_kernel<T, kBRowsMajor>;
  STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      WideTile::kSharedBytes));
  optimizer::launch("progress_matmul", kernel, blocks, kThreads, WideTile::kSharedBytes, true,
                    stream, args);
}

}  // namespace
}  // namespace communication

void progress_matmul_cuda(const Tensor& a, const Tensor& b, const Tensor& out,
                          std::optional<Tensor> signals, int64_t chunks, int64_t pivot,
                          int64_t epoch, std::optional<Tensor> epochs, int64_t timeout_ms,
                          std::optional<Tensor> status, int64_t blocks, int64_t narrow) {
  using namespace communication;
  const Operands x = describe(a, b, out, chunks);
  STD_TORCH_CHECK(pivot >= 0 && pivot < chunks, "progress_matmul: there is no chunk ", pivot);
  STD_TORCH_CHECK(signals.has_value() == status.has_value(),
                  "progress_matmul: signals need a status, and nothing else does");
  STD_TORCH_CHECK(epoch >= 0 && epoch <= UINT32_MAX, "progress_matmul: epoch must be a uint32");
  if (x.m == 0 || x.n == 0) return;
  const int device = a.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  check_sm90("progress_matmul", refusal(x), device);

  ProgressArguments args{};
  args.signals = words_of("signals", signals, chunks, a);
  args.epochs = words_of("epochs", epochs, 1, a);
  args.epoch = static_cast<uint32_t>(epoch);
  args.nanoseconds = nanoseconds_of("progress_matmul", timeout_ms);
  if (status.has_value()) args.status = status_of("progress_matmul", *status, a);
  const ScalarType dtype = a.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Half || dtype == ScalarType::BFloat16,
                  "progress_matmul: the sm90 tiles need float16 or bfloat16");
  args.a = tensor_map(x.a, x.m, x.k, x.chunks, dtype);
  args.b = tensor_map(x.b, x.n, x.k, 1, dtype);
  args.out = tensor_map(x.out, x.m, x.n, x.chunks, dtype);
  args.out_data = const_cast<void*>(x.out.data);
  args.out_batch = x.out.batch;
  args.out_row = x.out.row;
  args.m = x.m;
  args.n = x.n;
  args.k = x.k;
  args.alpha = 1.0f;
  const auto most = static_cast<int64_t>(processors_of(device));
  const auto grid = static_cast<uint32_t>(blocks > 0 ? std::min(blocks, most) : most);
  const int64_t widest = (x.n + kNarrowCols - 1) / kNarrowCols;
  STD_TORCH_CHECK(narrow <= widest, "progress_matmul: at most ", widest, " narrow columns");
  args.schedule = narrow < 0
                      ? picked_schedule(x.chunks, x.m, x.n, x.k, grid)
                      : ProgressSchedule::of(x.chunks, 0, x.m, x.n, static_cast<int>(narrow), grid);
  args.schedule.pivot = static_cast<uint32_t>(pivot);
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  const auto on = static_cast<cudaStream_t>(stream);
  const auto count = std::min(args.schedule.blocks, args.schedule.count());
  if (dtype == ScalarType::Half) {
    by_rows(x.b) ? launch_kernel<__half, false>(args, count, on)
                 : launch_kernel<__half, true>(args, count, on);
  } else {
    by_rows(x.b) ? launch_kernel<__nv_bfloat16, false>(args, count, on)
                 : launch_kernel<__nv_bfloat16, true>(args, count, on);
  }
}

}  // namespace optimizer
