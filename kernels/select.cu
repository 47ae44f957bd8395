// What each head reads: the pinned pages and the best others by digest, or all pages, or those that the engine names.
//
// Scores have the bits of the CPU backend's (src/backend/cpu/kernels/digest): sums are made in 8 lanes, without fused operations, and
// joined in one order. So both backends select the same pages.
#include "page.cuh"
#include "rotated.cuh"
#include "state.cuh"

constexpr u32 SCORE_WARPS = 4;
constexpr u32 SELECT_THREADS = 256;

enum { SELECT_ALL, SELECT_TOP, SELECT_LISTED };
struct Selection {
  u32 mode;
  u32 count;   // of SELECT_TOP
  u32 sinks;   // pages that are always read: at the start,
  u32 recent;  // and before the last one
  float stickiness;  // of SELECT_TOP: what a page's score is raised by if the last finished step that chose has chosen it
};

struct Digests {
  const u8* bytes;  // [host slots, stride]
  u64 stride;       // a multiple of 16
  u32 kind;
  u32 unused;
};
constexpr u32 DIGEST_SKETCH = 2;

// The pages that a decode step may or may not read: [first, end). Those before and behind are read anyway.
struct Candidates {
  u32 first, end, last;
};
__device__ __forceinline__ Candidates candidates(const Shape& shape, const Entry& entry, const Selection& selection) {
  const u32 last = pages_of(shape, entry.start + entry.tokens) - 1, written = entry.start / shape.page_tokens;
  const u32 first = min(selection.sinks, last);
  const u32 before_window = last > selection.recent ? last - selection.recent : 0;
  return {first, max(min(before_window, written), first), last};
}

// Whether pages are chosen anew. wakekv_select takes note of it when that is done.
__device__ __forceinline__ bool selects(const Lane& lane) { return lane.entry.reselect || lane.state->selection_due; }

// ---- scores ----

__device__ __forceinline__ float larger_or_nan(float a, float b) { return a != a || a > b ? a : b; }

// The score functions: the warp scores one page, staged in shared memory, for 4 rows at a time, 8 lanes each; the result is in all
// 8 lanes of each row. q: [dim] of shared memory.
template <typename T> __device__ float min_max_score(const u8* digest, const float* q, u32 dim) {
  const u32 lane = threadIdx.x % 8;
  const T* lowest = reinterpret_cast<const T*>(digest);
  const T* highest = lowest + dim;
  float sum = 0;
  for (u32 d = lane; d < dim; d += 8) {
    const float up = __fmul_rn(0.0f > q[d] ? 0.0f : q[d], widen(highest[d]));  // these orders keep NaN
    const float down = __fmul_rn(0.0f < q[d] ? 0.0f : q[d], widen(lowest[d]));
    sum = __fadd_rn(sum, __fadd_rn(up, down));
  }
  return sum_of_8_lanes(sum);
}

// q * scale is rounded to bytes with a step of its own; the rest is integers. bytes: [dim] of the row, in shared memory.
template <typename T> __device__ float sketch_score(const u8* digest, const float* q, u32 dim, u32 tokens, i8* bytes) {
  const u32 lane = threadIdx.x % 8;
  const T* zero = reinterpret_cast<const T*>(digest + tokens * dim / 4);
  const T* scale = zero + dim;
  float offset = 0, largest = 0;
  for (u32 d = lane; d < dim; d += 8) {
    offset = __fadd_rn(offset, __fmul_rn(q[d], widen(zero[d])));
    const float product = fabsf(__fmul_rn(q[d], widen(scale[d])));
    largest = product > largest ? product : largest;
  }
  offset = sum_of_8_lanes(offset);
#pragma unroll
  for (int distance = 1; distance < 8; distance *= 2) largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, distance));
  const bool finite = largest < __int_as_float(0x7f800000);
  const float step = __fdiv_rn(largest, 127.0f), inverse = largest > 1e-30f ? __fdiv_rn(127.0f, largest) : 0.0f;
  for (u32 d = lane; d < dim; d += 8) {
    const float product = __fmul_rn(__fmul_rn(q[d], widen(scale[d])), inverse);
    bytes[d] = finite ? i8(__float2int_rn(product)) : 0;
  }
  __syncwarp();
  // Words of four codes; the codes of a word's plane j belong to four consecutive channels.
  const u32 stride = dim / 4;
  int best = -0x7fffffff - 1;
  for (u32 token = lane; token < tokens; token += 8) {
    int dot = 0;
    for (u32 byte = 0; byte < stride; byte += 4) {
      const u32 codes = *reinterpret_cast<const u32*>(digest + token * stride + byte);
#pragma unroll
      for (u32 plane = 0; plane < 4; plane++) {
        const int query = *reinterpret_cast<const int*>(bytes + plane * stride + byte);
        dot = __dp4a(int(codes >> 2 * plane & 0x03030303u), query, dot);
      }
    }
    best = max(best, dot);
  }
#pragma unroll
  for (int distance = 1; distance < 8; distance *= 2) best = max(best, __shfl_xor_sync(ALL_LANES, best, distance));
  return finite ? __fadd_rn(offset, __fmul_rn(step, float(best))) : not_a_number();
}

// Scores the candidates of each decode entry: the largest over the query heads of the group and the entry's tokens, which share one
// demand; infinite if any is NaN.
//
// grid (blocks, kv_heads, entries), any number of blocks; a warp takes every page that is its turn. q: [tokens, query heads, dim].
// scores: [lanes, room], by logical page. Bytes moved: each digest once per new token, 4 bytes per page.
// Shared memory: queries 4 * max(group, 4) * dim, twice for rotated sketches; then per warp the digest's stride and 4 * dim bytes.
template <typename T>
__device__ void score(const Tables& tables, const Shape& shape, const Entry* entries, const Selection& selection,
                      const Digests& digests, const void* q, u32 dtype, float scale, float* scores, u32 room) {
  SHARED_MEMORY(shared);
  const Lane lane = lane_of(tables, shape, entries, blockIdx.z, blockIdx.y);
  const Candidates range = candidates(shape, lane.entry, selection);
  if (!lane.entry.decode || !selects(lane) || selection.count >= range.end - range.first) return;
  const u32 dim = shape.head_dim, rows = shape.group, warp = threadIdx.x / 32, lane_id = threadIdx.x % 32;
  const bool turned = is_rotated(digests.kind);
  const Rotated sketch = rotated(turned ? digests.kind : DIGEST_ROTATED_1, dim, shape.page_tokens);
  float* queries = reinterpret_cast<float*>(shared);
  u8* prepared = shared + max(rows, 4u) * dim * 4;
  u8* digest = prepared + (turned ? max(rows, 4u) * dim * 4 : 0) + warp * (digests.stride + 4 * dim);
  i8* bytes = reinterpret_cast<i8*>(digest + digests.stride) + lane_id / 8 * dim;

  for (u32 token = 0; token < lane.entry.tokens; token++) {
    const u64 first = (u64(lane.entry.row + token) * shape.kv_heads + blockIdx.y) * rows * dim;
    __syncthreads();  // the queries of the token before have been read
    for (u32 i = threadIdx.x * 8; i < rows * dim; i += blockDim.x * 8) {
      float row[8];
      load8(q, dtype, first + i, row);
      for (int e = 0; e < 8; e++) queries[i + e] = __fmul_rn(row[e], scale);
    }
    __syncthreads();
    if (turned) prepare_rotated(sketch, queries, rows, prepared);
    __syncthreads();

    for (u32 page = range.first + blockIdx.x * SCORE_WARPS + warp; page < range.end; page += gridDim.x * SCORE_WARPS) {
      const u64 host = lane.groups[page] * shape.heads + lane.head;
      const uint4* from = reinterpret_cast<const uint4*>(digests.bytes + host * digests.stride);
      for (u32 i = lane_id; i < digests.stride / 16; i += 32) reinterpret_cast<uint4*>(digest)[i] = from[i];
      __syncwarp();
      float best = minus_infinity();
      for (u32 row = 0; row < rows; row += 4) {
        // Lanes without a row of their own repeat the last one.
        const u32 mine = min(row + lane_id / 8, rows - 1);
        const float* query = queries + mine * dim;
        const float value = turned                          ? rotated_score(sketch, digest, rotated_row(prepared, mine, dim))
                            : digests.kind == DIGEST_SKETCH ? sketch_score<T>(digest, query, dim, shape.page_tokens, bytes)
                                                            : min_max_score<T>(digest, query, dim);
        best = larger_or_nan(best, value);
        __syncwarp();
      }
#pragma unroll
      for (int distance = 8; distance < 32; distance *= 2) {
        const float other = __shfl_xor_sync(ALL_LANES, best, distance);
        best = larger_or_nan(best, other);
      }
      // Unknown is read first, so that it shows in the output as it would without a selection.
      if (best != best) best = -minus_infinity();
      float* score = &scores[u64(lane.index) * room + page];
      if (lane_id == 0) *score = token == 0 || best > *score ? best : *score;
    }
  }
}

#define SCORE(name, T)                                                                                                         \
  extern "C" __global__ void __launch_bounds__(SCORE_WARPS * 32)                                                               \
  name(Tables tables, Shape shape, const Entry* entries, Selection selection, Digests digests, const void* q, u32 dtype,       \
       float scale, float* scores, u32 room) {                                                                                 \
    score<T>(tables, shape, entries, selection, digests, q, dtype, scale, scores, room);                                       \
  }                                                                                                                            \
  EXPORT_KERNEL(name)
SCORE(wakekv_score_f16, __half)
SCORE(wakekv_score_bf16, __nv_bfloat16)

// ---- selection ----

// Larger floats have larger keys, and -0 comes before +0.
__device__ __forceinline__ u32 key_of_score(float score) {
  const u32 bits = __float_as_uint(score);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The `wanted`-th largest key among the scores, and in *above how many are larger. A radix search, 8 bits at a time.
// counts: [256], result: [2] of shared memory. All threads.
__device__ u32 nth_largest(const float* scores, u32 first, u32 end, u32 wanted, u32* counts, u32* result, u32* above) {
  u32 prefix = 0, found_above = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (u32 i = threadIdx.x; i < 256; i += blockDim.x) counts[i] = 0;
    __syncthreads();
    for (u32 page = first + threadIdx.x; page < end; page += blockDim.x) {
      const u32 key = key_of_score(scores[page]);
      const bool matches = shift == 24 || key >> (shift + 8) == prefix >> (shift + 8);
      if (matches) atomicAdd(&counts[key >> shift & 255], 1);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      u32 digit = 255, larger = found_above;
      while (larger + counts[digit] < wanted) larger += counts[digit--];
      result[0] = digit, result[1] = larger;
    }
    __syncthreads();
    prefix |= result[0] << shift;
    found_above = result[1];
    __syncthreads();
  }
  *above = found_above;
  return prefix;
}

__device__ __forceinline__ u32* list_of(const Lane& lane, u32 list) { return list ? lane.selected[1] : lane.selected[0]; }

// Which of a head's lists has what the last finished step chose, and how many pages that is. A lane chooses once in a step, so before it
// does so what is noted is an earlier step's, and stands unless that was undone.
struct Kept {
  u32 list;
  u32 count;
};
__device__ __forceinline__ Kept kept_of(const Head& state) {
  return state.selected_step ? Kept{state.list, state.selected} : Kept{state.list ^ 1, state.kept};
}

// Writes each lane's demand, ascending.
//
// One block per lane: grid (kv_heads, entries). listed: [lanes + 1] offsets into list_pages, for SELECT_LISTED; a list may have
// any order, and names no page twice. scores: [lanes, room]; with SELECT_LISTED scratch of the same size.
// Bytes moved: 20 per candidate, 8 per demanded page, 12 per page whose score is raised. Shared memory: (256 + 2 + 8) * 4 bytes.
extern "C" __global__ void __launch_bounds__(SELECT_THREADS, 1)
wakekv_select(Tables tables, Shape shape, const Entry* entries, const u64* step_number, Selection selection, float* scores,
              const u32* listed, const u32* list_pages, Demand demand, Fault* fault) {
  SHARED_MEMORY(shared);
  u32* counts = reinterpret_cast<u32*>(shared);
  u32* result = counts + 256;
  u32* scratch = result + 2;
  const Lane lane = lane_of(tables, shape, entries, blockIdx.y, blockIdx.x);
  Candidates range = candidates(shape, lane.entry, selection);
  u32* pages = demand.pages + u64(lane.index) * demand.room;
  float* mine = scores + u64(lane.index) * demand.room;

  bool everything = !lane.entry.decode || selection.mode == SELECT_ALL;
  const bool top = !everything && selection.mode == SELECT_TOP, reuse = top && !selects(lane);
  if (top && !reuse && selection.count >= range.end - range.first) everything = true;
  const bool sticky = selection.stickiness > 0;
  const Kept kept = sticky ? kept_of(*lane.state) : Kept{1, 0};
  const u32 list = reuse ? lane.state->list : kept.list ^ 1;
  u32* selected = list_of(lane, list);
  u32 least = 0, ties = 0;  // of SELECT_TOP: every key above `least`, and the first `ties` that are equal to it
  if (everything) {
    // Nothing to choose.
  } else if (top && !reuse) {
    if (sticky) {
      const u32* raised = list_of(lane, kept.list);
      for (u32 i = threadIdx.x; i < kept.count; i += blockDim.x) {
        const u32 page = raised[i];
        if (page >= range.first && page < range.end) mine[page] += selection.stickiness;
      }
      __syncthreads();
    }
    if (selection.count > 0) {
      u32 above;
      least = nth_largest(mine, range.first, range.end, selection.count, counts, result, &above);
      ties = selection.count - above;
    } else {
      least = ~0u;
    }
  } else if (!top) {
    for (u32 page = range.first + threadIdx.x; page < range.end; page += blockDim.x) mine[page] = 0;
    __syncthreads();
    for (u32 i = listed[lane.index] + threadIdx.x; i < listed[lane.index + 1]; i += blockDim.x) {
      const u32 page = list_pages[i];
      if (page > range.last) raise_fault(fault, FAULT_BAD_DEMAND, lane.entry.sequence, lane.head, page);
      if (page >= range.first && page < range.end) mine[page] = 1;
    }
    __syncthreads();
  }

  for (u32 page = threadIdx.x; page < range.first; page += blockDim.x) pages[page] = page;
  u32 taken = range.first, equal = 0;
  const u32 begin = reuse ? 0 : range.first, end = reuse ? lane.state->selected : range.end;
  for (u32 from = begin; from < end; from += blockDim.x) {
    const u32 i = from + threadIdx.x;
    const bool inside = i < end;
    u32 page = i, total;
    bool take = inside;
    if (reuse) {
      page = inside ? selected[i] : 0;
      take = inside && page >= range.first && page < range.end;  // what has become pinned since is read anyway
    } else if (top && !everything) {
      const u32 key = inside ? key_of_score(mine[page]) : 0;
      const bool tie = inside && key == least && ties > 0;
      const u32 rank = equal + block_rank(tie, scratch, &total);
      equal += total;
      take = inside && (key > least || (tie && rank < ties));
    } else if (!everything) {
      take = inside && mine[page] != 0;
    }
    const u32 rank = taken + block_rank(take, scratch, &total);
    taken += total;
    if (take) pages[rank] = page;
    if (take && top && !reuse) selected[rank - range.first] = page;
  }
  for (u32 page = range.end + threadIdx.x; page <= range.last; page += blockDim.x) pages[taken + page - range.end] = page;
  __syncthreads();  // everyone has read whether a selection is due
  if (threadIdx.x == 0) {
    demand.counts[lane.index] = taken + range.last + 1 - range.end;
    if (top && !reuse) {
      lane.state->selected = taken - range.first, lane.state->selection_due = 0, lane.state->selected_step = *step_number;
      if (sticky) lane.state->list = list, lane.state->kept = kept.count;
    }
  }
}
EXPORT_KERNEL(wakekv_select)
