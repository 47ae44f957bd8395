// Block after block, and within a block warp after warp.
#include <algorithm>

#include "machine.h"
#include "traps.h"

namespace shim {
namespace {

// xorshift64: schedules have to be reproducible from a seed, not good.
struct Random {
  uint64_t state;
  uint64_t next() {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
  }
};

class Schedule {
 public:
  Schedule(Machine& machine, Policy policy) : machine_(machine), policy_(policy), random_{policy.seed * 0x9e3779b97f4a7c15ull + 1} {}

  // Until every thread of the block has ended.
  void run_block() {
    while (machine_.live && machine_.error.empty()) {
      const bool progress = pass_over_warps();
      machine_.release_barrier();  // a thread that ended may have been the last one that others waited for
      if (!progress && machine_.error.empty() && !anyone_ready() && machine_.live) {
        machine_.fail("deadlock: threads wait in a __syncthreads or *_sync that the others never reach");
      }
    }
  }

 private:
  bool pass_over_warps() {
    const unsigned warps = (machine_.count + 31) / 32;
    const bool random = policy_.order == Order::Random;
    const unsigned first = random ? unsigned(random_.next() % warps) : 0;
    bool progress = false;
    for (unsigned i = 0; i < warps && machine_.error.empty(); i++) {
      const unsigned warp = policy_.order == Order::Reverse ? warps - 1 - i : (i + first) % warps;
      const unsigned burst = random ? 1u << random_.next() % 8 : ~0u;
      for (unsigned turn = 0; turn < burst && run_lanes(warp); turn++) progress = true;
    }
    return progress;
  }

  // Every lane of the warp that is ready, once.
  bool run_lanes(unsigned warp) {
    const unsigned low = warp * 32, lanes = std::min(machine_.count - low, 32u);
    const unsigned first = policy_.order == Order::Random ? unsigned(random_.next() % lanes) : 0;
    bool ran = false;
    for (unsigned i = 0; i < lanes && machine_.error.empty(); i++) {
      const unsigned lane = policy_.order == Order::Reverse ? lanes - 1 - i : (i + first) % lanes;
      Fiber& fiber = machine_.fibers[low + lane];
      if (fiber.state != State::Ready) continue;
      machine_.run(fiber);
      ran = true;
    }
    return ran;
  }

  bool anyone_ready() const {
    for (unsigned i = 0; i < machine_.count; i++) {
      if (machine_.fibers[i].state == State::Ready) return true;
    }
    return false;
  }

  Machine& machine_;
  Policy policy_;
  Random random_;
};

}  // namespace

std::string run_grid(const Kernel& kernel, dim3 blocks, dim3 threads, size_t shared_bytes, void** parameters, Policy policy) {
  catch_bad_addresses();
  Machine& machine = Machine::here();
  machine.error.clear();
  machine.call = kernel.call;
  machine.parameters = parameters;
  machine.scheduler_strand.begin_thread();
  machine.orders.begin_launch();
  Schedule schedule(machine, policy);
  for (unsigned z = 0; z < blocks.z; z++) {
    for (unsigned y = 0; y < blocks.y; y++) {
      for (unsigned x = 0; x < blocks.x; x++) {
        machine.block = {{x, y, z}, threads, blocks, machine.shared.fresh(shared_bytes), shared_bytes};
        machine.begin_block(threads.x * threads.y * threads.z);
        schedule.run_block();
        if (!machine.error.empty()) {
          machine.abandon_fibers();
          return machine.error;
        }
      }
    }
  }
  machine.orders.end_launch();
  return {};
}

}  // namespace shim
