//! Paged attention of a few query rows over one head.
//!
//! Pages are walked in blocks of some tokens. For a block all logits are computed first, then the softmax state advances
//! once, then the values are summed. While the keys of a block are read its values are prefetched, and while its values
//! are read the keys of the next block are, so scattered pages stream as well as a contiguous cache.
//!
//! ```text
//! logits of a block   [token slot][STRIDE]   f32, STRIDE = rows rounded up to 1, 2, 4 or 8
//! ```
//! Token-major logits let four horizontal sums be stored at once, need no horizontal maximum, and make the weight of a
//! (token, row) one broadcast load.

use std::mem::MaybeUninit;

use super::element::Element;
use super::vector::{Vector, prefetch};
use super::{MAX_HEAD_DIM, MAX_ROWS, PageShape, PageView, State, Tile};

/// Tokens of a block: their keys or values (f16, 128 channels) share the L1 cache with the queries and sums.
const BLOCK: usize = 64;

/// Bytes of a cache line.
const LINE: usize = 64;

/// Parts of a block: the smallest pages have 8 tokens.
const MAX_PARTS: usize = BLOCK / 8;

/// Floats between the logits of two tokens.
const fn stride(rows: usize) -> usize {
    match rows {
        0..=2 => rows,
        3..=4 => 4,
        _ => 8,
    }
}

/// Continues the softmax of `ROWS` rows over `pages`.
///
/// # Safety
/// The contract of [`Kernels::attend`](super::Kernels::attend), with exactly `ROWS` rows, `shape.dtype` stored as `E`
/// and `shape.head_dim` a multiple of `V::LANES`. The CPU has what `V` needs.
#[inline(always)]
pub(super) unsafe fn attend<V: Vector, E: Element, const ROWS: usize>(
    shape: &PageShape,
    tile: &Tile<'_>,
    pages: &[PageView],
    state: &mut State<'_>,
) {
    let mut walk = Walk::new::<E>(shape, tile.visible, pages);
    let mut block = walk.next();
    if block.parts().is_empty() {
        return;
    }
    let mut packed = [const { MaybeUninit::<f32>::uninit() }; MAX_ROWS * MAX_HEAD_DIM];
    let mut logits = [const { MaybeUninit::<f32>::uninit() }; BLOCK * MAX_ROWS];
    let (packed, logits) = (packed.as_mut_ptr().cast::<f32>(), logits.as_mut_ptr().cast::<f32>());
    // SAFETY: `packed` holds ROWS × head_dim floats, `logits` BLOCK × stride(ROWS); both are written before they are
    // read. Parts describe written tokens of the caller's pages.
    unsafe {
        pack::<V, ROWS>(tile.queries, shape.head_dim, packed);
        while !block.parts().is_empty() {
            let next = walk.next();
            for part in block.parts() {
                part_logits::<V, E, ROWS>(part, shape.head_dim, packed, logits.add(part.slot * stride(ROWS)));
            }
            hide::<V, ROWS>(&block, walk.span, tile.visible, logits);
            let scale = softmax::<V, ROWS>(&block, walk.span, tile.visible, logits, state);
            add_values::<V, E, ROWS>(&block, &next, shape.head_dim, tile.visible, logits, &scale, state.acc);
            block = next;
        }
    }
}

/// Consecutive tokens of one page, at most a block of them.
#[derive(Clone, Copy)]
struct Part {
    keys: *const u8,
    values: *const u8,
    /// Position of the first token.
    first: u32,
    /// Tokens that some row sees.
    tokens: usize,
    /// Leading tokens that every row sees.
    common: usize,
    /// The first token's place in the block.
    slot: usize,
}

impl Part {
    /// Leading tokens that a row sees.
    #[inline(always)]
    fn seen(&self, visible: u32) -> usize {
        (visible.saturating_sub(self.first) as usize).min(self.tokens)
    }
}

struct Block {
    parts: [Part; MAX_PARTS],
    len: usize,
}

impl Block {
    #[inline(always)]
    fn parts(&self) -> &[Part] {
        // SAFETY: `Walk::next` stops at MAX_PARTS.
        unsafe { self.parts.get_unchecked(..self.len) }
    }
}

/// Cuts the pages into blocks. What no row sees is left out.
struct Walk<'a> {
    pages: &'a [PageView],
    /// Tokens of the first page that are behind us.
    done: usize,
    /// Most tokens of a part.
    span: usize,
    token_bytes: usize,
    block_bytes: usize,
    /// What every row sees, and what some row sees.
    visible: (u32, u32),
}

impl<'a> Walk<'a> {
    #[inline(always)]
    fn new<E>(shape: &PageShape, visible: &[u32], pages: &'a [PageView]) -> Self {
        let token_bytes = shape.head_dim * size_of::<E>();
        let least = visible.iter().copied().min().unwrap_or(0);
        let most = visible.iter().copied().max().unwrap_or(0);
        Walk {
            pages,
            done: 0,
            span: shape.page_tokens.min(BLOCK),
            token_bytes,
            block_bytes: shape.page_tokens * token_bytes,
            visible: (least, most),
        }
    }

    #[inline(always)]
    fn next(&mut self) -> Block {
        let none = Part { keys: [].as_ptr(), values: [].as_ptr(), first: 0, tokens: 0, common: 0, slot: 0 };
        let mut block = Block { parts: [none; MAX_PARTS], len: 0 };
        while block.len * self.span < BLOCK {
            let Some((page, rest)) = self.pages.split_first() else { break };
            let seen = |visible: u32| (visible.saturating_sub(page.first)).min(page.tokens) as usize;
            let (least, most) = (seen(self.visible.0), seen(self.visible.1));
            if self.done < most {
                let keys = page.data.wrapping_add(self.done * self.token_bytes);
                block.parts[block.len] = Part {
                    keys,
                    values: keys.wrapping_add(self.block_bytes),
                    first: page.first + self.done as u32,
                    tokens: (most - self.done).min(self.span),
                    common: least.saturating_sub(self.done).min(self.span),
                    slot: block.len * self.span,
                };
                block.len += 1;
                self.done += self.span;
            }
            if self.done >= most {
                self.pages = rest;
                self.done = 0;
            }
        }
        block
    }
}

/// Interleaves the rows of the queries, a register each, so that the inner loop walks one pointer.
///
/// # Safety
/// As [`attend`]; `to` is writable for ROWS × `dim` floats.
#[inline(always)]
unsafe fn pack<V: Vector, const ROWS: usize>(queries: &[f32], dim: usize, to: *mut f32) {
    let from = queries.as_ptr();
    for d in (0..dim).step_by(V::LANES) {
        for row in 0..ROWS {
            // SAFETY: `d` + LANES ≤ dim, and the queries are [ROWS, dim].
            unsafe { V::load(from.add(row * dim + d)).store(to.add(d * ROWS + row * V::LANES)) };
        }
    }
}

/// # Safety
/// As [`attend`]; `logits` is writable for the part's tokens.
#[inline(always)]
unsafe fn part_logits<V: Vector, E: Element, const ROWS: usize>(
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
            4..=6 => tiles::<V, E, ROWS, 2>(part, dim, queries, logits),
            _ => tiles::<V, E, ROWS, 1>(part, dim, queries, logits),
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

/// Gives −∞ to every logit that a row must not see, and to the slots that no token fills.
///
/// # Safety
/// `logits` is the block's buffer.
#[inline(always)]
unsafe fn hide<V: Vector, const ROWS: usize>(block: &Block, span: usize, visible: &[u32], logits: *mut f32) {
    const NEVER: f32 = f32::NEG_INFINITY;
    for part in block.parts() {
        for slot in part.slot + part.tokens..part.slot + span {
            for row in 0..stride(ROWS) {
                // SAFETY: slots of a part lie in the block.
                unsafe { logits.add(slot * stride(ROWS) + row).write(NEVER) };
            }
        }
        if part.common < part.tokens {
            for (row, &visible) in visible.iter().enumerate().take(ROWS) {
                for slot in part.slot + part.seen(visible)..part.slot + part.tokens {
                    // SAFETY: as above.
                    unsafe { logits.add(slot * stride(ROWS) + row).write(NEVER) };
                }
            }
        }
    }
    let filled = block.len * span * stride(ROWS);
    for i in filled..filled.next_multiple_of(V::LANES) {
        // SAFETY: the buffer's length is a multiple of LANES.
        unsafe { logits.add(i).write(NEVER) };
    }
}

/// Turns a block's logits into weights, and advances maximum and sum. Returns by what each row's sums so far shrink.
///
/// A row that sees a token has a maximum of at least `f32::MIN`, even where all its logits are −∞. So −∞ − −∞ cannot
/// happen, and such a row ends as 0/0, like a dense softmax; while a row that sees nothing keeps −∞.
/// A NaN logit is not taken into the maximum, but its weight is NaN and with it every sum.
///
/// # Safety
/// `logits` is the block's buffer, filled.
#[inline(always)]
unsafe fn softmax<V: Vector, const ROWS: usize>(
    block: &Block,
    span: usize,
    visible: &[u32],
    logits: *mut f32,
    state: &mut State<'_>,
) -> [f32; MAX_ROWS] {
    let len = (block.len * span * stride(ROWS)).next_multiple_of(V::LANES);
    let mut lanes = [0.0f32; 16]; // one register, spilled to get at its lanes: lane i belongs to row i mod stride
    let mut scale = [1.0f32; MAX_ROWS];
    // SAFETY: `len` floats of `logits` are initialised; `lanes` holds a register.
    unsafe {
        let mut top = V::splat(f32::NEG_INFINITY);
        for i in (0..len).step_by(V::LANES) {
            top = V::load(logits.add(i)).max(top);
        }
        top.store(lanes.as_mut_ptr());
        let mut top = [0.0f32; MAX_ROWS];
        for row in 0..ROWS {
            let own = (row..V::LANES).step_by(stride(ROWS)).map(|i| lanes[i]);
            let own = own.fold(f32::MIN, |top, x| if x > top { x } else { top });
            let seen = block.parts().iter().any(|part| part.common > 0 || part.seen(visible[row]) > 0);
            let before = state.max[row];
            top[row] = if seen && own > before { own } else { before };
            scale[row] = if seen { before - top[row] } else { 0.0 };
        }
        for (i, lane) in lanes.iter_mut().enumerate().take(V::LANES) {
            *lane = scale[i % MAX_ROWS];
        }
        V::load(lanes.as_ptr()).exp().store(lanes.as_mut_ptr());
        scale.copy_from_slice(&lanes[..MAX_ROWS]);

        for (i, lane) in lanes.iter_mut().enumerate().take(V::LANES) {
            *lane = top[i % stride(ROWS)];
        }
        let top_lanes = V::load(lanes.as_ptr());
        let mut sum = V::splat(0.0);
        for i in (0..len).step_by(V::LANES) {
            let weight = V::load(logits.add(i)).sub(top_lanes).exp();
            sum = sum.add(weight);
            weight.store(logits.add(i));
        }
        sum.store(lanes.as_mut_ptr());
        for row in 0..ROWS {
            if top[row] == f32::NEG_INFINITY {
                continue; // has never seen a token; its weights mean nothing
            }
            let own: f32 = (row..V::LANES).step_by(stride(ROWS)).map(|i| lanes[i]).sum();
            state.sum[row] = state.sum[row] * scale[row] + own;
            state.max[row] = top[row];
        }
    }
    scale
}

/// # Safety
/// As [`attend`]; `weights` is the block's buffer.
#[inline(always)]
unsafe fn add_values<V: Vector, E: Element, const ROWS: usize>(
    block: &Block,
    next: &Block,
    dim: usize,
    visible: &[u32],
    weights: *const f32,
    scale: &[f32; MAX_ROWS],
    acc: &mut [f32],
) {
    // Accumulators of rows × registers of channels.
    // SAFETY: the function's contract.
    unsafe {
        match ROWS {
            1 | 2 => columns::<V, E, ROWS, 4>(block, next, dim, weights, scale, acc),
            3 => columns::<V, E, ROWS, 3>(block, next, dim, weights, scale, acc),
            4..=6 => columns::<V, E, ROWS, 2>(block, next, dim, weights, scale, acc),
            _ => columns::<V, E, ROWS, 1>(block, next, dim, weights, scale, acc),
        }
        if block.parts().iter().any(|part| part.common < part.tokens) {
            diagonal::<V, E, ROWS>(block, dim, visible, weights, acc);
        }
    }
}

/// The tokens that all rows see, some channels at a time.
///
/// # Safety
/// As [`add_values`].
#[inline(always)]
unsafe fn columns<V: Vector, E: Element, const ROWS: usize, const WIDTH: usize>(
    block: &Block,
    next: &Block,
    dim: usize,
    weights: *const f32,
    scale: &[f32; MAX_ROWS],
    acc: &mut [f32],
) {
    let acc = acc.as_mut_ptr();
    let mut d = 0;
    // SAFETY: a column lies within `dim`.
    unsafe {
        while d + WIDTH * V::LANES <= dim {
            column::<V, E, ROWS, WIDTH>(block, next, dim, d, weights, scale, acc);
            d += WIDTH * V::LANES;
        }
        while d < dim {
            column::<V, E, ROWS, 1>(block, next, dim, d, weights, scale, acc);
            d += V::LANES;
        }
    }
}

/// `WIDTH` registers of channels from `d` on. With every value read, as much of the next block's keys is fetched.
///
/// # Safety
/// As [`add_values`]; `d` + WIDTH × LANES ≤ `dim`.
#[inline(always)]
unsafe fn column<V: Vector, E: Element, const ROWS: usize, const WIDTH: usize>(
    block: &Block,
    next: &Block,
    dim: usize,
    d: usize,
    weights: *const f32,
    scale: &[f32; MAX_ROWS],
    acc: *mut f32,
) {
    let bytes = WIDTH * V::LANES * size_of::<E>(); // of values per token
    let tokens = (LINE / bytes).max(1); // per prefetch
    // SAFETY: acc is [ROWS, dim]; a part's values are [tokens, dim], its weights [tokens, stride] from its slot on.
    unsafe {
        let mut sums = [[V::splat(0.0); WIDTH]; ROWS];
        for r in 0..ROWS {
            for w in 0..WIDTH {
                sums[r][w] = V::load(acc.add(r * dim + d + w * V::LANES)).mul(V::splat(scale[r]));
            }
        }
        for (i, part) in block.parts().iter().enumerate() {
            // Over the whole block, the next one's keys are asked for from their first byte to their last.
            let place = d * block.len + i * WIDTH * V::LANES;
            let next = next.parts().get(place / dim).unwrap_or(part);
            let mut ahead = next.keys.wrapping_add(part.common * (place % dim) * size_of::<E>());
            let values = part.values.cast::<E>().add(d);
            let weights = weights.add(part.slot * stride(ROWS));
            let mut token = 0;
            while token + tokens <= part.common {
                prefetch_range(ahead, tokens * bytes);
                ahead = ahead.wrapping_add(tokens * bytes);
                for _ in 0..tokens {
                    add_token::<V, E, ROWS, WIDTH>(
                        values.add(token * dim),
                        weights.add(token * stride(ROWS)),
                        &mut sums,
                    );
                    token += 1;
                }
            }
            while token < part.common {
                add_token::<V, E, ROWS, WIDTH>(values.add(token * dim), weights.add(token * stride(ROWS)), &mut sums);
                token += 1;
            }
        }
        for r in 0..ROWS {
            for w in 0..WIDTH {
                sums[r][w].store(acc.add(r * dim + d + w * V::LANES));
            }
        }
    }
}

/// Adds a token's values, by its weight in every row.
///
/// # Safety
/// `values` is readable for WIDTH registers, `weights` for ROWS floats.
#[inline(always)]
unsafe fn add_token<V: Vector, E: Element, const ROWS: usize, const WIDTH: usize>(
    values: *const E,
    weights: *const f32,
    sums: &mut [[V; WIDTH]; ROWS],
) {
    // SAFETY: the function's contract.
    unsafe {
        let mut value = [V::splat(0.0); WIDTH];
        for w in 0..WIDTH {
            value[w] = E::load::<V>(values.add(w * V::LANES));
        }
        for r in 0..ROWS {
            let weight = V::splat(*weights.add(r));
            for w in 0..WIDTH {
                sums[r][w] = weight.mul_add(value[w], sums[r][w]);
            }
        }
    }
}

/// The tokens that only some rows see, row by row: a hidden value may be NaN, so its weight of 0 would not hide it.
///
/// # Safety
/// As [`add_values`].
#[inline(always)]
unsafe fn diagonal<V: Vector, E: Element, const ROWS: usize>(
    block: &Block,
    dim: usize,
    visible: &[u32],
    weights: *const f32,
    acc: &mut [f32],
) {
    for (row, (&visible, acc)) in visible.iter().zip(acc.chunks_exact_mut(dim)).enumerate() {
        for part in block.parts() {
            for token in part.common..part.seen(visible) {
                // SAFETY: `token` is one of the part's; `d` + LANES ≤ dim.
                unsafe {
                    let values = part.values.cast::<E>().add(token * dim);
                    let p = V::splat(*weights.add((part.slot + token) * stride(ROWS) + row));
                    for d in (0..dim).step_by(V::LANES) {
                        let sum = acc.as_mut_ptr().add(d);
                        p.mul_add(E::load::<V>(values.add(d)), V::load(sum)).store(sum);
                    }
                }
            }
        }
    }
}

#[inline(always)]
fn prefetch_range(from: *const u8, bytes: usize) {
    for offset in (0..bytes).step_by(LINE) {
        prefetch(from.wrapping_add(offset));
    }
}
