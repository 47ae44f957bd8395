//! What a device must do, in terms of batches, layers and heads.
//!
//! The [`Cache`](crate::Cache) above this line knows sequences, their lengths and who owns which slot. The backend below
//! knows page tables, memory and time: it plans residency by itself, so that a backend whose tables live in device memory needs
//! no host in its loop.

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;

use std::ops::Range;
use std::time::Duration;

use crate::error::Error;
use crate::geometry::Geometry;
use crate::reservoir::Reservoir;
use crate::residency::{Rule, Scores};
use crate::selection::{PageLists, Selection};
use crate::stats::PhaseCounts;
use crate::table::{Phase, Pins, Place, Tally};

/// A device that is not set up yet: what [`CacheBuilder::build`](crate::CacheBuilder::build) takes.
pub trait Device {
    /// The device once it is set up.
    type Backend: Backend;

    /// Sets the device up.
    ///
    /// # Errors
    /// Memory or threads could not be had, or a setting does not suit the device.
    fn open(self, setup: Setup) -> Result<Self::Backend, Error>;
}

/// Everything a backend is built from. The numbers have been checked against each other.
#[derive(Debug)]
#[non_exhaustive]
pub struct Setup {
    /// Shape of the model.
    pub geometry: Geometry,
    /// Factor on q·k before the softmax.
    pub scale: f32,
    /// Slots of the device pool, one page each.
    pub device_slots: u32,
    /// Groups of the reservoir, one logical page of all heads each.
    pub reservoir_groups: u32,
    /// The reservoir.
    pub reservoir: Reservoir,
    /// What decode steps demand.
    pub selection: Selection,
    /// What the scores of pages are raised by that the last selection of a finished step chose. Not negative.
    pub stickiness: f32,
    /// Who goes when a page needs a way.
    pub replacement: Rule,
    /// The selection's pins.
    pub pins: Pins,
    /// Whether freed slots are overwritten with zeros.
    pub scrub_on_free: bool,
}

/// One sequence's part in a step.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct EntryPlan {
    /// Which sequence: an index that is dense, reused after removal, and live.
    pub sequence: u32,
    /// Tokens that the sequence has before the step.
    pub start: usize,
    /// New tokens, at least 1.
    pub tokens: usize,
    /// Row of the first new token in the batch's tensors.
    pub row: usize,
    /// Prefill or decode.
    pub phase: Phase,
    /// Whether a decode step selects pages anew rather than reusing the last selection. A layer whose attention is left out selects when
    /// it is attended next.
    pub reselect: bool,
    /// The sequence's part of [`StepPlan::groups`].
    pub groups: Range<usize>,
    /// The sequence's part of [`StepPlan::ways`].
    pub ways: Range<usize>,
}

/// One way more for a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct WayGrant {
    /// [`Geometry::head`].
    pub head: u32,
    /// Device slot.
    pub slot: u32,
}

/// An admitted step: everything it will need has been set aside.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct StepPlan {
    /// The step's number, which only grows. Numbers of dropped steps are not used again.
    pub number: u64,
    /// New tokens of the batch.
    pub tokens: usize,
    /// The sequences, in the order of the batch's tensors.
    pub entries: Vec<EntryPlan>,
    /// Reservoir groups for the pages that the step seals, by entry, in page order.
    pub groups: Vec<u32>,
    /// New ways, by entry.
    pub ways: Vec<WayGrant>,
}

/// What a backend counted in one step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StepCounts {
    /// Per head, at [`Geometry::head`].
    pub heads: Vec<PhaseCounts>,
    /// Time that attention waited for fetches.
    pub stall: Duration,
}

/// What one head demanded, and what its table said to that.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct HeadDemand<'a> {
    /// Logical pages, ascending.
    pub pages: &'a [u32],
    /// Where each of them was.
    pub places: &'a [Place],
    /// The sums.
    pub tally: Tally,
    /// What its pages were worth, if they have been scored in this step.
    pub scores: Option<Scores<'a>>,
}

/// A device that is set up.
///
/// # What the cache guarantees
/// * Calls come as `insert* (begin (append attend?)^layers (finish | abort) | insert | remove)*`, layers ascending. `abort` may come
///   at any point after a successful `begin`, and comes after every error.
/// * Tensors have the shape of the plan. The sequences of a plan are distinct and live. No slot or group is given to two owners.
/// * Slots and groups that a `remove` or `abort` sets free may be given to others right after the call.
///
/// # What the backend guarantees
/// * The rule and the invariants of the design, per head. Decisions depend on the calls alone.
/// * `begin` either succeeds or changes nothing.
/// * After `finish` every page that the step sealed is reserved. If `finish` fails, `abort` still undoes the step.
/// * After `abort` every sequence has the tokens it had before `begin`, and groups and ways of the plan are no longer used.
///   Which pages are resident may differ.
/// * No call allocates once its buffers have grown to the batch, the lengths and the demands at hand.
pub trait Backend {
    /// A borrowed input tensor.
    type Tensor<'t>;
    /// A borrowed output tensor.
    type TensorMut<'t>;

    /// Elements of an input tensor.
    fn elements(tensor: &Self::Tensor<'_>) -> usize;

    /// Elements of an output tensor.
    fn elements_mut(tensor: &Self::TensorMut<'_>) -> usize;

    /// A new sequence without tokens, with room in its tables for `tokens` tokens and `ways` ways per head.
    fn insert(&mut self, sequence: u32, tokens: usize, ways: usize);

    /// The sequence is gone.
    ///
    /// # Errors
    /// Scrubbing failed. The sequence is gone all the same.
    fn remove(&mut self, sequence: u32) -> Result<(), Error>;

    /// Begins a step.
    ///
    /// # Errors
    /// The device cannot; nothing has changed.
    fn begin(&mut self, plan: &StepPlan) -> Result<(), Error>;

    /// Stores the new keys and values of one layer: `[plan.tokens, kv_heads, head_dim]` each.
    ///
    /// # Errors
    /// The step has failed.
    fn append(&mut self, plan: &StepPlan, layer: usize, k: Self::Tensor<'_>, v: Self::Tensor<'_>) -> Result<(), Error>;

    /// Attends one layer: `q` and `out` are `[plan.tokens, query_heads, head_dim]`. `pages` are checked lists for the decode
    /// entries under [`Selection::Explicit`].
    ///
    /// # Errors
    /// The step has failed, and `out` holds nothing to be used.
    fn attend(
        &mut self,
        plan: &StepPlan,
        layer: usize,
        q: Self::Tensor<'_>,
        pages: Option<PageLists<'_>>,
        out: Self::TensorMut<'_>,
    ) -> Result<(), Error>;

    /// What a head demanded in the layer that was attended last, until the next call that changes anything. `lane` is batch
    /// entry × kv_heads + KV head. `None` where the backend keeps its demands where the host does not see them.
    fn demand(&self, lane: usize) -> Option<HeadDemand<'_>> {
        let _ = lane;
        None
    }

    /// Commits the step and adds what it counted to `counts`. A device that the host does not wait for may tell it later, in a
    /// call of this or of [`synchronize`](Self::synchronize).
    ///
    /// # Errors
    /// The step has failed.
    fn finish(&mut self, plan: &StepPlan, counts: &mut StepCounts) -> Result<(), Error>;

    /// Waits for everything under way, and adds to `counts` what finished steps have counted since the last call that did so. A
    /// device that has told everything by the end of [`finish`](Self::finish) has nothing to do.
    ///
    /// # Errors
    /// Something under way has failed.
    fn synchronize(&mut self, counts: &mut StepCounts) -> Result<(), Error> {
        let _ = counts;
        Ok(())
    }

    /// Undoes the step.
    fn abort(&mut self, plan: &StepPlan);

    /// Bytes of the tables that manage the pages of live sequences.
    fn table_bytes(&self) -> usize;

    /// Checks the design's invariants on the backend's own tables, given the live sequences as (index, tokens).
    ///
    /// # Errors
    /// What does not hold, in words.
    fn check(&self, sequences: &[(u32, usize)]) -> Result<(), String>;
}
