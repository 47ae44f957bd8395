// __syncthreads and the warp collectives. Misuse that a GPU answers with a hang or with garbage ends the launch with an error.
#include "machine.h"

namespace shim {

void Machine::release_barrier() {
  if (in_barrier == 0 || in_barrier != live) return;
  for (unsigned i = 0; i < count; i++) {
    if (fibers[i].state != State::InBarrier) continue;
    fibers[i].state = State::Ready;
    fibers[i].barrier_result = barrier_value;
  }
  in_barrier = 0;
  barrier_turn++;
}

int block_barrier(Barrier kind, int predicate) {
  Machine& machine = Machine::here();
  Fiber& fiber = *machine.running;
  const int vote = predicate != 0;
  if (machine.in_barrier == 0) {
    machine.barrier_kind = kind;
    machine.barrier_value = vote;
  } else if (machine.barrier_kind != kind) {
    machine.fail("threads of a block wait in different kinds of __syncthreads");
    machine.leave(fiber, State::Done);
  } else {
    switch (kind) {
      case Barrier::Count: machine.barrier_value += vote; break;
      case Barrier::And: machine.barrier_value &= vote; break;
      case Barrier::Or: machine.barrier_value |= vote; break;
    }
  }
  void* const order = machine.orders.barrier(machine.barrier_turn);
  release(order);
  machine.in_barrier++;
  fiber.state = State::InBarrier;
  machine.release_barrier();
  // The last one to arrive stops as well: the scheduler decides who goes on first.
  machine.leave(fiber, fiber.state);
  acquire(order);
  return fiber.barrier_result;
}

static Meeting& meeting_for(Warp& warp, uint32_t mask, Collective kind) {
  Meeting* empty = nullptr;
  for (Meeting& meeting : warp.meetings) {
    if (meeting.arrived && meeting.mask & mask) return meeting;
    if (!meeting.arrived && !empty) empty = &meeting;
  }
  empty->mask = mask;
  empty->kind = kind;
  return *empty;
}

void warp_collective(Collective kind, Exchange exchange, uint32_t mask) {
  Machine& machine = Machine::here();
  Fiber& fiber = *machine.running;
  Warp& warp = *fiber.warp;
  const uint32_t bit = 1u << fiber.lane;
  const char* misuse = nullptr;
  if (!(mask & bit)) misuse = "a lane called a *_sync whose mask does not name it";
  if (mask & ~warp.live) misuse = "the mask of a *_sync names a lane that does not exist or has ended";
  Meeting& meeting = meeting_for(warp, mask, kind);
  if (meeting.mask != mask || meeting.kind != kind) misuse = "lanes of a warp wait in different *_sync operations or masks";
  if (misuse) {
    machine.fail(misuse);
    machine.leave(fiber, State::Done);
  }
  void* const order = machine.orders.meeting(unsigned(&warp - machine.warps.data()), unsigned(&meeting - warp.meetings), meeting.turn);
  if (kind == Collective::Sync) release(order);
  meeting.arrived |= bit;
  if (meeting.arrived != mask) {
    machine.leave(fiber, State::InWarp);
  } else {
    exchange(warp.lanes, mask);
    for (uint32_t left = mask; left; left &= left - 1) static_cast<Fiber*>(warp.lanes[__builtin_ctz(left)])->state = State::Ready;
    meeting.arrived = 0;
    meeting.turn++;
  }
  if (kind == Collective::Sync) acquire(order);
}

}  // namespace shim
