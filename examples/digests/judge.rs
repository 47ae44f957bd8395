//! How well a candidate finds the pages that matter.

use anyhow::Result;

use super::candidate::{Candidate, Digest, Score};
use super::pages::{Pages, RowScores};
use super::recording::{Head, Recording};
use crate::tasks::run::PINNED;

/// Pages that are read, the pinned ones among them: the first and the last two.
pub const BUDGETS: [usize; 3] = [4, 8, 16];

/// The pages that count, of one head.
pub struct Truth {
    pages: usize,
    /// `[positions, pages]`: attention, averaged over the group; 0 where pinned.
    mass: Vec<f32>,
    /// `[positions, pages]`: largest logits; -inf where pinned.
    largest: Vec<f32>,
}

/// Sums over heads and positions.
#[derive(Clone, Copy, Debug, Default)]
pub struct Verdict {
    found: [f64; 3],
    wanted: [f64; 3],
    mass: [f64; 3],
    best: [f64; 3],
}

impl Verdict {
    /// The share of the pages with the largest true logits that was chosen, per budget.
    pub fn recall(&self) -> [f64; 3] {
        std::array::from_fn(|i| self.found[i] / self.wanted[i])
    }

    /// The attention on the chosen pages as a share of that on as many best ones, per budget.
    pub fn mass(&self) -> [f64; 3] {
        std::array::from_fn(|i| self.mass[i] / self.best[i])
    }

    pub fn add(&mut self, other: Verdict) {
        for i in 0..BUDGETS.len() {
            self.found[i] += other.found[i];
            self.wanted[i] += other.wanted[i];
            self.mass[i] += other.mass[i];
            self.best[i] += other.best[i];
        }
    }
}

pub fn truth(recording: &Recording, head: &Head, page: usize) -> Result<Truth> {
    let (dim, group) = (recording.head_dim, recording.group);
    let sums = score(Digest::Exact, head, dim, page, true)?;
    let largest = score(Digest::Exact, head, dim, page, false)?;
    let combine = |score: Score, rows: &[f32], pinned| {
        let rows = rows.chunks_exact(group * sums.pages);
        rows.flat_map(|rows| with_pinned(score.combine(rows, sums.pages), pinned)).collect()
    };
    Ok(Truth {
        pages: sums.pages,
        mass: combine(Score::Mass, &sums.scores, 0.0),
        largest: combine(Score::Max, &largest.scores, f32::NEG_INFINITY),
    })
}

pub fn judge(recording: &Recording, head: &Head, truth: &Truth, candidate: &Candidate, page: usize) -> Result<Verdict> {
    let rows = score(candidate.digest, head, recording.head_dim, page, candidate.score.sums())?;
    let mut verdict = Verdict::default();
    for (position, rows) in rows.scores.chunks_exact(recording.group * rows.pages).enumerate() {
        let scores = with_pinned(candidate.score.combine(rows, truth.pages), f32::NEG_INFINITY);
        let at = position * truth.pages..(position + 1) * truth.pages;
        let (mass, largest) = (&truth.mass[at.clone()], &truth.largest[at]);
        let (chosen, wanted, best) = (order(&scores), order(largest), order(mass));
        for (i, budget) in BUDGETS.iter().map(|budget| budget - PINNED).enumerate() {
            let chosen = &chosen[..budget];
            verdict.found[i] += wanted[..budget].iter().filter(|page| chosen.contains(page)).count() as f64;
            verdict.wanted[i] += budget as f64;
            verdict.mass[i] += chosen.iter().map(|&page| f64::from(mass[page])).sum::<f64>();
            verdict.best[i] += best[..budget].iter().map(|&page| f64::from(mass[page])).sum::<f64>();
        }
    }
    Ok(verdict)
}

fn score(digest: Digest, head: &Head, dim: usize, page: usize, log_sum: bool) -> Result<RowScores> {
    let mut pages = Pages::new(digest, &head.keys, dim, page);
    pages.extend(&head.keys);
    pages.score(&head.queries, log_sum)
}

fn with_pinned(mut scores: Vec<f32>, value: f32) -> Vec<f32> {
    let pages = scores.len();
    for page in [0, pages - 2, pages - 1] {
        scores[page] = value;
    }
    scores
}

/// Pages from the best to the worst.
fn order(scores: &[f32]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]).then(a.cmp(&b)));
    order
}
