// Pages, page tables and what a step brings: the views that the kernels share. The host fills structs of the same layout.
//
//   page       K [page_tokens, head_dim], then V [page_tokens, head_dim], contiguous, 16-byte aligned
//   head       index layer * kv_heads + kv_head among the heads of a sequence
//   lane       index entry * kv_heads + kv_head among the heads that a launch works on: one layer of the batch
//   device slot   index of a page in the device pool
//   host slot     group * heads + head, index of a page in the reservoir
#pragma once
#include "device.cuh"

// The launch's part of the model: one layer.
struct Shape {
  u32 kv_heads;
  u32 group;        // query heads that share a KV head
  u32 page_tokens;  // a power of two, 8 to 64
  u32 heads;        // of a sequence: layers * kv_heads
  u32 first_head;   // layer * kv_heads
  u32 head_dim;     // a multiple of 16
};

// One sequence's part in the step.
struct Entry {
  u32 sequence;
  u32 start;   // tokens before the step
  u32 tokens;  // new ones, at least 1
  u32 row;     // of the first new token in the batch's tensors
  u32 decode;  // 0 while the prompt is read
  u32 reselect;
};

// Where a sequence's tables begin. Written by the host between steps.
struct Sequence {
  u64 ways_at;   // first element in slot_of_way, page_of_way and stamp_of_way: [heads, ways_room]
  u64 pages_at;  // first element in way_of_page and both of selected: [heads, pages_room]
  u64 groups_at; // first element in groups: [pages_room]
  u32 ways_room;
  u32 pages_room;
};

// What changes in a head from step to step. All zeros is a head without pages and ways.
//
// Where scores are sticky, two lists of selected pages take turns: what the last finished step chose stays until a step that chooses
// anew has finished, for that step may be undone. Else the first list serves alone, and `list` and `kept` stay 0.
struct Head {
  u64 opened_step;  // the step that last opened pages,
  u32 opened_from;  // and the first of them
  u32 pages;        // the open one included
  u32 ways;         // that have been granted
  u32 prompt_from;  // 1 + the first page that prefill opened since the last decode step; 0 if there is none
  u32 selected;     // pages in the list that was written last
  u32 selection_due;  // since a step that was to select, if its attention was left out
  u32 list;           // the list that was written last, 0 or 1
  u32 kept;           // pages in the other one
  u64 selected_step;  // the step that wrote it; 0 if that was undone
};

struct Tables {
  const Sequence* sequences;  // [sequences]
  Head* heads;                // [sequences, heads]
  u32* slot_of_way;           // device slot
  u32* page_of_way;           // logical page, NONE if the way is free
  u64* stamp_of_way;          // the last step that used the page
  u32* way_of_page;           // NO_WAY if the page is not resident; with COLD
  u32* selected[2];           // pages that were selected, ascending; both the same where scores are not sticky
  const u32* groups;          // reservoir group of each sealed page
};

// A page table entry is a way and a flag: a prompt page that prefill left off the device and no decode step has demanded.
constexpr u32 COLD = 0x80000000u;
constexpr u32 NO_WAY = 0x7fffffffu;

// Where a demanded page is. wave 0: it was resident. Wave 1: it is fetched into a way. Waves from 2 on: it exceeds the budget and
// passes through a staging slot, which the next wave uses again. PENDING until its bytes are there; kernels that may run beside a
// fetch load it with load_place.
struct alignas(8) Place {
  u32 slot;
  u32 wave;
};
__device__ __forceinline__ Place load_place(const Place* from) {
  const u64 both = load_relaxed(reinterpret_cast<const u64*>(from));
  return {u32(both), u32(both >> 32)};
}
constexpr u32 PENDING = 0x80000000u;

// What each lane reads in this step.
struct Demand {
  u32* pages;     // [lanes, room], ascending
  Place* places;  // [lanes, room]
  u32* counts;    // [lanes]
  u32 room;
  u32 unused;
};

// One page to copy between the reservoir and a device slot. `place` is an index into Demand::places, or NONE.
struct Copy {
  u32 host;
  u32 device;
  u32 place;
};

// Copies by wave. Wave 1 begins at 0, wave w >= 2 at first_room + (w - 2) * wave_room. Mirrors use a list of one wave.
struct CopyList {
  Copy* copies;
  u32* counts;  // [waves]
  u32 first_room;
  u32 wave_room;
};
__device__ __forceinline__ u64 first_of_wave(const CopyList& list, u32 wave) {
  return wave < 2 ? 0 : list.first_room + u64(wave - 2) * list.wave_room;
}

// The reservoir as the device sees it: mapped pinned memory in chunks of chunk_pages pages.
struct Reservoir {
  u8* const* chunks;
  u64 chunk_pages;
};
__device__ __forceinline__ u8* host_page(const Reservoir& reservoir, u32 host, u64 page_bytes) {
  return reservoir.chunks[host / reservoir.chunk_pages] + host % reservoir.chunk_pages * page_bytes;
}

// Staging slots: `ring` of them per lane, from device slot `first` on.
struct Staging {
  u32 first;
  u32 ring;
};

// The first thing that went wrong, for the host to find a step later. Outputs are NaN from then on.
struct Fault {
  u32 kind;  // FAULT_*; 0 is none
  u32 sequence;
  u32 head;
  u32 page;
};
constexpr u32 FAULT_NO_WAY = 1;       // a page could not be opened: everything in the ways is pinned
constexpr u32 FAULT_NOT_THERE = 2;    // a demanded page had not arrived when it was to be attended
constexpr u32 FAULT_BAD_DEMAND = 3;   // the demand names a page that the head does not have, or is not ascending
constexpr u32 FAULT_TOO_MANY = 4;     // the demand needs more waves than the step has

__device__ __forceinline__ void raise_fault(Fault* fault, u32 kind, u32 sequence, u32 head, u32 page) {
  if (atomicCAS(&fault->kind, 0u, kind) != 0) return;
  fault->sequence = sequence;
  fault->head = head;
  fault->page = page;
}

// A lane's tables.
struct Lane {
  Entry entry;
  u32 index;  // of the lane
  u32 head;   // within its sequence
  Head* state;
  u32* slot_of_way;
  u32* page_of_way;
  u64* stamp_of_way;
  u32* way_of_page;
  u32* selected[2];
  const u32* groups;
};

__device__ __forceinline__ Lane lane_of(const Tables& tables, const Shape& shape, const Entry* entries, u32 entry, u32 kv_head) {
  Lane lane;
  lane.entry = entries[entry];
  lane.index = entry * shape.kv_heads + kv_head;
  lane.head = shape.first_head + kv_head;
  const Sequence sequence = tables.sequences[lane.entry.sequence];
  const u64 ways = sequence.ways_at + u64(lane.head) * sequence.ways_room;
  const u64 pages = sequence.pages_at + u64(lane.head) * sequence.pages_room;
  lane.state = tables.heads + u64(lane.entry.sequence) * shape.heads + lane.head;
  lane.slot_of_way = tables.slot_of_way + ways;
  lane.page_of_way = tables.page_of_way + ways;
  lane.stamp_of_way = tables.stamp_of_way + ways;
  lane.way_of_page = tables.way_of_page + pages;
  lane.selected[0] = tables.selected[0] + pages;
  lane.selected[1] = tables.selected[1] + pages;
  lane.groups = tables.groups + sequence.groups_at;
  return lane;
}

__device__ __forceinline__ u32 pages_of(const Shape& shape, u32 tokens) {
  return (tokens + shape.page_tokens - 1) / shape.page_tokens;
}

// ---- elements ----

constexpr u32 F32 = 0, F16 = 1, BF16 = 2;

__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
template <typename T> __device__ __forceinline__ T narrow(float x);
template <> __device__ __forceinline__ __half narrow<__half>(float x) { return __float2half_rn(x); }
template <> __device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }

// Eight elements, loaded and stored as one.
template <typename T> struct alignas(16) Vec8 {
  T x[8];
};

// Eight stored elements, or zeros. One predicated load: where the compiler made a branch of the condition, it would wait for the bytes
// within, and loads would not be under way together.
template <typename T> __device__ __forceinline__ Vec8<T> load8_if(bool wanted, const T* from) {
#ifdef CUDA_HOST_SHIM
  return wanted ? *reinterpret_cast<const Vec8<T>*>(from) : Vec8<T>{};
#else
  u32 words[4];
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.u32 wanted, %5, 0;\n"
      "mov.u32 %0, 0;\nmov.u32 %1, 0;\nmov.u32 %2, 0;\nmov.u32 %3, 0;\n"
      "@wanted ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n"
      "}"
      : "=&r"(words[0]), "=&r"(words[1]), "=&r"(words[2]), "=&r"(words[3])
      : "l"(from), "r"(u32(wanted)));
  Vec8<T> to;
#pragma unroll
  for (int i = 0; i < 4; i++) to.x[2 * i] = T{u16(words[i])}, to.x[2 * i + 1] = T{u16(words[i] >> 16)};
  return to;
#endif
}

// Eight elements of a tensor of the engine's, whose element type is known at run time only. `at` is a multiple of 8.
__device__ __forceinline__ void load8(const void* tensor, u32 dtype, u64 at, float (&to)[8]) {
  if (dtype == F32) {
    const float4* from = reinterpret_cast<const float4*>(static_cast<const float*>(tensor) + at);
    const float4 low = from[0], high = from[1];
    to[0] = low.x, to[1] = low.y, to[2] = low.z, to[3] = low.w;
    to[4] = high.x, to[5] = high.y, to[6] = high.z, to[7] = high.w;
  } else if (dtype == F16) {
    const Vec8<__half> from = *reinterpret_cast<const Vec8<__half>*>(static_cast<const __half*>(tensor) + at);
#pragma unroll
    for (int i = 0; i < 8; i++) to[i] = widen(from.x[i]);
  } else {
    const Vec8<__nv_bfloat16> from = *reinterpret_cast<const Vec8<__nv_bfloat16>*>(static_cast<const __nv_bfloat16*>(tensor) + at);
#pragma unroll
    for (int i = 0; i < 8; i++) to[i] = widen(from.x[i]);
  }
}

__device__ __forceinline__ void store1(void* tensor, u32 dtype, u64 at, float value) {
  if (dtype == F32) {
    static_cast<float*>(tensor)[at] = value;
  } else if (dtype == F16) {
    static_cast<__half*>(tensor)[at] = narrow<__half>(value);
  } else {
    static_cast<__nv_bfloat16*>(tensor)[at] = narrow<__nv_bfloat16>(value);
  }
}
