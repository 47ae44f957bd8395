//! Moving pages between the reservoir and the device: fetches through the cache over page size and count, mirrors by prefill.
//!
//! Floor: each page is read once and written once. `memcpy` moves the same pages between two buffers on one thread.

mod common;

use std::time::Duration;

use common::{filled, random};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use wakekv::{Cache, Cpu, DType, Entry, Geometry, PageLists, Reservoir, Selection};

/// One KV head whose pages have `page_kib` KiB, with as little arithmetic as can be: one query head.
fn shape(page_kib: usize) -> Geometry {
    // [page_tokens, 128] f16 twice is half a KiB per token.
    let builder = Geometry::builder().head_dim(128).dtype(DType::F16).page_tokens(2 * page_kib);
    builder.build().expect("a valid shape")
}

fn fetch(c: &mut Criterion) {
    let mut group = c.benchmark_group("transfer/fetch");
    for page_kib in [4, 8, 16, 32, 64] {
        let geometry = shape(page_kib);
        for count in [1usize, 16, 256, 1024] {
            let tokens = (2 * count + 1) * geometry.page_tokens();
            let selection = Selection::Explicit { sink_pages: 0, recent_pages: 0 };
            let settings = Cache::builder(geometry).pages_per_head(count + 1).selection(selection);
            let (mut cache, sequence) = filled(settings, &geometry, 1, tokens - 1);
            let sets = [0, count as u32].map(|from| (from..from + count as u32).collect::<Vec<u32>>());
            let offsets = [0, count as u32];
            let (k, mut out, mut turn) = (random(128, 1), vec![0f32; 128], 0);
            group.throughput(Throughput::Bytes((count * geometry.page_bytes()) as u64));
            group.bench_function(BenchmarkId::new(format!("{page_kib}KiB"), count), |b| {
                b.iter(|| {
                    turn += 1;
                    let pages = PageLists { offsets: &offsets, pages: &sets[turn % 2] };
                    let mut step = cache.step(&[Entry::decode(sequence, 1)]).expect("room for a token");
                    step.append(0, &k, &k).expect("tensors of the right shape");
                    step.attend_pages(0, &k, pages, &mut out).expect("nothing to fail");
                });
            });
        }
    }
    group.finish();
}

fn mirror(c: &mut Criterion) {
    let mut group = c.benchmark_group("transfer/mirror");
    let geometry = common::llama(1);
    let tokens = 2048;
    let (k, v) = (random(geometry.kv_elements(tokens), 1), random(geometry.kv_elements(tokens), 2));
    group.throughput(Throughput::Bytes(geometry.sequence_bytes(tokens) as u64));
    for (name, budget) in [("through_ways", tokens / 16), ("through_staging", 4)] {
        let reservoir = Reservoir::memory(geometry.sequence_bytes(tokens) as u64);
        let settings = Cache::builder(geometry).pages_per_head(budget).reservoir(reservoir);
        let mut cache = settings.build(Cpu::new().threads(1)).expect("settings that fit");
        let sequence = cache.insert();
        group.bench_function(name, |b| {
            b.iter(|| {
                let mut step = cache.step(&[(sequence, tokens)]).expect("room for the tokens");
                step.append(0, &k, &v).expect("tensors of the right shape");
            });
        });
    }
    group.finish();
}

fn memcpy(c: &mut Criterion) {
    let mut group = c.benchmark_group("transfer/memcpy");
    for page_kib in [8, 64] {
        let page = page_kib << 10;
        let (from, mut into) = (vec![1u8; 64 << 20], vec![0u8; 32 << 20]);
        group.throughput(Throughput::Bytes(into.len() as u64));
        group.bench_function(BenchmarkId::from_parameter(format!("{page_kib}KiB")), |b| {
            b.iter(|| {
                let pages = from.chunks_exact(page).step_by(2).zip(into.chunks_exact_mut(page));
                pages.for_each(|(from, into)| into.copy_from_slice(from));
            });
        });
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(20).warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_secs(1));
    targets = fetch, mirror, memcpy
}
criterion_main!(benches);
