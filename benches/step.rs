//! What fetching costs a step, and what overlap hides of it.
//!
//! One layer of the Llama-3-8B shape. Each head demands 512 of 1,024 pages, 32 MiB in all, and owns 512 ways. `hits` finds them all,
//! `misses` finds none of them, `half` every other one. Floor of `misses` is the longer of attention alone, which is `hits`, and of copying
//! alone, which is `copy`: the same number of pages moved by one thread between two buffers, in the order of the misses.

mod common;

use std::time::Duration;

use common::{Decode, filled, llama};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use wakekv::{Cache, Entry, Geometry, PageLists, Selection, Sequence};

const TOKENS: usize = 16_384;
const DEMANDED: u32 = 512;

/// Page lists for all heads: `list(i)` for i below 511, and the last page, which is always read.
struct Lists {
    offsets: Vec<u32>,
    pages: Vec<u32>,
}

impl Lists {
    fn new(geometry: &Geometry, list: impl Fn(u32) -> u32) -> Self {
        let heads = geometry.kv_heads() as u32;
        let pages = (0..heads).flat_map(|_| (0..DEMANDED - 1).map(&list)).collect();
        Lists { offsets: (0..=heads).map(|head| head * (DEMANDED - 1)).collect(), pages }
    }

    fn as_lists(&self) -> PageLists<'_> {
        PageLists { offsets: &self.offsets, pages: &self.pages }
    }
}

/// A step over the given pages, dropped at the end. What it fetched stays resident.
fn step(cache: &mut Cache, sequence: Sequence, decode: &mut Decode, lists: &Lists) {
    let mut step = cache.step(&[Entry::decode(sequence, 1)]).expect("room for a token");
    step.append(0, &decode.k, &decode.k).expect("tensors of the right shape");
    step.attend_pages(0, &decode.q, lists.as_lists(), &mut decode.out).expect("nothing to fail");
}

fn fetching(c: &mut Criterion) {
    let geometry = llama(1);
    let selection = Selection::Explicit { sink_pages: 0, recent_pages: 0 };
    let settings = Cache::builder(geometry).pages_per_head(DEMANDED as usize).selection(selection);
    let (mut cache, sequence) = filled(settings, &geometry, 1, TOKENS - 1);
    let mut decode = Decode::new(&geometry);
    let even = Lists::new(&geometry, |i| 2 * i);
    let odd = Lists::new(&geometry, |i| 2 * i + 1);
    // Half of its pages are even.
    let mixed = Lists::new(&geometry, |i| if i < 256 { 2 * i } else { 2 * i + 1 });

    let mut group = c.benchmark_group("step");
    group
        .throughput(Throughput::Bytes(geometry.kv_heads() as u64 * u64::from(DEMANDED) * geometry.page_bytes() as u64));
    for (name, lists) in [("hits", [&even, &even]), ("half", [&mixed, &even]), ("misses", [&even, &odd])] {
        let mut turn = 0;
        group.bench_function(name, |b| {
            b.iter(|| {
                turn += 1;
                step(&mut cache, sequence, &mut decode, lists[turn % 2]);
            });
        });
    }
    group.bench_function("copy", |b| {
        let page = geometry.page_bytes();
        let pages = TOKENS / geometry.page_tokens() * geometry.kv_heads();
        let reservoir = vec![1u8; pages * page];
        let mut device = vec![0u8; pages / 2 * page];
        b.iter(|| {
            for (from, into) in reservoir.chunks_exact(page).step_by(2).zip(device.chunks_exact_mut(page)) {
                into.copy_from_slice(from);
            }
        });
    });
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(40).warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(4));
    targets = fetching
}
criterion_main!(benches);
