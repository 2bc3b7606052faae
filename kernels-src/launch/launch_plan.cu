// launch_plan: what a call costs the host is one lookup, and for every
// launch the copy of its arguments and the driver's part.

#include <cudaTypedefs.h>

#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <utility>

#include "launch/launch_plan.h"

namespace optimizer {

using TensorVector = std::vector<Tensor>;

namespace launch_plan {
namespace {

constexpr size_t kMostPlans = 1024;  // of some 10 KB each; the one unused for longest goes
constexpr int64_t kAlignment = 16;   // bytes: Triton compiles in whether an address is a multiple
constexpr size_t kMostArguments = 96;

// What a plan was recorded for: its tag, and every operand but for its address.
using Key = std::vector<int64_t>;

struct Entry {
  std::shared_ptr<const Plan> plan;
  uint64_t used;  // when, in calls
};

std::mutex guard;
std::map<Key, Entry> plans;
uint64_t calls = 0;

Key key_of(const TensorVector& operands, int64_t tag) {
  Key key;
  key.reserve(1 + 12 * operands.size());
  key.push_back(tag);
  for (const Tensor& x : operands) {
    const auto sizes = x.sizes(), strides = x.strides();
    const auto within =
        static_cast<int64_t>(reinterpret_cast<uintptr_t>(x.data_ptr()) % kAlignment);
    key.push_back(static_cast<int64_t>(x.scalar_type()) << 32 |
                  static_cast<int64_t>(x.get_device_index() & 0xffff) << 12 |
                  static_cast<int64_t>(sizes.size()) << 4 | within);
    key.insert(key.end(), sizes.begin(), sizes.end());
    key.insert(key.end(), strides.begin(), strides.end());
  }
  return key;
}

std::shared_ptr<const Plan> find(const Key& key) {
  const std::lock_guard<std::mutex> lock(guard);
  const auto found = plans.find(key);
  if (found == plans.end()) return nullptr;
  found->second.used = ++calls;
  return found->second.plan;
}

void keep(Key key, std::shared_ptr<const Plan> plan) {
  const std::lock_guard<std::mutex> lock(guard);
  if (plans.size() >= kMostPlans) {
    auto oldest = plans.begin();
    for (auto one = plans.begin(); one != plans.end(); ++one) {
      if (one->second.used < oldest->second.used) oldest = one;
    }
    plans.erase(oldest);
  }
  plans.insert_or_assign(std::move(key), Entry{std::move(plan), ++calls});
}

class Reader {
 public:
  explicit Reader(const std::vector<int64_t>& program) : program_(program) {}

  int64_t next() {
    STD_TORCH_CHECK(at_ < program_.size(), "launch_plan: the program ends too early");
    return program_[at_++];
  }

  int64_t count() {
    const int64_t found = next();
    STD_TORCH_CHECK(found >= 0 && found <= static_cast<int64_t>(program_.size()),
                    "launch_plan: ", found, " is no count");
    return found;
  }

  // An index below `bound`
  int32_t index(size_t bound) {
    const int64_t found = next();
    STD_TORCH_CHECK(found >= 0 && found < static_cast<int64_t>(bound), "launch_plan: index ", found,
                    " of ", bound);
    return static_cast<int32_t>(found);
  }

  bool ended() const { return at_ == program_.size(); }

 private:
  const std::vector<int64_t>& program_;
  size_t at_ = 0;
};

void read_arguments(Reader& reader, int64_t count, size_t bases, Step& step) {
  STD_TORCH_CHECK(count <= static_cast<int64_t>(kMostArguments), "launch_plan: ", count,
                  " arguments, at most ", kMostArguments);
  for (int64_t n = 0; n < count; ++n) {
    const int64_t base = reader.next();
    STD_TORCH_CHECK(base < static_cast<int64_t>(bases), "launch_plan: there is no base ", base);
    step.arguments.push_back({static_cast<int32_t>(base), reader.next()});
  }
}

constexpr int64_t kProductAddresses = 12;

void read_product(Reader& reader, nf4_product::Problem& p) {
  for (int64_t* size : {&p.x_row, &p.factor_expert, &p.factor_rank, &p.factor_column, &p.experts,
                        &p.rows, &p.n, &p.k, &p.rank, &p.fan}) {
    *size = reader.next();
  }
  p.shift = static_cast<int>(reader.next());
  p.along = reader.next() != 0;
  p.scatter = reader.next() != 0;
  p.format = static_cast<nf4_product::Format>(reader.next());
  p.row_shift = static_cast<int>(reader.next());
  p.early = reader.next() != 0;
}

Step read_step(Reader& reader, const Plan& plan, size_t operands) {
  const size_t streams = 1 + plan.priorities.size(), buffers = plan.buffers.size();
  Step step{};
  step.kind = static_cast<Kind>(reader.index(kNf4Product + 1));
  if (step.kind == kAllocate || step.kind == kFree) {
    step.first = reader.index(buffers);
    return step;
  }
  step.first = reader.index(streams);
  if (step.kind == kWait) {
    step.second = reader.index(streams);
    return step;
  }
  if (step.kind == kNf4Product) {
    read_product(reader, step.product);
    read_arguments(reader, kProductAddresses, operands + buffers, step);
    return step;
  }
  step.function = reinterpret_cast<CUfunction>(reader.next());
  step.threads = static_cast<unsigned>(reader.next());
  step.shared = static_cast<unsigned>(reader.next());
  for (unsigned& side : step.grid) side = static_cast<unsigned>(reader.next());
  step.early = reader.next() != 0;
  read_arguments(reader, reader.count(), operands + buffers, step);
  return step;
}

Plan read_plan(const std::vector<int64_t>& program, size_t operands) {
  Reader reader(program);
  Plan plan;
  for (int64_t n = reader.count(); n > 0; --n) {
    plan.priorities.push_back(static_cast<int>(reader.next()));
  }
  for (int64_t n = reader.count(); n > 0; --n) {
    Buffer buffer;
    buffer.dtype = static_cast<int32_t>(reader.next());
    const int64_t dims = reader.count();
    for (int64_t d = 0; d < dims; ++d) buffer.sizes.push_back(reader.next());
    for (int64_t d = 0; d < dims; ++d) buffer.strides.push_back(reader.next());
    plan.buffers.push_back(std::move(buffer));
  }
  for (int64_t n = reader.count(); n > 0; --n) {
    plan.results.push_back(reader.index(plan.buffers.size()));
  }
  for (int64_t n = reader.count(); n > 0; --n) {
    plan.steps.push_back(read_step(reader, plan, operands));
  }
  STD_TORCH_CHECK(reader.ended(), "launch_plan: the program goes on behind its steps");
  return plan;
}

// From the driver that runs; the library does not link against it.
PFN_cuLaunchKernelEx_v11060 launcher() {
  static const auto found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    STD_CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuLaunchKernelEx", &function, 11060,
                                                    cudaEnableDefault, &result));
    STD_TORCH_CHECK(result == cudaDriverEntryPointSuccess && function != nullptr,
                    "the CUDA driver has no cuLaunchKernelEx; it must be of CUDA 12 or newer");
    return reinterpret_cast<PFN_cuLaunchKernelEx_v11060>(function);
  }();
  return found;
}

// The event of a stream: recorded there, awaited elsewhere.
cudaEvent_t event_of(int device, cudaStream_t stream) {
  static std::map<std::pair<int, cudaStream_t>, cudaEvent_t> events;
  const std::lock_guard<std::mutex> lock(guard);
  cudaEvent_t& event = events[{device, stream}];
  if (event == nullptr) {
    STD_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  }
  return event;
}

// The n-th stream beside `first`, which it keeps.
cudaStream_t beside(int device, cudaStream_t first, size_t n, int priority) {
  static std::map<std::tuple<int, cudaStream_t, size_t, int>, cudaStream_t> streams;
  const std::lock_guard<std::mutex> lock(guard);
  cudaStream_t& stream = streams[{device, first, n, priority}];
  if (stream == nullptr) {
    STD_CUDA_CHECK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, priority));
  }
  return stream;
}

// One playing of a plan: its streams, and what is allocated.
class Playing {
 public:
  Playing(const Plan& plan, const TensorVector& operands, int device)
      : plan_(plan), device_(device), made_(plan.buffers.size()) {
    void* current = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &current));
    streams_.push_back(static_cast<cudaStream_t>(current));
    for (size_t n = 0; n < plan.priorities.size(); ++n) {
      streams_.push_back(beside(device, streams_[0], n, plan.priorities[n]));
    }
    addresses_.reserve(operands.size() + plan.buffers.size());
    for (const Tensor& x : operands) addresses_.push_back(static_cast<char*>(x.data_ptr()));
    addresses_.resize(operands.size() + plan.buffers.size());
    first_buffer_ = operands.size();
  }

  TensorVector run() {
    for (const Step& step : plan_.steps) {
      switch (step.kind) {
        case kAllocate:
          allocate(step.first);
          break;
        case kFree:
          made_[step.first].reset();
          break;
        case kWait: {
          const cudaStream_t awaited = streams_[step.second];
          const cudaEvent_t event = event_of(device_, awaited);
          STD_CUDA_CHECK(cudaEventRecord(event, awaited));
          STD_CUDA_CHECK(cudaStreamWaitEvent(streams_[step.first], event, 0));
          break;
        }
        case kLaunch:
          launch(step);
          break;
        case kNf4Product:
          multiply(step);
          break;
      }
    }
    TensorVector results;
    results.reserve(plan_.results.size());
    for (const int32_t one : plan_.results) results.push_back(std::move(*made_[one]));
    return results;
  }

 private:
  void allocate(int32_t index) {
    const Buffer& buffer = plan_.buffers[index];
    AtenTensorHandle handle = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
        static_cast<int64_t>(buffer.sizes.size()), buffer.sizes.data(), buffer.strides.data(),
        buffer.dtype, aoti_torch_device_type_cuda(), device_, &handle));
    made_[index].emplace(handle);
    addresses_[first_buffer_ + index] = static_cast<char*>(made_[index]->data_ptr());
  }

  int64_t value_of(const Argument& one) const {
    return one.base < 0 ? one.value : reinterpret_cast<int64_t>(addresses_[one.base] + one.value);
  }

  template <typename T>
  T* address_of(const Argument& one) const {
    return reinterpret_cast<T*>(value_of(one));
  }

  void multiply(const Step& step) {
    nf4_product::Problem p = step.product;
    const Argument* next = step.arguments.data();
    p.packed = address_of<const uint8_t>(*next++);
    p.absmax = address_of<const void>(*next++);
    p.codebook = address_of<const float>(*next++);
    p.x = address_of<const void>(*next++);
    p.low = address_of<const void>(*next++);
    p.factor = address_of<const void>(*next++);
    p.bias = address_of<const float>(*next++);
    p.gates = address_of<const float>(*next++);
    p.slots = address_of<const int64_t>(*next++);
    p.offsets = address_of<const int64_t>(*next++);
    p.out = address_of<void>(*next++);
    p.activated = address_of<void>(*next++);
    nf4_product::run(p, device_, streams_[step.first]);
  }

  void launch(const Step& step) {
    int64_t values[kMostArguments];
    void* pointers[kMostArguments];
    for (size_t n = 0; n < step.arguments.size(); ++n) {
      values[n] = value_of(step.arguments[n]);
      pointers[n] = &values[n];
    }
    CUlaunchAttribute early{};
    early.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    early.value.programmaticStreamSerializationAllowed = 1;
    CUlaunchConfig config{};
    config.gridDimX = step.grid[0];
    config.gridDimY = step.grid[1];
    config.gridDimZ = step.grid[2];
    config.blockDimX = step.threads;
    config.blockDimY = config.blockDimZ = 1;
    config.sharedMemBytes = step.shared;
    config.hStream = streams_[step.first];
    config.attrs = &early;
    config.numAttrs = step.early ? 1 : 0;
    const CUresult result = launcher()(&config, step.function, pointers, nullptr);
    STD_TORCH_CHECK(result == CUDA_SUCCESS, "launch_plan: a launch failed with CUDA error ",
                    static_cast<int>(result));
  }

  const Plan& plan_;
  const int device_;
  std::vector<cudaStream_t> streams_;
  std::vector<char*> addresses_;
  std::vector<std::optional<Tensor>> made_;
  size_t first_buffer_ = 0;
};

}  // namespace
}  // namespace launch_plan

namespace {

void define(const TensorVector& operands, int64_t tag, const std::vector<int64_t>& program) {
  using namespace launch_plan;
  keep(key_of(operands, tag), std::make_shared<const Plan>(read_plan(program, operands.size())));
}

TensorVector play(const TensorVector& operands, int64_t tag) {
  using namespace launch_plan;
  const std::shared_ptr<const Plan> plan = find(key_of(operands, tag));
  if (plan == nullptr) return {};
  const int device = operands[0].get_device_index();
  const torch::stable::accelerator::DeviceGuard on(device);
  return Playing(*plan, operands, device).run();
}

}  // namespace

// Boxed by hand: TORCH_BOX copies the list of results once more.
void launch_plan_cuda(StableIValue* stack, uint64_t, uint64_t) {
  using torch::stable::detail::from;
  using torch::stable::detail::to;
  const auto operands = to<TensorVector>(stack[0]);
  const auto tag = to<int64_t>(stack[1]);
  const auto program = to<std::vector<int64_t>>(stack[2]);
  STD_TORCH_CHECK(!operands.empty(), "launch_plan: there are no operands");
  if (!program.empty()) define(operands, tag, program);
  stack[0] = from(program.empty() ? play(operands, tag) : TensorVector{});
}

}  // namespace optimizer
