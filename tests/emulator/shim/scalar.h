// Bit casts, arithmetic intrinsics and atomics of one thread.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace shim {
template <class To, class From> inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
}  // namespace shim

inline float __int_as_float(int v) { return ::shim::bit_cast<float>(v); }
inline int __float_as_int(float v) { return ::shim::bit_cast<int>(v); }
inline float __uint_as_float(unsigned v) { return ::shim::bit_cast<float>(v); }
inline unsigned __float_as_uint(float v) { return ::shim::bit_cast<unsigned>(v); }

inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __clz(int v) { return v ? __builtin_clz(unsigned(v)) : 32; }

// The kernels are compiled without contraction, so plain operators round like these.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline int __float2int_rn(float v) { return int(std::nearbyint(v)); }

// Four products of signed bytes, added to c.
inline int __dp4a(int a, int b, int c) {
  for (int byte = 0; byte < 4; byte++) c += int(int8_t(a >> 8 * byte)) * int(int8_t(b >> 8 * byte));
  return c;
}

template <class T> inline T __ldg(const T* p) { return *p; }
template <class T> inline T min(T a, T b) { return b < a ? b : a; }
template <class T> inline T max(T a, T b) { return a < b ? b : a; }

inline unsigned atomicAdd(unsigned* p, unsigned v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
inline unsigned atomicOr(unsigned* p, unsigned v) { return __atomic_fetch_or(p, v, __ATOMIC_RELAXED); }
inline unsigned atomicCAS(unsigned* p, unsigned expected, unsigned value) {
  __atomic_compare_exchange_n(p, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}
