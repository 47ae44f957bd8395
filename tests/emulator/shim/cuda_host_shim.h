// Lets kernels/*.cu be compiled by a C++ compiler, to run on the SIMT runtime in ../simt. Force-included before the kernel's
// first line; see ../build.rs. Each part holds one kind of built-in:
//
//   qualifiers.h  __global__, threadIdx and the like
//   vectors.h     uint4, float2, ...
//   runtime.h     what the SIMT runtime offers
//   collectives.h __syncthreads, shuffles, votes
//   scalar.h      bit casts, integer and float intrinsics, atomics
//   half.h        __half and __nv_bfloat16
//   launch.h      how a kernel gets known to the driver by its name
#pragma once
#include "vectors.h"
#include "runtime.h"
#include "qualifiers.h"
#include "collectives.h"
#include "scalar.h"
#include "half.h"
#include "launch.h"
