//! A sequence's keys and values in the cache.

use std::time::Duration;

use anyhow::Result;
use wakekv::{Cache, Counts, CpuBackend, Entry, Sequence, Step};

use super::attention::{Attention, Kind, Memory, Pass};

/// One sequence in a cache of its own.
pub struct Cached {
    cache: Cache,
    sequence: Sequence,
    prefill: Tally,
    decode: Tally,
}

/// What the cache did in one part of a run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    pub steps: u64,
    pub counts: Counts,
    pub stall: Duration,
}

impl Cached {
    /// An empty sequence in `cache`.
    pub fn new(mut cache: Cache) -> Self {
        let sequence = cache.insert();
        Self { cache, sequence, prefill: Tally::default(), decode: Tally::default() }
    }

    /// The sequence's handle, for a recorder.
    pub fn sequence(&self) -> Sequence {
        self.sequence
    }

    /// What the cache did for the prompt.
    pub fn prefill(&self) -> &Tally {
        &self.prefill
    }

    /// What the cache did for generated tokens.
    pub fn decode(&self) -> &Tally {
        &self.decode
    }

    /// Bytes set aside for the pages that the device does not hold.
    pub fn reservoir_bytes(&self) -> u64 {
        (self.cache.occupancy().reservoir_total * self.cache.geometry().group_bytes()) as u64
    }
}

impl Memory for Cached {
    fn step(&mut self, kind: Kind, tokens: usize, pass: Pass<'_>) -> Result<Vec<f32>> {
        let entry = match kind {
            Kind::Prompt => Entry::prefill(self.sequence, tokens),
            Kind::Generated => Entry::decode(self.sequence, tokens),
        };
        let mut step = self.cache.step(&[entry])?;
        let logits = pass(&mut step)?;
        let report = step.finish()?;
        let tally = match kind {
            Kind::Prompt => &mut self.prefill,
            Kind::Generated => &mut self.decode,
        };
        tally.steps += 1;
        tally.counts += report.counts.total();
        tally.stall += report.stall;
        Ok(logits)
    }

    fn len(&self) -> usize {
        // The sequence lives as long as its cache, so this cannot fail.
        self.cache.tokens(self.sequence).unwrap_or(0)
    }
}

/// A step of the cache is all that a forward pass needs.
impl Attention for Step<'_, CpuBackend> {
    fn attend(&mut self, layer: usize, q: &[f32], k: &[f32], v: &[f32], out: &mut [f32]) -> Result<()> {
        Step::append(self, layer, k, v)?;
        Step::attend(self, layer, q, out)?;
        Ok(())
    }

    fn append(&mut self, layer: usize, k: &[f32], v: &[f32]) -> Result<()> {
        Ok(Step::append(self, layer, k, v)?)
    }
}
