//! The ways of choosing pages that are compared.

use std::fmt;

use super::sketch::{Centre, Scale, Sketch, Turn};

/// How a page's score is made of its tokens' logits and the rows of its group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Score {
    /// The largest logit of any token and row.
    Max,
    /// The largest over the rows of log Σ exp over the tokens.
    LogSum,
    /// The mean over the rows of the largest logit.
    MeanMax,
    /// As `Max`, but each row less its largest score of any page.
    EvenMax,
    /// The mean over the rows of the share of attention, as far as the logits tell.
    Mass,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Digest {
    /// The keys themselves.
    Exact,
    /// Smallest and largest key per channel (Quest, arXiv 2406.10774).
    MinMax,
    /// Centre and mean deviation per channel (ArkVale, NeurIPS 2024).
    CuboidMean,
    /// The mean key.
    Mean,
    Sketch(Sketch),
    /// The best quarter of the pages by one, scored by the other.
    Stages(Coarse, Sketch),
}

/// First stages.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Coarse {
    CuboidMean,
    Mean,
    OneBit,
}

#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    pub digest: Digest,
    pub score: Score,
}

impl Digest {
    pub fn bytes(&self, dim: usize, page: usize) -> f64 {
        match self {
            Digest::Exact => (2 * dim * page) as f64,
            Digest::MinMax | Digest::CuboidMean => 4.0 * dim as f64,
            Digest::Mean => 2.0 * dim as f64,
            Digest::Sketch(sketch) => sketch.bytes(dim, page),
            Digest::Stages(coarse, fine) => coarse.digest().bytes(dim, page) + fine.bytes(dim, page),
        }
    }

    /// Bytes that a step reads of a page's digest.
    pub fn bytes_read(&self, dim: usize, page: usize) -> f64 {
        match self {
            Digest::Stages(coarse, fine) => coarse.digest().bytes(dim, page) + fine.bytes(dim, page) / 4.0,
            other => other.bytes(dim, page),
        }
    }
}

impl Coarse {
    pub fn digest(self) -> Digest {
        match self {
            Coarse::CuboidMean => Digest::CuboidMean,
            Coarse::Mean => Digest::Mean,
            Coarse::OneBit => {
                Digest::Sketch(Sketch { bits: 1, turn: Turn::Hadamard, centre: Centre::Mean8, scale: Scale::Page })
            }
        }
    }
}

impl Score {
    pub fn sums(self) -> bool {
        matches!(self, Score::LogSum | Score::Mass)
    }

    /// A page's score from those of the rows of one position, `[group, pages]`.
    pub fn combine(self, rows: &[f32], pages: usize) -> Vec<f32> {
        let group = rows.len() / pages;
        let base = |row: &[f32]| match self {
            Score::EvenMax => row.iter().copied().fold(f32::NEG_INFINITY, f32::max),
            Score::Mass => {
                let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                largest + row.iter().map(|x| (x - largest).exp()).sum::<f32>().ln()
            }
            _ => 0.0,
        };
        let bases: Vec<f32> = rows.chunks_exact(pages).map(base).collect();
        (0..pages)
            .map(|page| {
                let values = rows.iter().skip(page).step_by(pages).zip(&bases).map(|(x, base)| x - base);
                match self {
                    Score::MeanMax => values.sum::<f32>() / group as f32,
                    Score::Mass => values.map(f32::exp).sum::<f32>() / group as f32,
                    _ => values.fold(f32::NEG_INFINITY, f32::max),
                }
            })
            .collect()
    }
}

/// Everything that is compared.
pub fn all(dim: usize) -> Vec<Candidate> {
    let with = |digest| Candidate { digest, score: Score::Max };
    let sketch = |bits, turn, centre, scale| with(Digest::Sketch(Sketch { bits, turn, centre, scale }));
    let mut all = Vec::new();
    let scores = [Score::Max, Score::LogSum, Score::MeanMax, Score::EvenMax, Score::Mass];
    all.extend(scores.map(|score| Candidate { digest: Digest::Exact, score }));
    all.extend([Digest::MinMax, Digest::CuboidMean, Digest::Mean].map(with));
    for bits in 1..=4 {
        all.push(sketch(bits, Turn::Plain, Centre::Middle, Scale::ChannelPage));
        for turn in [Turn::Plain, Turn::Hadamard] {
            all.push(sketch(bits, turn, Centre::Prompt, Scale::ChannelSequence));
            all.push(sketch(bits, turn, Centre::Mean8, Scale::ChannelSequence));
            all.push(sketch(bits, turn, Centre::Prompt, Scale::Token));
            all.push(sketch(bits, turn, Centre::Mean8, Scale::Token));
            all.push(sketch(bits, turn, Centre::Mean8, Scale::Page));
        }
    }
    for bits in [2, 3] {
        all.push(sketch(bits, Turn::Plain, Centre::Mean, Scale::ChannelSequence));
        for width in [8, 16] {
            all.push(sketch(bits, Turn::Bands(width), Centre::Mean8, Scale::Band(width)));
            all.push(sketch(bits, Turn::Bands(width), Centre::Mean8, Scale::BandToken(width)));
        }
    }
    for (bits, rank) in [(2, dim / 2), (4, dim / 2), (4, dim / 4)] {
        all.push(sketch(bits, Turn::Channels(rank), Centre::Mean8, Scale::ChannelSequence));
        all.push(sketch(bits, Turn::Principal(rank), Centre::Mean8, Scale::ChannelSequence));
    }
    all.push(sketch(2, Turn::Principal(dim), Centre::Mean8, Scale::ChannelSequence));
    let fine = Sketch { bits: 3, turn: Turn::Hadamard, centre: Centre::Mean8, scale: Scale::Token };
    all.extend([Coarse::CuboidMean, Coarse::Mean, Coarse::OneBit].map(|coarse| with(Digest::Stages(coarse, fine))));
    for score in &scores[1..] {
        let sketch = Sketch { bits: 2, turn: Turn::Hadamard, centre: Centre::Mean8, scale: Scale::Token };
        all.push(Candidate { digest: Digest::Sketch(sketch), score: *score });
    }
    all
}

impl fmt::Display for Candidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?}", self.digest, self.score)
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Digest::Sketch(sketch) => sketch.fmt(f),
            Digest::Stages(coarse, fine) => write!(f, "{coarse:?} then {fine}"),
            other => write!(f, "{other:?}"),
        }
    }
}

impl fmt::Display for Sketch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = format!("{:?} {:?} {:?}", self.turn, self.centre, self.scale);
        write!(f, "{} bits {}", self.bits, parts.replace(['(', ')'], ""))
    }
}
