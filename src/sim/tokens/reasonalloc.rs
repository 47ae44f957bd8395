//! ReasonAlloc (arXiv 2606.11164).

use super::rkv::RKv;
use super::{Living, observe};
use crate::sim::SimError;
use crate::trace::{Tensors, TraceError};

/// ReasonAlloc: R-KV whose budget is dealt out between layers beforehand, and between the heads of a layer each time tokens go.
///
/// Nobody has published its code: all of it is our reading of what is told of it. A layer with budget B_l and H heads finds the B_l-th
/// largest score of all its heads' tokens; a head's demand r is the number of its tokens with at least that score; it gets
/// b_min + (B_l − H·b_min) × max(r − b_min, 0) / Σ max(r − b_min, 0), b_min = `floor` × B_l / H, in whole tokens by largest
/// remainder. The window's tokens count as scored above all others, because they stay. A layer is left alone while it has no more
/// tokens than its budget.
#[derive(Clone, Copy, Debug)]
pub struct ReasonAlloc<'a> {
    /// How tokens are scored, and when they go.
    pub scores: RKv,
    /// Each layer's share.
    pub layers: &'a LayerShares,
    /// What every head gets, as a part of an equal share. Published: 0.25.
    pub floor: f64,
}

impl<'a> ReasonAlloc<'a> {
    /// What was published, with these shares.
    pub fn new(layers: &'a LayerShares) -> Self {
        ReasonAlloc { scores: RKv::default(), layers, floor: 0.25 }
    }
}

/// How much of the whole budget each layer gets.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerShares(Vec<f64>);

impl LayerShares {
    /// The attention mass that a layer's tokens are counted up to.
    const MASS: f64 = 0.93;

    /// Learns shares from runs of the same model, at most 8 of them in the published method: by the number of tokens that it takes to
    /// gather 93 % of the attention mass, mean over query heads, steps and runs. Only every `stride`-th step is looked at.
    ///
    /// # Errors
    /// [`TraceError::Unknown`] when keys are missing, [`TraceError::Layer`] when the runs are of different models or there is none.
    pub fn learn(probes: &[&Tensors], stride: usize) -> Result<Self, TraceError> {
        let layers = probes.first().map_or(0, |probe| probe.layers());
        let (mut sums, mut count) = (vec![0.0; layers], 0u64);
        let mut weights = Vec::new();
        for probe in probes {
            if probe.layers() != layers {
                return Err(TraceError::Layer { layer: probe.layers(), layers });
            }
            for token in probe.steps().step_by(stride.max(1)) {
                for (layer, sum) in sums.iter_mut().enumerate() {
                    for query_head in 0..probe.query_heads() {
                        probe.attention(layer, query_head, token, &mut weights)?;
                        *sum += tokens_for(&mut weights, Self::MASS) as f64 / probe.query_heads() as f64;
                    }
                }
                count += 1;
            }
        }
        if count == 0 {
            return Err(TraceError::Layer { layer: 0, layers });
        }
        Ok(Self::from_depths(&sums.iter().map(|sum| sum / count as f64).collect::<Vec<_>>()))
    }

    /// Shares by the tokens that each layer needs: their square roots, held between a quarter and twice of the mean.
    pub fn from_depths(depths: &[f64]) -> Self {
        let roots: Vec<f64> = depths.iter().map(|depth| depth.max(0.0).sqrt()).collect();
        let mean = roots.iter().sum::<f64>() / roots.len().max(1) as f64;
        let held: Vec<f64> = roots.iter().map(|root| root.clamp(0.25 * mean, 2.0 * mean)).collect();
        let sum: f64 = held.iter().sum();
        LayerShares(held.iter().map(|held| if sum > 0.0 { held / sum } else { 1.0 / depths.len() as f64 }).collect())
    }

    /// Per layer its share; they add up to 1.
    pub fn shares(&self) -> &[f64] {
        &self.0
    }
}

/// How many of the greatest weights it takes to reach `mass`.
fn tokens_for(weights: &mut [f32], mass: f64) -> usize {
    weights.sort_unstable_by(|a, b| b.total_cmp(a));
    let mut sum = 0.0;
    let reached = weights.iter().position(|&weight| {
        sum += f64::from(weight);
        sum >= mass
    });
    reached.map_or(weights.len(), |index| index + 1)
}

pub(super) fn run(tensors: &Tensors, settings: ReasonAlloc<'_>, budget: usize) -> Result<Vec<Vec<u32>>, SimError> {
    settings.scores.check(budget)?;
    if settings.layers.0.len() != tensors.layers() {
        return Err(SimError::Tensors { reason: "their layers are not those that the shares are for" });
    }
    let total = budget.saturating_mul(tensors.layers() * tensors.kv_heads());
    let quotas: Vec<f64> = settings.layers.0.iter().map(|share| share * total as f64).collect();
    let mut died = Vec::new();
    for (layer, layer_budget) in apportion(total, &quotas).into_iter().enumerate() {
        died.extend(run_layer(tensors, settings, layer, layer_budget)?);
    }
    Ok(died)
}

fn run_layer(
    tensors: &Tensors,
    settings: ReasonAlloc<'_>,
    layer: usize,
    budget: usize,
) -> Result<Vec<Vec<u32>>, SimError> {
    let mut heads: Vec<Living> = (0..tensors.kv_heads()).map(|kv_head| Living::new(tensors, layer, kv_head)).collect();
    let window = settings.scores.window;
    let mut from = 0;
    for token in tensors.steps() {
        heads.iter_mut().for_each(|head| head.grow(from, token));
        from = token + 1;
        let alive: usize = heads.iter().map(|head| head.alive.len()).sum();
        if !settings.scores.is_due(tensors, token) || alive <= budget {
            continue;
        }
        let mut scores = Vec::with_capacity(heads.len());
        for (kv_head, head) in heads.iter().enumerate() {
            let observed = observe(tensors, layer, kv_head, token, window)?;
            scores.push(settings.scores.scores(head, &observed));
        }
        let windows: Vec<usize> =
            heads.iter().zip(&scores).map(|(head, scores)| head.alive.len() - scores.len()).collect();
        let shares = share_out(budget, &scores, &windows, settings.floor);
        for (index, head) in heads.iter_mut().enumerate() {
            head.keep_best(&scores[index], shares[index].saturating_sub(windows[index]), token + 1);
        }
    }
    Ok(heads.into_iter().map(|head| head.died).collect())
}

/// Tokens for each head of a layer.
fn share_out(budget: usize, scores: &[Vec<f32>], windows: &[usize], floor: f64) -> Vec<usize> {
    let mut pooled: Vec<f32> = scores.iter().flatten().copied().collect();
    pooled.extend(windows.iter().flat_map(|&window| std::iter::repeat_n(f32::INFINITY, window)));
    pooled.sort_unstable_by(|a, b| b.total_cmp(a));
    let threshold = budget.checked_sub(1).and_then(|last| pooled.get(last)).copied().unwrap_or(f32::NEG_INFINITY);
    let least = floor * budget as f64 / scores.len() as f64;
    let excess: Vec<f64> = scores
        .iter()
        .zip(windows)
        .map(|(scores, &window)| window + scores.iter().filter(|&&score| score >= threshold).count())
        .map(|demand| (demand as f64 - least).max(0.0))
        .collect();
    let sum: f64 = excess.iter().sum();
    let rest = budget as f64 - scores.len() as f64 * least;
    let part = |excess: f64| if sum > 0.0 { excess / sum } else { 1.0 / scores.len() as f64 };
    let quotas: Vec<f64> = excess.iter().map(|&excess| least + rest * part(excess)).collect();
    apportion(budget, &quotas)
}

/// Whole numbers that add up to `total`, by largest remainder; of equal remainders the first. The quotas add up to it as well.
fn apportion(total: usize, quotas: &[f64]) -> Vec<usize> {
    let mut whole: Vec<usize> = quotas.iter().map(|quota| quota.floor() as usize).collect();
    let mut order: Vec<usize> = (0..quotas.len()).collect();
    let remainder = |index: usize| quotas.get(index).map_or(0.0, |quota| quota - quota.floor());
    order.sort_by(|&a, &b| remainder(b).total_cmp(&remainder(a)).then(a.cmp(&b)));
    let missing = total.saturating_sub(whole.iter().sum());
    for index in order.into_iter().take(missing) {
        if let Some(whole) = whole.get_mut(index) {
            *whole += 1;
        }
    }
    whole
}
