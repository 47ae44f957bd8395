// Stacks, and switching from one to another.
#pragma once
#include <cstddef>

namespace shim {

constexpr size_t kStackBytes = 64 << 10;

// A stack with an inaccessible page below it. Reused for as long as the OS thread lives.
class Stack {
 public:
  Stack();
  ~Stack();
  Stack(Stack&& other) noexcept;
  Stack(const Stack&) = delete;

  // Prepares the stack so that the first switch to it calls `entry`, which must not return.
  void* prepare(void (*entry)()) const;
  char* low() const { return low_; }

 private:
  char* low_;
};

// Saves the stack pointer in *save and goes on at `load`.
extern "C" void shim_switch(void** save, void* load);

}  // namespace shim
