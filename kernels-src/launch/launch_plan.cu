// launch_plan: what a call costs the host is one lookup, for every launch the arguments that a
// graph's node does not have yet, and the launch of the graph (launch_graph.h). Tensors are bare
// handles here, asked once for what is read of them: torch::stable::Tensor takes a block of memory
// of its own for each.

#include <atomic>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <tuple>
#include <utility>

#include "launch/launch_plan.h"

namespace optimizer {

namespace launch_plan {
namespace {

using torch::stable::detail::to;

constexpr size_t kMostPlans = 1024;  // of some 10 KB each; the one unused for longest goes
constexpr int64_t kAlignment = 16;   // bytes: Triton compiles in whether an address is a multiple
constexpr size_t kMostArguments = 96;

struct Delete {
  void operator()(AtenTensorHandle tensor) const { aoti_torch_delete_tensor_object(tensor); }
};
using Handle = std::unique_ptr<AtenTensorOpaque, Delete>;

char* address_of_first(const Handle& tensor) {
  void* data = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(tensor.get(), &data));
  return static_cast<char*>(data);
}

// The tensors of a list, which is deleted.
std::vector<Handle> taken(StableIValue value) {
  const auto list = to<StableListHandle>(value);
  size_t count = 0;
  TORCH_ERROR_CODE_CHECK(torch_list_size(list, &count));
  std::vector<Handle> tensors(count);
  for (size_t n = 0; n < count; ++n) {
    StableIValue one = 0;
    TORCH_ERROR_CODE_CHECK(torch_list_get_item(list, n, &one));
    tensors[n].reset(to<AtenTensorHandle>(one));
  }
  TORCH_ERROR_CODE_CHECK(torch_delete_list(list));
  return tensors;
}

StableIValue listed(std::vector<Handle> tensors) {
  StableListHandle list = nullptr;
  TORCH_ERROR_CODE_CHECK(torch_new_list_reserve_size(tensors.size(), &list));
  for (Handle& one : tensors) {
    TORCH_ERROR_CODE_CHECK(torch_list_push_back(list, torch::stable::detail::from(one.release())));
  }
  return torch::stable::detail::from(list);
}

// What a plan was recorded for: its tag, and every operand but for its address.
using Key = std::vector<int64_t>;

struct Entry {
  std::shared_ptr<const Plan> plan;
  uint64_t used;  // when, in calls
};

std::mutex guard;
// Never let go: when the process ends, the driver may have gone before their graphs.
std::map<Key, Entry>& plans = *new std::map<Key, Entry>;
uint64_t calls = 0;

// What a call reads of its operands.
struct Call {
  Key key;
  std::vector<char*> addresses;
  int32_t device;  // of the first
};

Call call_of(const std::vector<Handle>& operands, int64_t tag) {
  Call call{};
  call.key.reserve(1 + 12 * operands.size());
  call.key.push_back(tag);
  call.addresses.reserve(operands.size());
  for (const Handle& x : operands) {
    int64_t dims = 0, *sizes = nullptr, *strides = nullptr;
    int32_t dtype = 0, device = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(x.get(), &dims));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(x.get(), &sizes));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(x.get(), &strides));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &dtype));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(x.get(), &device));
    char* const address = address_of_first(x);
    if (call.addresses.empty()) call.device = device;
    call.addresses.push_back(address);
    const auto within = static_cast<int64_t>(reinterpret_cast<uintptr_t>(address) % kAlignment);
    call.key.push_back(static_cast<int64_t>(dtype) << 32 |
                       static_cast<int64_t>(device & 0xffff) << 12 | dims << 4 | within);
    call.key.insert(call.key.end(), sizes, sizes + dims);
    call.key.insert(call.key.end(), strides, strides + dims);
  }
  return call;
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

// Whether one plan more may have graphs, each of which holds 10 KB of the device's memory per
// launch: at most so many plans have any, and one that was unused for long makes room.
bool has_room_for_graphs() {
  constexpr size_t kMostGraphs = 64;
  constexpr uint64_t kLong = 1 << 10;  // calls: plans in rotation must not take turns
  const std::lock_guard<std::mutex> lock(guard);
  Entry* oldest = nullptr;
  size_t count = 0;
  for (auto& [key, entry] : plans) {
    if (!entry.plan->graphs->has.load(std::memory_order_relaxed)) continue;
    ++count;
    if (oldest == nullptr || entry.used < oldest->used) oldest = &entry;
  }
  if (count < kMostGraphs) return true;
  Graphs& graphs = *oldest->plan->graphs;
  if (calls - oldest->used < kLong || !graphs.take()) return false;
  graphs.drop();
  graphs.leave();
  return true;
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
  const size_t streams = 1 + plan.seconds, buffers = plan.buffers.size();
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
  plan.seconds = static_cast<size_t>(reader.count());
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

// A stream and its event, which is recorded there and awaited elsewhere.
struct Stream {
  cudaStream_t stream;
  cudaEvent_t event;
};

// The current stream, and as many beside it, which it keeps; they are as urgent as it is.
std::vector<Stream> streams_of(int32_t device, size_t seconds) {
  void* current = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &current));
  const auto first = static_cast<cudaStream_t>(current);
  if (seconds == 0) return {{first, nullptr}};
  int priority = 0;
  STD_CUDA_CHECK(cudaStreamGetPriority(first, &priority));
  // By its priority, too: the handle of a stream that is gone may be another one's.
  using Key = std::tuple<int32_t, cudaStream_t, int>;
  static std::map<Key, std::vector<Stream>>& streams = *new std::map<Key, std::vector<Stream>>;
  const std::lock_guard<std::mutex> lock(guard);
  std::vector<Stream>& found = streams[{device, first, priority}];
  while (found.size() <= seconds) {
    Stream one{first, nullptr};
    if (!found.empty()) {
      STD_CUDA_CHECK(cudaStreamCreateWithPriority(&one.stream, cudaStreamNonBlocking, priority));
    }
    STD_CUDA_CHECK(cudaEventCreateWithFlags(&one.event, cudaEventDisableTiming));
    found.push_back(one);
  }
  return {found.begin(), found.begin() + static_cast<std::ptrdiff_t>(seconds) + 1};
}

// One playing of a plan: its streams, and what is allocated.
class Playing {
 public:
  Playing(const Plan& plan, Call& call)
      : plan_(plan),
        device_(call.device),
        graphs_(*plan.graphs),
        streams_(streams_of(call.device, 0)),
        addresses_(call.addresses),
        first_buffer_(call.addresses.size()),
        made_(plan.buffers.size()) {
    addresses_.resize(first_buffer_ + plan.buffers.size());
    joins_ = graphs_.serve(streams_[0].stream, has_room_for_graphs);
    if (!joins_ && plan.seconds > 0) streams_ = streams_of(device_, plan.seconds);
  }

  ~Playing() {
    if (!joins_) return;
    if (!graphs_.made) graphs_.drop();  // the play failed
    graphs_.leave();
  }
  Playing(const Playing&) = delete;
  Playing& operator=(const Playing&) = delete;

  std::vector<Handle> run() {
    std::optional<Relaxed> making;
    if (joins_ && !graphs_.made) making.emplace();
    try {
      play();
    } catch (const NoGraph&) {
      play_without_graphs();
    }
    if (joins_) graphs_.made = graphs_.has = true;
    std::vector<Handle> results;
    results.reserve(plan_.results.size());
    for (const int32_t one : plan_.results) results.push_back(std::move(made_[one]));
    return results;
  }

 private:
  void play() {
    for (const Step& step : plan_.steps) take(step);
    play_part();
  }

  // From the beginning, also what was played: plans of several parts write nothing but what they
  // allocate, and a plan's only part was not played.
  void play_without_graphs() {
    static std::atomic<bool> said{false};
    if (!said.exchange(true)) {
      aoti_torch_warn(
          __func__, __FILE__, __LINE__,
          "the CUDA driver gave no graph, for want of memory outside of torch's pool as "
          "a rule: layers of experts launch their kernels one by one, which takes the "
          "host longer");
    }
    graphs_.bar();
    graphs_.leave();
    joins_ = has_part_ = false;
    for (Handle& one : made_) one.reset();
    streams_ = streams_of(device_, plan_.seconds);
    play();
  }

  void take(const Step& step) {
    switch (step.kind) {
      case kAllocate:
        return allocate(step.first);
      case kFree:
        play_part();  // another thread may get the memory, and launch first
        return made_[step.first].reset();
      case kWait:
        return wait(step);
      case kLaunch:
        return launch(step);
      case kNf4Product:
        return multiply(step);
    }
  }

  // The graph of the launches since the last free.
  LaunchGraph& part() {
    if (!has_part_) {
      if (!graphs_.made) graphs_.parts.emplace_back();
      graphs_.parts[part_].begin();
      has_part_ = true;
    }
    return graphs_.parts[part_];
  }

  void play_part() {
    if (!has_part_) return;
    graphs_.parts[part_++].play(streams_[0].stream);
    has_part_ = false;
  }

  void wait(const Step& step) {
    if (joins_) return part().wait(step.first, step.second);
    const Stream& awaited = streams_[step.second];
    STD_CUDA_CHECK(cudaEventRecord(awaited.event, awaited.stream));
    STD_CUDA_CHECK(cudaStreamWaitEvent(streams_[step.first].stream, awaited.event, 0));
  }

  void allocate(int32_t index) {
    const Buffer& buffer = plan_.buffers[index];
    AtenTensorHandle handle = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
        static_cast<int64_t>(buffer.sizes.size()), buffer.sizes.data(), buffer.strides.data(),
        buffer.dtype, aoti_torch_device_type_cuda(), device_, &handle));
    made_[index].reset(handle);
    addresses_[first_buffer_ + index] = address_of_first(made_[index]);
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
    nf4_product::run(p, device_, [&](const nf4_product::Launch& one) {
      CUfunction function = nullptr;
      STD_CUDA_CHECK(cudaGetFuncBySymbol(&function, one.kernel));
      void* arguments[] = {one.argument};
      launch(step.first, {function,
                          {one.blocks, 1, 1},
                          one.threads,
                          one.shared,
                          p.early,
                          arguments,
                          one.argument,
                          one.bytes});
    });
  }

  void launch(const Step& step) {
    int64_t values[kMostArguments];
    void* pointers[kMostArguments];
    for (size_t n = 0; n < step.arguments.size(); ++n) {
      values[n] = value_of(step.arguments[n]);
      pointers[n] = &values[n];
    }
    launch(step.first, {step.function,
                        {step.grid[0], step.grid[1], step.grid[2]},
                        step.threads,
                        step.shared,
                        step.early,
                        pointers,
                        values,
                        step.arguments.size() * sizeof(int64_t)});
  }

  void launch(int32_t stream, const Launch& one) {
    if (joins_) return part().put(stream, one);
    CUlaunchAttribute early{};
    early.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    early.value.programmaticStreamSerializationAllowed = 1;
    CUlaunchConfig config{};
    config.gridDimX = one.grid[0];
    config.gridDimY = one.grid[1];
    config.gridDimZ = one.grid[2];
    config.blockDimX = one.threads;
    config.blockDimY = config.blockDimZ = 1;
    config.sharedMemBytes = one.shared;
    config.hStream = streams_[stream].stream;
    config.attrs = &early;
    config.numAttrs = one.early ? 1 : 0;
    check(driver().launch(&config, one.function, one.arguments, nullptr), "a launch");
  }

  const Plan& plan_;
  const int32_t device_;
  Graphs& graphs_;
  std::vector<Stream> streams_;
  std::vector<char*>& addresses_;  // of the operands, then of the buffers
  const size_t first_buffer_;
  std::vector<Handle> made_;
  bool joins_ = false;     // the launches in graphs
  bool has_part_ = false;  // that was not played yet
  size_t part_ = 0;
};

std::vector<Handle> play(Call call) {
  const std::shared_ptr<const Plan> plan = find(call.key);
  if (plan == nullptr) return {};
  int32_t current = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_device_index(&current));
  std::optional<torch::stable::accelerator::DeviceGuard> on;
  if (current != call.device) on.emplace(call.device);
  return Playing(*plan, call).run();
}

}  // namespace
}  // namespace launch_plan

// Boxed by hand: TORCH_BOX copies the list of results once more.
void launch_plan_cuda(StableIValue* stack, uint64_t, uint64_t) {
  using namespace launch_plan;
  const std::vector<Handle> operands = taken(stack[0]);
  const auto tag = to<int64_t>(stack[1]);
  const auto program = to<std::vector<int64_t>>(stack[2]);
  STD_TORCH_CHECK(!operands.empty(), "launch_plan: there are no operands");
  Call call = call_of(operands, tag);
  if (program.empty()) {
    stack[0] = listed(play(std::move(call)));
    return;
  }
  auto plan = std::make_shared<const Plan>(read_plan(program, operands.size()));
  keep(std::move(call.key), std::move(plan));
  stack[0] = listed({});
}

}  // namespace optimizer
