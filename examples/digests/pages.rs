//! The summaries of one head's sealed pages, and their scores.

use anyhow::Result;
use candle_core::{Device, Tensor};

use super::candidate::Digest;
use super::sketch::{Learned, PROMPT};

/// What one head's pages get from each row of its queries.
pub struct RowScores {
    pub pages: usize,
    /// `[rows, pages]`.
    pub scores: Vec<f32>,
}

pub struct Pages {
    dim: usize,
    page: usize,
    summaries: Summaries,
}

enum Summaries {
    /// The keys, more or less: `[tokens, rank]`, in the basis of `Learned`, or as they are.
    Keys(Option<Learned>, Vec<f32>),
    /// Per page and channel a centre and how far keys reach around it, `[pages, dim]` each.
    Boxes(Digest, Vec<f32>, Vec<f32>),
    Stages(Box<Pages>, Box<Pages>),
}

impl Pages {
    /// No pages yet. `first` are the sequence's first keys, as many as there are.
    pub fn new(digest: Digest, first: &[f32], dim: usize, page: usize) -> Pages {
        let first = &first[..first.len().min(PROMPT * dim)];
        let summaries = match digest {
            Digest::Exact => Summaries::Keys(None, Vec::new()),
            Digest::Sketch(sketch) => Summaries::Keys(Some(Learned::new(sketch, first, dim, page)), Vec::new()),
            Digest::Stages(coarse, fine) => {
                let of = |digest| Box::new(Pages::new(digest, first, dim, page));
                Summaries::Stages(of(coarse.digest()), of(Digest::Sketch(fine)))
            }
            Digest::MinMax | Digest::CuboidMean | Digest::Mean => Summaries::Boxes(digest, Vec::new(), Vec::new()),
        };
        Pages { dim, page, summaries }
    }

    /// Adds sealed pages.
    pub fn extend(&mut self, keys: &[f32]) {
        for keys in keys.chunks_exact(self.page * self.dim) {
            match &mut self.summaries {
                Summaries::Keys(None, all) => all.extend_from_slice(keys),
                Summaries::Keys(Some(learned), all) => all.extend(learned.round(keys)),
                Summaries::Boxes(digest, centres, radii) => {
                    for channel in 0..self.dim {
                        let keys: Vec<f32> = keys.iter().skip(channel).step_by(self.dim).copied().collect();
                        let [centre, radius] = enclose(*digest, &keys);
                        centres.push(centre);
                        radii.push(radius);
                    }
                }
                Summaries::Stages(coarse, fine) => {
                    coarse.extend(keys);
                    fine.extend(keys);
                }
            }
        }
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        match &self.summaries {
            Summaries::Keys(learned, keys) => {
                keys.len() / (self.page * learned.as_ref().map_or(self.dim, |learned| learned.basis.rank))
            }
            Summaries::Boxes(_, centres, _) => centres.len() / self.dim,
            Summaries::Stages(coarse, _) => coarse.count(),
        }
    }

    /// The scores that queries `[rows, dim]` give: the largest logit of a page, or the logarithm of the sum of their exponentials.
    pub fn score(&self, queries: &[f32], log_sum: bool) -> Result<RowScores> {
        let pages = self.count();
        let scores = match &self.summaries {
            Summaries::Keys(None, keys) => by_page(&products(keys, queries, self.dim)?, self.page, log_sum),
            Summaries::Keys(Some(learned), keys) => {
                by_page(&products(keys, &learned.basis.apply(queries), learned.basis.rank)?, self.page, log_sum)
            }
            // Σ max(q·(c − r), q·(c + r)) = q·c + |q|·r.
            Summaries::Boxes(_, centres, radii) => {
                let magnitudes: Vec<f32> = queries.iter().map(|x| x.abs()).collect();
                let mut scores = products(centres, queries, self.dim)?;
                let reach = products(radii, &magnitudes, self.dim)?;
                scores.iter_mut().zip(reach).for_each(|(score, reach)| *score += reach);
                scores
            }
            Summaries::Stages(coarse, fine) => {
                let coarse = coarse.score(queries, log_sum)?;
                let mut fine = fine.score(queries, log_sum)?.scores;
                for (coarse, fine) in coarse.scores.chunks_exact(pages).zip(fine.chunks_exact_mut(pages)) {
                    keep_best_quarter(coarse, fine);
                }
                fine
            }
        };
        Ok(RowScores { pages, scores })
    }
}

/// Centre and radius of a channel.
fn enclose(digest: Digest, keys: &[f32]) -> [f32; 2] {
    let low = keys.iter().copied().fold(f32::INFINITY, f32::min);
    let high = keys.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let (centre, count) = ((low + high) / 2.0, keys.len() as f32);
    match digest {
        Digest::Mean => [keys.iter().sum::<f32>() / count, 0.0],
        Digest::CuboidMean => [centre, keys.iter().map(|x| (x - centre).abs()).sum::<f32>() / count],
        _ => [centre, (high - low) / 2.0],
    }
}

/// The dot products of all queries with all keys, `[queries, keys]`.
fn products(keys: &[f32], queries: &[f32], rank: usize) -> Result<Vec<f32>> {
    let keys = Tensor::from_slice(keys, (keys.len() / rank, rank), &Device::Cpu)?;
    let queries = Tensor::from_slice(queries, (queries.len() / rank, rank), &Device::Cpu)?;
    Ok(queries.matmul(&keys.t()?)?.flatten_all()?.to_vec1()?)
}

fn by_page(logits: &[f32], page: usize, log_sum: bool) -> Vec<f32> {
    let of_page = |page: &[f32]| {
        let largest = page.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        if log_sum { largest + page.iter().map(|x| (x - largest).exp()).sum::<f32>().ln() } else { largest }
    };
    logits.chunks_exact(page).map(of_page).collect()
}

/// What the first stage drops is not scored.
fn keep_best_quarter(coarse: &[f32], fine: &mut [f32]) {
    let mut order: Vec<usize> = (0..coarse.len()).collect();
    order.sort_by(|&a, &b| coarse[b].total_cmp(&coarse[a]).then(a.cmp(&b)));
    for &page in &order[coarse.len() / 4..] {
        fine[page] = f32::NEG_INFINITY;
    }
}
