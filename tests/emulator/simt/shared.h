// The shared memory of a block.
#pragma once
#include <cstddef>

namespace shim {

// Ends where an inaccessible page begins. Reused from block to block.
class SharedMemory {
 public:
  SharedMemory() = default;
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;

  // That many bytes, aligned to 16, all ones: NaN, whatever is read from them before it is written.
  void* fresh(size_t bytes);

 private:
  char* mapping_ = nullptr;
  size_t mapped_ = 0;
};

}  // namespace shim
