//! The residency kernels decide as `HeadTable` does: places, counters, tables and fetch lists, after every step.

mod common;
#[path = "common/world/mod.rs"]
mod world;

use common::Gpu;
use common::layout::{FAULT_BAD_DEMAND, FAULT_NO_WAY, FAULT_TOO_MANY, Fault, NONE};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use wakekv_emulator::Order;
use world::{Shape, World};

/// Steps of one world with random shape, all of whose heads demand at random.
fn run_world(gpu: &Gpu, seed: u64, shape: Shape, steps: usize) -> Result<u64, String> {
    let mut rng = SmallRng::seed_from_u64(seed);
    let mut world = World::new(gpu, shape);
    let mut demands = 0;
    for step in 0..steps {
        gpu.session.order(Order::ALL[step % Order::ALL.len()]);
        demands += world.step(&mut rng).map_err(|wrong| format!("seed {seed}, step {step}: {wrong}"))?;
    }
    Ok(demands)
}

fn random_shape(rng: &mut SmallRng) -> Shape {
    let (sinks, recent) = (rng.random_range(0..3), rng.random_range(0..3));
    Shape {
        entries: 8,
        kv_heads: 8,
        sinks,
        recent,
        budget: sinks + recent + 2 + rng.random_range(0..12),
        most_pages: 60,
        threads: [32, 32, 64, 96][rng.random_range(0..4)],
        ring: rng.random_range(1..6),
    }
}

#[test]
fn decisions_are_those_of_the_head_table() {
    let Some(gpu) = Gpu::new() else { return };
    let begun = std::time::Instant::now();
    let mut demands = 0;
    let mut worlds = 0;
    while demands < demands_wanted() {
        let mut rng = SmallRng::seed_from_u64(worlds);
        demands += run_world(&gpu, worlds, random_shape(&mut rng), 100).unwrap();
        worlds += 1;
    }
    println!("{demands} demands in {worlds} worlds, {:.1?}", begun.elapsed());
}

#[test]
fn decisions_of_large_heads_are_those_of_the_head_table() {
    let Some(gpu) = Gpu::new() else { return };
    let large = |budget, most_pages, threads| Shape {
        entries: 1,
        kv_heads: 2,
        sinks: 1,
        recent: 2,
        budget,
        most_pages,
        threads,
        ring: 16,
    };
    run_world(&gpu, 1, large(500, 1200, 256), 40).unwrap();
    run_world(&gpu, 2, large(4096, 6000, 256), 12).unwrap();
}

#[test]
fn what_cannot_be_decided_is_a_fault() {
    let Some(gpu) = Gpu::new() else { return };
    let shape = Shape { entries: 1, kv_heads: 1, sinks: 1, recent: 1, budget: 4, most_pages: 20, threads: 32, ring: 2 };
    let fault = |kind, page| Fault { kind, sequence: 0, head: 0, page };
    // Two ways: sink and window fill them, and page 2 finds none.
    assert_eq!(World::new(&gpu, shape).fault_of(2, 24, &[0, 1, 2], 10), fault(FAULT_NO_WAY, 2));
    assert_eq!(World::new(&gpu, shape).fault_of(4, 24, &[0, 2, 1], 10), fault(FAULT_BAD_DEMAND, NONE));
    assert_eq!(World::new(&gpu, shape).fault_of(4, 24, &[0, 1, 3], 10), fault(FAULT_BAD_DEMAND, NONE));
    // Four of eight pages stay, the others take two waves of two: waves 2 and 3.
    let all: Vec<u32> = (0..8).collect();
    assert_eq!(World::new(&gpu, shape).fault_of(4, 64, &all, 3), fault(FAULT_TOO_MANY, NONE));
    assert_eq!(World::new(&gpu, shape).fault_of(4, 64, &all, 4), Fault::default());
}

#[test]
fn planted_bugs_are_found() {
    for bug in [
        "victim_off_by_one",
        "victim_by_page_alone",
        "slot_reused_too_early",
        "residency_missing_barrier",
        "residency_wrong_lane_mask",
    ] {
        let Some(gpu) = Gpu::seeded(bug) else { return };
        let found = (0..20).find_map(|seed| {
            let mut rng = SmallRng::seed_from_u64(seed);
            let shape = Shape { threads: 64, ..random_shape(&mut rng) };
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run_world(&gpu, seed, shape, 40))).ok()?.err()
        });
        println!("{bug}: {}", found.unwrap_or_else(|| panic!("{bug} has not been found")));
    }
}

/// Enough to meet what is rare, in a few seconds; `WAKEKV_DEMANDS` asks for more.
fn demands_wanted() -> u64 {
    std::env::var("WAKEKV_DEMANDS").ok().and_then(|count| count.parse().ok()).unwrap_or(100_000)
}
