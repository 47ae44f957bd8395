//! The rule alone: nanoseconds per demanded page, hits and misses, over budgets.
//!
//! Floor: a hit reads the page's way, writes its stamp and moves two links; a miss also finds a victim and writes two page entries.
//! Throughput is in pages, so the inverse of what is printed is the time per page.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use wakekv::Phase;
use wakekv::table::{HeadTable, Pins};

/// A head with `pages` pages and `budget` ways.
fn table(pages: u32, budget: u32) -> HeadTable {
    let mut table = HeadTable::new();
    (0..budget).for_each(|slot| table.grant(slot));
    for page in 0..pages {
        table.open(u64::from(page) + 1, Phase::Decode, Pins::default(), None).expect("a budget of two or more");
    }
    table
}

fn demands(c: &mut Criterion) {
    for (name, sets) in [("hit", 1), ("miss", 2)] {
        let mut group = c.benchmark_group(format!("page_table/{name}"));
        for budget in [16u32, 64, 256, 1024] {
            // Every second page, so that nothing is gained from neighbours. Two disjoint sets never find a page resident.
            let pages = 4 * budget;
            let sets: Vec<Vec<u32>> =
                (0..sets).map(|set| (0..budget).map(|page| 2 * page + set * 2 * budget).collect()).collect();
            let mut table = table(pages, budget);
            let mut places = Vec::with_capacity(budget as usize);
            let mut step = u64::from(pages) + 1;
            for set in &sets {
                step += 1;
                table.demand(step, Phase::Decode, set, &mut places).expect("pages are in range");
            }
            group.throughput(Throughput::Elements(u64::from(budget)));
            group.bench_function(BenchmarkId::from_parameter(budget), |b| {
                b.iter(|| {
                    step += 1;
                    let set = &sets[step as usize % sets.len()];
                    table.demand(step, Phase::Decode, set, &mut places).expect("pages are in range")
                });
            });
        }
        group.finish();
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(50).warm_up_time(std::time::Duration::from_millis(500)).measurement_time(std::time::Duration::from_secs(2));
    targets = demands
}
criterion_main!(benches);
