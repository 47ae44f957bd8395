#include "shared.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>

#include "sanitizers.h"

namespace shim {

constexpr size_t kPage = 4096;
constexpr size_t kMost = 232 << 10;  // what any device has, with room to spare

SharedMemory::~SharedMemory() {
  if (!mapping_) return;
  allow(mapping_, mapped_);  // what is mapped there next is somebody else's
  munmap(mapping_, mapped_);
}

void* SharedMemory::fresh(size_t bytes) {
  if (bytes > kMost) abort();  // the driver has refused the launch
  if (kFindsRaces && mapping_) {  // what another block did to the memory is forgotten with it
    munmap(mapping_, mapped_);
    mapping_ = nullptr;
  }
  if (!mapping_) {
    mapped_ = kMost + kPage;
    void* mapping = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapping == MAP_FAILED) abort();
    mapping_ = static_cast<char*>(mapping);
    if (mprotect(mapping_ + kMost, kPage, PROT_NONE)) abort();
  }
  char* start = mapping_ + kMost - (bytes + 15) / 16 * 16;
  allow(mapping_, kMost);
  memset(start, 0xff, bytes);
  forbid(mapping_, size_t(start - mapping_));
  forbid(start + bytes, size_t(mapping_ + kMost - start) - bytes);
  return start;
}

}  // namespace shim
