// What AddressSanitizer and ThreadSanitizer have to be told: that the stack is another one, which bytes nobody may touch, and what puts
// the threads of a block in an order. Nothing in a plain build.
//
// AddressSanitizer instruments everything. ThreadSanitizer instruments kernels and driver but not this runtime, whose own data is no
// business of the kernels'; WAKEKV_TSAN says that it is there nevertheless.
#pragma once
#include <cstddef>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#elif defined(WAKEKV_TSAN)
#include <sanitizer/tsan_interface.h>
#endif

namespace shim {

// A fiber, or an OS thread that switches to fibers, as a sanitizer knows it.
struct Strand {
  const void* low = nullptr;
  size_t bytes = 0;
  void* frames = nullptr;
  void* context = nullptr;

  // The OS thread that calls.
  void begin_thread() {
#if defined(WAKEKV_TSAN)
    context = __tsan_get_current_fiber();
#endif
  }

  // A fiber on a stack without frames.
  void begin_fiber(void* stack_low, size_t stack_bytes) {
    low = stack_low, bytes = stack_bytes, frames = nullptr;
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(stack_low, stack_bytes);
#elif defined(WAKEKV_TSAN)
    if (!context) context = __tsan_create_fiber(0);
#endif
  }

  // The fiber is abandoned, with frames on its stack.
  void end_fiber() {
#if defined(WAKEKV_TSAN)
    if (context) __tsan_destroy_fiber(context);
    context = nullptr;
#endif
  }
};

// Right before the switch. for_good: nobody will switch back.
inline void before_switch([[maybe_unused]] Strand& from, [[maybe_unused]] const Strand& to, [[maybe_unused]] bool for_good) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(for_good ? nullptr : &from.frames, to.low, to.bytes);
#elif defined(WAKEKV_TSAN)
  __tsan_switch_to_fiber(to.context, __tsan_switch_to_fiber_no_sync);
#endif
}

// Right behind the switch, on the other stack.
inline void after_switch([[maybe_unused]] Strand& here, [[maybe_unused]] Strand& from) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(here.frames, &from.low, &from.bytes);
#endif
}

inline void forbid([[maybe_unused]] const void* low, [[maybe_unused]] size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __asan_poison_memory_region(low, bytes);
#endif
}
inline void allow([[maybe_unused]] const void* low, [[maybe_unused]] size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(low, bytes);
#endif
}

// What a strand did before its release of an object comes before what another does after its acquire.
inline void release([[maybe_unused]] void* object) {
#if defined(WAKEKV_TSAN)
  __tsan_release(object);
#endif
}
inline void acquire([[maybe_unused]] void* object) {
#if defined(WAKEKV_TSAN)
  __tsan_acquire(object);
#endif
}

#if defined(WAKEKV_TSAN)
constexpr bool kFindsRaces = true;
#else
constexpr bool kFindsRaces = false;
#endif

}  // namespace shim
