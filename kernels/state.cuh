// The softmax state of a query row: what it has attended so far, not yet normalised, and how two of them become one.
//
//   max   the largest logit, in units of log 2
//   sum   sum of 2^(logit - max)
//   acc   sum of 2^(logit - max) * v, by channel
//
// A row that has seen nothing has the smallest float as its maximum rather than minus infinity, so that differences of maxima are
// never NaN: it then has no weight beside any other, and an all -inf row ends as 0/0, like a dense softmax.
#pragma once
#include "device.cuh"

constexpr float LOWEST = -3.402823466e38f;
__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }
__device__ __forceinline__ float not_a_number() { return __int_as_float(0x7fc00000); }

// The common maximum of two states, and by what each one's sums are to be multiplied.
struct Weights {
  float max, a, b;
};
__device__ __forceinline__ Weights weigh(float max_a, float max_b) {
  const float max = fmaxf(max_a, max_b);
  return {max, exp2f(max_a - max), exp2f(max_b - max)};
}
