//! What only shows from within: the bytes of the arena, and a panic in the middle of a step.

use super::{Cpu, CpuBackend, CpuTensor, CpuTensorMut};
use crate::backend::Backend;
use crate::{Cache, DType, Entry, Error, Geometry, Reservoir, Sequence};

fn geometry() -> Geometry {
    let shape = Geometry::builder().layers(1).query_heads(2).kv_heads(2).head_dim(32);
    shape.page_tokens(8).dtype(DType::F32).build().unwrap()
}

fn cache(threads: usize, scrub: bool) -> Cache {
    let builder = Cache::builder(geometry()).pages_per_head(2).reservoir(Reservoir::memory(1 << 20));
    builder.scrub_on_free(scrub).build(Cpu::new().threads(threads)).unwrap()
}

/// Tokens of small numbers, none of them 0, that differ from page to page.
fn numbers(tokens: usize) -> Vec<f32> {
    (0..geometry().kv_elements(tokens)).map(|index| 0.001 * (1 + index) as f32).collect()
}

/// One step of one sequence, up to and including its attention.
fn attended(cache: &mut Cache, sequence: Sequence, tokens: usize) -> crate::Step<'_, CpuBackend> {
    let mut step = cache.step(&[Entry::prefill(sequence, tokens)]).unwrap();
    let numbers = numbers(tokens);
    step.append(0, &numbers, &numbers).unwrap();
    step.attend(0, &numbers, &mut numbers.clone()).unwrap();
    step
}

fn arena_bytes_that_are_not_zero(cache: &Cache) -> usize {
    let arena = &cache.backend.parts.arena;
    let slots = cache.backend.parts.staging.first + cache.backend.parts.staging.count;
    let bytes = |slot| {
        // SAFETY: no step is under way, so nobody writes the arena.
        unsafe { std::slice::from_raw_parts(arena.slot(slot).cast_const(), arena.slot_bytes()) }
    };
    (0..slots).map(|slot| bytes(slot).iter().filter(|&&byte| byte != 0).count()).sum()
}

#[test]
fn scrubbing_leaves_nothing_on_the_device() {
    for scrub in [true, false] {
        let mut cache = cache(2, scrub);
        // Ten pages for two ways: most of them pass through the staging slots.
        let sequence = cache.insert();
        attended(&mut cache, sequence, 77).finish().unwrap();
        assert!(arena_bytes_that_are_not_zero(&cache) > 0);
        cache.remove(sequence).unwrap();
        assert_eq!(arena_bytes_that_are_not_zero(&cache) == 0, scrub);
        // An undone step leaves nothing either.
        let sequence = cache.insert();
        drop(attended(&mut cache, sequence, 77));
        assert_eq!(arena_bytes_that_are_not_zero(&cache) == 0, scrub);
    }
}

/// The backend trusts the shapes that it is given. Given too few queries it panics for the second head, when the first head has
/// already given ways to pages that nobody will fetch.
#[test]
fn pages_that_a_panic_kept_from_being_fetched_are_not_resident() {
    for threads in [1, 2] {
        let mut cache = cache(threads, false);
        let sequence = cache.insert();
        attended(&mut cache, sequence, 20).finish().unwrap();
        let expected = {
            let mut out = vec![0.0; geometry().query_elements(1)];
            let mut step = cache.step(&[(sequence, 1)]).unwrap();
            step.append(0, &numbers(1), &numbers(1)).unwrap();
            step.attend(0, &numbers(1), &mut out).unwrap();
            out
        };
        // Makes room for page 0 in the first head.
        cache.backend.tables.all().0[0].table.drop_page(1);
        cache.step(&[(sequence, 1)]).map(std::mem::forget).unwrap();
        let plan = cache.plan.clone();
        cache.backend.append(&plan, 0, CpuTensor::from(&numbers(1)), CpuTensor::from(&numbers(1))).unwrap();
        let (queries, mut out) = (vec![1.0; 32], vec![0.0; 64]);
        let result = cache.backend.attend(&plan, 0, CpuTensor::from(&queries), None, CpuTensorMut::from(&mut out));
        assert!(matches!(result, Err(Error::ThreadPanicked)), "{threads} threads: {result:?}");
        // The next call undoes the step, which was leaked.
        let mut out = vec![0.0; geometry().query_elements(1)];
        let mut step = cache.step(&[(sequence, 1)]).unwrap();
        step.append(0, &numbers(1), &numbers(1)).unwrap();
        step.attend(0, &numbers(1), &mut out).unwrap();
        assert_eq!(out, expected, "{threads} threads");
    }
}
