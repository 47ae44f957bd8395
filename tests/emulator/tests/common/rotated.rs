//! Rotated sketches, channel by channel.

use super::in_lanes;

/// Where the parts of a digest begin.
pub struct Layout {
    bits: usize,
    dim: usize,
    tokens: usize,
    pairs: usize,
    quads: usize,
}

impl Layout {
    pub fn new(kind: u32, dim: usize, tokens: usize) -> Self {
        let bits = (kind - super::DIGEST_ROTATED + 1) as usize;
        let (pairs, quads) = [(0, dim / 16), (dim / 8, 0), (dim / 8, dim / 16)][bits - 1];
        Layout { bits, dim, tokens, pairs, quads }
    }

    fn blocks(&self) -> usize {
        self.tokens.div_ceil(16)
    }

    fn block_bytes(&self) -> usize {
        (self.pairs + self.quads) * 32
    }

    fn weights(&self) -> usize {
        self.blocks() * self.block_bytes()
    }

    fn centre(&self) -> usize {
        self.weights() + self.blocks() * 16
    }

    fn scales(&self) -> usize {
        self.centre() + self.dim
    }

    /// With what the device pads it by.
    pub fn bytes(&self) -> usize {
        (self.scales() + 8).next_multiple_of(16)
    }

    fn largest(&self) -> f32 {
        ((1 << self.bits) - 1) as f32
    }

    /// Byte and first bit of a nibble of a token, in words that begin at `word`.
    fn nibble(&self, token: usize, word: usize, nibble: usize) -> (usize, usize) {
        let byte = token / 16 * self.block_bytes() + (word + nibble / 4) * 32 + nibble % 2 * 16 + token % 16;
        (byte, nibble / 2 % 2 * 4)
    }
}

/// Hadamard's matrix by its definition's recursion: the halves, then their sum and difference.
fn rotate(channels: &[f32]) -> Vec<f32> {
    fn block(channels: &[f32]) -> Vec<f32> {
        if channels.len() == 1 {
            return channels.to_vec();
        }
        let (low, high) = channels.split_at(channels.len() / 2);
        let (low, high) = (block(low), block(high));
        let sums = low.iter().zip(&high).map(|(a, b)| a + b);
        sums.chain(low.iter().zip(&high).map(|(a, b)| a - b)).collect()
    }
    channels.chunks(1 << channels.len().trailing_zeros()).flat_map(block).collect()
}

fn largest_magnitude(of: impl Iterator<Item = f32>) -> f32 {
    of.fold(0.0, |most, x| if most.is_nan() || x.is_nan() { f32::NAN } else { f32::max(most, x.abs()) })
}

fn inverse(most: f32, of: f32) -> f32 {
    if of > 1e-30 { most / of } else { 0.0 }
}

pub fn build(kind: u32, keys: &[f32], dim: usize) -> Vec<u8> {
    let tokens = keys.len() / dim;
    let layout = Layout::new(kind, dim, tokens);
    let mut out = vec![0; layout.bytes()];
    let mean: Vec<f32> = (0..dim)
        .map(|d| keys.iter().skip(d).step_by(dim).fold(0.0, |sum, x| sum + x) * (1.0 / tokens as f32))
        .collect();
    let mean = rotate(&mean);
    let most = largest_magnitude(mean.iter().copied());
    let step = most / 127.0;
    let rounded: Vec<i32> = mean.iter().map(|x| (x * inverse(127.0, most)).round_ties_even() as i32).collect();

    let mut scales = Vec::new();
    for (token, key) in keys.chunks_exact(dim).enumerate() {
        let rotated = rotate(key);
        let rest: Vec<f32> = rotated.iter().zip(&rounded).map(|(x, &c)| x - c as f32 * step).collect();
        let square = in_lanes(dim, |d| rest[d] * rest[d]);
        let distance = [1.596, 0.996, 0.586][layout.bits - 1];
        let inverse = 1.0 / (distance * (square / dim as f32).sqrt());
        let inverse = if inverse.is_finite() { inverse } else { 0.0 };
        let half = (1 << (layout.bits - 1)) as f32;
        let codes: Vec<f32> = rest.iter().map(|x| (x * inverse + half).clamp(0.0, layout.largest()).floor()).collect();
        let product = in_lanes(dim, |d| rest[d] * (2.0 * codes[d] - layout.largest()));
        scales.push(if square == 0.0 { 0.0 } else { square / product });
        // A page of 8 tokens fills its block twice.
        for place in (token..layout.blocks() * 16).step_by(tokens) {
            for (d, &code) in codes.iter().enumerate() {
                let code = code as u8;
                if layout.pairs > 0 {
                    let (byte, bit) = layout.nibble(place, 0, d / 2);
                    out[byte] |= (if layout.bits == 3 { code >> 1 } else { code }) << (bit + d % 2 * 2);
                }
                if layout.quads > 0 {
                    let (byte, bit) = layout.nibble(place, layout.pairs, d / 4);
                    out[byte] |= (code & 1) << (bit + d % 4);
                }
            }
        }
    }
    let most = largest_magnitude(scales.iter().copied());
    let weigh = if most > 0.0 { 255.0 / most } else { 0.0 };
    for place in 0..layout.blocks() * 16 {
        out[layout.weights() + place] = (scales[place % tokens] * weigh).round_ties_even() as u8;
    }
    for (d, &c) in rounded.iter().enumerate() {
        out[layout.centre() + d] = c as i8 as u8;
    }
    let known = most.is_finite() && step.is_finite() && weigh.is_finite();
    let (scale, step) = if known { (most, step) } else { (f32::NAN, 0.0) };
    out[layout.scales()..layout.scales() + 4].copy_from_slice(&scale.to_ne_bytes());
    out[layout.scales() + 4..layout.scales() + 8].copy_from_slice(&step.to_ne_bytes());
    out
}

fn number(bytes: &[u8]) -> f32 {
    f32::from_ne_bytes(bytes[..4].try_into().expect("four bytes"))
}

/// Equal to the bit, unless both are unknown.
pub fn compare(got: &[u8], want: &[u8], layout: &Layout) {
    let end = layout.scales() + 8;
    if number(&want[layout.scales()..]).is_nan() {
        assert!(number(&got[layout.scales()..]).is_nan(), "a page with NaN is known");
    } else {
        assert_eq!(got[..end], want[..end], "a rotated sketch");
    }
}

pub fn score(kind: u32, digest: &[u8], rows: &[f32], dim: usize, tokens: usize) -> f32 {
    let layout = Layout::new(kind, dim, tokens);
    let (scale, step) = (number(&digest[layout.scales()..]), number(&digest[layout.scales() + 4..]));
    rows.chunks_exact(dim).fold(f32::NEG_INFINITY, |best, row| {
        let score = row_score(&layout, digest, row, scale, step);
        if best.is_nan() || best > score { best } else { score }
    })
}

fn row_score(layout: &Layout, digest: &[u8], row: &[f32], scale: f32, step: f32) -> f32 {
    let dim = layout.dim;
    let block = 1usize << dim.trailing_zeros();
    let row: Vec<f32> = rotate(row).iter().map(|x| x / block as f32).collect();
    let (near, most_near, shift) = [(4, 61.0, 8.0), (2, 20.0, 4.0), (2, 20.0, 1.0)][layout.bits - 1];
    let most = largest_magnitude(row.iter().copied());
    let sum = largest_magnitude(row.chunks_exact(near).map(|near| near.iter().fold(0.0, |sum, x| sum + x.abs())));
    if !sum.is_finite() {
        return f32::NAN;
    }
    let rounded = |by: f32| row.iter().map(move |x| (x * by).round_ties_even() as i32);
    let narrow: Vec<i32> = rounded(inverse(most_near, sum)).collect();
    let centre: i32 =
        rounded(inverse(32767.0, most)).zip(&digest[layout.centre()..]).map(|(q, &c)| q * i32::from(c as i8)).sum();
    let dot = |token: usize| -> i32 {
        let bits = |word, n, at: usize, mask: u8| {
            let (byte, bit) = layout.nibble(token, word, n);
            i32::from(digest[byte] >> (bit + at) & mask)
        };
        let code = |d: usize| {
            let high = if layout.pairs > 0 { bits(0, d / 2, d % 2 * 2, 3) } else { 0 };
            if layout.quads > 0 { 2 * high + bits(layout.pairs, d / 4, d % 4, 1) } else { high }
        };
        (0..dim).map(|d| narrow[d] * (2 * code(d) - layout.largest() as i32)).sum()
    };
    let weighted =
        |token: usize| (dot(token) * shift as i32 * i32::from(digest[layout.weights() + token]) + 128).div_euclid(256);
    let best = (0..layout.tokens).map(weighted).max().expect("a page has tokens");
    let unit = sum / most_near * (256.0 / 255.0 / shift);
    centre as f32 * (most / 32767.0 * step) + best as f32 * (unit * scale)
}
