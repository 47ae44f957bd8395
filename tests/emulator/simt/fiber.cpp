#include "fiber.h"

#include <sys/mman.h>

#include <cstdlib>
#include <utility>

#include "sanitizers.h"

#if !defined(__x86_64__)
#error "switching stacks is written for x86-64 only"
#endif

// Callee-saved registers go to the old stack and come from the new one; the rest is the compiler's to save around a call.
asm(R"(
.text
.globl shim_switch
.hidden shim_switch
.type shim_switch,@function
shim_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size shim_switch,.-shim_switch
)");

namespace shim {

constexpr size_t kGuardBytes = 4096;
constexpr int kSavedRegisters = 6;

Stack::Stack() {
  void* all = mmap(nullptr, kStackBytes + kGuardBytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (all == MAP_FAILED || mprotect(all, kGuardBytes, PROT_NONE)) abort();
  low_ = static_cast<char*>(all) + kGuardBytes;
}

Stack::~Stack() {
  if (!low_) return;
  allow(low_, kStackBytes);
  munmap(low_ - kGuardBytes, kStackBytes + kGuardBytes);
}

Stack::Stack(Stack&& other) noexcept : low_(std::exchange(other.low_, nullptr)) {}

void* Stack::prepare(void (*entry)()) const {
  void** top = reinterpret_cast<void**>(low_ + kStackBytes - 64);
  *--top = nullptr;  // where entry would return to; also makes the stack pointer odd by 8 at entry, as after a call
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < kSavedRegisters; i++) *--top = nullptr;
  return top;
}

}  // namespace shim
