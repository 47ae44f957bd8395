// Rotated sketches: keys about the page's mean, turned by Hadamard's matrix, at 1 to 3 bits with a scale per token. The layout and the
// bits are those of the CPU backend's (src/backend/cpu/kernels/digest/rotated.rs and nibbles.rs):
//
//   codes    [blocks of 16 tokens][words][32]: byte t < 16 of a word holds nibbles 0 (low) and 2 of token t, byte 16 + t nibbles 1 and 3.
//            First the words of the two-bit plane, nibble n having the codes of channels 2n and 2n + 1, then those of the one-bit
//            plane, nibble n having channels 4n..4n + 3. A three-bit code is twice the one and once the other
//   weights  [tokens] u8, the scale of a token in parts of the largest
//   centre   [head_dim] i8
//   scale, step of the centre  float; scale is NaN where the page is unknown
#pragma once
#include "page.cuh"

constexpr u32 DIGEST_ROTATED_1 = 3, DIGEST_ROTATED_3 = 5;  // kinds 3, 4, 5 have 1, 2, 3 bits
__device__ __forceinline__ bool is_rotated(u32 kind) { return kind >= DIGEST_ROTATED_1 && kind <= DIGEST_ROTATED_3; }

struct Rotated {
  u32 bits, dim, blocks;
  u32 pairs, quads;                 // words of a block's planes
  u32 weights, centre, scales;      // where they begin
  float largest;                    // codes stand for -largest to largest in steps of 2
};

__device__ __forceinline__ Rotated rotated(u32 kind, u32 dim, u32 tokens) {
  Rotated r;
  r.bits = kind - DIGEST_ROTATED_1 + 1, r.dim = dim, r.blocks = (tokens + 15) / 16;
  r.pairs = r.bits >= 2 ? dim / 8 : 0, r.quads = r.bits % 2 == 1 ? dim / 16 : 0;
  r.weights = r.blocks * (r.pairs + r.quads) * 32;
  r.centre = r.weights + r.blocks * 16;
  r.scales = r.centre + dim;
  r.largest = float((1u << r.bits) - 1);
  return r;
}

// Eight lanes' sums, in the order in which the CPU adds them: ((0 + 2) + (1 + 3)) + ((4 + 6) + (5 + 7)).
__device__ __forceinline__ float sum_of_8_lanes(float x) {
  x = __fadd_rn(x, __shfl_xor_sync(ALL_LANES, x, 2));
  x = __fadd_rn(x, __shfl_xor_sync(ALL_LANES, x, 1));
  return __fadd_rn(x, __shfl_xor_sync(ALL_LANES, x, 4));
}

// The largest of eight lanes' magnitudes. NaN counts as larger than infinity: bits of positive numbers are in their order.
__device__ __forceinline__ float largest_of_8_lanes(u32 bits) {
#pragma unroll
  for (int distance = 1; distance < 8; distance *= 2) {
    const u32 other = __shfl_xor_sync(ALL_LANES, bits, distance);
    bits = max(bits, other);
  }
  return __uint_as_float(bits);
}
__device__ __forceinline__ u32 magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }
__device__ __forceinline__ bool finite(float x) { return magnitude(x) < 0x7f800000u; }

// Hadamard's matrix over blocks of the largest power of two that divides the channels, by the 8 lanes that have `mine`. Whole warps
// call it.
__device__ __forceinline__ u32 power_of_two_in(u32 dim) { return dim & (0u - dim); }
__device__ __forceinline__ void rotate(float* channels, u32 dim, bool mine) {
  const u32 block = power_of_two_in(dim);
  for (u32 half = 1; half < block; half *= 2) {
    __syncwarp();
    for (u32 i = threadIdx.x % 8; mine && i < dim / 2; i += 8) {
      const u32 low = i / half * 2 * half + i % half;
      const float a = channels[low], b = channels[low + half];
      channels[low] = __fadd_rn(a, b), channels[low + half] = __fsub_rn(a, b);
    }
  }
  __syncwarp();
}

// ---- building ----

// A token's channels, rotated, become codes by 8 lanes. Returns the token's scale.
__device__ __forceinline__ float code_token(const Rotated& r, float* channels, const float* centre) {
  const u32 lane = threadIdx.x % 8;
  float square = 0, product = 0;
  for (u32 d = lane; d < r.dim; d += 8) {
    const float rest = __fsub_rn(channels[d], centre[d]);
    square = __fadd_rn(square, __fmul_rn(rest, rest));
    channels[d] = rest;
  }
  square = sum_of_8_lanes(square);
  // The distance between codes that loses least of a normal distribution, in its deviations.
  const float distance = r.bits == 1 ? 1.596f : r.bits == 2 ? 0.996f : 0.586f;
  float inverse = __fdiv_rn(1.0f, __fmul_rn(distance, __fsqrt_rn(__fdiv_rn(square, float(r.dim)))));
  if (!finite(inverse)) inverse = 0;
  const float half = float(1u << (r.bits - 1));
  for (u32 d = lane; d < r.dim; d += 8) {
    const float rest = channels[d], steps = __fadd_rn(__fmul_rn(rest, inverse), half);
    float code = steps < r.largest ? steps : r.largest;  // NaN counts as the largest; the scale still has it
    code = float(u32(code > 0 ? code : 0));
    product = __fadd_rn(product, __fmul_rn(rest, __fsub_rn(__fmul_rn(2.0f, code), r.largest)));
    channels[d] = code;
  }
  product = sum_of_8_lanes(product);
  return square == 0 ? 0 : __fdiv_rn(square, product);
}

// The byte of a block's codes that holds nibbles n and n + 2 of a token, whose codes are `channels`.
__device__ __forceinline__ u8 packed_byte(const Rotated& r, const float* channels, u32 word, u32 half) {
  u32 byte = 0;
  for (u32 n = 0; n < 2; n++) {
    if (word < r.pairs) {
      const u32 d = 2 * (word * 4 + half + 2 * n);
      for (u32 i = 0; i < 2; i++) byte |= u32(channels[d + i]) >> (r.bits - 2) << (4 * n + 2 * i);
    } else {
      const u32 d = 4 * ((word - r.pairs) * 4 + half + 2 * n);
      for (u32 i = 0; i < 4; i++) byte |= (u32(channels[d + i]) & 1) << (4 * n + i);
    }
  }
  return u8(byte);
}

// scratch: 17 * head_dim + page_tokens floats of shared memory. A block of 128 threads: 8 lanes for each of 16 tokens.
template <typename T> __device__ void write_rotated(u32 kind, u8* to, const T* keys, u32 dim, u32 tokens, float* scratch) {
  const Rotated r = rotated(kind, dim, tokens);
  const u32 lane = threadIdx.x % 8, team = threadIdx.x / 8;
  float* centre = scratch;
  float* channels = scratch + (1 + team) * dim;
  float* scales = scratch + 17 * dim;

  for (u32 d = threadIdx.x; d < dim; d += blockDim.x) {
    float sum = 0;
    for (u32 token = 0; token < tokens; token++) sum = __fadd_rn(sum, widen(keys[token * dim + d]));
    centre[d] = __fmul_rn(sum, __fdiv_rn(1.0f, float(tokens)));
  }
  __syncthreads();
  // Every team turns a copy of the mean, so that all warps do the same; the first one's is kept.
  for (u32 d = lane; d < dim; d += 8) channels[d] = centre[d];
  rotate(channels, dim, true);
  u32 bits = 0;
  for (u32 d = lane; d < dim; d += 8) bits = max(bits, magnitude(channels[d]));
  const float largest = largest_of_8_lanes(bits);
  const float inverse = largest > 1e-30f ? __fdiv_rn(127.0f, largest) : 0.0f, step = __fdiv_rn(largest, 127.0f);
  __syncthreads();
  if (team == 0) {
    for (u32 d = lane; d < dim; d += 8) {
      const int rounded = finite(largest) ? __float2int_rn(__fmul_rn(channels[d], inverse)) : 0;
      reinterpret_cast<i8*>(to + r.centre)[d] = i8(rounded);
      centre[d] = __fmul_rn(float(rounded), step);
    }
  }
  __syncthreads();

  const u32 block_bytes = (r.pairs + r.quads) * 32;
  for (u32 block = 0; block < r.blocks; block++) {
    const u32 token = (block * 16 + team) % tokens;  // a short page fills its block with what it has
    for (u32 d = lane; d < dim; d += 8) channels[d] = widen(keys[token * dim + d]);
    rotate(channels, dim, true);
    const float scale = code_token(r, channels, centre);
    if (lane == 0) scales[token] = scale;
    __syncthreads();
    for (u32 i = threadIdx.x; i < block_bytes; i += blockDim.x) {
      const float* codes = scratch + (1 + i % 16) * dim;
      to[block * block_bytes + i] = packed_byte(r, codes, i / 32, i / 16 % 2);
    }
    __syncthreads();
  }

  float most = 0;
  for (u32 token = 0; token < tokens; token++) most = most != most || most > scales[token] ? most : scales[token];  // NaN stays
  const float weigh = most > 0 ? __fdiv_rn(255.0f, most) : 0.0f;
  const bool known = finite(most) && finite(step) && finite(weigh);
  for (u32 i = threadIdx.x; i < r.blocks * 16; i += blockDim.x) {
    to[r.weights + i] = known ? u8(__float2int_rn(__fmul_rn(scales[i % tokens], weigh))) : 0;
  }
  if (threadIdx.x == 0) {
    reinterpret_cast<float*>(to + r.scales)[0] = known ? most : __int_as_float(0x7fc00000);
    reinterpret_cast<float*>(to + r.scales)[1] = known ? step : 0.0f;
  }
}

// ---- scoring ----

// What a row's dot products are shifted up by before they are weighted, and what the magnitudes of the channels that share a nibble add up to.
__device__ __forceinline__ u32 shift_of(const Rotated& r) { return r.bits == 1 ? 3 : r.bits == 2 ? 2 : 0; }
__device__ __forceinline__ float largest_sum_of(const Rotated& r) { return r.bits == 1 ? 61.0f : 20.0f; }

// A row of queries, rounded: at 16 bits for the centre, at some 5 for the codes. [dim] of each, and what a unit of the dot products is
// worth: NaN where the row has one. 4 * dim bytes in all, dim being at least 16.
struct RotatedRow {
  short* wide;
  i8* narrow;
  float* units;
};
__device__ __forceinline__ RotatedRow rotated_row(u8* rows, u32 row, u32 dim) {
  u8* at = rows + row * 4 * dim;
  return {reinterpret_cast<short*>(at), reinterpret_cast<i8*>(at + 2 * dim), reinterpret_cast<float*>(at + 3 * dim)};
}

// Rounds rows of queries [rows, dim], which are used up. All threads; whole warps of the block take rows.
__device__ __forceinline__ void prepare_rotated(const Rotated& r, float* queries, u32 rows, u8* to) {
  const u32 lane = threadIdx.x % 8, teams = blockDim.x / 8, dim = r.dim;
  const u32 neighbours = r.bits == 1 ? 4 : 2;
  const float largest_sum = largest_sum_of(r);
  for (u32 first = 0; first < rows; first += teams) {
    const u32 row = first + threadIdx.x / 8;
    const bool mine = row < rows;
    float* channels = queries + row * dim;
    rotate(channels, dim, mine);
    const float shrink = __fdiv_rn(1.0f, float(power_of_two_in(dim)));
    u32 most = 0, most_sum = 0;
    for (u32 d = lane; mine && d < dim; d += 8) most = max(most, magnitude(__fmul_rn(channels[d], shrink)));
    for (u32 d = lane * neighbours; mine && d < dim; d += 8 * neighbours) {
      float sum = 0;
      for (u32 i = 0; i < neighbours; i++) sum = __fadd_rn(sum, fabsf(__fmul_rn(channels[d + i], shrink)));
      most_sum = max(most_sum, magnitude(sum));
    }
    const float largest = largest_of_8_lanes(most), sum = largest_of_8_lanes(most_sum);
    const bool known = finite(sum);
    const float wide = largest > 1e-30f ? __fdiv_rn(32767.0f, largest) : 0.0f;
    const float narrow = sum > 1e-30f ? __fdiv_rn(largest_sum, sum) : 0.0f;
    const RotatedRow out = rotated_row(to, row, dim);
    for (u32 d = lane; mine && d < dim; d += 8) {
      const float x = known ? __fmul_rn(channels[d], shrink) : 0.0f;
      out.wide[d] = short(__float2int_rn(__fmul_rn(x, wide)));
      out.narrow[d] = i8(__float2int_rn(__fmul_rn(x, narrow)));
    }
    if (mine && lane == 0) {
      const float shifted = __fdiv_rn(__fdiv_rn(256.0f, 255.0f), float(1u << shift_of(r)));
      out.units[0] = known ? __fdiv_rn(largest, 32767.0f) : __int_as_float(0x7fc00000);
      out.units[1] = known ? __fmul_rn(__fdiv_rn(sum, largest_sum), shifted) : __int_as_float(0x7fc00000);
    }
  }
}

// Four codes of two bits, or of one, spread over the bytes of a word.
__device__ __forceinline__ int spread_pairs(u32 codes) {
  return int((codes | codes << 6 | codes << 12 | codes << 18) & 0x03030303u);
}
__device__ __forceinline__ int spread_quads(u32 nibble) { return int(nibble * 0x00204081u & 0x01010101u); }

// The score of a page in shared memory for a row, by 8 lanes: the result is in all of them.
__device__ __forceinline__ float rotated_score(const Rotated& r, const u8* digest, const RotatedRow& row) {
  const u32 lane = threadIdx.x % 8, block_bytes = (r.pairs + r.quads) * 32;
  const int* narrow = reinterpret_cast<const int*>(row.narrow);
  int centre = 0, sum = 0;
  for (u32 d = lane; d < r.dim; d += 8) {
    centre += int(row.wide[d]) * int(reinterpret_cast<const i8*>(digest + r.centre)[d]);
    sum += row.narrow[d];
  }
#pragma unroll
  for (int distance = 1; distance < 8; distance *= 2) {
    centre += __shfl_xor_sync(ALL_LANES, centre, distance);
    sum += __shfl_xor_sync(ALL_LANES, sum, distance);
  }
  int best = -0x7fffffff - 1;
  for (u32 token = lane; token < r.blocks * 16; token += 8) {
    const u8* codes = digest + token / 16 * block_bytes + token % 16;
    int dot = 0;
    for (u32 word = 0; word < r.pairs; word++, codes += 32) {
      const u32 even = codes[0], odd = codes[16];
      dot = __dp4a(spread_pairs((even & 15) | (odd & 15) << 4), narrow[2 * word], dot);
      dot = __dp4a(spread_pairs(even >> 4 | (odd & 0xf0)), narrow[2 * word + 1], dot);
    }
    if (r.quads > 0) dot *= 2;
    for (u32 word = 0; word < r.quads; word++, codes += 32) {
      const u32 even = codes[0], odd = codes[16];
      dot = __dp4a(spread_quads(even & 15), narrow[4 * word], dot);
      dot = __dp4a(spread_quads(odd & 15), narrow[4 * word + 1], dot);
      dot = __dp4a(spread_quads(even >> 4), narrow[4 * word + 2], dot);
      dot = __dp4a(spread_quads(odd >> 4), narrow[4 * word + 3], dot);
    }
    // Code c stands for 2c - largest.
    dot = 2 * dot - int(r.largest) * sum;
    best = max(best, (dot * (1 << shift_of(r)) * int(digest[r.weights + token]) + 128) >> 8);
  }
#pragma unroll
  for (int distance = 1; distance < 8; distance *= 2) best = max(best, __shfl_xor_sync(ALL_LANES, best, distance));
  const float* scales = reinterpret_cast<const float*>(digest + r.scales);
  return __fadd_rn(__fmul_rn(float(centre), __fmul_rn(row.units[0], scales[1])),
                   __fmul_rn(float(best), __fmul_rn(row.units[1], scales[0])));
}
