//! The library on the CPU selects what the model of the digests says, by which the kernels are judged: so both backends select the same.

mod common;
#[path = "common/digests.rs"]
mod digests;

use std::sync::{Arc, Mutex};

use common::layout::{BF16, DIGEST_CUBOID, DIGEST_MIN_MAX, DIGEST_ROTATED, DIGEST_SKETCH, F16};
use common::numbers::{DType, normal};
use rand::SeedableRng;
use rand::rngs::SmallRng;
use wakekv::backend::HeadDemand;
use wakekv::table::Pins;
use wakekv::{Cache, Cpu, Digest, Entry, Geometry, Observer, Part, Selection};

const KINDS: [(u32, Digest); 6] = [
    (DIGEST_MIN_MAX, Digest::MinMax),
    (DIGEST_CUBOID, Digest::CuboidMean),
    (DIGEST_SKETCH, Digest::KeySketch2),
    (DIGEST_ROTATED, Digest::RotatedSketch1),
    (DIGEST_ROTATED + 1, Digest::RotatedSketch2),
    (DIGEST_ROTATED + 2, Digest::RotatedSketch3),
];

/// The pages of each head that were last demanded.
#[derive(Clone, Debug, Default)]
struct Demands(Arc<Mutex<Vec<Vec<u32>>>>);

impl Observer for Demands {
    fn built(&mut self, geometry: &Geometry, _: Pins, _: Option<usize>) {
        *self.0.lock().unwrap() = vec![Vec::new(); geometry.heads()];
    }

    fn attended(&mut self, _: Part, head: usize, demand: HeadDemand<'_>) {
        self.0.lock().unwrap()[head] = demand.pages.to_vec();
    }

    fn finished(&mut self, _: Part) {}

    fn undone(&mut self, _: Part) {}
}

#[test]
fn the_library_selects_by_the_same_digests() {
    let mut rng = SmallRng::seed_from_u64(5);
    for (dim, group, page_tokens) in [(64, 3, 8), (80, 1, 16), (128, 7, 16), (256, 4, 32)] {
        for (kind, digest) in KINDS {
            for (stored, dtype) in [(DType(F16), wakekv::DType::F16), (DType(BF16), wakekv::DType::BF16)] {
                let (kv_heads, pages, count) = (2, 40, 7);
                let geometry = Geometry::builder()
                    .query_heads(kv_heads * group)
                    .kv_heads(kv_heads)
                    .head_dim(dim)
                    .page_tokens(page_tokens)
                    .dtype(dtype)
                    .build()
                    .unwrap();
                let demands = Demands::default();
                let mut cache = Cache::builder(geometry)
                    .selection(Selection::top_pages(count).pinned(1, 1).scored_by(digest))
                    .scale(0.125)
                    .reservoir(wakekv::Reservoir::memory(geometry.sequence_bytes((pages + 1) * page_tokens) as u64))
                    .observer(demands.clone())
                    .build(Cpu::new().threads(1))
                    .unwrap();
                let sequence = cache.insert();
                let prompt = pages * page_tokens;
                let k = normal(&mut rng, stored, prompt * kv_heads * dim);
                let q = normal(&mut rng, DType(common::layout::F32), kv_heads * group * dim);
                let mut out = vec![0.0; q.len()];
                let mut step = cache.step(&[Entry::prefill(sequence, prompt)]).unwrap();
                step.append(0, &k, &k).unwrap();
                step.finish().unwrap();
                let mut step = cache.step(&[Entry::decode(sequence, 1)]).unwrap();
                step.append(0, &k[..kv_heads * dim], &k[..kv_heads * dim]).unwrap();
                step.attend(0, &q, &mut out).unwrap();
                step.finish().unwrap();

                for head in 0..kv_heads {
                    let own: Vec<f32> = k.chunks_exact(dim).skip(head).step_by(kv_heads).flatten().copied().collect();
                    let rows: Vec<f32> =
                        q[head * group * dim..(head + 1) * group * dim].iter().map(|x| x * 0.125).collect();
                    let score = |page: usize| {
                        let keys = &own[page * page_tokens * dim..(page + 1) * page_tokens * dim];
                        let built = digests::build(kind, stored, keys, dim);
                        digests::score(kind, stored, &built, &rows, dim, page_tokens)
                    };
                    // The page being written and the one before it are pinned, and so is the first.
                    let mut order: Vec<(f32, usize)> = (1..pages - 1).map(|page| (score(page), page)).collect();
                    order.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
                    let mut want: Vec<u32> = order.iter().take(count).map(|&(_, page)| page as u32).collect();
                    want.extend([0, pages as u32 - 1, pages as u32]);
                    want.sort_unstable();
                    assert_eq!(
                        demands.0.lock().unwrap()[head],
                        want,
                        "{digest:?}, {dtype:?}, {dim} channels, head {head}"
                    );
                }
            }
        }
    }
}
