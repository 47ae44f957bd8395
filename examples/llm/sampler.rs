//! From logits to the next id.

use anyhow::{Context, Result, ensure};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Picks ids, reproducibly.
pub struct Sampler {
    temperature: f64,
    random: StdRng,
}

impl Sampler {
    /// Temperature 0 is greedy and never draws.
    pub fn new(temperature: f64, seed: u64) -> Self {
        Self { temperature, random: StdRng::seed_from_u64(seed) }
    }

    /// The next id: the likeliest, or drawn by probability.
    pub fn pick(&mut self, logits: &[f32]) -> Result<u32> {
        ensure!(logits.iter().all(|logit| logit.is_finite()), "the model's output is not finite");
        let best = argmax(logits).context("the model has no vocabulary")?;
        if self.temperature <= 0.0 {
            return Ok(best as u32);
        }
        let weight = |logit: f32| (f64::from(logit - logits[best]) / self.temperature).exp();
        let total: f64 = logits.iter().map(|&logit| weight(logit)).sum();
        let mut left = self.random.random::<f64>() * total;
        for (id, &logit) in logits.iter().enumerate() {
            left -= weight(logit);
            if left < 0.0 {
                return Ok(id as u32);
            }
        }
        Ok(best as u32)
    }
}

/// The index of the largest number, the first of equals.
pub fn argmax(numbers: &[f32]) -> Option<usize> {
    let better = |best: usize, at: usize| if numbers[at] > numbers[best] { at } else { best };
    (0..numbers.len()).reduce(better)
}
