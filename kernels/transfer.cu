// Copies pages between device slots and the reservoir, over mapped pinned memory, as a list on the device says. No host in the loop.
//
// The grid is bounded by the host: few blocks are to keep the bus busy, and to leave the other multiprocessors to attention. A block takes
// every gridDim.x-th page of the list. Each thread keeps LOADS 16-byte loads in flight, for the bus takes long to answer.
// Bytes moved: each page once over the bus and once to or from device memory. No shared memory.
#include "page.cuh"

constexpr u32 TRANSFER_THREADS = 256;
constexpr u32 LOADS = 4;

__device__ __forceinline__ void copy_page(uint4* to, const uint4* from, u32 vectors) {
  for (u32 base = threadIdx.x; base < vectors; base += LOADS * blockDim.x) {
    uint4 loaded[LOADS];
#pragma unroll
    for (u32 i = 0; i < LOADS; i++) {
      if (base + i * blockDim.x < vectors) loaded[i] = from[base + i * blockDim.x];
    }
#pragma unroll
    for (u32 i = 0; i < LOADS; i++) {
      if (base + i * blockDim.x < vectors) to[base + i * blockDim.x] = loaded[i];
    }
  }
}

// Reservoir to device, one wave of the list. A place is not pending any more once its page is there; `places` is not looked at for
// copies that no demand waits for.
extern "C" __global__ void __launch_bounds__(TRANSFER_THREADS)
wakekv_gather(CopyList list, u32 wave, Reservoir reservoir, u8* pool, u64 page_bytes, Place* places) {
  const u32 count = list.counts[wave];
  for (u32 i = blockIdx.x; i < count; i += gridDim.x) {
    const Copy copy = list.copies[first_of_wave(list, wave) + i];
    const u8* from = host_page(reservoir, copy.host, page_bytes);
    copy_page(reinterpret_cast<uint4*>(pool + copy.device * page_bytes), reinterpret_cast<const uint4*>(from), u32(page_bytes / 16));
    if (copy.place == NONE) continue;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) store_relaxed(&places[copy.place].wave, wave);
  }
}
EXPORT_KERNEL(wakekv_gather)

// Device to reservoir.
extern "C" __global__ void __launch_bounds__(TRANSFER_THREADS)
wakekv_mirror(CopyList list, u32 wave, Reservoir reservoir, const u8* pool, u64 page_bytes) {
  const u32 count = list.counts[wave];
  for (u32 i = blockIdx.x; i < count; i += gridDim.x) {
    const Copy copy = list.copies[first_of_wave(list, wave) + i];
    u8* to = host_page(reservoir, copy.host, page_bytes);
    copy_page(reinterpret_cast<uint4*>(to), reinterpret_cast<const uint4*>(pool + copy.device * page_bytes), u32(page_bytes / 16));
  }
}
EXPORT_KERNEL(wakekv_mirror)

// Marks the places of a wave as there, after the host has made its copies by DMA. One thread per copy.
extern "C" __global__ void __launch_bounds__(TRANSFER_THREADS) wakekv_arrive(CopyList list, u32 wave, Place* places) {
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= list.counts[wave]) return;
  const u32 place = list.copies[first_of_wave(list, wave) + i].place;
  if (place != NONE) store_relaxed(&places[place].wave, wave);
}
EXPORT_KERNEL(wakekv_arrive)
