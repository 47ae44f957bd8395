//! Counters: per step, per head, and since the cache was built.

use std::ops::AddAssign;
use std::time::Duration;

use crate::table::Phase;

/// What some demands came to. `hits + compulsory + capacity = demanded`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counts {
    /// Pages that heads had to read.
    pub demanded: u64,
    /// Demanded pages that were resident.
    pub hits: u64,
    /// First decode demands for prompt pages that prefill had left only in the reservoir.
    pub compulsory: u64,
    /// All other demanded pages that were not resident.
    pub capacity: u64,
    /// Misses, of either kind, that exceeded the budget and were streamed without being admitted.
    pub overflow: u64,
    /// Pages that gave up their way.
    pub evictions: u64,
    /// Bytes copied from the reservoir to the device.
    pub fetched_bytes: u64,
    /// Bytes copied from the device to the reservoir.
    pub mirrored_bytes: u64,
}

impl Counts {
    /// Demanded pages that were not resident.
    pub const fn misses(&self) -> u64 {
        self.compulsory + self.capacity
    }

    /// Share of the demanded pages that were not resident, 0 when nothing was demanded.
    pub fn miss_rate(&self) -> f64 {
        if self.demanded == 0 { 0.0 } else { self.misses() as f64 / self.demanded as f64 }
    }
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.demanded += other.demanded;
        self.hits += other.hits;
        self.compulsory += other.compulsory;
        self.capacity += other.capacity;
        self.overflow += other.overflow;
        self.evictions += other.evictions;
        self.fetched_bytes += other.fetched_bytes;
        self.mirrored_bytes += other.mirrored_bytes;
    }
}

/// The counters of decode and of prefill, which reads everything by design and would drown decode's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PhaseCounts {
    /// Of decode entries.
    pub decode: Counts,
    /// Of prefill entries. Pages that prefill reads again from the reservoir count as capacity misses.
    pub prefill: Counts,
}

impl PhaseCounts {
    /// Both phases together.
    pub fn total(&self) -> Counts {
        let mut total = self.decode;
        total += self.prefill;
        total
    }

    pub(crate) fn of_mut(&mut self, phase: Phase) -> &mut Counts {
        match phase {
            Phase::Decode => &mut self.decode,
            Phase::Prefill => &mut self.prefill,
        }
    }
}

impl AddAssign for PhaseCounts {
    fn add_assign(&mut self, other: Self) {
        self.decode += other.decode;
        self.prefill += other.prefill;
    }
}

/// How full the pools are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Occupancy {
    /// Device slots that heads own as ways.
    pub device_owned: usize,
    /// Device slots in all.
    pub device_total: usize,
    /// Logical pages (of all heads of a sequence) that the reservoir holds.
    pub reservoir_owned: usize,
    /// Logical pages that the reservoir can hold.
    pub reservoir_total: usize,
}

/// What a finished step did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StepReport {
    /// The step's number, counted from 1.
    pub step: u64,
    /// Sequences in the batch.
    pub sequences: usize,
    /// New tokens in the batch.
    pub tokens: usize,
    /// Counters summed over layers, heads and sequences.
    pub counts: PhaseCounts,
    /// Time that attention waited for fetches with nothing else to do. Zero on CUDA, where the host does not see it.
    pub stall: Duration,
    /// How full the pools are after the step.
    pub occupancy: Occupancy,
}

/// Counters since the cache was built. Only finished steps count.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Finished steps.
    pub steps: u64,
    /// New tokens of finished steps.
    pub tokens: u64,
    /// Counters summed over everything.
    pub counts: PhaseCounts,
    /// Time that attention waited for fetches.
    pub stall: Duration,
    /// Per head, at [`Geometry::head`](crate::Geometry::head)`(layer, kv_head)`, summed over sequences.
    pub heads: Vec<PhaseCounts>,
    /// The same of the last finished step.
    pub last_step: Vec<PhaseCounts>,
}
