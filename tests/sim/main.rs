//! Recorded runs under other policies: against hand-computed counts, naive implementations, bounds and the live cache.

#[path = "../common/mod.rs"]
mod common;

mod belady;
mod destroyed;
mod flexicache;
mod hand;
mod live;
mod metrics;
mod naive;
mod oracle;
mod quality;
mod replacement;
mod sequences;
mod streams;
mod traffic;

/// `WAKEKV_SEED`, or 7. A failing test prints it.
fn seed() -> u64 {
    let seed = std::env::var("WAKEKV_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(7);
    eprintln!("WAKEKV_SEED={seed}");
    seed
}
