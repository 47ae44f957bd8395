//! What attention loses when it reads less than everything.

use super::replay::Reads;
use super::{Replay, SimError};
use crate::table::Phase;
use crate::trace::{Lane, Tensors, Trace, softmax};

/// What one KV head lost, summed over decode tokens and averaged over the query heads of its group.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct HeadQuality {
    /// Tokens that were generated.
    pub tokens: u64,
    /// True attention weight of what was not read.
    pub lost_mass: f64,
    /// ‖o_R − o‖ / ‖o‖, where o is the true output and o_R that of attention over what was read. Reading nothing is an error of 1.
    pub output_error: f64,
}

/// What a policy cost in quality.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Quality {
    /// Per KV head, in the trace's order.
    pub heads: Vec<HeadQuality>,
}

impl Quality {
    /// Attention mass that was not read, mean over heads and generated tokens.
    pub fn lost_mass(&self) -> f64 {
        self.mean(|head| head.lost_mass)
    }

    /// Relative error of the attention output, mean over heads and generated tokens.
    pub fn output_error(&self) -> f64 {
        self.mean(|head| head.output_error)
    }

    fn mean(&self, of: impl Fn(&HeadQuality) -> f64) -> f64 {
        let tokens: u64 = self.heads.iter().map(|head| head.tokens).sum();
        self.heads.iter().map(of).sum::<f64>() / tokens.max(1) as f64
    }
}

/// Judges replays of `trace` by the attention that `tensors` make, all in one pass over it: the sequence's own keys and values, whatever
/// the policy would have made of what is generated next.
///
/// # Errors
/// [`SimError::Tensors`] when trace and tensors are not of the same run.
pub fn judge(tensors: &Tensors, trace: &Trace, replays: &[Replay]) -> Result<Vec<Quality>, SimError> {
    let shape = trace.shape();
    if (shape.layers, shape.heads_per_layer) != (tensors.layers(), tensors.kv_heads()) {
        return Err(SimError::Tensors { reason: "their layers and KV heads are not the trace's" });
    }
    let mut qualities = vec![Quality::default(); replays.len()];
    for head in 0..shape.heads() {
        let (layer, kv_head) = (head / shape.heads_per_layer, head % shape.heads_per_layer);
        let lane = Lane::new(tensors, layer, kv_head);
        let mut attention = Attention::new(tensors.head_dim());
        let mut judged = vec![HeadQuality::default(); replays.len()];
        for (step, mark) in trace.marks().iter().enumerate().filter(|(_, mark)| mark.phase == Phase::Decode) {
            for token in mark.start..mark.end() {
                let group = tensors.scaled_group(layer, kv_head, token).filter(|_| token < lane.tokens());
                let group = group.ok_or(SimError::Tensors { reason: "they have no query or key of a decode step" })?;
                for query in &group {
                    attention.compute(&lane, query, token + 1, shape.page_tokens);
                    for (replay, judged) in replays.iter().zip(&mut judged) {
                        let (lost, error) = match &replay.reads {
                            Reads::Demanded => attention.of_pages(trace.head(head).demand(step)),
                            Reads::Pages(reads) => attention.of_pages(reads.head(head).demand(step)),
                            Reads::Tokens(survival) => {
                                attention.of_tokens(&lane, |other| survival.alive(head, other, token))
                            }
                        };
                        judged.lost_mass += lost / group.len() as f64;
                        judged.output_error += error / group.len() as f64;
                    }
                }
                judged.iter_mut().for_each(|judged| judged.tokens += 1);
            }
        }
        qualities.iter_mut().zip(judged).for_each(|(quality, judged)| quality.heads.push(judged));
    }
    Ok(qualities)
}

/// True attention of one query, as a whole and page by page.
struct Attention {
    dim: usize,
    weights: Vec<f32>,
    output: Vec<f32>,
    /// Per page its weight, and `[head_dim]` of weighted values.
    masses: Vec<f32>,
    parts: Vec<f32>,
    read: Vec<bool>,
    sum: Vec<f32>,
}

impl Attention {
    fn new(dim: usize) -> Self {
        Attention {
            dim,
            weights: Vec::new(),
            output: vec![0.0; dim],
            masses: Vec::new(),
            parts: Vec::new(),
            read: Vec::new(),
            sum: vec![0.0; dim],
        }
    }

    fn compute(&mut self, lane: &Lane, query: &[f32], tokens: usize, page_tokens: usize) {
        lane.logits(query, tokens, &mut self.weights);
        softmax(&mut self.weights);
        self.masses.clear();
        self.masses.extend(self.weights.chunks(page_tokens).map(|weights| weights.iter().sum::<f32>()));
        self.parts.clear();
        self.parts.resize(self.masses.len() * self.dim, 0.0);
        let mut weighted = self.weights.iter().zip(lane.values());
        for part in self.parts.chunks_exact_mut(self.dim) {
            weighted.by_ref().take(page_tokens).for_each(|(&weight, value)| add(part, weight, value));
        }
        self.output.fill(0.0);
        for part in self.parts.chunks_exact(self.dim) {
            add(&mut self.output, 1.0, part);
        }
    }

    /// Lost mass and output error when only these pages are read.
    fn of_pages(&mut self, pages: &[u32]) -> (f64, f64) {
        self.read.clear();
        self.read.resize(self.masses.len(), false);
        for &page in pages {
            if let Some(read) = self.read.get_mut(page as usize) {
                *read = true;
            }
        }
        self.sum.fill(0.0);
        let (mut kept, mut lost) = (0.0, 0.0);
        for ((&read, &mass), part) in self.read.iter().zip(&self.masses).zip(self.parts.chunks_exact(self.dim)) {
            if read {
                kept += f64::from(mass);
                add(&mut self.sum, 1.0, part);
            } else {
                lost += f64::from(mass);
            }
        }
        (lost, self.error(kept))
    }

    /// The same when only the tokens are read that are alive.
    fn of_tokens(&mut self, lane: &Lane, alive: impl Fn(usize) -> bool) -> (f64, f64) {
        self.sum.fill(0.0);
        let (mut kept, mut lost) = (0.0, 0.0);
        for (token, (&weight, value)) in self.weights.iter().zip(lane.values()).enumerate() {
            if alive(token) {
                kept += f64::from(weight);
                add(&mut self.sum, weight, value);
            } else {
                lost += f64::from(weight);
            }
        }
        (lost, self.error(kept))
    }

    /// Of what was read, given its mass.
    fn error(&self, kept: f64) -> f64 {
        let norm = |squares: f64| squares.sqrt();
        let scale = if kept > 0.0 { 1.0 / kept } else { 0.0 };
        let difference = |(sum, output): (&f32, &f32)| (f64::from(*sum) * scale - f64::from(*output)).powi(2);
        let error = norm(self.sum.iter().zip(&self.output).map(difference).sum());
        let size = norm(self.output.iter().map(|&x| f64::from(x).powi(2)).sum());
        if size > 0.0 { error / size } else { f64::from(error > 0.0) }
    }
}

/// `sum` += `weight` × `values`.
fn add(sum: &mut [f32], weight: f32, values: &[f32]) {
    sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += weight * value);
}
