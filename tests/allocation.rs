//! A steady decode step allocates nothing, on no thread, and tables are small.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use wakekv::residency::Rule;
use wakekv::{Cache, Cpu, DType, Digest, Entry, Geometry, Reservoir, Selection, Sequence};

struct Counting;

static COUNTS: AtomicBool = AtomicBool::new(false);
static CALLS: AtomicUsize = AtomicUsize::new(0);

fn count() {
    if COUNTS.load(Ordering::Relaxed) {
        CALLS.fetch_add(1, Ordering::Relaxed);
    }
}

// SAFETY: everything is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.realloc(memory, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// One test at a time, because the counter is everybody's.
static ALONE: Mutex<()> = Mutex::new(());

fn allocations(work: impl FnOnce()) -> usize {
    CALLS.store(0, Ordering::SeqCst);
    COUNTS.store(true, Ordering::SeqCst);
    work();
    COUNTS.store(false, Ordering::SeqCst);
    CALLS.load(Ordering::SeqCst)
}

/// Keys, values and queries for the largest step.
struct Tensors {
    kv: Vec<f32>,
    q: Vec<f32>,
    out: Vec<f32>,
}

impl Tensors {
    fn new(geometry: &Geometry, tokens: usize) -> Self {
        let numbers = |count: usize| (0..count).map(|index| (index % 251) as f32 / 251.0 - 0.5).collect();
        let queries = geometry.query_elements(tokens);
        Tensors { kv: numbers(geometry.kv_elements(tokens)), q: numbers(queries), out: vec![0.0; queries] }
    }

    fn step(&mut self, cache: &mut Cache, batch: &[Entry]) -> wakekv::StepReport {
        let geometry = *cache.geometry();
        let mut step = cache.step(batch).unwrap();
        let (kv, q) = (geometry.kv_elements(step.tokens()), geometry.query_elements(step.tokens()));
        for layer in 0..geometry.layers() {
            step.append(layer, &self.kv[..kv], &self.kv[..kv]).unwrap();
            step.attend(layer, &self.q[..q], &mut self.out[..q]).unwrap();
        }
        step.finish().unwrap()
    }
}

const BATCH: usize = 3;

/// Sequences with room for 400 tokens, taken to some length.
fn insert(cache: &mut Cache, tensors: &mut Tensors, tokens: usize) -> [Sequence; BATCH] {
    let sequences = [(); BATCH].map(|()| cache.insert_with_capacity(400));
    // Different lengths, so that their pages fill in different steps.
    for (index, &sequence) in sequences.iter().enumerate() {
        tensors.step(cache, &[Entry::prefill(sequence, tokens + 3 * index)]);
    }
    sequences
}

#[test]
fn a_steady_decode_step_allocates_nothing() {
    let _alone = ALONE.lock().unwrap();
    let shape = Geometry::builder().layers(2).query_heads(6).kv_heads(2).head_dim(32).page_tokens(8);
    let geometry = shape.dtype(DType::F32).build().unwrap();
    let tensors = &mut Tensors::new(&geometry, 400);
    let top = |digest| Selection::TopPages { count: 4, sink_pages: 1, recent_pages: 1, digest };
    let digests = [Digest::MinMax, Digest::KeySketch2].map(|digest| (top(digest), Rule::Lru));
    let rules = Rule::ALL.map(|rule| (top(Digest::RotatedSketch2), rule));
    for (selection, rule) in [(Selection::All, Rule::Lru)].into_iter().chain(digests).chain(rules) {
        for (budget, threads) in [(5, 1), (5, 2), (16, 2), (1000, 1)] {
            let mut cache = Cache::builder(geometry)
                .pages_per_head(budget)
                .reservoir(Reservoir::memory(200 * geometry.group_bytes() as u64))
                .device_pool(200 * geometry.group_bytes() as u64)
                .selection(selection)
                .replacement(rule)
                .build(Cpu::new().threads(threads))
                .unwrap();
            // What all sequences share grows to the lengths at hand, and threads have slept and been woken.
            let longer = insert(&mut cache, tensors, 300);
            let batch = longer.map(|sequence| Entry::decode(sequence, 1));
            (0..60).for_each(|_| assert_eq!(tensors.step(&mut cache, &batch).tokens, BATCH));
            longer.into_iter().for_each(|sequence| cache.remove(sequence).unwrap());
            let sequences = insert(&mut cache, tensors, 100);
            let batch = sequences.map(|sequence| Entry::decode(sequence, 1));
            (0..10).for_each(|_| assert_eq!(tensors.step(&mut cache, &batch).tokens, BATCH));
            let (mut misses, mut overflow, mut sealed) = (0, 0, 0);
            let allocations = allocations(|| {
                for _ in 0..100 {
                    let report = tensors.step(&mut cache, &batch);
                    misses += report.counts.decode.misses();
                    overflow += report.counts.decode.overflow;
                    sealed += report.counts.decode.mirrored_bytes / geometry.group_bytes() as u64;
                }
            });
            let what = format!("{selection:?}, {rule}, {budget} ways, {threads} threads");
            assert_eq!(allocations, 0, "{what}");
            assert!(sealed >= 36, "{what}: pages have filled, {sealed}");
            assert!(misses > 0 || budget > 16 || selection != Selection::All, "{what}: something was fetched");
            assert!(overflow > 0 || budget > 16 || selection != Selection::All, "{what}: something was streamed");
        }
    }
    // The counter counts.
    assert_eq!(allocations(|| drop(std::hint::black_box(vec![1]))), 1);
}

#[test]
fn tables_take_less_than_a_hundredth_of_the_bytes_they_manage() {
    let _alone = ALONE.lock().unwrap();
    let shape = Geometry::builder().layers(1).query_heads(2).kv_heads(2).head_dim(128).page_tokens(16);
    let geometry = shape.dtype(DType::F16).build().unwrap();
    // Just past a power of two, where buffers that double are emptiest.
    let tokens: usize = 16 * (1024 + 60);
    let bytes = geometry.sequence_bytes(tokens);
    for (budget, capacity) in [(None, 0), (None, tokens), (Some(64), 0), (Some(64), tokens), (Some(4), 0)] {
        let builder = Cache::builder(geometry).reservoir(Reservoir::memory(bytes as u64));
        let builder = match budget {
            None => builder.device_pool(bytes as u64),
            Some(budget) => builder.pages_per_head(budget).device_pool((budget * geometry.group_bytes()) as u64),
        };
        let mut cache = builder.build(Cpu::new().threads(1)).unwrap();
        let sequence = cache.insert_with_capacity(capacity);
        let chunk = vec![0.5; geometry.kv_elements(16)];
        for _ in 0..tokens / 16 {
            let mut step = cache.step(&[Entry::prefill(sequence, 16)]).unwrap();
            step.append(0, &chunk, &chunk).unwrap();
            step.finish().unwrap();
        }
        let tables = cache.table_bytes();
        let percent = 100.0 * tables as f64 / bytes as f64;
        assert!(percent < 1.0, "{budget:?} ways, room for {capacity}: {tables} of {bytes} bytes, {percent:.3} %");
        // Every page has its group and its place in the table: a count that leaves these out is wrong.
        assert!(tables > tokens / 16 * 2 * 4);
    }
}
