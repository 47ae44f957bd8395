//! Recorded runs through the simulator: demanded pages per second and core.
//!
//! Floor: a few nanoseconds per page in the head's table (`page_table`). The goal is 20 million pages per second at a budget of 64 pages.
//! The streams are those of heads that keep four fifths of what they read from step to step.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use wakekv::residency::BalanceSettings;
use wakekv::sim::{Accounting, Policy, Rule, run};
use wakekv::table::{Phase, Pins};
use wakekv::trace::{Mark, Shape, Trace};

/// 8 heads that read 32 of 128 and more pages in each of 512 steps.
fn trace() -> Trace {
    const HEADS: usize = 8;
    let shape =
        Shape { layers: 1, heads_per_layer: HEADS, page_tokens: 16, pins: Pins { sinks: 1, recent: 1 }, budget: None };
    let mut rng = SmallRng::seed_from_u64(1);
    let mut trace = Trace::new(shape);
    let all: Vec<u32> = (0..128).collect();
    let prompt = Mark { step: 1, phase: Phase::Prefill, start: 0, tokens: 2048 };
    trace.push(prompt, &vec![all; HEADS]).expect("a sane prompt");
    let mut read: Vec<Vec<u32>> = vec![Vec::new(); HEADS];
    for step in 0..512 {
        let mark = Mark { step: step + 2, phase: Phase::Decode, start: 2047 + step as usize + 1, tokens: 1 };
        let last = (mark.start / 16) as u32;
        for read in &mut read {
            read.retain(|_| rng.random_range(0..5) > 0);
            read.extend([0, last - 1, last]);
            while {
                read.sort_unstable();
                read.dedup();
                read.len() < 32
            } {
                read.push(rng.random_range(0..last));
            }
        }
        trace.push(mark, &read).expect("a sane demand");
    }
    trace
}

fn replays(c: &mut Criterion) {
    let trace = trace();
    let mut group = c.benchmark_group("replay");
    group.throughput(Throughput::Elements(trace.demanded()));
    let mut bench = |name: String, policy: Policy<'_>, budget: usize| {
        group.bench_function(BenchmarkId::new(name, budget), |b| {
            b.iter(|| run(&trace, policy, budget, Accounting::Strict).expect("a sane trace"));
        });
    };
    for budget in [16, 64] {
        for rule in Rule::ALL {
            bench(format!("{rule:?}"), Policy::Reactive(rule), budget);
        }
        bench("moving".into(), Policy::Moving(Rule::Lru, BalanceSettings::default()), budget);
        bench("evict".into(), Policy::Evict, budget);
        bench("belady".into(), Policy::Belady, budget);
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(20).warm_up_time(std::time::Duration::from_millis(300)).measurement_time(std::time::Duration::from_secs(1));
    targets = replays
}
criterion_main!(benches);
