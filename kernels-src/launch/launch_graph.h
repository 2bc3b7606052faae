#pragma once
// The launches of a plan between two of its frees, as one CUDA graph. A graph whose nodes get new
// arguments takes the host less than half of what its launches take one by one; a node whose
// arguments are those of the last time takes nothing.

#include <cudaTypedefs.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "common/stable.h"

namespace optimizer::launch_plan {

struct Launch {
  CUfunction function;
  unsigned grid[3];
  unsigned threads;
  unsigned shared;    // bytes
  bool early;         // begins before its predecessor ended
  void** arguments;   // the address of each
  const void* bytes;  // where all of them lie
  size_t size;        // of that, in bytes
};

// From the driver that runs; the library does not link against it.
struct Driver {
  PFN_cuLaunchKernelEx_v11060 launch;
  PFN_cuGraphAddNode_v12030 add_node;  // null, as the next one, in a driver before CUDA 12.3
  PFN_cuGraphExecKernelNodeSetParams_v12000 set_arguments;
};

// Null where the driver has none: an older one calls the version that is asked for invalid.
template <typename Function>
Function driver_function(const char* name, int version) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result{};
  if (cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &result) !=
      cudaSuccess) {
    cudaGetLastError();
    return nullptr;
  }
  return result == cudaDriverEntryPointSuccess ? reinterpret_cast<Function>(function) : nullptr;
}

inline const Driver& driver() {
  static const Driver found = [] {
    Driver one{driver_function<PFN_cuLaunchKernelEx_v11060>("cuLaunchKernelEx", 11060), nullptr,
               nullptr};
    int version = 0;
    if (cudaDriverGetVersion(&version) == cudaSuccess && version >= 12030) {
      one.add_node = driver_function<PFN_cuGraphAddNode_v12030>("cuGraphAddNode", 12030);
      one.set_arguments = driver_function<PFN_cuGraphExecKernelNodeSetParams_v12000>(
          "cuGraphExecKernelNodeSetParams", 12000);
    }
    STD_TORCH_CHECK(one.launch != nullptr,
                    "the CUDA driver has no cuLaunchKernelEx; it must be of CUDA 12 or newer");
    return one;
  }();
  return found;
}

inline void check(CUresult result, const char* what) {
  STD_TORCH_CHECK(result == CUDA_SUCCESS, "launch_plan: ", what, " failed with CUDA error ",
                  static_cast<int>(result));
}

// A graph that cannot be had, as where the driver has no memory left: the plan is played without.
struct NoGraph {};

inline void need(cudaError_t result) {
  if (result == cudaSuccess) return;
  cudaGetLastError();
  throw NoGraph{};
}
inline void need(CUresult result) {
  if (result != CUDA_SUCCESS) throw NoGraph{};
}

// What allocates or frees may run beside another thread's capture, which is none of its business.
class Relaxed {
 public:
  Relaxed() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~Relaxed() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  Relaxed(const Relaxed&) = delete;
  Relaxed& operator=(const Relaxed&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

class LaunchGraph {
 public:
  LaunchGraph() {
    cudaGraph_t graph = nullptr;
    need(cudaGraphCreate(&graph, 0));
    graph_.reset(graph);
  }

  // The launches follow in the order of the plan, which is the same every time.
  void begin() { next_ = 0; }

  // The next launch, on the plan's stream of that number.
  void put(int32_t stream, const Launch& launch) {
    if (exec_ == nullptr) return add(stream, launch);
    Node& node = nodes_[next_++];
    if (std::memcmp(node.bytes.data(), launch.bytes, launch.size) == 0) return;
    const auto arguments = node_of<CUDA_KERNEL_NODE_PARAMS>(launch);
    need(driver().set_arguments(exec_.get(), node.node, &arguments));
    std::memcpy(node.bytes.data(), launch.bytes, launch.size);
  }

  // What comes next on `stream` follows all that `awaited` has had.
  void wait(int32_t stream, int32_t awaited) {
    if (exec_ != nullptr) return;
    const size_t streams = static_cast<size_t>(std::max(stream, awaited)) + 1;
    if (before_.size() < streams) before_.resize(streams);
    Before& own = before_[stream];
    for (CUgraphNode one : before_[awaited].nodes) {
      if (std::find(own.nodes.begin(), own.nodes.end(), one) != own.nodes.end()) continue;
      own.nodes.push_back(one);
    }
  }

  void play(cudaStream_t stream) {
    if (nodes_.empty()) return;
    if (exec_ == nullptr) instantiate(stream);
    need(cudaGraphLaunch(exec_.get(), stream));
  }

 private:
  struct Node {
    CUgraphNode node;
    std::vector<char> bytes;  // its arguments
  };
  // What the next launch of a stream follows.
  struct Before {
    std::vector<CUgraphNode> nodes;
    CUgraphNode last;  // of them the one on the same stream, if any
  };
  struct Destroy {
    void operator()(cudaGraph_t graph) const { cudaGraphDestroy(graph); }
    void operator()(cudaGraphExec_t exec) const { cudaGraphExecDestroy(exec); }
  };

  template <typename Parameters>
  static Parameters node_of(const Launch& launch) {
    Parameters found{};
    found.func = launch.function;
    found.gridDimX = launch.grid[0];
    found.gridDimY = launch.grid[1];
    found.gridDimZ = launch.grid[2];
    found.blockDimX = launch.threads;
    found.blockDimY = found.blockDimZ = 1;
    found.sharedMemBytes = launch.shared;
    found.kernelParams = launch.arguments;
    return found;
  }

  void add(int32_t stream, const Launch& launch) {
    if (before_.size() <= static_cast<size_t>(stream)) before_.resize(stream + 1);
    Before& own = before_[stream];
    std::vector<CUgraphEdgeData> edges(own.nodes.size());
    for (size_t n = 0; n < edges.size(); ++n) {
      if (!launch.early || own.nodes[n] != own.last) continue;
      edges[n].from_port = CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC;
      edges[n].type = CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC;
    }
    CUgraphNodeParams parameters{};
    parameters.type = CU_GRAPH_NODE_TYPE_KERNEL;
    parameters.kernel = node_of<CUDA_KERNEL_NODE_PARAMS_v3>(launch);
    CUgraphNode made = nullptr;
    need(driver().add_node(&made, graph_.get(), own.nodes.data(), edges.data(), edges.size(),
                           &parameters));
    const char* bytes = static_cast<const char*>(launch.bytes);
    nodes_.push_back({made, {bytes, bytes + launch.size}});
    own = {{made}, made};
  }

  void instantiate(cudaStream_t stream) {
    cudaGraphExec_t exec = nullptr;
    need(cudaGraphInstantiate(&exec, graph_.get(), 0));
    exec_.reset(exec);
    need(cudaGraphUpload(exec, stream));
    before_.clear();
  }

  std::unique_ptr<std::remove_pointer_t<cudaGraph_t>, Destroy> graph_;
  std::unique_ptr<std::remove_pointer_t<cudaGraphExec_t>, Destroy> exec_;
  std::vector<Node> nodes_;
  std::vector<Before> before_;  // of each stream, until all launches are there
  size_t next_ = 0;
};

// The graphs of a plan, of the stream that they were made on: on the device, launches of one graph
// follow each other. One thread prepares them at a time; other threads and streams launch one by
// one.
struct Graphs {
  static constexpr int kFew = 2;          // plays that are not worth a graph
  static constexpr int kMove = 32;        // plays elsewhere, none at home, that graphs move for
  static constexpr int kAskAgain = 64;    // plays from one question for room to the next
  static constexpr int kRetry = 1 << 10;  // plays until a refused graph is tried again

  std::atomic<bool> taken{false};
  int plays = 0;      // without graphs
  int elsewhere = 0;  // on another stream since the last one on theirs
  bool made = false;
  std::atomic<bool> has{false};  // the same, for those who have not taken them
  cudaStream_t stream = nullptr;
  std::vector<LaunchGraph> parts;

  ~Graphs() { drop(); }

  bool take() { return !taken.exchange(true, std::memory_order_acquire); }
  void leave() { taken.store(false, std::memory_order_release); }

  void drop() {
    const Relaxed relaxed;
    parts.clear();
    made = has = false;
    plays = elsewhere = 0;
  }

  // The plan cannot have them now.
  void bar() {
    drop();
    plays = -kRetry;
  }

  // Whether they serve this play, which may make them if there is `room`; if so they are taken.
  template <typename Room>
  bool serve(cudaStream_t current, const Room& room) {
    if (driver().add_node == nullptr || driver().set_arguments == nullptr) return false;
    cudaStreamCaptureStatus status{};
    if (cudaStreamIsCapturing(current, &status) != cudaSuccess) {
      cudaGetLastError();
      return false;
    }
    if (status != cudaStreamCaptureStatusNone || !take()) return false;
    if (made && current == stream) {
      elsewhere = 0;
      return true;
    }
    if (made && ++elsewhere > kMove) {  // the work has moved there
      drop();
      plays = kFew;
    }
    if (!made && ++plays > kFew) {
      if (room()) {
        stream = current;
        return true;
      }
      plays = kFew - kAskAgain;
    }
    leave();
    return false;
  }
};

}  // namespace optimizer::launch_plan
