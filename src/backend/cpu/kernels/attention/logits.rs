//! Dot products of the queries with a block's keys.

use super::super::element::Element;
use super::super::vector::Vector;
use super::walk::Part;
use super::{LINE, prefetch_range, stride};

/// Interleaves the rows of the queries, a register each, so that the inner loop walks one pointer.
///
/// # Safety
/// As [`attend`](super::attend); `to` is writable for ROWS × `dim` floats.
#[inline(always)]
pub(super) unsafe fn pack<V: Vector, const ROWS: usize>(queries: &[f32], dim: usize, to: *mut f32) {
    let from = queries.as_ptr();
    for d in (0..dim).step_by(V::LANES) {
        for row in 0..ROWS {
            // SAFETY: `d` + LANES ≤ dim, and the queries are [ROWS, dim].
            unsafe { V::load(from.add(row * dim + d)).store(to.add(d * ROWS + row * V::LANES)) };
        }
    }
}

/// # Safety
/// As [`attend`](super::attend); `logits` is writable for the part's tokens.
#[inline(always)]
pub(super) unsafe fn part_logits<V: Vector, E: Element, const ROWS: usize>(
    part: &Part,
    dim: usize,
    queries: *const f32,
    logits: *mut f32,
) {
    // Accumulators of tokens × rows fill the registers, so that a loaded query serves several tokens.
    // SAFETY: the function's contract.
    unsafe {
        match ROWS {
            1 | 2 => tiles::<V, E, ROWS, 4>(part, dim, queries, logits),
            3 => tiles::<V, E, ROWS, 3>(part, dim, queries, logits),
            _ => tiles::<V, E, ROWS, 2>(part, dim, queries, logits),
        }
    }
}

/// # Safety
/// As [`part_logits`].
#[inline(always)]
unsafe fn tiles<V: Vector, E: Element, const ROWS: usize, const TOKENS: usize>(
    part: &Part,
    dim: usize,
    queries: *const f32,
    logits: *mut f32,
) {
    let keys = part.keys.cast::<E>();
    let token_bytes = dim * size_of::<E>();
    let mut token = 0;
    while token + TOKENS <= part.tokens {
        let ahead = part.values.wrapping_add(token * token_bytes);
        // SAFETY: the part has TOKENS more tokens.
        unsafe {
            dots::<V, E, ROWS, TOKENS>(keys.add(token * dim), dim, queries, logits.add(token * stride(ROWS)), ahead)
        };
        token += TOKENS;
    }
    while token < part.tokens {
        let ahead = part.values.wrapping_add(token * token_bytes);
        // SAFETY: the part has one more token.
        unsafe { dots::<V, E, ROWS, 1>(keys.add(token * dim), dim, queries, logits.add(token * stride(ROWS)), ahead) };
        token += 1;
    }
}

/// The dot products of some tokens with every row.
///
/// # Safety
/// As [`part_logits`], for TOKENS tokens.
#[inline(always)]
unsafe fn dots<V: Vector, E: Element, const ROWS: usize, const TOKENS: usize>(
    keys: *const E,
    dim: usize,
    queries: *const f32,
    logits: *mut f32,
    ahead: *const u8,
) {
    let bytes = TOKENS * V::LANES * size_of::<E>(); // of keys per round
    let rounds = (LINE / bytes).max(1); // per prefetch: asking twice for a line delays the next
    let mut ahead = ahead;
    // SAFETY: `d` + LANES ≤ dim, keys are [TOKENS, dim], packed queries [dim / LANES, ROWS, LANES], logits
    // [TOKENS, stride].
    unsafe {
        let mut sums = [[V::splat(0.0); ROWS]; TOKENS];
        let mut d = 0;
        while d + rounds * V::LANES <= dim {
            prefetch_range(ahead, rounds * bytes);
            ahead = ahead.wrapping_add(rounds * bytes);
            for _ in 0..rounds {
                round::<V, E, ROWS, TOKENS>(keys.add(d), dim, queries.add(d * ROWS), &mut sums);
                d += V::LANES;
            }
        }
        while d < dim {
            round::<V, E, ROWS, TOKENS>(keys.add(d), dim, queries.add(d * ROWS), &mut sums);
            d += V::LANES;
        }
        let at = |i: usize| {
            let (t, r) = (i / stride(ROWS), i % stride(ROWS));
            if t < TOKENS && r < ROWS { sums[t][r] } else { V::splat(0.0) }
        };
        let mut i = 0;
        while i + 4 <= TOKENS * stride(ROWS) {
            V::sum4([at(i), at(i + 1), at(i + 2), at(i + 3)], logits.add(i));
            i += 4;
        }
        if i < TOKENS * stride(ROWS) {
            let mut four = [0.0; 4];
            V::sum4([at(i), at(i + 1), at(i + 2), at(i + 3)], four.as_mut_ptr());
            logits.add(i).copy_from_nonoverlapping(four.as_ptr(), TOKENS * stride(ROWS) - i);
        }
    }
}

/// Adds one register's worth of channels to the dot products.
///
/// # Safety
/// `keys` is readable for LANES elements in each of TOKENS tokens, `queries` for ROWS registers.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "indices name tokens, rows and registers")]
unsafe fn round<V: Vector, E: Element, const ROWS: usize, const TOKENS: usize>(
    keys: *const E,
    dim: usize,
    queries: *const f32,
    sums: &mut [[V; ROWS]; TOKENS],
) {
    // SAFETY: the function's contract.
    unsafe {
        let mut key = [V::splat(0.0); TOKENS];
        for t in 0..TOKENS {
            key[t] = E::load::<V>(keys.add(t * dim));
        }
        for r in 0..ROWS {
            let query = V::load(queries.add(r * V::LANES));
            for t in 0..TOKENS {
                sums[t][r] = query.mul_add(key[t], sums[t][r]);
            }
        }
    }
}
