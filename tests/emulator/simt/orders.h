// What orders the memory accesses of a launch, for ThreadSanitizer: its begin and end, barriers of a block, __syncwarp. Blocks are not
// ordered among each other, although they run one after the other, so that a race between blocks shows; nor do shuffles and votes order
// anything.
#pragma once
#include <cstdint>
#include <memory>

#include "sanitizers.h"

namespace shim {

class Orders {
 public:
  void begin_launch() { release(&launch_begun_); }
  void end_launch() { acquire(&launch_ended_); }

  // Objects of an earlier block would carry its order into this one, and so would its memory.
  void begin_block(unsigned warps) {
    if (!kFindsRaces) return;
    objects_ = std::make_unique<uint64_t[]>(2 + size_t(warps) * 2 * kMeetings);
    release(&launch_begun_);
  }
  void begin_thread() { acquire(&launch_begun_); }
  void end_thread() { release(&launch_ended_); }

  // Two objects in turn: a thread that goes on late must not pick up what others have released for the next barrier.
  void* barrier(unsigned turn) { return kFindsRaces ? &objects_[turn % 2] : nullptr; }
  void* meeting(unsigned warp, unsigned meeting, unsigned turn) {
    return kFindsRaces ? &objects_[2 + (size_t(warp) * kMeetings + meeting) * 2 + turn % 2] : nullptr;
  }

 private:
  static constexpr unsigned kMeetings = 32;
  std::unique_ptr<uint64_t[]> objects_;
  uint64_t launch_begun_ = 0, launch_ended_ = 0;
};

}  // namespace shim
