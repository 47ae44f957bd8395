//! Decode attention over resident pages, through the whole cache.
//!
//! Floor: every byte of K and V is read once, and throughput is printed in those bytes. Compare with the machine's sequential read
//! bandwidth (`read` here, the same bytes summed up) and, on the same shapes, with ggml's flash attention.

mod common;

use std::time::Duration;

use common::{Decode, filled, llama, random};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use wakekv::{Cache, DType, Geometry};

fn resident(c: &mut Criterion) {
    let mut group = c.benchmark_group("attention");
    for threads in [1, 2] {
        for (name, geometry, tokens) in [
            ("f16_group4_d128_16k", llama(1), 16_384),
            ("f16_group1_d128_4k", shape(32, 32, 128, DType::F16), 4096),
            ("f16_group7_d128_16k", shape(28, 4, 128, DType::F16), 16_384),
            ("bf16_group4_d128_16k", shape(32, 8, 128, DType::BF16), 16_384),
            ("f32_group3_d64_16k", shape(9, 3, 64, DType::F32), 16_384),
        ] {
            let (mut cache, sequence) = filled(Cache::builder(geometry), &geometry, threads, tokens - 1);
            let mut decode = Decode::new(&geometry);
            group.throughput(Throughput::Bytes(geometry.sequence_bytes(tokens) as u64));
            group.bench_function(BenchmarkId::new(name, threads), |b| b.iter(|| decode.step(&mut cache, sequence)));
        }
    }
    group.finish();
}

fn shape(query_heads: usize, kv_heads: usize, head_dim: usize, dtype: DType) -> Geometry {
    let builder = Geometry::builder().query_heads(query_heads).kv_heads(kv_heads).head_dim(head_dim).dtype(dtype);
    builder.build().expect("a valid shape")
}

/// What the memory gives to plain reads.
fn read(c: &mut Criterion) {
    let mut group = c.benchmark_group("read");
    let memory: Vec<u64> = random((64 << 20) / 4, 3).chunks_exact(2).map(|x| (x[0] * x[1]).to_bits().into()).collect();
    group.throughput(Throughput::Bytes(8 * memory.len() as u64));
    for threads in [1, 2] {
        group.bench_function(BenchmarkId::from_parameter(threads), |b| {
            b.iter(|| {
                std::thread::scope(|scope| {
                    let parts = memory.chunks(memory.len() / threads);
                    let sums: Vec<_> = parts.map(|part| scope.spawn(|| exclusive_or(part))).collect();
                    sums.into_iter().map(|sum| sum.join().expect("a sum cannot fail")).fold(0, |a, b| a ^ b)
                })
            });
        });
    }
    group.finish();
}

/// Wide enough for the compiler to make it a stream of vector loads.
fn exclusive_or(part: &[u64]) -> u64 {
    let mut lanes = [0; 32];
    for chunk in part.chunks_exact(32) {
        lanes.iter_mut().zip(chunk).for_each(|(lane, x)| *lane ^= x);
    }
    lanes.iter().fold(0, |a, b| a ^ b)
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(30).warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(2));
    targets = read, resident
}
criterion_main!(benches);
