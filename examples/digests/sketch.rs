//! Keys at a few bits, and what a page is scored with instead of them.

use super::basis::Basis;

/// In which directions keys are sketched.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Turn {
    Plain,
    Hadamard,
    /// Hadamard's matrix over each so many neighbouring channels.
    Bands(usize),
    /// So many principal directions of the first [`PROMPT`] keys.
    Principal(usize),
    /// The so many channels that vary most in the first [`PROMPT`] keys.
    Channels(usize),
}

/// What is taken off the keys before they are rounded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Centre {
    /// The middle of the smallest and the largest key of the page, per channel, in 2 bytes.
    Middle,
    /// The page's mean per channel, in 2 bytes.
    Mean,
    /// The same in 1 byte, with a scale per page.
    Mean8,
    /// The mean of the first [`PROMPT`] keys.
    Prompt,
}

/// What codes are multiplied by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scale {
    /// Spans the page's range per channel.
    ChannelPage,
    /// Spans the range of the channel in the first [`PROMPT`] keys, or what remains of it about the centre.
    ChannelSequence,
    /// One number per token.
    Token,
    /// One number per page.
    Page,
    /// One number per page and so many neighbouring channels, in 1 byte.
    Band(usize),
    /// The same, times one number per token.
    BandToken(usize),
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sketch {
    pub bits: u32,
    pub turn: Turn,
    pub centre: Centre,
    pub scale: Scale,
}

/// Keys that a sequence's own statistics are learned from.
pub const PROMPT: usize = 1024;

/// A sketch and what it has learned of a sequence.
pub struct Learned {
    sketch: Sketch,
    pub basis: Basis,
    mean: Vec<f32>,
    /// Root mean square of each direction about the centre.
    deviations: Vec<f32>,
}

impl Learned {
    /// Learns from the first keys, `[at most PROMPT, dim]`.
    pub fn new(sketch: Sketch, prompt: &[f32], dim: usize, page: usize) -> Learned {
        let basis = sketch.basis(prompt, dim);
        let (prompt, rank) = (basis.apply(prompt), basis.rank);
        let mean = means(&prompt, rank);
        let mut squares = vec![0.0f32; rank];
        for keys in prompt.chunks_exact(page * rank) {
            let centre = sketch.centre_of(keys, rank, &mean);
            for key in keys.chunks_exact(rank) {
                for (sum, (x, c)) in squares.iter_mut().zip(key.iter().zip(&centre)) {
                    *sum += (x - c) * (x - c);
                }
            }
        }
        let count = (prompt.len() / rank).max(1) as f32;
        let deviations = squares.iter().map(|sum| (sum / count).sqrt()).collect();
        Learned { sketch, basis, mean, deviations }
    }

    /// What is left of a page's keys: `[tokens, rank]`, in the basis.
    pub fn round(&self, keys: &[f32]) -> Vec<f32> {
        let mut keys = self.basis.apply(keys);
        let centre = self.sketch.centre_of(&keys, self.basis.rank, &self.mean);
        self.sketch.round_page(&mut keys, &centre, &self.deviations);
        keys
    }
}

/// Steps between codes, in deviations of a normal distribution, that lose least: 1 to 4 bits.
const NORMAL_STEPS: [f32; 4] = [1.596, 0.996, 0.586, 0.335];

impl Sketch {
    /// Bytes of one page's digest.
    pub fn bytes(&self, dim: usize, page: usize) -> f64 {
        let rank = self.rank(dim) as f64;
        let codes = rank * page as f64 * f64::from(self.bits) / 8.0;
        let centre = match self.centre {
            Centre::Prompt => 0.0,
            Centre::Middle | Centre::Mean => 2.0 * rank,
            Centre::Mean8 => rank + 2.0,
        };
        let scales = match self.scale {
            Scale::ChannelPage => 2.0 * rank,
            Scale::ChannelSequence => 0.0,
            // Bytes that count in parts of the largest one.
            Scale::Token => 4.0 + page as f64,
            Scale::Page => 4.0,
            Scale::Band(width) => 4.0 + rank / width as f64,
            Scale::BandToken(width) => 4.0 + rank / width as f64 + page as f64,
        };
        codes + centre + scales
    }

    fn rank(&self, dim: usize) -> usize {
        match self.turn {
            Turn::Plain | Turn::Hadamard | Turn::Bands(_) => dim,
            Turn::Principal(rank) | Turn::Channels(rank) => rank,
        }
    }

    fn basis(&self, prompt: &[f32], dim: usize) -> Basis {
        match self.turn {
            Turn::Plain => Basis::identity(dim),
            Turn::Hadamard => Basis::hadamard(dim, dim),
            Turn::Bands(width) => Basis::hadamard(dim, width),
            Turn::Principal(rank) => Basis::principal(prompt, dim, rank),
            Turn::Channels(rank) => Basis::channels(prompt, dim, rank),
        }
    }

    fn centre_of(&self, keys: &[f32], rank: usize, prompt_mean: &[f32]) -> Vec<f32> {
        match self.centre {
            Centre::Prompt => prompt_mean.to_vec(),
            Centre::Mean => means(keys, rank),
            Centre::Middle => (0..rank)
                .map(|d| {
                    let (low, high) = range(keys.iter().skip(d).step_by(rank));
                    (low + high) / 2.0
                })
                .collect(),
            Centre::Mean8 => {
                let mean = means(keys, rank);
                let step = mean.iter().fold(0.0f32, |a, x| a.max(x.abs())) / 127.0;
                mean.iter().map(|x| if step > 0.0 { (x / step).round() * step } else { 0.0 }).collect()
            }
        }
    }

    fn round_page(&self, keys: &mut [f32], centre: &[f32], deviations: &[f32]) {
        let rank = centre.len();
        for key in keys.chunks_exact_mut(rank) {
            key.iter_mut().zip(centre).for_each(|(x, c)| *x -= c);
        }
        let normal = NORMAL_STEPS[self.bits as usize - 1];
        match self.scale {
            Scale::ChannelPage => {
                for d in 0..rank {
                    let (low, high) = range(keys.iter().skip(d).step_by(rank));
                    let levels = ((1u32 << self.bits) - 1) as f32;
                    // At one bit the ends of the range are far from most keys; two mean deviations are not.
                    let step = if self.bits == 1 {
                        let tokens = keys.len() / rank;
                        2.0 * keys.iter().skip(d).step_by(rank).map(|x| x.abs()).sum::<f32>() / tokens as f32
                    } else {
                        (high - low) / levels
                    };
                    keys.iter_mut().skip(d).step_by(rank).for_each(|x| *x = self.nearest(*x, step));
                }
            }
            Scale::ChannelSequence => {
                for key in keys.chunks_exact_mut(rank) {
                    key.iter_mut().zip(deviations).for_each(|(x, s)| *x = self.nearest(*x, s * normal));
                }
            }
            Scale::Token => keys.chunks_exact_mut(rank).for_each(|key| self.round_with_one_scale(key, normal)),
            Scale::Page => self.round_with_one_scale(keys, normal),
            Scale::Band(width) => self.round_bands(keys, rank, width, normal),
            Scale::BandToken(width) => {
                // Tokens of one size, then bands, then back.
                let sizes: Vec<f32> = keys.chunks_exact(rank).map(size).collect();
                let scaled = |keys: &mut [f32], by: &dyn Fn(f32) -> f32| {
                    for (key, &size) in keys.chunks_exact_mut(rank).zip(&sizes) {
                        key.iter_mut().for_each(|x| *x *= by(size));
                    }
                };
                scaled(keys, &|size| if size > 0.0 { 1.0 / size } else { 0.0 });
                self.round_bands(keys, rank, width, normal);
                scaled(keys, &|size| size);
            }
        }
        for key in keys.chunks_exact_mut(rank) {
            key.iter_mut().zip(centre).for_each(|(x, c)| *x += c);
        }
    }

    /// A step that suits normally distributed numbers, then the scale that keeps dot products with them unbiased (RaBitQ, arXiv
    /// 2405.12497).
    fn round_with_one_scale(&self, keys: &mut [f32], normal: f32) {
        let square = keys.iter().map(|x| x * x).sum::<f32>();
        let step = normal * (square / keys.len() as f32).sqrt();
        let rounded: Vec<f32> = keys.iter().map(|&x| self.nearest(x, step)).collect();
        let product = rounded.iter().zip(&*keys).map(|(a, b)| a * b).sum::<f32>();
        let correction = if product > 0.0 { square / product } else { 1.0 };
        keys.iter_mut().zip(rounded).for_each(|(x, r)| *x = r * correction);
    }

    fn round_bands(&self, keys: &mut [f32], rank: usize, width: usize, normal: f32) {
        for band in (0..rank).step_by(width) {
            let mut part: Vec<f32> = keys.chunks_exact(rank).flat_map(|key| key[band..band + width].to_vec()).collect();
            self.round_with_one_scale(&mut part, normal);
            for (key, part) in keys.chunks_exact_mut(rank).zip(part.chunks_exact(width)) {
                key[band..band + width].copy_from_slice(part);
            }
        }
    }

    /// The nearest of 2^bits values that lie `step` apart about 0.
    fn nearest(&self, x: f32, step: f32) -> f32 {
        if step <= 0.0 {
            return 0.0;
        }
        let half = (1u32 << self.bits) as f32 / 2.0;
        ((x / step).floor().clamp(-half, half - 1.0) + 0.5) * step
    }
}

fn size(key: &[f32]) -> f32 {
    (key.iter().map(|x| x * x).sum::<f32>() / key.len() as f32).sqrt()
}

fn means(keys: &[f32], rank: usize) -> Vec<f32> {
    let count = (keys.len() / rank) as f32;
    let mut means = vec![0.0; rank];
    for key in keys.chunks_exact(rank) {
        means.iter_mut().zip(key).for_each(|(mean, x)| *mean += x / count);
    }
    means
}

fn range<'a>(values: impl Iterator<Item = &'a f32>) -> (f32, f32) {
    values.fold((f32::INFINITY, f32::NEG_INFINITY), |(low, high), &x| (low.min(x), high.max(x)))
}
