// Launches: parameters are copied at the call, the kernel runs when its stream gets there.
#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "capture.h"
#include "context.h"
#include "function.h"
#include "memory.h"
#include "stream.h"

namespace driver {
namespace {

std::atomic<int> warp_order{int(shim::Order::Forward)};
std::atomic<uint64_t> warp_seed{0};

struct Launch {
  const shim::Kernel* kernel;
  dim3 blocks, threads;
  size_t shared_bytes;
  std::vector<std::vector<char>> parameters;

  // A struct of pointers is as good as pointers: any word that was an address and is none any more is an error.
  bool uses_freed_memory() const {
    for (const auto& bytes : parameters) {
      for (size_t at = 0; at + 8 <= bytes.size(); at += 8) {
        uint64_t word;
        memcpy(&word, bytes.data() + at, sizeof word);
        if (was_freed(word)) return true;
      }
    }
    return false;
  }

  std::string wild_pointer() const {
    for (size_t i = 0; i < parameters.size(); i++) {
      if (!kernel->is_pointer[i]) continue;
      void* pointer;
      memcpy(&pointer, parameters[i].data(), sizeof pointer);
      if (pointer && !holds_any(pointer, 0)) return "parameter " + std::to_string(i) + " points outside of device and pinned memory";
    }
    return {};
  }

  void run() const {
    if (sticky()) return;
    if (meets(Fault::Launch)) return break_context(LAUNCH_FAILED, kernel->name + ": a planted failure");
    std::string error = uses_freed_memory() ? "a parameter points into memory that has been freed" : wild_pointer();
    if (!error.empty()) return break_context(ILLEGAL_ADDRESS, kernel->name + ": " + error);
    std::vector<void*> addresses;
    for (const auto& bytes : parameters) addresses.push_back(const_cast<char*>(bytes.data()));
    const shim::Policy policy{shim::Order(warp_order.load()), warp_seed++};
    error = shim::run_grid(*kernel, blocks, threads, shared_bytes, addresses.data(), policy);
    if (!error.empty()) break_context(LAUNCH_FAILED, kernel->name + ": " + error);
  }
};

bool fits(dim3 blocks, dim3 threads) {
  const bool none = !blocks.x || !blocks.y || !blocks.z || !threads.x || !threads.y || !threads.z;
  return !none && blocks.x <= 0x7fffffff && blocks.y <= 65535 && blocks.z <= 65535 && threads.z <= 64 &&
         uint64_t(threads.x) * threads.y * threads.z <= 1024;
}

}  // namespace
}  // namespace driver

using namespace driver;

API CUresult cuLaunchKernel(void* handle, unsigned blocks_x, unsigned blocks_y, unsigned blocks_z, unsigned threads_x,
                            unsigned threads_y, unsigned threads_z, unsigned shared_bytes, void* stream_handle,
                            void** parameters, void** extra) {
  ENTER();
  Stream* stream = find_stream(stream_handle);
  if (!stream) return INVALID_HANDLE;
  if (extra) return NOT_SUPPORTED;
  const auto* function = static_cast<Function*>(handle);
  auto launch = std::make_shared<Launch>();
  launch->kernel = function->kernel;
  launch->blocks = {blocks_x, blocks_y, blocks_z};
  launch->threads = {threads_x, threads_y, threads_z};
  launch->shared_bytes = shared_bytes;
  if (!fits(launch->blocks, launch->threads) || shared_bytes > unsigned(function->shared_limit)) return INVALID_VALUE;
  for (size_t i = 0; i < function->kernel->sizes.size(); i++) {
    const char* value = static_cast<const char*>(parameters[i]);
    launch->parameters.emplace_back(value, value + function->kernel->sizes[i]);
  }
  stream->submit([launch] { launch->run(); });
  return SUCCESS;
}

// For tests: in which order warps run, 0 forward, 1 reverse, 2 at random.
API void fakecuda_order(int order, uint64_t seed) {
  warp_order = order;
  warp_seed = seed;
}
