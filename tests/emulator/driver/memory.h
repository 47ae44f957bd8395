// Which addresses are device memory, which are pinned, and which were once.
#pragma once
#include <cstddef>
#include <cstdint>

namespace driver {

constexpr size_t kDeviceBytes = size_t(24) << 30;

enum class Kind { Device, Pinned };

// Whether `bytes` bytes from `p` on lie inside one live allocation of the kind.
bool holds(Kind kind, const void* p, size_t bytes);
bool holds_any(const void* p, size_t bytes);

// Whether the address belonged to an allocation that has been freed, and to none since.
bool was_freed(uint64_t address);

// Frees all memory, as the end of a process does.
void release_everything();

}  // namespace driver
