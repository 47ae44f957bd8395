// Words of CUDA C++ that mean nothing, or something plain, on a CPU.
#pragma once
#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)

#define threadIdx (::shim::current_thread()->index)
#define blockIdx (::shim::current_block()->index)
#define blockDim (::shim::current_block()->threads)
#define gridDim (::shim::current_block()->blocks)
