//! The copy engine: one worker thread that moves pages between the arena and the reservoir.
//!
//! Jobs run in the order in which they were submitted, so copies never overtake each other. What a copy and a kernel must not do
//! at once is kept apart by *tickets*, per physical slot: every job has one, each slot remembers the last job that touches it,
//! and whoever wants to use a slot waits for that ticket.

mod engine;
mod queue;

pub(super) use engine::CopyEngine;
pub(super) use queue::{Failed, Job, Kind};
