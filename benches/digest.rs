//! What it costs to score a page by its digest and to build one, beside what it costs to attend the page.
//!
//! All through the cache: a decode step that attends everything, or scores everything and attends next to nothing, less a step that does
//! neither. Times are per page and KV head. `cache`: keys and values fit the second level; `memory`: they do not fit the third.

mod common;

use std::time::{Duration, Instant};

use common::{Decode, filled, random};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use wakekv::{Cache, Cpu, DType, Digest, Geometry, PageLists, Selection, Sequence};

const DIGESTS: [(&str, Digest); 6] = [
    ("min_max", Digest::MinMax),
    ("cuboid_mean", Digest::CuboidMean),
    ("key_sketch_2", Digest::KeySketch2),
    ("rotated_sketch_1", Digest::RotatedSketch1),
    ("rotated_sketch_2", Digest::RotatedSketch2),
    ("rotated_sketch_3", Digest::RotatedSketch3),
];

fn per_page(c: &mut Criterion) {
    for (name, query_heads, kv_heads, head_dim, dtype, pages) in [
        ("cache_f16_group4_d128", 4, 1, 128, DType::F16, 40),
        ("cache_f16_group3_d64", 3, 1, 64, DType::F16, 96),
        ("memory_f16_group4_d128", 32, 8, 128, DType::F16, 1024),
    ] {
        let builder = Geometry::builder().query_heads(query_heads).kv_heads(kv_heads).head_dim(head_dim).dtype(dtype);
        let geometry = builder.build().expect("a valid shape");
        // Not one short of a page, or the step would seal it and build its digest.
        let tokens = pages * geometry.page_tokens() - 8;
        let of = |selection| filled(Cache::builder(geometry).selection(selection), &geometry, 1, tokens);
        let mut nothing = of(Selection::Explicit { sink_pages: 1, recent_pages: 1 });
        let mut decode = Decode::new(&geometry);

        let mut group = c.benchmark_group(name);
        group.throughput(Throughput::Elements((pages * kv_heads) as u64));
        let mut bench = |name: &str, mut work: (Cache, Sequence)| {
            group.bench_function(BenchmarkId::from_parameter(name), |b| {
                b.iter_custom(|times| {
                    let (mut more, mut less) = (Duration::ZERO, Duration::ZERO);
                    for _ in 0..times {
                        more += time(|| decode.step(&mut work.0, work.1));
                        less += time(|| pinned_only(&mut decode, &mut nothing));
                    }
                    // Never nothing, whatever disturbs a measurement: criterion takes logarithms.
                    more.saturating_sub(less).max(Duration::from_nanos(1))
                });
            });
        };
        bench("attend", of(Selection::All));
        for (name, digest) in DIGESTS {
            bench(name, of(Selection::top_pages(0).scored_by(digest)));
        }
    }
}

/// Pages of a prompt whose digests are built.
const PROMPT: usize = 64;

/// The time per page and KV head that storing a prompt takes more with a digest than without. `store` is what it takes without.
fn building(c: &mut Criterion) {
    for (name, kv_heads, head_dim) in [("build_f16_d128", 8, 128), ("build_f16_d64", 3, 64)] {
        let builder = Geometry::builder().query_heads(kv_heads).kv_heads(kv_heads).head_dim(head_dim).dtype(DType::F16);
        let geometry = builder.build().expect("a valid shape");
        let tokens = PROMPT * geometry.page_tokens();
        let values = random(geometry.kv_elements(tokens), 1);
        let of = |selection| {
            let mut cache =
                Cache::builder(geometry).selection(selection).build(Cpu::new().threads(1)).expect("room for a prompt");
            let sequence = cache.insert();
            (cache, sequence)
        };
        // The step is dropped, so that the next one stores the same prompt.
        let store = |(cache, sequence): &mut (Cache, Sequence)| {
            let mut step = cache.step(&[(*sequence, tokens)]).expect("room for a prompt");
            time(|| step.append(0, &values, &values).expect("tensors of the right shape"))
        };
        let mut plain = of(Selection::All);
        let mut group = c.benchmark_group(name);
        group.throughput(Throughput::Elements((PROMPT * kv_heads) as u64));
        group.bench_function(BenchmarkId::from_parameter("store"), |b| {
            b.iter_custom(|times| (0..times).map(|_| store(&mut plain)).sum());
        });
        for (name, digest) in DIGESTS {
            let mut with = of(Selection::top_pages(0).scored_by(digest));
            group.bench_function(BenchmarkId::from_parameter(name), |b| {
                b.iter_custom(|times| {
                    let (more, less) = (0..times).fold((Duration::ZERO, Duration::ZERO), |(more, less), _| {
                        (more + store(&mut with), less + store(&mut plain))
                    });
                    more.saturating_sub(less).max(Duration::from_nanos(1))
                });
            });
        }
    }
}

fn time(work: impl FnOnce()) -> Duration {
    let started = Instant::now();
    work();
    started.elapsed()
}

/// A step that reads the pinned pages, and is dropped as those of `Decode` are.
fn pinned_only(decode: &mut Decode, (cache, sequence): &mut (Cache, Sequence)) {
    let offsets = vec![0; cache.geometry().kv_heads() + 1];
    let mut step = cache.step(&[(*sequence, 1)]).expect("room for a token");
    step.append(0, &decode.k, &decode.k).expect("tensors of the right shape");
    step.attend_pages(0, &decode.q, PageLists { offsets: &offsets, pages: &[] }, &mut decode.out)
        .expect("nothing to fail");
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(20).warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1));
    targets = per_page, building
}
criterion_main!(benches);
