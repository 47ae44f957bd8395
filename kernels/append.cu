// Writes the step's new keys and values into open pages. A page that fills up leaves its digest, and is listed to be mirrored.
//
// Digests have the very layout of the CPU backend's (src/backend/cpu/kernels/digest), and the same bits:
//
//   min/max      lowest [head_dim], highest [head_dim], as stored elements
//   cuboid       the same, around the middle of the two by the keys' mean distance from it
//   key sketch   codes [page_tokens, S] bytes, S = head_dim / 4; zero [head_dim], scale [head_dim], as stored elements.
//                Bits 2j.. of byte b of a token are the code of channel j * S + b, and key ~ zero + scale * code
//   rotated      see rotated.cuh
#include "page.cuh"
#include "rotated.cuh"
#include "state.cuh"

constexpr u32 APPEND_THREADS = 128;
constexpr u32 DIGEST_NONE = 0, DIGEST_SKETCH = 2, DIGEST_CUBOID = 6;  // 1 is min/max, what is left
constexpr float LARGEST_CODE = 3.0f;

struct Digests {
  u8* bytes;       // [host slots, stride]
  u64 stride;      // a multiple of 16
  u32 kind;        // DIGEST_*
  u32 unused;
};

// Smallest and largest key of a channel; NaN in both where a key is NaN or infinite.
template <typename T> __device__ __forceinline__ float2 bounds(const T* keys, u32 dim, u32 tokens, u32 channel) {
  float lowest = __int_as_float(0x7f800000), highest = minus_infinity(), unknown = 0;
  for (u32 token = 0; token < tokens; token++) {
    const float key = widen(keys[token * dim + channel]);
    lowest = key < lowest ? key : lowest;
    highest = key > highest ? key : highest;
    unknown = __fadd_rn(unknown, __fsub_rn(key, key));  // 0, or NaN
  }
  return make_float2(__fadd_rn(lowest, unknown), __fadd_rn(highest, unknown));
}

// As far around the middle of a range as keys are from it on average.
template <typename T>
__device__ __forceinline__ float2 around_middle(float2 range, const T* keys, u32 dim, u32 tokens, u32 channel) {
  const float middle = __fmul_rn(__fadd_rn(range.x, range.y), 0.5f);
  float sum = 0;
  for (u32 token = 0; token < tokens; token++) {
    sum = __fadd_rn(sum, fabsf(__fsub_rn(widen(keys[token * dim + channel]), middle)));
  }
  const float deviation = __fmul_rn(sum, __fdiv_rn(1.0f, float(tokens)));
  return make_float2(__fsub_rn(middle, deviation), __fadd_rn(middle, deviation));
}

// fits: shared memory, 2 * head_dim floats; 17 * head_dim + page_tokens for rotated sketches. All threads.
template <typename T> __device__ void write_digest(const Digests& digests, u8* to, const T* keys, u32 dim, u32 tokens, float* fits) {
  if (is_rotated(digests.kind)) return write_rotated(digests.kind, to, keys, dim, tokens, fits);
  T* first = reinterpret_cast<T*>(digests.kind == DIGEST_SKETCH ? to + tokens * dim / 4 : to);
  T* second = first + dim;
  for (u32 d = threadIdx.x; d < dim; d += blockDim.x) {
    float2 range = bounds(keys, dim, tokens, d);
    if (digests.kind == DIGEST_CUBOID) range = around_middle(range, keys, dim, tokens, d);
    if (digests.kind != DIGEST_SKETCH) {
      first[d] = narrow<T>(range.x), second[d] = narrow<T>(range.y);
      continue;
    }
    T zero = narrow<T>(range.x), scale = narrow<T>(__fdiv_rn(__fsub_rn(range.y, range.x), LARGEST_CODE));
    const bool fits_in = fabsf(widen(scale)) < __int_as_float(0x7f800000);
    if (!fits_in) zero = narrow<T>(not_a_number()), scale = narrow<T>(0.0f);
    first[d] = zero, second[d] = scale;
    const float inverse = __fdiv_rn(1.0f, widen(scale));
    fits[d] = widen(zero);
    fits[dim + d] = fabsf(inverse) < __int_as_float(0x7f800000) ? inverse : 0.0f;
  }
  if (digests.kind != DIGEST_SKETCH) return;
  __syncthreads();
  const u32 stride = dim / 4;
  for (u32 i = threadIdx.x; i < tokens * stride; i += blockDim.x) {
    const u32 token = i / stride, byte = i % stride;
    u32 codes = 0;
    for (u32 plane = 0; plane < 4; plane++) {
      const u32 d = plane * stride + byte;
      const float key = widen(keys[token * dim + d]);
      const float steps = __fadd_rn(__fmul_rn(__fsub_rn(key, fits[d]), fits[dim + d]), 0.5f);
      const float code = steps < LARGEST_CODE ? steps : LARGEST_CODE;  // NaN counts as the largest
      codes |= (code > 0 ? u32(code) : 0) << 2 * plane;
    }
    to[i] = u8(codes);
  }
}

// One block per page that the step writes to: grid (pages, kv_heads, entries), the page being the first unsealed one of the entry
// plus `first_page` plus blockIdx.x. A page that has lost its way again, to later pages of the same chunk, is written to the lane's
// staging slot blockIdx.x; so no launch covers more pages than the ring has, and the next one waits for the mirrors of this one.
//
// k, v: [tokens, kv_heads, head_dim] of `dtype`. pool: [slots, page]. Shared memory: that of `write_digest`.
// Bytes moved: each input once, each element stored once; a page that seals is read once more, from the cache, for its digest.
template <typename T>
__device__ void append(const Tables& tables, const Shape& shape, const Entry* entries, const void* k, const void* v, u32 dtype,
                       u8* pool, const Digests& digests, const Staging& staging, const CopyList& mirrors, u32 first_page) {
  SHARED_MEMORY(shared);
  const Lane lane = lane_of(tables, shape, entries, blockIdx.z, blockIdx.y);
  const u32 tokens = shape.page_tokens, dim = shape.head_dim, start = lane.entry.start, end = start + lane.entry.tokens;
  const u32 page = start / tokens + first_page + blockIdx.x;
  if (page >= lane.state->pages || page * tokens >= end) return;  // the former where the page could not be opened
  const u32 way = lane.way_of_page[page] & NO_WAY;
  const u32 slot = way != NO_WAY ? lane.slot_of_way[way] : staging.first + lane.index * staging.ring + blockIdx.x;
  T* keys = reinterpret_cast<T*>(pool) + u64(slot) * 2 * tokens * dim;
  const u32 from = max(start, page * tokens), to = min(end, (page + 1) * tokens);

  const u32 vectors = dim / 8, count = (to - from) * vectors;
  for (u32 i = threadIdx.x; i < 2 * count; i += blockDim.x) {
    const bool is_value = i >= count;
    const u32 j = is_value ? i - count : i, position = from + j / vectors, d = j % vectors * 8;
    float row[8];
    load8(is_value ? v : k, dtype, (u64(lane.entry.row + position - start) * shape.kv_heads + blockIdx.y) * dim + d, row);
    Vec8<T> stored;
#pragma unroll
    for (int e = 0; e < 8; e++) stored.x[e] = narrow<T>(row[e]);
    T* block = keys + (is_value ? tokens * dim : 0);
    *reinterpret_cast<Vec8<T>*>(block + position % tokens * dim + d) = stored;
  }
  if (to != (page + 1) * tokens) return;

  const u32 host = lane.groups[page] * shape.heads + lane.head;
  __syncthreads();
  if (digests.kind != DIGEST_NONE) {
    write_digest(digests, digests.bytes + host * digests.stride, keys, dim, tokens, reinterpret_cast<float*>(shared));
  }
  if (threadIdx.x == 0) mirrors.copies[atomicAdd(&mirrors.counts[1], 1)] = {host, slot, NONE};
}

#define APPEND(name, T)                                                                                                      \
  extern "C" __global__ void __launch_bounds__(APPEND_THREADS)                                                               \
  name(Tables tables, Shape shape, const Entry* entries, const void* k, const void* v, u32 dtype, u8* pool, Digests digests, \
       Staging staging, CopyList mirrors, u32 first_page) {                                                                  \
    append<T>(tables, shape, entries, k, v, dtype, pool, digests, staging, mirrors, first_page);                             \
  }                                                                                                                          \
  EXPORT_KERNEL(name)
APPEND(wakekv_append_f16, __half)
APPEND(wakekv_append_bf16, __nv_bfloat16)
