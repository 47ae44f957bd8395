// Barriers, shuffles and votes.
#pragma once
#include <cstring>
#include <type_traits>

#include "runtime.h"

inline void __syncthreads() { ::shim::block_barrier(::shim::Barrier::Count, 0); }
inline int __syncthreads_count(int p) { return ::shim::block_barrier(::shim::Barrier::Count, p); }
inline int __syncthreads_and(int p) { return ::shim::block_barrier(::shim::Barrier::And, p); }
inline int __syncthreads_or(int p) { return ::shim::block_barrier(::shim::Barrier::Or, p); }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

namespace shim {

template <class T> inline uint64_t offer(T value) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return bits;
}

inline uint64_t vote(Collective kind, Exchange exchange, uint32_t mask, uint64_t offered) {
  Thread* t = current_thread();
  t->offered = offered;
  warp_collective(kind, exchange, mask);
  return t->received;
}

template <class T> inline T shuffle(uint32_t mask, T value, unsigned from) {
  Thread* t = current_thread();
  t->wanted = from;
  const uint64_t bits = vote(Collective::Shuffle, exchange_shuffle, mask, offer(value));
  T result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

}  // namespace shim

inline void __syncwarp(unsigned mask = 0xffffffffu) {
  ::shim::warp_collective(::shim::Collective::Sync, ::shim::exchange_nothing, mask);
}
template <class T> inline T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
  const unsigned lane = ::shim::current_thread()->lane;
  return ::shim::shuffle(mask, value, (lane & ~(width - 1)) | (unsigned(from) & (width - 1)));
}
template <class T> inline T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  const unsigned lane = ::shim::current_thread()->lane, from = lane ^ unsigned(bits);
  return ::shim::shuffle(mask, value, from / width > lane / width ? lane : from);
}
template <class T> inline T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32) {
  const unsigned lane = ::shim::current_thread()->lane;
  return ::shim::shuffle(mask, value, (lane & (width - 1)) >= by ? lane - by : lane);
}
template <class T> inline T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32) {
  const unsigned lane = ::shim::current_thread()->lane;
  return ::shim::shuffle(mask, value, (lane & (width - 1)) + by < unsigned(width) ? lane + by : lane);
}
inline unsigned __ballot_sync(unsigned mask, int p) {
  return unsigned(::shim::vote(::shim::Collective::Ballot, ::shim::exchange_ballot, mask, p != 0));
}
inline int __any_sync(unsigned mask, int p) { return __ballot_sync(mask, p) != 0; }
inline int __all_sync(unsigned mask, int p) { return __ballot_sync(mask, p) == mask; }
template <class T> inline unsigned __match_any_sync(unsigned mask, T value) {
  return unsigned(::shim::vote(::shim::Collective::Match, ::shim::exchange_match, mask, ::shim::offer(value)));
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned value) {
  return unsigned(::shim::vote(::shim::Collective::Add, ::shim::exchange_add, mask, value));
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned value) {
  return unsigned(::shim::vote(::shim::Collective::Min, ::shim::exchange_min, mask, value));
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
  return unsigned(::shim::vote(::shim::Collective::Max, ::shim::exchange_max, mask, value));
}
