// Runs a grid of CUDA blocks on the calling thread, one block after the other, every CUDA thread a fiber.
#pragma once
#include <string>
#include <vector>

#include "../shim/launch.h"
#include "../shim/runtime.h"

namespace shim {

struct Kernel {
  std::string name;
  void (*call)(void**);
  std::vector<unsigned> sizes;
  std::vector<unsigned char> is_pointer;
};

// In which order warps run. Forward and Reverse are greedy: a warp runs until all of it waits in a block barrier, the largest
// skew between warps that the barriers allow, so that a missing barrier shows. Random runs a warp for a random while.
enum class Order { Forward, Reverse, Random };
struct Policy {
  Order order = Order::Forward;
  uint64_t seed = 0;
};

// What went wrong, in words; empty if nothing did.
std::string run_grid(const Kernel& kernel, dim3 blocks, dim3 threads, size_t shared_bytes, void** parameters, Policy policy);

}  // namespace shim
