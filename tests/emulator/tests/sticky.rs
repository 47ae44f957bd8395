//! `CacheBuilder::stickiness` on the emulated device: what the CPU computes, whatever steps were given up between.

#[path = "../../common/mod.rs"]
mod common;
mod device;
#[path = "../../common/replays.rs"]
mod replays;

use common::drive::{After, Outputs, Stop, drive};
use common::memory::{Draft, Turn};
use common::overdue::outputs_after_overdue;
use common::{Rng, Tensors};
use device::Device;
use replays::Scene;
use wakekv::{Cache, CacheBuilder, Cpu, DType, Digest, Entry, Geometry, Reservoir, Selection};

fn geometry() -> Geometry {
    let shape = Geometry::builder().layers(2).query_heads(4).kv_heads(2).head_dim(64);
    shape.page_tokens(8).dtype(DType::F16).build().unwrap()
}

fn builder(stickiness: f32, reselect_every: usize) -> CacheBuilder {
    Cache::builder(geometry())
        .selection(Selection::top_pages(4).pinned(1, 1).scored_by(Digest::KeySketch2))
        .stickiness(stickiness)
        .reselect_every(reselect_every)
        .reservoir(Reservoir::memory(4 << 20))
}

/// Outputs of twelve decode steps. With `dropped`, other steps are given up between them: dropped and leaked, before the attention of
/// the first layer, after it, and after that of both.
fn outputs<B: Tensors>(mut cache: Cache<B>, dropped: bool) -> Vec<Outputs> {
    let turn = |entry, tokens, seed| [Turn { entry, draft: Draft::random(&geometry(), tokens, &mut Rng::new(seed)) }];
    let sequence = cache.insert();
    drive(&mut cache, &turn(Entry::prefill(sequence, 100), 100, 4), &[], None).unwrap();
    let mut outputs = Vec::new();
    for step in 0..12 {
        if dropped && step % 3 != 1 {
            let after = if step % 4 == 0 { After::Append } else { After::Attend };
            let stop = Stop { layer: step as usize / 2 % 2, after, leak: step % 5 == 0 };
            let given_up = drive(&mut cache, &turn(Entry::decode(sequence, 1), 1, 90 + step), &[], Some(stop)).unwrap();
            assert!(given_up.is_none());
        }
        let (output, _) =
            drive(&mut cache, &turn(Entry::decode(sequence, 1), 1, 5 + step), &[], None).unwrap().unwrap();
        outputs.push(output);
        cache.check().unwrap();
    }
    outputs
}

/// The largest difference between two runs.
fn difference(a: &[Outputs], b: &[Outputs]) -> f32 {
    let pairs = a.iter().flatten().flatten().zip(b.iter().flatten().flatten());
    pairs.map(|(a, b)| (a - b).abs()).fold(0.0, |worst, off| if off.is_nan() { f32::INFINITY } else { worst.max(off) })
}

#[test]
fn outputs_are_those_of_the_cpu_whatever_was_given_up() {
    let Some(device) = Device::new() else { return };
    for reselect_every in [1, 3] {
        let cpu =
            |stickiness| outputs(builder(stickiness, reselect_every).build(Cpu::new().threads(1)).unwrap(), false);
        let free = cpu(0.0);
        for stickiness in [1.0, 1e6] {
            let want = cpu(stickiness);
            assert!(difference(&want, &free) > 0.05, "stickiness {stickiness} changes nothing here");
            for (budget, dropped) in [(12, false), (7, true)] {
                let cuda = device.cuda();
                let cache = builder(stickiness, reselect_every).pages_per_head(budget).build(cuda).unwrap();
                let off = difference(&outputs(cache, dropped), &want);
                assert!(off < 2e-5, "{stickiness}, {reselect_every}, {budget} ways, dropped {dropped}: off by {off}");
            }
        }
    }
}

#[test]
fn replays_are_those_of_the_cpu_whatever_was_given_up() {
    let Some(device) = Device::new() else { return };
    for (stickiness, reselect_every) in [(1.0, 1), (1e6, 1), (1.0, 2)] {
        let mut scene = Scene::new(device.cuda(), || builder(stickiness, reselect_every), 7, 100, 2e-5);
        let captured = scene.capture();
        for token in 0..16 {
            match token % 4 {
                0 => scene.call().unwrap(),
                1 => scene.give_up(&captured).unwrap(),
                _ => scene.replay(&captured).unwrap(),
            }
        }
        scene.cache.check().unwrap();
    }
}

#[test]
fn a_dropped_step_leaves_a_selection_as_due_as_it_was() {
    let Some(device) = Device::new() else { return };
    for stickiness in [0.0, 2.0] {
        let want = outputs_after_overdue(builder(stickiness, 100).build(Cpu::new().threads(1)).unwrap(), false);
        for dropped in [false, true] {
            let cache = builder(stickiness, 100).pages_per_head(9).build(device.cuda()).unwrap();
            let off = difference(&outputs_after_overdue(cache, dropped), &want);
            assert!(off < 2e-5, "stickiness {stickiness}, dropped {dropped}: off by {off}");
        }
    }
}

/// Tables that move take both lists of each head along.
#[test]
fn lists_move_with_the_tables() {
    let Some(device) = Device::new() else { return };
    let twin = outputs_as_the_tables_grow(builder(2.0, 1).build(Cpu::new().threads(1)).unwrap());
    let cuda = outputs_as_the_tables_grow(builder(2.0, 1).pages_per_head(9).build(device.cuda()).unwrap());
    let off = difference(&cuda, &twin);
    assert!(off < 2e-5, "off by {off}");
}

/// Of sequences that take turns growing, from pages that fit the smallest tables on.
fn outputs_as_the_tables_grow<B: Tensors>(mut cache: Cache<B>) -> Vec<Outputs> {
    let sequences = [cache.insert(), cache.insert(), cache.insert()];
    let rng = &mut Rng::new(8);
    let mut outputs = Vec::new();
    for round in 0..12 {
        for &sequence in &sequences {
            // A short step is given up first, so that the list of the step before is not the one that was written last when the tables move.
            if round > 0 {
                let turn = [Turn { entry: Entry::decode(sequence, 1), draft: Draft::random(&geometry(), 1, rng) }];
                let stop = Stop { layer: 1, after: After::Attend, leak: false };
                assert!(drive(&mut cache, &turn, &[], Some(stop)).unwrap().is_none());
            }
            let tokens = if round == 0 { 56 } else { 1 + rng.below(16) };
            let entry = if round == 0 { Entry::prefill(sequence, tokens) } else { Entry::decode(sequence, tokens) };
            let turn = [Turn { entry, draft: Draft::random(&geometry(), tokens, rng) }];
            outputs.push(drive(&mut cache, &turn, &[], None).unwrap().unwrap().0);
        }
    }
    outputs
}
