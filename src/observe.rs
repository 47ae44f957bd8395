//! Somebody who watches what heads demand: the seam for recorders.

use crate::backend::HeadDemand;
use crate::cache::Sequence;
use crate::geometry::Geometry;
use crate::table::{Phase, Pins};

/// One sequence's part in a step, as an [`Observer`] is told of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Part {
    /// The step's number.
    pub step: u64,
    /// The sequence.
    pub sequence: Sequence,
    /// Tokens that the sequence had before the step.
    pub start: usize,
    /// New tokens.
    pub tokens: usize,
    /// Prefill or decode.
    pub phase: Phase,
}

/// Is told what every head demands, right after each layer has been attended. Handed to
/// [`CacheBuilder::observer`](crate::CacheBuilder::observer); a cache without one pays a branch per layer.
///
/// What is seen is a view of the backend's own lists: nothing is copied unless the observer does so. Backends whose tables the
/// host does not see, so that [`Backend::demand`](crate::backend::Backend::demand) is `None`, show nothing.
pub trait Observer: std::fmt::Debug + Send + Sync {
    /// The cache has been built. `budget` is the ways per head, if there is a limit.
    fn built(&mut self, geometry: &Geometry, pins: Pins, budget: Option<usize>);

    /// A head has been attended. `head` is [`Geometry::head`].
    fn attended(&mut self, part: Part, head: usize, demand: HeadDemand<'_>);

    /// The sequence's part in a step is final. Comes after everything that was attended in the step.
    fn finished(&mut self, part: Part);

    /// The sequence's part in a step has been undone: its demands never happened. They may have moved pages all the same.
    fn undone(&mut self, part: Part);
}
