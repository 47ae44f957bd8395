#include "traps.h"

#include <csignal>
#include <cstdio>
#include <cstdlib>

#include "machine.h"

namespace shim {
namespace {

struct sigaction previous_segv, previous_bus;

void on_bad_address(int signal, siginfo_t* info, void*) {
  Machine& machine = Machine::here();
  if (!machine.running) {  // not a kernel's doing: what would have happened without us happens on return
    sigaction(signal, signal == SIGSEGV ? &previous_segv : &previous_bus, nullptr);
    return;
  }
  char text[64];
  snprintf(text, sizeof text, "illegal address %p", info->si_addr);
  machine.fail(text);
  // Never comes back: the fiber is abandoned where it is, and the scheduler stops at the error.
  machine.leave(*machine.running, State::Done);
}

// The handler runs on a stack of its own, for the address may be one below a fiber's stack.
struct SignalStack {
  SignalStack() {
    stack_t stack = {};
    stack.ss_size = 64 << 10;
    stack.ss_sp = malloc(stack.ss_size);
    if (!stack.ss_sp || sigaltstack(&stack, nullptr)) abort();
  }
};

}  // namespace

void catch_bad_addresses() {
  static const bool installed = [] {
    struct sigaction action = {};
    action.sa_sigaction = on_bad_address;
    // Not masked in the handler, because it is left without a return.
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    return !sigaction(SIGSEGV, &action, &previous_segv) && !sigaction(SIGBUS, &action, &previous_bus);
  }();
  if (!installed) abort();
  static thread_local SignalStack stack;
  (void)stack;
}

}  // namespace shim
