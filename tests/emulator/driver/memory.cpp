#include "memory.h"

#include <sys/mman.h>

#include <cstring>
#include <iterator>
#include <map>
#include <mutex>

#include "../simt/sanitizers.h"
#include "context.h"
#include "stream.h"

namespace driver {
namespace {

struct Allocation {
  size_t bytes;
  Kind kind;
};
std::mutex memory_lock;
std::map<uintptr_t, Allocation> live;
std::map<uintptr_t, size_t> freed;
size_t device_bytes_used = 0;

// The entry at or below an address. memory_lock is held.
template <class Map> auto below(Map& map, uintptr_t address) {
  auto after = map.upper_bound(address);
  return after == map.begin() ? map.end() : std::prev(after);
}

bool inside(uintptr_t from, size_t bytes, uintptr_t start, size_t length) {
  return from >= start && bytes <= length && from - start <= length - bytes;
}

bool holds_kind(const Kind* kind, const void* p, size_t bytes) {
  std::lock_guard lock(memory_lock);
  const auto found = below(live, uintptr_t(p));
  if (found == live.end() || !inside(uintptr_t(p), bytes, found->first, found->second.bytes)) return false;
  return !kind || found->second.kind == *kind;
}

void forget_freed(uintptr_t address, size_t bytes) {
  auto at = freed.lower_bound(address);
  if (at != freed.begin() && std::prev(at)->first + std::prev(at)->second > address) --at;
  while (at != freed.end() && at->first < address + bytes) at = freed.erase(at);
}

// An allocation ends where an inaccessible page begins, and begins behind another one, so that a kernel which leaves it does not
// get far. Alignment costs up to 255 bytes at the end.
constexpr size_t kPage = 4096, kAlignment = 256;
size_t round_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }
size_t mapped_bytes(size_t bytes) { return round_up(bytes, kPage) + 2 * kPage; }
char* start_of_mapping(void* p, size_t bytes) {
  return static_cast<char*>(p) + round_up(bytes, kAlignment) - round_up(bytes, kPage) - kPage;
}

// Fresh memory is all ones: a NaN in every floating-point type, and an index that leads nowhere.
void* allocate(size_t bytes, Kind kind) {
  std::lock_guard lock(memory_lock);
  if (kind == Kind::Device && bytes > kDeviceBytes - device_bytes_used) return nullptr;
  void* mapping = mmap(nullptr, mapped_bytes(bytes), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) return nullptr;
  char* first = static_cast<char*>(mapping) + kPage;
  char* p = first + round_up(bytes, kPage) - round_up(bytes, kAlignment);
  if (mprotect(first, round_up(bytes, kPage), PROT_READ | PROT_WRITE)) {
    munmap(mapping, mapped_bytes(bytes));
    return nullptr;
  }
  memset(p, 0xff, bytes);
  shim::forbid(first, size_t(p - first));
  shim::forbid(p + bytes, round_up(bytes, kAlignment) - bytes);
  forget_freed(uintptr_t(p), bytes);
  live[uintptr_t(p)] = {bytes, kind};
  if (kind == Kind::Device) device_bytes_used += bytes;
  return p;
}

// memory_lock is held.
void release_at(std::map<uintptr_t, Allocation>::iterator found) {
  const auto [address, allocation] = *found;
  if (allocation.kind == Kind::Device) device_bytes_used -= allocation.bytes;
  freed[address] = allocation.bytes;
  live.erase(found);
  char* const start = start_of_mapping(reinterpret_cast<void*>(address), allocation.bytes);
  const size_t mapped = mapped_bytes(allocation.bytes);
  shim::allow(start, mapped);  // what is mapped there next is somebody else's
  munmap(start, mapped);
}

bool release(void* p, Kind kind) {
  std::lock_guard lock(memory_lock);
  const auto found = live.find(uintptr_t(p));
  if (found == live.end() || found->second.kind != kind) return false;
  release_at(found);
  return true;
}

CUresult allocate_device(CUdeviceptr* p, size_t bytes) {
  if (!bytes) return INVALID_VALUE;
  void* memory = meets(Fault::DeviceMemory) ? nullptr : allocate(bytes, Kind::Device);
  *p = CUdeviceptr(memory);
  return memory ? SUCCESS : OUT_OF_MEMORY;
}

}  // namespace

bool holds(Kind kind, const void* p, size_t bytes) { return holds_kind(&kind, p, bytes); }
bool holds_any(const void* p, size_t bytes) { return holds_kind(nullptr, p, bytes); }

void release_everything() {
  std::lock_guard lock(memory_lock);
  while (!live.empty()) release_at(live.begin());
}

bool was_freed(uint64_t address) {
  std::lock_guard lock(memory_lock);
  const auto found = below(freed, address);
  return found != freed.end() && address - found->first < found->second;
}

}  // namespace driver

using namespace driver;

API CUresult cuMemAlloc_v2(CUdeviceptr* p, size_t bytes) {
  ENTER();
  return allocate_device(p, bytes);
}
API CUresult cuMemFree_v2(CUdeviceptr p) {
  ENTER();
  synchronise_all();
  return !p || release(reinterpret_cast<void*>(p), Kind::Device) ? SUCCESS : INVALID_VALUE;
}
API CUresult cuMemAllocAsync(CUdeviceptr* p, size_t bytes, void* handle) {
  ENTER();
  Stream* stream = find_stream(handle);
  if (!stream) return INVALID_HANDLE;
  if (stream->capture) return CAPTURE_UNSUPPORTED;
  return allocate_device(p, bytes);
}
API CUresult cuMemFreeAsync(CUdeviceptr p, void* handle) {
  ENTER();
  Stream* stream = find_stream(handle);
  if (!stream) return INVALID_HANDLE;
  if (!holds(Kind::Device, reinterpret_cast<void*>(p), 0)) return INVALID_VALUE;
  stream->submit([p] { release(reinterpret_cast<void*>(p), Kind::Device); });
  return SUCCESS;
}
API CUresult cuMemHostAlloc(void** p, size_t bytes, unsigned flags) {
  ENTER();
  constexpr unsigned kKnownFlags = 7;  // portable, mapped, write-combined
  if (!bytes || flags & ~kKnownFlags) return INVALID_VALUE;
  *p = meets(Fault::PinnedMemory) ? nullptr : allocate(bytes, Kind::Pinned);
  return *p ? SUCCESS : OUT_OF_MEMORY;
}
API CUresult cuMemFreeHost(void* p) {
  ENTER();
  synchronise_all();
  return release(p, Kind::Pinned) ? SUCCESS : INVALID_VALUE;
}
API CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* mapped, void* p, unsigned) {
  ENTER();
  if (!holds(Kind::Pinned, p, 0)) return INVALID_VALUE;
  *mapped = CUdeviceptr(p);
  return SUCCESS;
}
API CUresult cuMemGetInfo_v2(size_t* free_bytes, size_t* total) {
  ENTER();
  std::lock_guard lock(memory_lock);
  *free_bytes = kDeviceBytes - device_bytes_used;
  *total = kDeviceBytes;
  return SUCCESS;
}
// Bytes of live device and pinned memory: a test that drops everything ends where it began.
API size_t fakecuda_live_bytes() {
  std::lock_guard lock(memory_lock);
  size_t bytes = 0;
  for (const auto& [address, allocation] : live) bytes += allocation.bytes;
  return bytes;
}
