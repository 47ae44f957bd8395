// What differs between the compilers of these kernels: nvcc, NVRTC, and a C++ compiler with a host shim, by which the tests run
// them on machines without a GPU.
//
// Rules that keep one source for all three: kernels are extern "C" and exported by name; shared memory is dynamic, its size comes
// from the launch; no macros or headers of the C library; products are fused where fmaf says so and nowhere else that bits matter.
#pragma once

#ifdef CUDA_HOST_SHIM
#define SHARED_MEMORY(name) unsigned char* const name = static_cast<unsigned char*>(::shim::current_block()->shared)
#define EXPORT_KERNEL(name) SHIM_KERNEL(name)
#else
#include "half.cuh"
extern __shared__ __align__(16) unsigned char dynamic_shared_memory[];
#define SHARED_MEMORY(name) unsigned char* const name = dynamic_shared_memory
#define EXPORT_KERNEL(name)
#endif

using u8 = unsigned char;
using i8 = signed char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr u32 ALL_LANES = 0xffffffffu;
constexpr u32 NONE = 0xffffffffu;

// Words of which one kernel stores a half while another may be loading them: the load finds the old half or the new one. It orders
// nothing.
__device__ __forceinline__ u64 load_relaxed(const u64* from) {
#ifdef CUDA_HOST_SHIM
  return __atomic_load_n(from, __ATOMIC_RELAXED);
#else
  return *static_cast<const volatile u64*>(from);
#endif
}
__device__ __forceinline__ void store_relaxed(u32* to, u32 value) {
#ifdef CUDA_HOST_SHIM
  __atomic_store_n(to, value, __ATOMIC_RELAXED);
#else
  *static_cast<volatile u32*>(to) = value;
#endif
}

// How many threads of the block below this one have `yes`, and in *total how many have it in all. All threads call it; blocks are
// whole warps. scratch: [warps] of shared memory, free again after the call.
__device__ __forceinline__ u32 block_rank(bool yes, u32* scratch, u32* total) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const u32 votes = __ballot_sync(ALL_LANES, yes);
  if (lane == 0) scratch[warp] = __popc(votes);
  __syncthreads();
  u32 before = __popc(votes & ((1u << lane) - 1)), all = 0;
  for (u32 w = 0; w < warps; w++) {
    if (w < warp) before += scratch[w];
    all += scratch[w];
  }
  __syncthreads();
  *total = all;
  return before;
}

// The smallest value in the block. scratch: [warps] u64.
__device__ __forceinline__ u64 block_min(u64 value, u64* scratch) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  for (u32 offset = 16; offset > 0; offset /= 2) {
    const u64 other = __shfl_xor_sync(ALL_LANES, value, offset);
    value = other < value ? other : value;
  }
  if (lane == 0) scratch[warp] = value;
  __syncthreads();
  for (u32 w = 0; w < warps; w++) value = scratch[w] < value ? scratch[w] : value;
  __syncthreads();
  return value;
}
