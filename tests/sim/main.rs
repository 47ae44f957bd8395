//! Recorded runs under other policies: against hand-computed counts, naive implementations, bounds and the live cache.

#[path = "../common/mod.rs"]
mod common;

mod belady;
mod hand;
mod live;
mod metrics;
mod naive;
mod replacement;
mod streams;
