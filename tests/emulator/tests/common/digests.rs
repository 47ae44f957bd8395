//! Digests as the CPU backend defines them, one operation after the other.
#![allow(dead_code, reason = "each test uses a part of it")]

#[path = "rotated.rs"]
mod rotated;

use super::common::layout::{DIGEST_CUBOID, DIGEST_MIN_MAX, DIGEST_ROTATED, DIGEST_SKETCH};
use super::common::numbers::DType;

pub fn is_rotated(kind: u32) -> bool {
    (DIGEST_ROTATED..DIGEST_CUBOID).contains(&kind)
}

pub fn bytes(kind: u32, dim: usize, page_tokens: usize) -> usize {
    if is_rotated(kind) {
        return rotated::Layout::new(kind, dim, page_tokens).bytes();
    }
    let bounds = 2 * dim * 2;
    if kind != DIGEST_SKETCH { bounds } else { bounds + page_tokens * dim / 4 }
}

/// The digest of a page's keys, which are elements already.
pub fn build(kind: u32, stored: DType, keys: &[f32], dim: usize) -> Vec<u8> {
    if is_rotated(kind) {
        return rotated::build(kind, keys, dim);
    }
    let (mut first, mut second) = (Vec::new(), Vec::new());
    for d in 0..dim {
        let channel = keys.iter().skip(d).step_by(dim);
        let finite = channel.clone().all(|key| key.is_finite());
        let nan = if finite { 0.0 } else { f32::NAN };
        let lowest = channel.clone().fold(f32::INFINITY, |a, &b| if b < a { b } else { a }) + nan;
        let highest = channel.fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a }) + nan;
        if kind == DIGEST_CUBOID {
            let middle = (lowest + highest) * 0.5;
            let sum = keys.iter().skip(d).step_by(dim).fold(0.0, |sum, key| sum + (key - middle).abs());
            let deviation = sum * (1.0 / (keys.len() / dim) as f32);
            first.push(stored.round(middle - deviation));
            second.push(stored.round(middle + deviation));
            continue;
        }
        if kind == DIGEST_MIN_MAX {
            first.push(lowest);
            second.push(highest);
            continue;
        }
        let scale = stored.round((highest - lowest) / 3.0);
        first.push(if scale.is_finite() { stored.round(lowest) } else { f32::NAN });
        second.push(if scale.is_finite() { scale } else { 0.0 });
    }
    if kind != DIGEST_SKETCH {
        return stored.encode(&[first, second].concat());
    }
    let stride = dim / 4;
    let mut codes = vec![0; keys.len() / 4];
    for (i, &key) in keys.iter().enumerate() {
        let (token, d) = (i / dim, i % dim);
        let inverse = Some(1.0 / second[d]).filter(|inverse: &f32| inverse.is_finite()).unwrap_or(0.0);
        let steps = (key - first[d]) * inverse + 0.5;
        let code = if steps < 3.0 { steps } else { 3.0 } as u8;
        codes[token * stride + d % stride] |= code << (d / stride * 2);
    }
    codes.extend(stored.encode(&[first, second].concat()));
    codes
}

/// Digests are equal to the bit, but one NaN is as good as another.
pub fn compare(got: &[u8], want: &[u8], stored: DType, kind: u32, dim: usize, page_tokens: usize) {
    if is_rotated(kind) {
        return rotated::compare(got, want, &rotated::Layout::new(kind, dim, page_tokens));
    }
    let codes = bytes(kind, dim, page_tokens) - 2 * dim * 2;
    assert_eq!(got[..codes], want[..codes], "codes");
    let same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
    let (got, want) = (stored.decode(&got[codes..]), stored.decode(&want[codes..]));
    assert!(got.iter().zip(&want).all(same), "{got:?}\n{want:?}");
}

/// The largest score over the rows, each `dim` long and scaled; NaN if any is NaN.
pub fn score(kind: u32, stored: DType, digest: &[u8], rows: &[f32], dim: usize, page_tokens: usize) -> f32 {
    if is_rotated(kind) {
        return rotated::score(kind, digest, rows, dim, page_tokens);
    }
    let codes = bytes(kind, dim, page_tokens) - 2 * dim * 2;
    let elements = stored.decode(&digest[codes..]);
    let (first, second) = elements.split_at(dim);
    rows.chunks_exact(dim).fold(f32::NEG_INFINITY, |best, row| {
        let score = if kind != DIGEST_SKETCH {
            in_lanes(dim, |d| {
                let up = if 0.0 > row[d] { 0.0 } else { row[d] } * second[d];
                up + if 0.0 < row[d] { 0.0 } else { row[d] } * first[d]
            })
        } else {
            sketch_score(&digest[..codes], first, second, row)
        };
        if best.is_nan() || best > score { best } else { score }
    })
}

fn sketch_score(codes: &[u8], zero: &[f32], scale: &[f32], row: &[f32]) -> f32 {
    let (dim, stride) = (row.len(), row.len() / 4);
    let offset = in_lanes(dim, |d| row[d] * zero[d]);
    let products: Vec<f32> = row.iter().zip(scale).map(|(q, scale)| q * scale).collect();
    let largest = products.iter().fold(0.0f32, |a, b| if b.abs() > a { b.abs() } else { a });
    if !largest.is_finite() {
        return f32::NAN;
    }
    let inverse = if largest > 1e-30 { 127.0 / largest } else { 0.0 };
    let bytes: Vec<i32> = products.iter().map(|product| (product * inverse).round_ties_even() as i32).collect();
    let dot = |token: &[u8]| -> i32 {
        (0..dim).map(|d| i32::from(token[d % stride] >> (d / stride * 2) & 3) * bytes[d]).sum()
    };
    let best = codes.chunks_exact(stride).map(dot).max().expect("a page has tokens");
    offset + largest / 127.0 * best as f32
}

/// A sum made in 8 lanes, which are then added in the CPU backend's order.
pub(super) fn in_lanes(dim: usize, term: impl Fn(usize) -> f32) -> f32 {
    let mut x = [0.0f32; 8];
    for d in 0..dim {
        x[d % 8] += term(d);
    }
    ((x[0] + x[2]) + (x[1] + x[3])) + ((x[4] + x[6]) + (x[5] + x[7]))
}
