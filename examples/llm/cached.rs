//! A sequence's keys and values in the cache.

use std::time::Duration;

use anyhow::Result;
use wakekv::backend::Backend;
use wakekv::{Cache, Counts, CpuBackend, Entry, Sequence, Step};

use super::attention::{Attention, Kind, Memory, Pass};

/// One sequence in a cache of its own.
pub struct Cached<B: Backend = CpuBackend> {
    cache: Cache<B>,
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

impl<B: Backend> Cached<B> {
    /// An empty sequence in `cache`, which has run nothing yet.
    pub fn new(mut cache: Cache<B>) -> Self {
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

    /// Waits for whatever the device has not told yet.
    pub fn settle(&mut self) -> Result<()> {
        self.cache.synchronize()?;
        self.note_counts();
        Ok(())
    }

    fn note_counts(&mut self) {
        let counts = self.cache.stats().counts;
        (self.prefill.counts, self.decode.counts) = (counts.prefill, counts.decode);
    }

    /// Bytes set aside for the pages that the device does not hold.
    pub fn reservoir_bytes(&self) -> u64 {
        (self.cache.occupancy().reservoir_total * self.cache.geometry().group_bytes()) as u64
    }
}

impl<B: OnHost> Memory for Cached<B> {
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
        tally.stall += report.stall;
        self.note_counts();
        Ok(logits)
    }

    fn len(&self) -> usize {
        // The sequence lives as long as its cache, so this cannot fail.
        self.cache.tokens(self.sequence).unwrap_or(0)
    }
}

/// A backend that the model's tensors, which lie in host memory, can be given to.
pub trait OnHost: Backend + Sized {
    fn append(step: &mut Step<'_, Self>, layer: usize, k: &[f32], v: &[f32]) -> Result<()>;
    fn attend(step: &mut Step<'_, Self>, layer: usize, q: &[f32], out: &mut [f32]) -> Result<()>;
}

impl OnHost for CpuBackend {
    fn append(step: &mut Step<'_, Self>, layer: usize, k: &[f32], v: &[f32]) -> Result<()> {
        Ok(step.append(layer, k, v)?)
    }

    fn attend(step: &mut Step<'_, Self>, layer: usize, q: &[f32], out: &mut [f32]) -> Result<()> {
        Ok(step.attend(layer, q, out)?)
    }
}

/// The model runs on the CPU all the same: only keys, values, queries and attention are on the device.
#[cfg(feature = "cuda")]
impl OnHost for wakekv::CudaBackend {
    fn append(step: &mut Step<'_, Self>, layer: usize, k: &[f32], v: &[f32]) -> Result<()> {
        let stream = step.stream().clone();
        Ok(step.append(layer, &stream.clone_htod(k)?, &stream.clone_htod(v)?)?)
    }

    fn attend(step: &mut Step<'_, Self>, layer: usize, q: &[f32], out: &mut [f32]) -> Result<()> {
        let stream = step.stream().clone();
        let mut device_out = stream.alloc_zeros::<f32>(out.len())?;
        step.attend(layer, &stream.clone_htod(q)?, &mut device_out)?;
        Ok(stream.memcpy_dtoh(&device_out, out)?)
    }
}

/// A step of the cache is all that a forward pass needs.
impl<B: OnHost> Attention for Step<'_, B> {
    fn attend(&mut self, layer: usize, q: &[f32], k: &[f32], v: &[f32], out: &mut [f32]) -> Result<()> {
        OnHost::append(self, layer, k, v)?;
        OnHost::attend(self, layer, q, out)
    }

    fn append(&mut self, layer: usize, k: &[f32], v: &[f32]) -> Result<()> {
        OnHost::append(self, layer, k, v)
    }
}
