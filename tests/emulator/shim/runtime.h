// What device code needs from the SIMT runtime. Defined in ../simt; exported, because kernels may live in libraries of their own.
#pragma once
#include <cstddef>
#include <cstdint>

#include "vectors.h"

#define SHIM_EXPORT __attribute__((visibility("default")))

namespace shim {

// A CUDA thread, as far as device code looks into it.
struct Thread {
  uint3 index;
  unsigned lane;
  // Warp exchange: what the lane offers, which lane it asks for, what it gets.
  uint64_t offered, received;
  uint32_t wanted;
};

struct Block {
  uint3 index;
  dim3 threads, blocks;
  void* shared;
  size_t shared_bytes;
};

// Functions rather than thread-local variables: a thread-local of a library that is loaded at run time is reached through a
// call anyway, and a cached address of one would go stale if a fiber moved.
SHIM_EXPORT Thread* current_thread();
SHIM_EXPORT Block* current_block();

// What a warp collective does once all lanes have arrived: reads `offered` and `wanted` of the masked lanes, writes `received`.
using Exchange = void (*)(Thread* const* lanes, uint32_t mask);
enum class Collective : uint8_t { Sync, Shuffle, Ballot, Match, Add, Min, Max };

// In the runtime rather than in the kernels, for they touch what belongs to other lanes.
SHIM_EXPORT void exchange_nothing(Thread* const* lanes, uint32_t mask);
SHIM_EXPORT void exchange_shuffle(Thread* const* lanes, uint32_t mask);
SHIM_EXPORT void exchange_ballot(Thread* const* lanes, uint32_t mask);
SHIM_EXPORT void exchange_match(Thread* const* lanes, uint32_t mask);
SHIM_EXPORT void exchange_add(Thread* const* lanes, uint32_t mask);
SHIM_EXPORT void exchange_min(Thread* const* lanes, uint32_t mask);
SHIM_EXPORT void exchange_max(Thread* const* lanes, uint32_t mask);

// Returns when every lane of the mask has arrived at the same kind of collective.
SHIM_EXPORT void warp_collective(Collective kind, Exchange exchange, uint32_t mask);

enum class Barrier : uint8_t { Count, And, Or };
SHIM_EXPORT int block_barrier(Barrier kind, int predicate);

}  // namespace shim
