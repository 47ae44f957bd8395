// Fibers of a block, and the way from one to the scheduler and back.
#include "machine.h"

namespace shim {

Machine& Machine::here() {
  static thread_local Machine machine;
  return machine;
}

Thread* current_thread() { return Machine::here().running; }
Block* current_block() { return &Machine::here().block; }

static void fiber_main() {
  Machine& machine = Machine::here();
  Fiber& fiber = *machine.running;
  after_switch(fiber.strand, machine.scheduler_strand);
  machine.orders.begin_thread();
  machine.call(machine.parameters);
  machine.orders.end_thread();
  fiber.warp->live &= ~(1u << fiber.lane);
  machine.live--;
  for (const Meeting& meeting : fiber.warp->meetings) {
    if (meeting.arrived && meeting.mask >> fiber.lane & 1) machine.fail("a thread ended while its warp waits for it in a *_sync");
  }
  machine.leave(fiber, State::Done);
  __builtin_unreachable();
}

void Machine::begin_block(unsigned threads) {
  count = live = threads;
  in_barrier = 0;
  while (stacks.size() < threads) stacks.emplace_back();
  if (fibers.size() < threads) fibers.resize(threads);
  warps.assign((threads + 31) / 32, Warp{});
  orders.begin_block(unsigned(warps.size()));
  for (unsigned i = 0; i < threads; i++) {
    Fiber& fiber = fibers[i];
    const dim3& shape = block.threads;
    fiber.index = {i % shape.x, i / shape.x % shape.y, i / (shape.x * shape.y)};
    fiber.lane = i % 32;
    fiber.warp = &warps[i / 32];
    fiber.warp->lanes[fiber.lane] = &fiber;
    fiber.warp->live |= 1u << fiber.lane;
    fiber.state = State::Ready;
    fiber.stack_pointer = stacks[i].prepare(fiber_main);
    fiber.strand.begin_fiber(stacks[i].low(), kStackBytes);
  }
}

void Machine::abandon_fibers() {
  for (Fiber& fiber : fibers) fiber.strand.end_fiber();
}

void Machine::run(Fiber& fiber) {
  running = &fiber;
  before_switch(scheduler_strand, fiber.strand, false);
  shim_switch(&scheduler, fiber.stack_pointer);
  after_switch(scheduler_strand, fiber.strand);
  running = nullptr;
}

void Machine::leave(Fiber& fiber, State state) {
  fiber.state = state;
  before_switch(fiber.strand, scheduler_strand, state == State::Done);
  shim_switch(&fiber.stack_pointer, scheduler);
  after_switch(fiber.strand, scheduler_strand);
}

}  // namespace shim
