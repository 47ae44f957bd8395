//! Sums of looked-up bytes: the inner loop of the rotated sketches.
//!
//! A nibble holds the codes of two channels at two bits, or of four at one. What it adds to a row's dot product is one of
//! 16 numbers, the same for every token and page: so a table of 16 bytes per nibble replaces the products, and the tokens lie
//! in the lanes of a register, which needs no sum over lanes.
//!
//! ```text
//! block   16 tokens: words of the planes, in order
//! word    32 bytes: byte t < 16 holds nibbles 0 (low) and 2 of token t, byte 16 + t nibbles 1 and 3
//! plane   2 bits per channel: nibble n holds channels 2n, 2n + 1;  1 bit: nibble n holds channels 4n..4n + 3
//! ```

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use super::super::MAX_HEAD_DIM;
#[cfg(target_arch = "x86_64")]
use super::super::vector::Avx2;
use super::super::vector::Portable;

/// Tokens of a block.
pub(super) const BLOCK: usize = 16;
/// Bytes of a word.
pub(super) const WORD: usize = 32;
/// Bytes of the tables for a word.
const TABLES: usize = 64;
/// Rows that are looked up side by side.
pub(super) const ROWS: usize = 4;

/// Table entries lie within ±63, and are stored with 64 added: two of them fit a byte.
const OFFSET: i32 = 64;
/// What an entry is at most, but for the offset.
pub(super) const LARGEST_ENTRY: i32 = 63;

/// Words of a block's planes: two-bit codes, one-bit codes.
#[derive(Clone, Copy)]
pub(super) struct Words {
    pub pairs: usize,
    pub quads: usize,
}

impl Words {
    /// For codes of 1, 2 or 3 bits.
    pub const fn new(bits: usize, dim: usize) -> Words {
        Words {
            pairs: if bits >= 2 { dim.div_ceil(8) } else { 0 },
            quads: if bits % 2 == 1 { dim.div_ceil(16) } else { 0 },
        }
    }

    /// Bytes of a block.
    pub const fn bytes(self) -> usize {
        (self.pairs + self.quads) * WORD
    }
}

/// What one row of queries is looked up and multiplied with.
#[repr(align(32))]
pub(super) struct Row {
    /// Entries of every nibble of the two-bit plane, then of the one-bit plane.
    tables: [u8; MAX_HEAD_DIM / 8 * TABLES + MAX_HEAD_DIM / 16 * TABLES],
    /// The row at 16 bits, for the centre; zeros behind it.
    pub wide: [i16; MAX_HEAD_DIM],
}

impl Row {
    pub const EMPTY: Row =
        Row { tables: [0; MAX_HEAD_DIM / 8 * TABLES + MAX_HEAD_DIM / 16 * TABLES], wide: [0; MAX_HEAD_DIM] };
}

/// What a nibble's codes stand for, two of two bits or four of one.
const PAIR: [[i16; 16]; 2] = [values(2, 0), values(2, 2)];
const QUAD: [[i16; 16]; 4] = [values(1, 0), values(1, 1), values(1, 2), values(1, 3)];

/// What the code at bit `at` of each nibble stands for, the code having so many bits.
const fn values(bits: usize, at: usize) -> [i16; 16] {
    let mut values = [0; 16];
    let mut nibble = 0;
    while nibble < 16 {
        values[nibble] = 2 * (nibble >> at & ((1 << bits) - 1)) as i16 - ((1 << bits) - 1);
        nibble += 1;
    }
    values
}

/// # Safety of every function
/// The CPU has the instructions that the type stands for.
pub(super) trait Lookup {
    /// Fills a row's tables: code c of b bits stands for 2c − (2^b − 1). `small` is zero behind the row's channels, and the
    /// magnitudes that a nibble's channels can add up to keep its entries within [`LARGEST_ENTRY`].
    unsafe fn fill(row: &mut Row, small: &[i8; MAX_HEAD_DIM + 16], words: Words);

    /// For each of the first `count` rows the largest token's round(2^`shift` · dot · weight / 256) over the blocks.
    ///
    /// `codes` is readable for the blocks, `weights` for a byte per token.
    unsafe fn largest<const COUNT: usize>(
        rows: &[Row; ROWS],
        words: Words,
        shift: u32,
        blocks: usize,
        codes: *const u8,
        weights: *const u8,
    ) -> [i32; ROWS];

    /// For each of the first `COUNT` rows Σ wide · centre. `centre` is readable for `dim` bytes, a multiple of 16.
    unsafe fn centre<const COUNT: usize>(rows: &[Row; ROWS], centre: *const i8, dim: usize) -> [i32; ROWS];
}

impl Lookup for Portable<8> {
    #[inline(always)]
    unsafe fn fill(row: &mut Row, small: &[i8; MAX_HEAD_DIM + 16], words: Words) {
        let (pairs, quads) = row.tables.split_at_mut(words.pairs * TABLES);
        for (table, q) in pairs.chunks_exact_mut(16).zip(small.chunks_exact(2)) {
            for (entry, (low, high)) in table.iter_mut().zip(PAIR[0].iter().zip(&PAIR[1])) {
                *entry = (OFFSET as i16 + i16::from(q[0]) * low + i16::from(q[1]) * high) as u8;
            }
        }
        for (table, q) in quads.chunks_exact_mut(16).zip(small.chunks_exact(4)).take(words.quads * 4) {
            for (nibble, entry) in table.iter_mut().enumerate() {
                let sum: i16 = q.iter().zip(&QUAD).map(|(&q, values)| i16::from(q) * values[nibble]).sum();
                *entry = (OFFSET as i16 + sum) as u8;
            }
        }
    }

    #[inline(always)]
    unsafe fn largest<const COUNT: usize>(
        rows: &[Row; ROWS],
        words: Words,
        shift: u32,
        blocks: usize,
        codes: *const u8,
        weights: *const u8,
    ) -> [i32; ROWS] {
        let mut largest = [i32::MIN; ROWS];
        for block in 0..blocks {
            // SAFETY: every block has its words and weights.
            let (codes, weights) = unsafe {
                let codes = std::slice::from_raw_parts(codes.add(block * words.bytes()), words.bytes());
                (codes, std::slice::from_raw_parts(weights.add(block * BLOCK), BLOCK))
            };
            for (row, largest) in rows.iter().zip(&mut largest).take(COUNT) {
                let mut sums = [0i32; BLOCK];
                for (index, (word, tables)) in codes.chunks_exact(WORD).zip(row.tables.chunks_exact(TABLES)).enumerate()
                {
                    // What the two-bit plane says counts twice beside a one-bit plane.
                    let times = if index < words.pairs && words.quads > 0 { 2 } else { 1 };
                    for (token, sum) in sums.iter_mut().enumerate() {
                        let (even, odd) = (usize::from(word[token]), usize::from(word[token + BLOCK]));
                        let entries = [even & 15, 16 + (odd & 15), 32 + (even >> 4), 48 + (odd >> 4)];
                        let entries: i32 = entries.iter().map(|&at| i32::from(tables[at]) - OFFSET).sum();
                        *sum += times * entries;
                    }
                }
                for (&dot, &weight) in sums.iter().zip(weights) {
                    *largest = (((dot << shift) * i32::from(weight) + 128) >> 8).max(*largest);
                }
            }
        }
        largest
    }

    #[inline(always)]
    unsafe fn centre<const COUNT: usize>(rows: &[Row; ROWS], centre: *const i8, dim: usize) -> [i32; ROWS] {
        // SAFETY: the trait's contract.
        let centre = unsafe { std::slice::from_raw_parts(centre, dim) };
        let dot = |row: &Row| row.wide.iter().zip(centre).map(|(&q, &c)| i32::from(q) * i32::from(c)).sum();
        std::array::from_fn(|r| if r < COUNT { dot(&rows[r]) } else { 0 })
    }
}

#[cfg(target_arch = "x86_64")]
impl Lookup for Avx2 {
    #[inline(always)]
    unsafe fn fill(row: &mut Row, small: &[i8; MAX_HEAD_DIM + 16], words: Words) {
        // SAFETY: a row has tables for every word, and `small` channels for every nibble: two or four.
        unsafe {
            let coefficients = |values: [&[i16; 16]; 2], codes: i16| {
                // A code of 0 stands for -(codes − 1): that much is added to all, for the products' first factor has no sign.
                let bytes: [[u8; 2]; 16] = std::array::from_fn(|i| values.map(|values| (values[i] + codes - 1) as u8));
                _mm256_loadu_si256(bytes.as_ptr().cast())
            };
            let (pair, low, high) = (
                coefficients([&PAIR[0], &PAIR[1]], 4),
                coefficients([&QUAD[0], &QUAD[1]], 2),
                coefficients([&QUAD[2], &QUAD[3]], 2),
            );
            let two = |at: usize| _mm256_set1_epi16(small.as_ptr().add(at).cast::<i16>().read_unaligned());
            let store = |to: *mut u8, entries: __m256i| {
                let (low, high) = (_mm256_castsi256_si128(entries), _mm256_extracti128_si256::<1>(entries));
                _mm_storeu_si128(to.cast(), _mm_packus_epi16(low, high));
            };
            let sum = |q: &[i8]| q.iter().map(|&q| i16::from(q)).sum::<i16>();
            let offset = |less: i16| _mm256_set1_epi16(OFFSET as i16 - less);
            let tables = row.tables.as_mut_ptr();
            for nibble in 0..words.pairs * 4 {
                let q = 2 * nibble;
                let products = _mm256_maddubs_epi16(pair, two(q));
                store(tables.add(nibble * 16), _mm256_add_epi16(products, offset(3 * sum(&small[q..q + 2]))));
            }
            let tables = tables.add(words.pairs * TABLES);
            for nibble in 0..words.quads * 4 {
                let q = 4 * nibble;
                let products =
                    _mm256_add_epi16(_mm256_maddubs_epi16(low, two(q)), _mm256_maddubs_epi16(high, two(q + 2)));
                store(tables.add(nibble * 16), _mm256_add_epi16(products, offset(sum(&small[q..q + 4]))));
            }
        }
    }

    #[inline(always)]
    unsafe fn largest<const COUNT: usize>(
        rows: &[Row; ROWS],
        words: Words,
        shift: u32,
        blocks: usize,
        codes: *const u8,
        weights: *const u8,
    ) -> [i32; ROWS] {
        // SAFETY: the trait's contract; a row has tables for every word.
        unsafe {
            let mut largest = [_mm256_set1_epi16(i16::MIN); COUNT];
            let entries = 4 * OFFSET * (words.pairs as i32 * if words.quads > 0 { 2 } else { 1 } + words.quads as i32);
            let offset = _mm256_set1_epi16(entries as i16);
            let shift = _mm_cvtsi32_si128(shift as i32);
            for block in 0..blocks {
                let mut sums = Sums::<COUNT>::new();
                let codes = codes.add(block * words.bytes());
                for word in 0..words.pairs {
                    sums.add(rows, word, codes);
                }
                if words.quads > 0 {
                    sums.double();
                    for word in words.pairs..words.pairs + words.quads {
                        sums.add(rows, word, codes);
                    }
                }
                // Weights in the order of the sums: even tokens, then odd ones.
                let order = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
                let weights = _mm_shuffle_epi8(_mm_loadu_si128(weights.add(block * BLOCK).cast()), order);
                let weights = _mm256_slli_epi16::<7>(_mm256_cvtepu8_epi16(weights));
                for (largest, sums) in largest.iter_mut().zip(sums.by_token()) {
                    let dots = _mm256_sll_epi16(_mm256_sub_epi16(sums, offset), shift);
                    *largest = _mm256_max_epi16(*largest, _mm256_mulhrs_epi16(dots, weights));
                }
            }
            let mut out = [0; ROWS];
            for (out, largest) in out.iter_mut().zip(largest) {
                let eight = _mm_max_epi16(_mm256_castsi256_si128(largest), _mm256_extracti128_si256::<1>(largest));
                // The largest signed number is the smallest unsigned one when all bits but the sign are turned.
                let turn = _mm_set1_epi16(0x7fff);
                let smallest = _mm_minpos_epu16(_mm_xor_si128(eight, turn));
                *out = i32::from(_mm_cvtsi128_si32(_mm_xor_si128(smallest, turn)) as i16);
            }
            out
        }
    }

    #[inline(always)]
    unsafe fn centre<const COUNT: usize>(rows: &[Row; ROWS], centre: *const i8, dim: usize) -> [i32; ROWS] {
        // SAFETY: the trait's contract; `dim` is a multiple of 16 and at most the length of a row.
        unsafe {
            let mut sums = [_mm256_setzero_si256(); ROWS];
            for d in (0..dim).step_by(16) {
                let centre = _mm256_cvtepi8_epi16(_mm_loadu_si128(centre.add(d).cast()));
                for (sum, row) in sums.iter_mut().zip(rows).take(COUNT) {
                    let q = _mm256_loadu_si256(row.wide.as_ptr().add(d).cast());
                    *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(centre, q));
                }
            }
            let [a, b, c, d] = sums;
            let sums = _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
            let sums = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256::<1>(sums));
            let mut out = [0; ROWS];
            _mm_storeu_si128(out.as_mut_ptr().cast(), sums);
            out
        }
    }
}

/// Sums of the rows' entries per token, at 16 bits.
#[cfg(target_arch = "x86_64")]
struct Sums<const COUNT: usize> {
    /// Even tokens, plus 256 times the odd ones, modulo 2^16.
    both: [__m256i; COUNT],
    odd: [__m256i; COUNT],
}

/// # Safety of every function
/// The CPU has AVX2.
#[cfg(target_arch = "x86_64")]
impl<const COUNT: usize> Sums<COUNT> {
    #[inline(always)]
    unsafe fn new() -> Self {
        // SAFETY: the functions' contract.
        let zero = unsafe { [_mm256_setzero_si256(); COUNT] };
        Sums { both: zero, odd: zero }
    }

    /// Adds what a word of the block looks up. The rows have tables for the word, and `codes` is readable for it.
    #[inline(always)]
    #[expect(
        clippy::needless_range_loop,
        reason = "a constant number of rows is unrolled, and the sums stay in registers"
    )]
    unsafe fn add(&mut self, rows: &[Row; ROWS], word: usize, codes: *const u8) {
        // SAFETY: the function's contract.
        unsafe {
            let mask = _mm256_set1_epi8(15);
            // A product, because a shift would wait for the unit that looks up.
            let odd = _mm256_set1_epi16(0x0100);
            let packed = _mm256_loadu_si256(codes.add(word * WORD).cast());
            let low = _mm256_and_si256(packed, mask);
            let high = _mm256_and_si256(_mm256_srli_epi16::<4>(packed), mask);
            for r in 0..COUNT {
                let tables: *const __m256i = rows[r].tables.as_ptr().add(word * TABLES).cast();
                let entries = _mm256_add_epi8(
                    _mm256_shuffle_epi8(_mm256_load_si256(tables), low),
                    _mm256_shuffle_epi8(_mm256_load_si256(tables.add(1)), high),
                );
                self.both[r] = _mm256_add_epi16(self.both[r], entries);
                self.odd[r] = _mm256_add_epi16(self.odd[r], _mm256_maddubs_epi16(entries, odd));
            }
        }
    }

    #[inline(always)]
    unsafe fn double(&mut self) {
        for r in 0..COUNT {
            // SAFETY: the functions' contract.
            unsafe {
                self.both[r] = _mm256_add_epi16(self.both[r], self.both[r]);
                self.odd[r] = _mm256_add_epi16(self.odd[r], self.odd[r]);
            }
        }
    }

    /// The sums of the even tokens, then of the odd ones.
    #[inline(always)]
    unsafe fn by_token(self) -> [__m256i; COUNT] {
        std::array::from_fn(|r| {
            // SAFETY: the functions' contract.
            unsafe {
                let (both, odd) = (self.both[r], self.odd[r]);
                let even = _mm256_sub_epi16(both, _mm256_slli_epi16::<8>(odd));
                // Each half of a register has the sums of half of the nibbles.
                _mm256_add_epi16(
                    _mm256_permute2x128_si256::<0x20>(even, odd),
                    _mm256_permute2x128_si256::<0x31>(even, odd),
                )
            }
        })
    }
}
