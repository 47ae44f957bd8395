//! Digests against f64, and every instruction set against the portable one to the bit.

use rand::prelude::*;
use rand::rngs::StdRng;

use super::super::tests::{poke, random_page, read, rng};
use super::*;

const KINDS: [DigestKind; 6] = [
    DigestKind::MinMax,
    DigestKind::CuboidMean,
    DigestKind::KeySketch2,
    DigestKind::RotatedSketch1,
    DigestKind::RotatedSketch2,
    DigestKind::RotatedSketch3,
];

fn shapes() -> impl Iterator<Item = PageShape> {
    let dims = [32, 40, 64, 80, 96, 120, 128, 136, 248, 256].into_iter();
    dims.flat_map(|head_dim| {
        [(8, DType::F16), (16, DType::F16), (16, DType::BF16), (32, DType::F32), (128, DType::F16)]
            .map(|(page_tokens, dtype)| PageShape { head_dim, page_tokens, dtype })
    })
}

fn queries(rng: &mut StdRng, shape: PageShape, rows: usize) -> Vec<f32> {
    (0..rows * shape.head_dim).map(|_| rng.random_range(-1.0f32..1.0).powi(3)).collect()
}

/// Builds the digests of pages at odd addresses, poisoned before, and scores them.
fn scores(kernels: &DigestKernels, pages: &[Vec<u8>], queries: &[f32]) -> (Vec<Vec<u8>>, Vec<f32>) {
    let stride = kernels.bytes() + 2;
    let mut digests = vec![0xa5; pages.len() * stride + 1];
    let slots: Vec<u32> = (0..pages.len() as u32).rev().collect();
    for (page, &slot) in pages.iter().zip(&slots) {
        let digest = &mut digests[1 + slot as usize * stride..][..kernels.bytes()];
        // SAFETY: the page is a whole one.
        unsafe { kernels.build(page.as_ptr(), digest) };
    }
    let mut out = vec![f32::NAN; pages.len()];
    // SAFETY: the digests have just been built.
    unsafe { kernels.score(queries, Shelf { base: digests[1..].as_ptr(), stride, slots: &slots }, &mut out) };
    let digest = |slot: &u32| digests[1 + *slot as usize * stride..][..kernels.bytes()].to_vec();
    (slots.iter().map(digest).collect(), out)
}

fn pages(rng: &mut StdRng, shape: PageShape, count: usize) -> Vec<Vec<u8>> {
    (0..count).map(|_| random_page(rng, shape, shape.page_tokens as u32)).collect()
}

fn key(shape: PageShape, page: &[u8], token: usize, d: usize) -> f64 {
    read(shape, page, token * shape.head_dim + d)
}

fn largest_logit(shape: PageShape, queries: &[f32], key: impl Fn(usize, usize) -> f64) -> f64 {
    let rows = queries.chunks_exact(shape.head_dim);
    rows.flat_map(|row| {
        let key = &key;
        (0..shape.page_tokens).map(move |t| row.iter().enumerate().map(|(d, &q)| f64::from(q) * key(t, d)).sum::<f64>())
    })
    .fold(f64::NEG_INFINITY, f64::max)
}

#[test]
fn bounds_bound_every_logit() {
    let mut rng = rng();
    for shape in shapes() {
        let kernels = DigestKernels::new(DigestKind::MinMax, Isa::detect(), shape).unwrap();
        assert_eq!(kernels.bytes(), 2 * shape.head_dim * shape.dtype.bytes());
        let (rows, count) = (rng.random_range(1..20), rng.random_range(1..8));
        let (pages, queries) = (pages(&mut rng, shape, count), queries(&mut rng, shape, rows));
        for (page, score) in pages.iter().zip(scores(&kernels, &pages, &queries).1) {
            let logit = largest_logit(shape, &queries, |t, d| key(shape, page, t, d));
            let quest = queries.chunks_exact(shape.head_dim).map(|row| {
                let channel = |d: usize| {
                    let products = (0..shape.page_tokens).map(|t| f64::from(row[d]) * key(shape, page, t, d));
                    products.fold(f64::NEG_INFINITY, f64::max)
                };
                (0..shape.head_dim).map(channel).sum::<f64>()
            });
            let quest = quest.fold(f64::NEG_INFINITY, f64::max);
            let score = f64::from(score);
            assert!(score >= logit - 1e-4 && (score - quest).abs() < 1e-3, "{score}, {quest}, {logit} in {shape:?}");
        }
    }
}

#[test]
fn cuboids_reach_as_far_as_keys_do_on_average() {
    let mut rng = rng();
    for shape in shapes() {
        let kernels = DigestKernels::new(DigestKind::CuboidMean, Isa::detect(), shape).unwrap();
        let pages = pages(&mut rng, shape, 3);
        let digests = scores(&kernels, &pages, &queries(&mut rng, shape, 1)).0;
        for ((page, digest), d) in
            pages.iter().zip(&digests).flat_map(|both| (0..shape.head_dim).map(move |d| (both, d)))
        {
            let keys: Vec<f64> = (0..shape.page_tokens).map(|t| key(shape, page, t, d)).collect();
            let (low, high) = keys.iter().fold((f64::MAX, f64::MIN), |(low, high), &k| (low.min(k), high.max(k)));
            let centre = (low + high) / 2.0;
            let deviation = keys.iter().map(|k| (k - centre).abs()).sum::<f64>() / keys.len() as f64;
            for (at, want) in [(d, centre - deviation), (shape.head_dim + d, centre + deviation)] {
                let got = read(shape, digest, at);
                assert!((got - want).abs() <= 0.01 * want.abs() + 1e-3, "{got} instead of {want} in {shape:?}");
            }
        }
    }
}

#[test]
fn sketches_are_within_half_a_step_of_the_keys() {
    let mut rng = rng();
    for shape in shapes() {
        let kernels = DigestKernels::new(DigestKind::KeySketch2, Isa::detect(), shape).unwrap();
        let codes = shape.page_tokens * shape.head_dim / 4;
        assert_eq!(kernels.bytes(), codes + 2 * shape.head_dim * shape.dtype.bytes());
        let (rows, count) = (rng.random_range(1..20), rng.random_range(1..80));
        let (pages, queries) = (pages(&mut rng, shape, count), queries(&mut rng, shape, rows));
        let (digests, scores) = scores(&kernels, &pages, &queries);
        for ((page, digest), score) in pages.iter().zip(digests).zip(scores) {
            let scale = |d: usize| read(shape, &digest[codes..], shape.head_dim + d);
            let sketched = |t: usize, d: usize| {
                let stride = shape.head_dim / 4;
                let code = digest[t * stride + d % stride] >> (d / stride * 2) & 3;
                read(shape, &digest[codes..], d) + scale(d) * f64::from(code)
            };
            for (t, d) in (0..shape.page_tokens).flat_map(|t| (0..shape.head_dim).map(move |d| (t, d))) {
                let error = (sketched(t, d) - key(shape, page, t, d)).abs();
                assert!(error <= scale(d) * 0.52 + 1e-6, "{error} with a step of {} in {shape:?}", scale(d));
            }
            let exact = largest_logit(shape, &queries, sketched);
            // Query bytes are off by half a step of max |q · scale| / 127, each times a code of at most 3.
            let product = (0..queries.len()).map(|i| (f64::from(queries[i]) * scale(i % shape.head_dim)).abs());
            let allowed = product.fold(0.0, f64::max) / 127.0 * 1.5 * shape.head_dim as f64 + 1e-4;
            let score = f64::from(score);
            assert!((score - exact).abs() <= allowed, "{score} instead of {exact} ± {allowed} in {shape:?}");
        }
    }
}

#[test]
fn every_instruction_set_computes_the_same_bits() {
    let mut rng = rng();
    for (shape, kind) in shapes().flat_map(|shape| KINDS.map(|kind| (shape, kind))) {
        let rows = rng.random_range(1..12);
        let (pages, queries) = (pages(&mut rng, shape, 9), queries(&mut rng, shape, rows));
        let portable = DigestKernels::new(kind, Isa::Portable, shape).unwrap();
        let (digests, expected) = scores(&portable, &pages, &queries);
        for isa in Isa::available() {
            let (built, got) = scores(&DigestKernels::new(kind, isa, shape).unwrap(), &pages, &queries);
            assert!(built == digests, "{isa}, {kind:?}, {shape:?}");
            let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&got), bits(&expected), "{isa}, {kind:?}, {shape:?}");
        }
    }
}

#[test]
fn what_is_not_finite_scores_nan_and_spares_other_pages() {
    let mut rng = rng();
    for (shape, kind) in shapes().flat_map(|shape| KINDS.map(|kind| (shape, kind))) {
        for isa in Isa::available() {
            let kernels = DigestKernels::new(kind, isa, shape).unwrap();
            let (mut pages, mut queries) = (pages(&mut rng, shape, 3), queries(&mut rng, shape, 3));
            let special = *[f32::NAN, f32::INFINITY, f32::NEG_INFINITY].choose(&mut rng).unwrap();
            let at = rng.random_range(0..shape.page_tokens * shape.head_dim);
            poke(shape, &mut pages[1], at, special);
            let out = scores(&kernels, &pages, &queries).1;
            assert!(out[0].is_finite() && out[1].is_nan() && out[2].is_finite(), "{out:?} {isa} {kind:?} {shape:?}");
            let at = rng.random_range(0..queries.len());
            queries[at] = f32::NAN;
            assert!(scores(&kernels, &pages, &queries).1.iter().all(|x| x.is_nan()), "{isa} {kind:?} {shape:?}");
        }
    }
}

#[test]
fn constant_channels_are_exact() {
    let shape = PageShape { head_dim: 64, page_tokens: 16, dtype: DType::F16 };
    let mut rng = rng();
    let mut pages = pages(&mut rng, shape, 1);
    (0..16 * 64).for_each(|i| poke(shape, &mut pages[0], i, (i % 64) as f32));
    let queries = queries(&mut rng, shape, 1);
    let exact = largest_logit(shape, &queries, |t, d| key(shape, &pages[0], t, d));
    for kind in [DigestKind::MinMax, DigestKind::CuboidMean, DigestKind::KeySketch2] {
        let score = scores(&DigestKernels::new(kind, Isa::detect(), shape).unwrap(), &pages, &queries).1[0];
        assert!((f64::from(score) - exact).abs() < 1e-3, "{score} instead of {exact} with {kind:?}");
    }
}

/// What a digest's parts stand for, read as the layout says and multiplied out in f64 without any rotation.
struct Unrotated {
    /// `[page_tokens, head_dim]`.
    keys: Vec<f64>,
    /// Half of the distance between neighbouring codes, per token.
    steps: Vec<f64>,
}

fn unrotate(bits: usize, shape: PageShape, digest: &[u8]) -> Unrotated {
    let dim = shape.head_dim;
    let (pairs, quads) =
        (if bits >= 2 { dim.div_ceil(8) } else { 0 }, if bits % 2 == 1 { dim.div_ceil(16) } else { 0 });
    let blocks = shape.page_tokens.div_ceil(16);
    let (weights, centre) = (blocks * (pairs + quads) * 32, blocks * ((pairs + quads) * 32 + 16));
    let number = |at: usize| f64::from(f32::from_ne_bytes(digest[at..at + 4].try_into().unwrap()));
    let (scale, step) = (number(digest.len() - 8), number(digest.len() - 4));
    let nibble = |token: usize, plane: usize, n: usize| {
        let word = &digest[(token / 16 * (pairs + quads) + plane + n / 4) * 32..];
        word[n % 2 * 16 + token % 16] >> (n / 2 % 2 * 4) & 15
    };
    let code = |token: usize, d: usize| {
        let high = if bits >= 2 { nibble(token, 0, d / 2) >> (d % 2 * 2) & 3 } else { 0 };
        let low = if bits % 2 == 1 { nibble(token, pairs, d / 4) >> (d % 4) & 1 } else { 0 };
        let code = if bits % 2 == 1 { 2 * high + low } else { high };
        2.0 * f64::from(code) - f64::from((1 << bits) - 1)
    };
    let block = 1usize << dim.trailing_zeros();
    let (mut keys, mut steps) = (Vec::new(), Vec::new());
    for token in 0..shape.page_tokens {
        let step_of_token = scale * f64::from(digest[weights + token]) / 255.0;
        let rotated = |d: usize| f64::from(digest[centre + d] as i8) * step + step_of_token * code(token, d);
        for d in 0..dim {
            let first = d / block * block;
            let sum = (0..block).map(|i| {
                let sign = if (i & (d - first)).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
                sign * rotated(first + i)
            });
            keys.push(sum.sum::<f64>() / block as f64);
        }
        steps.push(step_of_token);
    }
    Unrotated { keys, steps }
}

#[test]
fn rotated_sketches_stand_for_keys_and_score_what_they_stand_for() {
    let mut rng = rng();
    let kinds = [(1, DigestKind::RotatedSketch1), (2, DigestKind::RotatedSketch2), (3, DigestKind::RotatedSketch3)];
    for (shape, (bits, kind)) in shapes().flat_map(|shape| kinds.map(|kind| (shape, kind))) {
        let kernels = DigestKernels::new(kind, Isa::detect(), shape).unwrap();
        let (rows, count) = (rng.random_range(1..10), rng.random_range(1..8));
        let (pages, queries) = (pages(&mut rng, shape, count), queries(&mut rng, shape, rows));
        let (digests, scores) = scores(&kernels, &pages, &queries);
        for ((page, digest), score) in pages.iter().zip(&digests).zip(scores) {
            let Unrotated { keys, steps } = unrotate(bits, shape, digest);
            // Rounding loses about this share of the energy about the page's mean: 36 %, 12 % and 3.5 % of a normal distribution.
            let mean = |d: usize| {
                (0..shape.page_tokens).map(|t| key(shape, page, t, d)).sum::<f64>() / shape.page_tokens as f64
            };
            let means: Vec<f64> = (0..shape.head_dim).map(mean).collect();
            let (mut energy, mut lost) = (0.0, 0.0);
            for (t, d) in (0..shape.page_tokens).flat_map(|t| (0..shape.head_dim).map(move |d| (t, d))) {
                let exact = key(shape, page, t, d);
                energy += (exact - means[d]).powi(2);
                lost += (exact - keys[t * shape.head_dim + d]).powi(2);
            }
            let allowed = [0.85, 0.25, 0.10][bits - 1];
            assert!(lost < allowed * energy, "{lost} of {energy} lost at {bits} bits in {shape:?}");

            let exact = largest_logit(shape, &queries, |t, d| keys[t * shape.head_dim + d]);
            // The query is off by half a step per channel, its steps being a twentieth of a pair's magnitudes at most; each counts at most
            // 2^bits − 1 steps of the token. Weights and shifts add less than a step.
            let block = 1usize << shape.head_dim.trailing_zeros();
            let largest_step = steps.iter().copied().fold(0.0, f64::max);
            let magnitude = queries.chunks_exact(shape.head_dim).map(|row| {
                row.chunks_exact(block).map(|x| x.iter().map(|x| f64::from(x.abs())).sum::<f64>()).fold(0.0, f64::max)
            });
            let query_step =
                magnitude.fold(0.0, f64::max) / block as f64 * if bits == 1 { 4.0 / 61.0 } else { 2.0 / 20.0 };
            let codes = f64::from((1 << bits) - 1);
            let allowed = query_step * largest_step * (0.5 * codes * shape.head_dim as f64 + 2.0) + 1e-3;
            let score = f64::from(score);
            assert!((score - exact).abs() <= allowed, "{score} instead of {exact} ± {allowed}, {bits} bits, {shape:?}");
        }
    }
}
