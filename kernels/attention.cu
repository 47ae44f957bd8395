// Paged flash decoding with split-KV over the pages that each head demands.
//
// A step runs it once per wave: wave 0 over the pages that were resident, wave 1 over those that were fetched into ways, waves from 2
// on over those that pass through staging slots. Each wave leaves partial softmax states, which wakekv_merge joins.
//
// One block: one part of a lane's page list (of `splits`), for up to ROWS query rows that share the KV head. Its warps take pages in
// turn and never wait for each other. Within a warp, a token's key is read by D / 8 lanes, 16 bytes each, so that a load instruction
// of the warp covers 512 consecutive bytes (fewer where D / 8 is no power of two), and UNROLL of them are under way at once, for K
// and for V. Lanes that share a token share its softmax state; states of different tokens meet only at the end.
//
// Bytes moved: every demanded token's K and V once per row tile, which is once per step for groups up to 8. That is the least there is.
// Shared memory: WARPS * ROWS * (D + 2) * 4 bytes, at the end only.
#include "page.cuh"
#include "state.cuh"

constexpr u32 WARPS = 4;
constexpr u32 ATTEND_THREADS = WARPS * 32;

// What the launch works on: of each entry the tokens [first_token, first_token + window), so that the partials of a long chunk need not
// all be held at once. Rows of q and out are (token of the batch) * query heads + query head, those of the partials
// (lane * window + token of the window) * group + query head of the group.
struct Attention {
  const void* q;  // [tokens, query heads, D] of `dtype`
  const u8* pool;
  float* acc;      // [partial rows, 2 * splits, D]
  float2* state;   // [partial rows, 2 * splits]: max, sum
  const u32* copies_per_wave;  // [waves], at least 3
  Fault* fault;
  float scale;     // softmax scale * log2(e)
  u32 dtype;
  u32 splits;
  u32 wave;
  u32 first_token;
  u32 window;
};

// The first wave beside 0 that has pages writes the second half of the partials, the later ones add to it.
__device__ __forceinline__ bool adds_to_partials(const Attention& a) {
  return a.wave > 2 || (a.wave == 2 && a.copies_per_wave[1] != 0);
}

template <typename T, int D, int ROWS, bool CHUNK>
__device__ void attend(const Shape& shape, const Entry* entries, const Demand& demand, const Attention& a) {
  constexpr int LANES = D <= 64 ? 8 : D <= 128 ? 16 : 32;  // that share a token
  constexpr int TOKENS = 32 / LANES;                       // of one load instruction
  constexpr int UNROLL = TOKENS >= 4 || CHUNK || ROWS * D > 1024 ? 2 : 4;  // as many as there are registers for
  static_assert(8 % (TOKENS * UNROLL) == 0, "pages of 8 tokens and more are whole turns");
  SHARED_MEMORY(shared);

  if (a.wave > 0 && a.copies_per_wave[a.wave] == 0) return;
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, sub = lane % LANES;
  const bool reads = sub < D / 8;
  const u32 kv_head = blockIdx.y % shape.kv_heads, tile = blockIdx.y / shape.kv_heads;
  const Entry entry = entries[blockIdx.z];
  const u32 window_row = a.first_token * shape.group, first_row = window_row + tile * ROWS;
  const u32 rows_of_lane = min(entry.tokens, a.first_token + a.window) * shape.group;
  if (first_row >= rows_of_lane) return;
  const u32 query_heads = shape.kv_heads * shape.group;
  const auto global_row = [&](u32 row) {
    return u64(entry.row + row / shape.group) * query_heads + kv_head * shape.group + row % shape.group;
  };

  float q[ROWS][8], acc[ROWS][8], top[ROWS], sum[ROWS];
  u32 visible[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    const u32 row = first_row + r;
    const bool exists = row < rows_of_lane;
    visible[r] = entry.start + row / shape.group + 1;
    top[r] = LOWEST;
    sum[r] = 0;
    if (exists && reads) load8(a.q, a.dtype, global_row(row) * D + sub * 8, q[r]);
#pragma unroll
    for (int e = 0; e < 8; e++) {
      q[r][e] = exists && reads ? q[r][e] * a.scale : 0.0f;
      acc[r][e] = 0;
    }
  }

  const u32 index = blockIdx.z * shape.kv_heads + kv_head, count = demand.counts[index];
  const u64 list = u64(index) * demand.room;
  const u32 part = (count + a.splits - 1) / a.splits;
  const u32 from = blockIdx.x * part, to = min(from + part, count);
  const u32 end = entry.start + entry.tokens;
  const u64 block_elements = u64(shape.page_tokens) * D;

  for (u32 i = from + warp; i < to; i += WARPS) {
    const Place place = load_place(&demand.places[list + i]);  // a fetch beside this wave may be clearing PENDING of a later one
    if ((place.wave & ~PENDING) != a.wave) continue;
    const u32 first_token = demand.pages[list + i] * shape.page_tokens;
    if (place.wave & PENDING) {
      if (lane == 0) raise_fault(a.fault, FAULT_NOT_THERE, entry.sequence, shape.first_head + kv_head, demand.pages[list + i]);
      continue;
    }
    const u32 filled = min(shape.page_tokens, end - first_token);
    const T* keys = reinterpret_cast<const T*>(a.pool) + u64(place.slot) * 2 * block_elements;
    for (u32 turn = 0; turn < filled; turn += TOKENS * UNROLL) {
      Vec8<T> k[UNROLL], v[UNROLL];
#pragma unroll
      for (int u = 0; u < UNROLL; u++) {
        const u32 token = turn + u * TOKENS + lane / LANES;
        const bool wanted = reads && token < filled;  // what lies behind was never written
        k[u] = load8_if(wanted, keys + token * D + sub * 8);
        v[u] = load8_if(wanted, keys + block_elements + token * D + sub * 8);
      }

      float logit[UNROLL][ROWS];
#pragma unroll
      for (int u = 0; u < UNROLL; u++) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) logit[u][r] = 0;
#pragma unroll
        for (int e = 0; e < 8; e++) {
          const float key = widen(k[u].x[e]);
#pragma unroll
          for (int r = 0; r < ROWS; r++) logit[u][r] = fmaf(q[r][e], key, logit[u][r]);
        }
      }

#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        float highest = top[r];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
#pragma unroll
          for (int offset = LANES / 2; offset > 0; offset /= 2) logit[u][r] += __shfl_xor_sync(ALL_LANES, logit[u][r], offset);
          const u32 token = turn + u * TOKENS + lane / LANES;
          const bool seen = token < filled && (!CHUNK || first_token + token < visible[r]);
          if (!seen) logit[u][r] = minus_infinity();
          highest = fmaxf(highest, logit[u][r]);
        }
        const float shrink = exp2f(top[r] - highest);
        top[r] = highest;
        sum[r] *= shrink;
#pragma unroll
        for (int e = 0; e < 8; e++) acc[r][e] *= shrink;
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
          logit[u][r] = exp2f(logit[u][r] - highest);  // the weight from here on
          sum[r] += logit[u][r];
        }
      }

#pragma unroll
      for (int u = 0; u < UNROLL; u++) {
        const u32 position = first_token + turn + u * TOKENS + lane / LANES;
#pragma unroll
        for (int e = 0; e < 8; e++) {
          const float value = widen(v[u].x[e]);
#pragma unroll
          for (int r = 0; r < ROWS; r++) {
            if (CHUNK && position >= visible[r]) continue;  // a weight of 0 would not do: the value may be NaN
            acc[r][e] = fmaf(logit[u][r], value, acc[r][e]);
          }
        }
      }
    }
  }

  // Lanes of the warp that hold the same channels, then the warps.
  float* accs = reinterpret_cast<float*>(shared);                              // [WARPS, ROWS, D]
  float2* states = reinterpret_cast<float2*>(accs + WARPS * ROWS * D);         // [WARPS, ROWS]
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
#pragma unroll
    for (int offset = LANES; offset < 32; offset *= 2) {
      const Weights w = weigh(top[r], __shfl_xor_sync(ALL_LANES, top[r], offset));
      sum[r] = sum[r] * w.a + __shfl_xor_sync(ALL_LANES, sum[r], offset) * w.b;
      top[r] = w.max;
#pragma unroll
      for (int e = 0; e < 8; e++) acc[r][e] = acc[r][e] * w.a + __shfl_xor_sync(ALL_LANES, acc[r][e], offset) * w.b;
    }
    if (lane == 0) states[warp * ROWS + r] = make_float2(top[r], sum[r]);
    if (lane < D / 8) {
#pragma unroll
      for (int e = 0; e < 8; e++) accs[(warp * ROWS + r) * D + lane * 8 + e] = acc[r][e];
    }
  }
  __syncthreads();
  const u32 slot = a.wave == 0 ? blockIdx.x : a.splits + blockIdx.x;
  const u32 rows = min(u32(ROWS), rows_of_lane - first_row);
  const bool adds = adds_to_partials(a);
  const u64 first_partial = u64(index) * a.window * shape.group + (first_row - window_row);
  const auto partial_of = [&](u32 r) { return (first_partial + r) * 2 * a.splits + slot; };
  for (u32 i = threadIdx.x; i < rows * D; i += ATTEND_THREADS) {
    const u32 r = i / D, d = i % D;
    float max = adds ? a.state[partial_of(r)].x : LOWEST, value = adds ? a.acc[partial_of(r) * D + d] : 0.0f;
#pragma unroll
    for (u32 w = 0; w < WARPS; w++) {
      const Weights weights = weigh(max, states[w * ROWS + r].x);
      max = weights.max;
      value = value * weights.a + accs[(w * ROWS + r) * D + d] * weights.b;
    }
    a.acc[partial_of(r) * D + d] = value;
  }
  __syncthreads();  // the old state has been read by everyone
  if (threadIdx.x < rows) {
    float2 state = adds ? a.state[partial_of(threadIdx.x)] : make_float2(LOWEST, 0);
#pragma unroll
    for (u32 w = 0; w < WARPS; w++) {
      const float2 other = states[w * ROWS + threadIdx.x];
      const Weights weights = weigh(state.x, other.x);
      state = make_float2(weights.max, state.y * weights.a + other.y * weights.b);
    }
    a.state[partial_of(threadIdx.x)] = state;
  }
}

// Joins the partial states of a row: grid (partial rows), one thread per channel. Where the step has failed the output is NaN, so that
// nobody computes on with an incomplete result. out: [tokens, query heads, head_dim]. Bytes moved: the partials once, the output once.
// No shared memory.
extern "C" __global__ void __launch_bounds__(256)
wakekv_merge(Shape shape, const Entry* entries, Attention a, void* out, u32 out_dtype) {
  const u32 d = threadIdx.x, dim = shape.head_dim, rows = a.window * shape.group;
  const u32 lane = blockIdx.x / rows, row = blockIdx.x % rows;
  const Entry entry = entries[lane / shape.kv_heads];
  const u32 token = a.first_token + row / shape.group;
  if (d >= dim || token >= entry.tokens) return;
  const bool fetched = a.copies_per_wave[1] != 0 || a.copies_per_wave[2] != 0;
  const u32 slots = fetched ? 2 * a.splits : a.splits;
  float max = LOWEST, sum = 0, value = 0;
  for (u32 s = 0; s < slots; s++) {
    const u64 partial = u64(blockIdx.x) * 2 * a.splits + s;
    const float2 state = a.state[partial];
    const Weights w = weigh(max, state.x);
    max = w.max;
    sum = sum * w.a + state.y * w.b;
    value = value * w.a + a.acc[partial * dim + d] * w.b;
  }
  const u64 head = lane % shape.kv_heads * shape.group + row % shape.group;
  const u64 at = (u64(entry.row + token) * shape.kv_heads * shape.group + head) * dim + d;
  store1(out, out_dtype, at, a.fault->kind != 0 ? not_a_number() : value / sum);
}
EXPORT_KERNEL(wakekv_merge)

#define ATTEND(name, T, D, ROWS, CHUNK)                                                      \
  extern "C" __global__ void __launch_bounds__(ATTEND_THREADS, 1)                            \
  name(Shape shape, const Entry* entries, Demand demand, Attention a) {                      \
    attend<T, D, ROWS, CHUNK>(shape, entries, demand, a);                                    \
  }                                                                                          \
  EXPORT_KERNEL(name)

// Decode steps, whose entries all have one new token: a tile of query rows as large as the group, or the next larger one. Chunks of
// up to 128 new tokens per entry, with any number: tiles of 8 rows, the rows of a token being next to each other.
#define ATTEND_DIM(T, type, D)                                       \
  ATTEND(wakekv_attend_##type##_d##D##_r1, T, D, 1, false)           \
  ATTEND(wakekv_attend_##type##_d##D##_r2, T, D, 2, false)           \
  ATTEND(wakekv_attend_##type##_d##D##_r4, T, D, 4, false)           \
  ATTEND(wakekv_attend_##type##_d##D##_r8, T, D, 8, false)           \
  ATTEND(wakekv_attend_chunk_##type##_d##D, T, D, 8, true)
#ifdef WAKEKV_ATTEND
WAKEKV_ATTEND  // such as ATTEND_DIM(__half, f16, 128): a program that compiles at first use needs one type and head dim
#else
#define ATTEND_TYPE(T, type) \
  ATTEND_DIM(T, type, 64)    \
  ATTEND_DIM(T, type, 80)    \
  ATTEND_DIM(T, type, 96)    \
  ATTEND_DIM(T, type, 128)   \
  ATTEND_DIM(T, type, 256)
ATTEND_TYPE(__half, f16)
ATTEND_TYPE(__nv_bfloat16, bf16)
#endif
