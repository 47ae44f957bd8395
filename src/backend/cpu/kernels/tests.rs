//! Attention against a dense softmax in f64.

use half::{bf16, f16};
use rand::prelude::*;
use rand::rngs::StdRng;

use super::*;

/// Everything that one call of a kernel is made from, with NaN wherever nothing was written.
struct Case {
    shape: PageShape,
    rows: usize,
    /// Per page its bytes, the first position and the number of tokens, in the order of the call.
    pages: Vec<(Vec<u8>, u32, u32)>,
    queries: Vec<f32>,
    visible: Vec<u32>,
}

impl Case {
    /// `lengths` are the tokens of each page; the pages are shuffled.
    fn random(rng: &mut StdRng, shape: PageShape, rows: usize, lengths: &[u32]) -> Case {
        let mut first = rng.random_range(0..3) * shape.page_tokens as u32;
        let mut pages = Vec::new();
        for &tokens in lengths {
            pages.push((random_page(rng, shape, tokens), first, tokens));
            first += shape.page_tokens as u32 * rng.random_range(1..3);
        }
        pages.shuffle(rng);
        let scale = 2.0 / (shape.head_dim as f32).sqrt();
        let queries = (0..rows * shape.head_dim).map(|_| normal(rng) * scale).collect();
        Case { shape, rows, pages, queries, visible: vec![u32::MAX; rows] }
    }

    fn views(&self) -> Vec<PageView> {
        self.pages
            .iter()
            .map(|(data, first, tokens)| PageView { data: data.as_ptr(), first: *first, tokens: *tokens })
            .collect()
    }

    /// Attends in calls of `split` pages, each into its own poisoned state, merges and finishes.
    fn run(&self, kernels: &Kernels, split: usize) -> Vec<f32> {
        let mut whole = Owned::new(self.rows, self.shape.head_dim);
        for (i, pages) in self.views().chunks(split.max(1)).enumerate() {
            let mut part = Owned::new(self.rows, self.shape.head_dim);
            let into = if i == 0 { &mut whole } else { &mut part };
            // SAFETY: the pages live in `self`, with the lengths that `Case::random` gave them.
            unsafe { kernels.attend(&self.tile(), pages, &mut into.state()) };
            if i > 0 {
                whole.state().merge(&part.state());
            }
        }
        let mut out = vec![f32::NAN; self.rows * self.shape.head_dim];
        whole.state().finish(&mut out);
        out
    }

    fn tile(&self) -> Tile<'_> {
        Tile { queries: &self.queries, visible: &self.visible }
    }

    /// Outputs, and per row the largest difference that rounding explains.
    fn reference(&self) -> (Vec<f64>, Vec<f64>) {
        let dim = self.shape.head_dim;
        let (mut out, mut tolerance) = (Vec::new(), Vec::new());
        for row in 0..self.rows {
            let query = &self.queries[row * dim..][..dim];
            let (mut logits, mut values, mut magnitude) = (Vec::new(), Vec::new(), 0.0f64);
            for (data, first, tokens) in &self.pages {
                for token in 0..(self.visible[row].saturating_sub(*first)).min(*tokens) as usize {
                    let key = |d| read(self.shape, data, token * dim + d);
                    logits.push((0..dim).map(|d| f64::from(query[d]) * key(d)).sum::<f64>());
                    let sum = (0..dim).map(|d| (f64::from(query[d]) * key(d)).abs()).sum::<f64>();
                    magnitude = if sum.is_finite() { magnitude.max(sum) } else { magnitude };
                    let value = |d| read(self.shape, data, (self.shape.page_tokens + token) * dim + d);
                    values.push((0..dim).map(value).collect::<Vec<_>>());
                }
            }
            let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = logits.iter().map(|x| (x - max).exp()).collect();
            let sum: f64 = weights.iter().sum();
            let mut largest = 0.0f64;
            for d in 0..dim {
                let total: f64 = weights.iter().zip(&values).map(|(w, v)| w * v[d]).sum();
                out.push(if logits.is_empty() { 0.0 } else { total / sum });
                let finite = values.iter().map(|v| v[d].abs()).filter(|v| v.is_finite());
                largest = finite.fold(largest, f64::max);
            }
            tolerance.push(largest * (magnitude * 4e-7 + 2e-6));
        }
        (out, tolerance)
    }

    fn check(&self, kernels: &Kernels, split: usize, name: &str) {
        let out = self.run(kernels, split);
        assert_eq!(bits(&out), bits(&self.run(kernels, split)), "{name}: not deterministic");
        let (expected, tolerance) = self.reference();
        for (i, (&got, &want)) in out.iter().zip(&expected).enumerate() {
            let allowed = tolerance[i / self.shape.head_dim];
            let got = f64::from(got);
            let same = got == want || (got - want).abs() <= allowed || (got.is_nan() && want.is_nan());
            let context = (self.shape, self.rows, self.pages.len(), split);
            assert!(same, "{name}: {got} instead of {want} ± {allowed:e} at {i} in {context:?}");
        }
    }
}

/// A state on its own memory; the sums are empty, as a caller starts.
struct Owned(Vec<f32>, Vec<f32>, Vec<f32>);

impl Owned {
    fn new(rows: usize, dim: usize) -> Owned {
        let mut owned = Owned(vec![f32::NAN; rows], vec![f32::NAN; rows], vec![f32::NAN; rows * dim]);
        owned.state().clear();
        owned
    }

    fn state(&mut self) -> State<'_> {
        State { max: &mut self.0, sum: &mut self.1, acc: &mut self.2 }
    }
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

fn normal(rng: &mut StdRng) -> f32 {
    (0..12).map(|_| rng.random::<f32>()).sum::<f32>() - 6.0
}

pub(super) fn random_page(rng: &mut StdRng, shape: PageShape, tokens: u32) -> Vec<u8> {
    let block = shape.page_tokens * shape.head_dim;
    let mut data = Vec::new();
    for i in 0..2 * block {
        let written = i % block < tokens as usize * shape.head_dim;
        write(shape, &mut data, if written { normal(rng) } else { f32::NAN });
    }
    data
}

fn write(shape: PageShape, data: &mut Vec<u8>, value: f32) {
    match shape.dtype {
        DType::F32 => data.extend(value.to_ne_bytes()),
        DType::F16 => data.extend(f16::from_f32(value).to_ne_bytes()),
        DType::BF16 => data.extend(bf16::from_f32(value).to_ne_bytes()),
    }
}

pub(super) fn poke(shape: PageShape, data: &mut [u8], index: usize, value: f32) {
    let mut element = Vec::new();
    write(shape, &mut element, value);
    data[index * element.len()..][..element.len()].copy_from_slice(&element);
}

pub(super) fn read(shape: PageShape, data: &[u8], index: usize) -> f64 {
    let at = |n: usize| data[index * n..][..n].iter();
    let two = || u16::from_ne_bytes(std::array::from_fn(|i| *at(2).nth(i).unwrap()));
    match shape.dtype {
        DType::F32 => f64::from(f32::from_ne_bytes(std::array::from_fn(|i| *at(4).nth(i).unwrap()))),
        DType::F16 => f16::from_bits(two()).to_f64(),
        DType::BF16 => bf16::from_bits(two()).to_f64(),
    }
}

/// Every kernel that this machine can run for the shape.
fn kernels(shape: PageShape) -> Vec<(String, Kernels)> {
    let isas = Isa::available().filter_map(|isa| Some((isa.to_string(), Kernels::new(isa, shape)?)));
    isas.chain(Kernels::wide(shape).map(|kernels| ("16 portable lanes".to_owned(), kernels))).collect()
}

pub(super) fn rng() -> StdRng {
    let seed = std::env::var("WAKEKV_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or_else(rand::random);
    println!("WAKEKV_SEED={seed}");
    StdRng::seed_from_u64(seed)
}

const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
const DIMS: [usize; 8] = [32, 40, 64, 80, 96, 128, 248, 256];

#[test]
fn agrees_with_f64_on_ragged_lengths() {
    let mut rng = rng();
    for head_dim in DIMS {
        for dtype in DTYPES {
            for page_tokens in [8, 16, 32, 64, 128] {
                let shape = PageShape { head_dim, page_tokens, dtype };
                let rows = rng.random_range(1..=MAX_ROWS);
                let lengths: Vec<u32> = (0..rng.random_range(1..12))
                    .map(|_| {
                        if rng.random_bool(0.5) { page_tokens as u32 } else { rng.random_range(1..=page_tokens as u32) }
                    })
                    .collect();
                let case = Case::random(&mut rng, shape, rows, &lengths);
                for (name, kernels) in kernels(shape) {
                    case.check(&kernels, usize::MAX, &name);
                    case.check(&kernels, 3, &name);
                }
            }
        }
    }
}

#[test]
fn agrees_with_f64_for_every_number_of_rows() {
    let mut rng = rng();
    for rows in 1..=MAX_ROWS {
        for (head_dim, dtype) in DIMS.into_iter().zip(DTYPES.into_iter().cycle()) {
            let shape = PageShape { head_dim, page_tokens: 16, dtype };
            let case = Case::random(&mut rng, shape, rows, &[16, 16, 16, 16, 16, 16, 1, 7]);
            for (name, kernels) in kernels(shape) {
                case.check(&kernels, usize::MAX, &name);
            }
        }
    }
}

#[test]
fn rows_see_only_what_is_before_them() {
    let mut rng = rng();
    for round in 0..120 {
        let page_tokens = 8 << rng.random_range(0..5);
        let shape = PageShape { head_dim: DIMS[round % 8], page_tokens, dtype: DTYPES[round % 3] };
        let rows = rng.random_range(1..=MAX_ROWS);
        let mut case = Case::random(&mut rng, shape, rows, &vec![page_tokens as u32; 1 + round % 9]);
        let end = case.pages.iter().map(|page| page.1 + page.2).max().unwrap();
        let causal = rng.random_range(0..=end);
        for row in 0..rows {
            case.visible[row] = match round % 3 {
                0 => rng.random_range(0..=end),          // anything
                1 => (causal + row as u32 / 2).min(end), // a prefill tile
                _ => [0, end][row % 2],                  // nothing or everything
            };
        }
        // What no row may see must not matter, be it NaN.
        for (data, first, tokens) in &mut case.pages {
            for token in 0..*tokens {
                if case.visible.iter().all(|&visible| visible <= *first + token) {
                    for block in [0, page_tokens] {
                        for d in 0..shape.head_dim {
                            poke(shape, data, (block + token as usize) * shape.head_dim + d, f32::NAN);
                        }
                    }
                }
            }
        }
        for (name, kernels) in kernels(shape) {
            case.check(&kernels, usize::MAX, &name);
            case.check(&kernels, 2, &name);
        }
    }
}

#[test]
fn nan_and_infinity_pass_as_through_a_dense_softmax() {
    let mut rng = rng();
    for round in 0..240 {
        let shape = PageShape { head_dim: DIMS[round % 8], page_tokens: 16, dtype: DTYPES[round % 3] };
        let rows = rng.random_range(1..=MAX_ROWS);
        let mut case = Case::random(&mut rng, shape, rows, &[16, 9, 16, 16, 16, 3]);
        for visible in &mut case.visible {
            *visible = rng.random_range(0..200);
        }
        let special = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][round / 3 % 3];
        let page = rng.random_range(0..case.pages.len());
        let token = rng.random_range(0..case.pages[page].2 as usize);
        let channel = rng.random_range(0..shape.head_dim);
        match round / 9 % 3 {
            0 => poke(shape, &mut case.pages[page].0, token * shape.head_dim + channel, special),
            1 => poke(shape, &mut case.pages[page].0, (16 + token) * shape.head_dim + channel, special),
            _ => case.queries[rng.random_range(0..rows) * shape.head_dim + channel] = special,
        }
        for (name, kernels) in kernels(shape) {
            case.check(&kernels, usize::MAX, &name);
            case.check(&kernels, 1, &name);
        }
    }
}

#[test]
fn logits_of_minus_infinity_alone_are_no_distribution() {
    let shape = PageShape { head_dim: 64, page_tokens: 16, dtype: DType::F16 };
    let mut case = Case::random(&mut rng(), shape, 2, &[16, 5]);
    case.queries[..64].fill(0.0);
    case.queries[0] = f32::NEG_INFINITY;
    for (data, _, tokens) in &mut case.pages {
        (0..*tokens as usize).for_each(|token| poke(shape, data, token * 64, 1.0));
    }
    for (name, kernels) in kernels(shape) {
        let out = case.run(&kernels, usize::MAX);
        assert!(out[..64].iter().all(|x| x.is_nan()) && out[64..].iter().all(|x| x.is_finite()), "{name}");
    }
}

#[test]
fn what_sees_nothing_changes_nothing() {
    let shape = PageShape { head_dim: 40, page_tokens: 16, dtype: DType::F32 };
    let mut case = Case::random(&mut rng(), shape, 3, &[16, 16]);
    case.visible = vec![0, u32::MAX, 0];
    for (name, kernels) in kernels(shape) {
        let mut owned = Owned::new(3, 40);
        (owned.0[2], owned.1[2]) = (3.5, 0.1);
        owned.2[80..].fill(0.7);
        // SAFETY: the pages live in `case`.
        unsafe { kernels.attend(&case.tile(), &case.views(), &mut owned.state()) };
        assert_eq!((owned.0[0], owned.1[0], &owned.2[..40]), (f32::NEG_INFINITY, 0.0, &[0.0; 40][..]), "{name}");
        assert_eq!((owned.0[2], owned.1[2], &owned.2[80..]), (3.5, 0.1, &[0.7; 40][..]), "{name}");
        // SAFETY: there are no pages.
        unsafe { kernels.attend(&case.tile(), &[], &mut owned.state()) };
        let mut out = [f32::NAN; 120];
        owned.state().finish(&mut out);
        assert!(out[..40].iter().all(|&x| x == 0.0) && out.iter().all(|x| x.is_finite()), "{name}");
    }
}

#[test]
fn merging_the_empty_state_is_exact() {
    let shape = PageShape { head_dim: 32, page_tokens: 8, dtype: DType::BF16 };
    let case = Case::random(&mut rng(), shape, 4, &[8, 8, 3]);
    let kernels = Kernels::new(Isa::Portable, shape).unwrap();
    let mut full = Owned::new(4, 32);
    // SAFETY: the pages live in `case`.
    unsafe { kernels.attend(&case.tile(), &case.views(), &mut full.state()) };
    let expected = (bits(&full.0), bits(&full.1), bits(&full.2));
    let mut empty = Owned::new(4, 32);
    full.state().merge(&empty.state());
    assert_eq!((bits(&full.0), bits(&full.1), bits(&full.2)), expected);
    empty.state().merge(&full.state());
    assert_eq!((bits(&empty.0), bits(&empty.1), bits(&empty.2)), expected);
}

#[test]
fn refuses_what_it_has_no_kernel_for() {
    let good = PageShape { head_dim: 64, page_tokens: 16, dtype: DType::F16 };
    for bad in [
        PageShape { head_dim: 24, ..good },
        PageShape { head_dim: 264, ..good },
        PageShape { head_dim: 44, ..good },
        PageShape { page_tokens: 4, ..good },
        PageShape { page_tokens: 24, ..good },
        PageShape { page_tokens: 256, ..good },
    ] {
        assert!(Kernels::new(Isa::Portable, bad).is_none(), "{bad:?}");
    }
    for isa in [Isa::Portable, Isa::Avx2, Isa::Avx512] {
        assert_eq!(Kernels::new(isa, good).is_some(), isa.is_available());
    }
    assert!(Isa::detect().is_available());
}
