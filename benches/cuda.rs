//! On a CUDA device: attention against the memory's bandwidth, pages over the bus, and what misses cost a step.
//!
//! The figures of `tests/gpu` in criterion's form, from the same scenes. Without a device it says so and measures nothing.
//!
//! * `memory`: plain copies of one large block. Floor of everything else.
//! * `attention`: one `attend` call of 32 sequences of 8k tokens, all resident. Floor: its bytes at the speed of `memory/WithinDevice`,
//!   which counts bytes that are read and bytes that are written.
//! * `pages`: scattered pages, by kernel and by DMA. Floor: their bytes at the speed of `memory/HostToDevice` and `DeviceToHost`.
//! * `step`: 16 sequences, 64 of 512 pages read, in calls and as a replayed graph, with everything resident and with a share of the pages
//!   replaced in every step. Floor of a step with misses: the longer of the step without and of `pages` of as many.

#[path = "common/cuda/mod.rs"]
mod scenes;

use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use scenes::copies::{MOVES, PAGE_KIB, cache_of_pages};
use scenes::memory::{Blocks, Route};
use scenes::scene::{Residency, Scene, Size};
use wakekv::Cuda;

/// Layers of the measured steps.
const LAYERS: usize = 8;

/// The device, or the reason why nothing is measured.
fn device() -> Option<Cuda> {
    let cuda = Cuda::new(0);
    match cache_of_pages(cuda.clone(), 8) {
        Ok(_) => Some(cuda),
        Err(reason) => {
            println!("skipped: {reason}");
            None
        }
    }
}

fn benches(c: &mut Criterion) {
    let Some(cuda) = device() else { return };
    memory(c, &cuda);
    attention(c, &cuda);
    pages(c, &cuda);
    steps(c, &cuda);
}

fn memory(c: &mut Criterion, cuda: &Cuda) {
    let mut group = c.benchmark_group("memory");
    let cache = cache_of_pages(cuda.clone(), 8).expect("it could be had before");
    let mut blocks =
        Blocks::new(cache.stream(), 1 << 30).expect("room for a GiB of pinned memory, and two on the device");
    for route in Route::ALL {
        group.throughput(Throughput::Bytes((route.traffic() * blocks.bytes()) as u64));
        group.bench_function(format!("{route:?}"), |b| {
            b.iter_custom(|iterations| {
                let time = |_| Duration::from_secs_f64(blocks.time(route).expect("the driver copies"));
                (0..iterations).map(time).sum()
            });
        });
    }
}

fn attention(c: &mut Criterion, cuda: &Cuda) {
    let size = Size::llama(2, 32);
    let mut group = c.benchmark_group("attention");
    let mut scene = Scene::new(cuda.clone(), size, Residency::ReadAll).expect("room for 32 sequences");
    group.throughput(Throughput::Bytes(size.layer_bytes(size.prompt_tokens()) as u64));
    group.bench_function("32_sequences", |b| {
        b.iter_custom(|iterations| {
            let time = |_| Duration::from_secs_f64(scene.attention().expect("nothing to fail"));
            (0..iterations).map(time).sum()
        });
    });
}

fn pages(c: &mut Criterion, cuda: &Cuda) {
    for (name, direction, path) in MOVES {
        let mut group = c.benchmark_group(format!("pages/{name}"));
        for kib in PAGE_KIB {
            let mut cache = cache_of_pages(cuda.clone(), kib).expect("it could be had before");
            let mut timer = cache.copy_timer(4096).expect("room for 4,096 pages");
            for count in [1, 4, 16, 64, 256, 1024, 4096] {
                group.throughput(Throughput::Bytes(((count * kib) << 10) as u64));
                group.bench_function(BenchmarkId::new(format!("{kib}KiB"), count), |b| {
                    b.iter_custom(|iterations| {
                        (0..iterations).map(|_| timer.time(direction, path, count).expect("the driver copies")).sum()
                    });
                });
            }
        }
    }
}

fn steps(c: &mut Criterion, cuda: &Cuda) {
    let mut group = c.benchmark_group("step");
    let shares =
        [0.0, 0.01, 0.05, 0.2, 1.0].map(|share| (format!("{}_percent", 100.0 * share), Residency::KeepRead, share));
    let resident = ("all_resident".to_owned(), Residency::KeepAll, 0.05);
    for (name, residency, share) in [resident].into_iter().chain(shares) {
        for replayed in [false, true] {
            let mut scene =
                Scene::new(cuda.clone(), Size::llama(LAYERS, 16), residency).expect("room for 16 sequences");
            if replayed {
                scene.capture().expect("a decode step can be captured");
            }
            let kind = if replayed { "replayed" } else { "called" };
            group.bench_function(BenchmarkId::new(&name, kind), |b| {
                b.iter_custom(|iterations| {
                    (0..iterations).map(|_| scene.step(share).expect("nothing to fail").step).sum()
                });
            });
        }
    }
}

criterion_group! {
    name = all;
    config = Criterion::default().sample_size(10).warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_secs(1));
    targets = benches
}
criterion_main!(all);
