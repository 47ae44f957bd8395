// The state of the block that an OS thread is running. One Machine per OS thread, reused from launch to launch.
#pragma once
#include <string>
#include <vector>

#include "fiber.h"
#include "orders.h"
#include "shared.h"
#include "simt.h"

namespace shim {

enum class State : uint8_t { Ready, InWarp, InBarrier, Done };

// Lanes of a warp that wait for each other in a collective. A warp can have several such groups with disjoint masks.
struct Meeting {
  uint32_t mask = 0, arrived = 0;
  Collective kind = Collective::Sync;
  unsigned turn = 0;
};

struct Warp {
  Thread* lanes[32] = {};
  uint32_t live = 0;
  Meeting meetings[32];
};

struct Fiber : Thread {
  State state = State::Ready;
  Warp* warp = nullptr;
  void* stack_pointer = nullptr;
  Strand strand;
  int barrier_result = 0;
};

struct Machine {
  std::vector<Stack> stacks;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  SharedMemory shared;
  Block block{};
  Fiber* running = nullptr;
  void* scheduler = nullptr;
  Strand scheduler_strand;
  Orders orders;

  unsigned count = 0, live = 0, in_barrier = 0;
  Barrier barrier_kind = Barrier::Count;
  int barrier_value = 0;
  unsigned barrier_turn = 0;

  void (*call)(void**) = nullptr;
  void** parameters = nullptr;
  std::string error;

  static Machine& here();
  ~Machine() { abandon_fibers(); }

  // The first error is the one that is reported.
  void fail(const std::string& what) {
    if (error.empty()) error = what;
  }
  void begin_block(unsigned threads);
  void abandon_fibers();
  void run(Fiber& fiber);
  void leave(Fiber& fiber, State state);
  void release_barrier();
};

}  // namespace shim
