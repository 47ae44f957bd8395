// The two 16-bit floating-point types and their conversions, rounding to nearest even as the device does.
#pragma once
#include <cstdint>

#include "scalar.h"

struct __half {
  uint16_t bits;
};
struct __nv_bfloat16 {
  uint16_t bits;
};

inline float __half2float(__half h) {
  const uint32_t sign = uint32_t(h.bits & 0x8000) << 16, exponent = h.bits >> 10 & 31, mantissa = h.bits & 1023;
  if (exponent == 0) {
    const float value = float(mantissa) * 0x1p-24f;
    return sign ? -value : value;
  }
  if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | mantissa << 13);
  return __uint_as_float(sign | (exponent + 112) << 23 | mantissa << 13);
}

inline __half __float2half_rn(float f) {
  const uint32_t bits = __float_as_uint(f), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return {uint16_t(0x7fff)};
  if (magnitude >= 0x477ff000) return {uint16_t(sign | 0x7c00)};
  if (magnitude < 0x38800000) {  // subnormal: adding 0.5 moves the bits that stay to the end of the mantissa
    return {uint16_t(sign | (__float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3f000000))};
  }
  const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
  return {uint16_t(sign | (rounded - (112u << 23)) >> 13)};
}

inline float __bfloat162float(__nv_bfloat16 h) { return __uint_as_float(uint32_t(h.bits) << 16); }

inline __nv_bfloat16 __float2bfloat16_rn(float f) {
  const uint32_t bits = __float_as_uint(f);
  if ((bits & 0x7fffffff) > 0x7f800000) return {uint16_t(0x7fff)};
  return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
