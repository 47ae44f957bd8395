//! Whatever is refused says what, how much and which knob, and has changed nothing.

mod common;

use common::{Part, World, error_against_dense, run_step};
use wakekv::{Cache, Cpu, DType, Entry, Error, Geometry, PageLists, Reservoir, Selection, Sequence};

fn geometry() -> Geometry {
    let shape = Geometry::builder().layers(2).query_heads(4).kv_heads(2).head_dim(32);
    shape.page_tokens(8).dtype(DType::F32).build().unwrap()
}

/// A cache with two sequences, of 20 and 9 tokens.
struct Scene {
    cache: Cache,
    worlds: [World; 2],
    sequences: [Sequence; 2],
    tokens: [usize; 2],
}

impl Scene {
    fn new(budget: usize, selection: Selection, reservoir: Reservoir) -> Self {
        let builder = Cache::builder(geometry()).pages_per_head(budget).selection(selection).reservoir(reservoir);
        Scene::of(builder.build(Cpu::new().threads(2)).unwrap())
    }

    fn of(mut cache: Cache) -> Self {
        let worlds = [1, 2].map(|seed| World { geometry: geometry(), seed });
        let sequences = [cache.insert(), cache.insert()];
        let mut scene = Scene { cache, worlds, sequences, tokens: [0, 0] };
        scene.advance([20, 9]);
        scene
    }

    /// A step of both sequences that must succeed, and be right.
    fn advance(&mut self, tokens: [usize; 2]) {
        let parts = [0, 1].map(|i| Part {
            entry: Entry::prefill(self.sequences[i], tokens[i]),
            ..Part::new(&self.worlds[i], self.sequences[i], self.tokens[i], tokens[i])
        });
        let (outputs, _) = run_step(&mut self.cache, &parts).unwrap();
        let width = geometry().query_elements(1);
        for (layer, out) in outputs.iter().enumerate() {
            for (part, out) in parts.iter().zip([&out[..tokens[0] * width], &out[tokens[0] * width..]]) {
                assert!(error_against_dense(part, layer, out, &|_| true) < 1e-5);
            }
        }
        self.tokens = [0, 1].map(|i| self.tokens[i] + tokens[i]);
        self.check();
    }

    fn check(&self) {
        self.cache.check().unwrap();
        assert_eq!([0, 1].map(|i| self.cache.tokens(self.sequences[i]).unwrap()), self.tokens);
    }

    /// What was refused has changed nothing: the pools are as they were, and both sequences go on as if it had not been.
    fn refuses(&mut self, words: &[&str], attempt: impl FnOnce(&mut Self) -> Error) {
        let before = self.cache.occupancy();
        let error = attempt(self);
        says(&error, words);
        assert!(error.is_refusal(), "{error}");
        self.check();
        assert_eq!(self.cache.occupancy(), before);
        self.advance([1, 1]);
    }
}

fn memory() -> Reservoir {
    Reservoir::memory(64 * geometry().group_bytes() as u64)
}

fn says(error: &Error, words: &[&str]) {
    let text = error.to_string();
    for word in words {
        assert!(text.contains(word), "no {word:?} in {text:?}");
    }
}

fn begin_error<E: Into<Entry> + Copy>(cache: &mut Cache, batch: &[E]) -> Error {
    cache.step(batch).map(drop).unwrap_err()
}

#[test]
fn a_full_reservoir_is_refused_before_anything_changes() {
    let mut scene = Scene::new(4, Selection::All, Reservoir::memory(5 * geometry().group_bytes() as u64));
    // 3 of 5 pages are taken; 20 + 21 tokens fill 3 more.
    let bytes = (5 * geometry().group_bytes()).to_string();
    scene.refuses(&["reservoir full", "seals 3 pages", "4 heads", "2 of 5", &bytes, "reservoir(..)"], |scene| {
        begin_error(&mut scene.cache, &[(scene.sequences[0], 21)])
    });
    scene.advance([2, 1]);
}

#[test]
fn a_step_larger_than_32_bits_of_ways_is_refused() {
    let shape = Geometry::builder().layers(30).query_heads(9).kv_heads(3).build().unwrap();
    let mut cache = Cache::builder(shape).reservoir(memory()).build(Cpu::new().threads(1)).unwrap();
    let sequence = cache.insert();
    let (longest, batch) = (u32::MAX as usize / 2, [cache.insert(), cache.insert(), sequence]);
    says(&begin_error(&mut cache, &[(sequence, longest)]), &["reservoir full", "134217727 pages in each of 90 heads"]);
    says(&begin_error(&mut cache, &batch.map(|sequence| (sequence, longest))), &["reservoir full"]);
    says(&begin_error(&mut cache, &[(sequence, longest + 1)]), &["sequence too long", "2147483648 tokens"]);
}

#[test]
fn a_full_device_pool_is_refused_before_anything_changes() {
    let builder = Cache::builder(geometry()).pages_per_head(4).reservoir(memory());
    let mut scene = Scene::of(builder.device_pool(6 * geometry().group_bytes() as u64).build(Cpu::new()).unwrap());
    // 3 + 2 ways per head are taken of 6; two more would be needed.
    scene
        .refuses(&["device pool full", "needs 8 more ways", "4 of 24", "pages_per_head", "device_pool(..)"], |scene| {
            begin_error(&mut scene.cache, &[(scene.sequences[0], 8), (scene.sequences[1], 10)])
        });
}

#[test]
fn a_budget_below_the_pins_is_refused() {
    let selection = Selection::Explicit { sink_pages: 2, recent_pages: 3 };
    let build = |budget| {
        Cache::builder(geometry()).reservoir(memory()).selection(selection).pages_per_head(budget).build(Cpu::new())
    };
    says(&build(6).map(drop).unwrap_err(), &["pages_per_head is 6", "7 pages", "raise pages_per_head or pin fewer"]);
    build(7).unwrap();
}

#[test]
fn settings_that_cannot_be_are_refused() {
    let cache = || Cache::builder(geometry()).reservoir(memory());
    let error = |result: Result<Cache, Error>| result.map(drop).unwrap_err();
    says(&error(cache().reselect_every(0).build(Cpu::new())), &["reselect_every is 0", "at least 1"]);
    for stickiness in [-0.5, f32::NAN, f32::INFINITY] {
        let error = error(cache().stickiness(stickiness).build(Cpu::new()));
        says(&error, &[&format!("stickiness is {stickiness}"), "finite", "not negative"]);
    }
    says(&error(cache().scale(f32::NAN).build(Cpu::new())), &["scale is NaN", "finite"]);
    says(&error(cache().device_pool(10).build(Cpu::new())), &["device_pool is 10 bytes", "4 heads", "8192 bytes"]);
    says(
        &error(cache().reservoir(Reservoir::memory(10)).build(Cpu::new())),
        &["reservoir is 10 bytes", "4 heads", "8192 bytes"],
    );
    says(&error(cache().build(Cpu::new().threads(0))), &["threads is 0", "at least 1"]);
    says(&error(cache().build(Cpu::new().queue_depth(3))), &["queue_depth is 3", "at least 128"]);
    says(&error(cache().build(Cpu::new().staging_pages(5))), &["staging_pages is 5", "at least 128"]);
    says(&error(cache().build(Cpu::new().threads(200).staging_pages(5))), &["staging_pages is 5", "at least 200"]);
}

#[test]
fn memory_that_no_machine_has_is_a_typed_error() {
    let shape = Geometry::builder().layers(1).query_heads(1).kv_heads(1).head_dim(256).page_tokens(128);
    let geometry = shape.dtype(DType::F32).build().unwrap();
    let bytes = 1 << 49;
    let reservoir = Cache::builder(geometry).pages_per_head(2).reservoir(Reservoir::memory(bytes)).build(Cpu::new());
    says(&reservoir.map(drop).unwrap_err(), &["reservoir", &bytes.to_string(), "could not be allocated"]);
    let small = Reservoir::memory(1 << 20);
    let device = Cache::builder(geometry).device_pool(bytes).reservoir(small).build(Cpu::new());
    says(&device.map(drop).unwrap_err(), &["device_pool", "could not be allocated"]);
}

#[test]
fn unknown_sequences_are_refused() {
    let mut scene = Scene::new(4, Selection::All, memory());
    let words = ["unknown sequence", "index", "generation", "removed or is another cache's"];
    let mut other = Scene::new(4, Selection::All, memory());
    scene.refuses(&words, |scene| begin_error(&mut scene.cache, &[(other.sequences[0], 1)]));
    scene.refuses(&words, |scene| scene.cache.remove(other.sequences[1]).unwrap_err());
    assert!(scene.cache.tokens(other.sequences[0]).is_err());
    other.advance([1, 1]);
    // A handle that was removed, before and after its place has been taken again.
    let stale = scene.cache.insert();
    scene.cache.remove(stale).unwrap();
    scene.refuses(&words, |scene| begin_error(&mut scene.cache, &[(stale, 1)]));
    scene.cache.insert();
    scene.refuses(&words, |scene| begin_error(&mut scene.cache, &[(scene.sequences[0], 1), (stale, 1)]));
    scene.refuses(&words, |scene| scene.cache.remove(stale).unwrap_err());
}

#[test]
fn batches_that_make_no_sense_are_refused() {
    let mut scene = Scene::new(4, Selection::All, memory());
    let [a, b] = scene.sequences;
    scene.refuses(&["entry 0", "empty"], |scene| begin_error::<Entry>(&mut scene.cache, &[]));
    scene.refuses(&["entry 1", "zero tokens"], |scene| begin_error(&mut scene.cache, &[(a, 1), (b, 0)]));
    scene.refuses(&["entry 2", "already"], |scene| begin_error(&mut scene.cache, &[(a, 1), (b, 2), (a, 1)]));
    for tokens in [usize::MAX, u32::MAX as usize] {
        scene.refuses(&["too long", "2147483647"], |scene| begin_error(&mut scene.cache, &[(a, tokens)]));
    }
}

#[test]
fn calls_out_of_order_and_of_the_wrong_shape_leave_the_step_usable() {
    let mut scene = Scene::new(4, Selection::All, memory());
    let g = geometry();
    let part = Part::new(&scene.worlds[0], scene.sequences[0], 20, 1);
    let tensor = |which, layer| part.world.tensor(which, layer, 20..21);
    let (k, v, q) = (common::Which::Key, common::Which::Value, common::Which::Query);
    let mut out = vec![f32::NAN; g.query_elements(1)];
    let mut step = scene.cache.step(&[part.entry]).unwrap();
    let wrong = |result: Result<(), Error>, words: &[&str]| {
        let error = result.unwrap_err();
        says(&error, words);
        assert!(error.is_refusal());
    };
    wrong(step.attend(0, &tensor(q, 0), &mut out), &["attend for layer 0", "append of layer 0 is next"]);
    wrong(step.append(1, &tensor(k, 0), &tensor(v, 0)), &["append for layer 1", "append of layer 0 is next"]);
    wrong(step.append(usize::MAX, &tensor(k, 0), &tensor(v, 0)), &["append of layer 0 is next", "2 layers"]);
    let (short, long) = (vec![0.0; 63], vec![0.0; 65]);
    wrong(step.append(0, &short, &tensor(v, 0)), &["k has 63", "[tokens, kv_heads, head_dim] is 64"]);
    wrong(step.append(0, &tensor(k, 0), &long), &["v has 65", "is 64"]);
    for layer in 0..2 {
        step.append(layer, &tensor(k, layer), &tensor(v, layer)).unwrap();
        wrong(step.append(layer, &tensor(k, layer), &tensor(v, layer)), &["out of order: append", "attend of layer"]);
        wrong(step.attend(1 - layer, &tensor(q, layer), &mut out), &["out of order: attend", "2 layers"]);
        wrong(step.attend(layer, &short, &mut out), &["q has 63", "[tokens, query_heads, head_dim] is 128"]);
        wrong(step.attend(layer, &tensor(q, layer), &mut vec![0.0; 129]), &["out has 129", "is 128"]);
        let lists = PageLists { offsets: &[0, 0, 0], pages: &[] };
        wrong(step.attend_pages(layer, &tensor(q, layer), lists, &mut out), &["not explicit", "Selection::Explicit"]);
        assert!(out.iter().all(|x| x.is_nan()) || layer > 0, "a refused call has written");
        step.attend(layer, &tensor(q, layer), &mut out).unwrap();
        assert!(error_against_dense(&part, layer, &out, &|_| true) < 1e-5);
        wrong(step.attend(layer, &tensor(q, layer), &mut out), &["out of order: attend", "is next"]);
    }
    wrong(step.append(2, &tensor(k, 0), &tensor(v, 0)), &["append for layer 2", "finish is next"]);
    step.finish().unwrap();
    scene.tokens[0] += 1;
    scene.refuses(&["finish", "append of layer 1 is next"], |scene| {
        let mut step = scene.cache.step(&[(scene.sequences[1], 1)]).unwrap();
        step.append(0, &vec![0.0; 64], &vec![0.0; 64]).unwrap();
        step.finish().unwrap_err()
    });
}

#[test]
fn page_lists_that_make_no_sense_are_refused() {
    let mut scene = Scene::new(4, Selection::Explicit { sink_pages: 1, recent_pages: 0 }, memory());
    let [a, b] = scene.sequences;
    let g = geometry();
    // Four lists: prefill a has two, which must be empty, and decode b has two, of pages 0 and 1.
    let cases: &[(&[u32], &[u32], &[&str])] = &[
        (&[0, 0, 0, 0], &[], &["4 offsets", "kv_heads + 1 is 5"]),
        (&[], &[], &["0 offsets", "is 5"]),
        (&[1, 1, 1, 1, 1], &[0], &["ascend from 0", "1"]),
        (&[0, 0, 2, 1, 2], &[0, 1], &["ascend from 0 to the number of pages, 2"]),
        (&[0, 0, 0, 0, 1], &[0, 1], &["number of pages, 2"]),
        (&[0, 0, 0, 0, 3], &[0, 1], &["number of pages, 2"]),
        (&[0, 0, 0, 0, u32::MAX], &[0, 1], &["number of pages, 2"]),
        (&[0, 0, 0, 1, 2], &[0, 2], &["entry 1", "KV head 1", "page 2", "2 pages"]),
        (&[0, 0, 0, 1, 2], &[u32::MAX, 0], &["entry 1", "KV head 0", "4294967295"]),
        (&[0, 0, 0, 3, 3], &[1, 0, 1], &["entry 1", "KV head 0", "page 1 twice"]),
        (&[0, 1, 1, 1, 1], &[0], &["entry 0", "prefill", "must be empty"]),
    ];
    let mut step = scene.cache.step(&[Entry::prefill(a, 1), Entry::decode(b, 1)]).unwrap();
    let mut out = vec![f32::NAN; g.query_elements(2)];
    let kv = vec![0.5; g.kv_elements(2)];
    step.append(0, &kv, &kv).unwrap();
    let queries = vec![0.5; g.query_elements(2)];
    let error = step.attend(0, &queries, &mut out).unwrap_err();
    says(&error, &["explicit", "attend_pages"]);
    for (offsets, pages, words) in cases {
        let error = step.attend_pages(0, &queries, PageLists { offsets, pages }, &mut out).unwrap_err();
        says(&error, words);
        assert!(error.is_refusal() && out.iter().all(|x| x.is_nan()));
    }
    step.attend_pages(0, &queries, PageLists { offsets: &[0, 0, 0, 2, 3], pages: &[1, 0, 0] }, &mut out).unwrap();
    assert!(out.iter().all(|x| x.is_finite()));
    drop(step);
    scene.check();
}

#[test]
fn nan_passes_through_its_own_sequence_and_touches_no_other() {
    let mut scene = Scene::new(3, Selection::All, memory());
    let g = geometry();
    let poisoned = scene.cache.insert();
    let tokens = 30;
    let mut step = scene.cache.step(&[(poisoned, tokens), (scene.sequences[0], 1)]).unwrap();
    let healthy = Part::new(&scene.worlds[0], scene.sequences[0], 20, 1);
    for layer in 0..2 {
        let tensor = |which, bad: Option<usize>, width: usize| {
            let mut tensor = scene.worlds[1].tensor(which, layer, 0..tokens);
            if let Some(token) = bad {
                tensor[token * width] = f32::NAN;
            }
            tensor.extend(healthy.world.tensor(which, layer, 20..21));
            tensor
        };
        // Token 11 has a key that is not a number in KV head 0; query 5 of head 3 is not one either.
        let (kv, queries) = (g.kv_elements(1), g.query_elements(1));
        let mut q = tensor(common::Which::Query, None, queries);
        q[5 * queries + 3 * g.head_dim()] = f32::NAN;
        let mut out = vec![0.0; g.query_elements(tokens + 1)];
        let (k, v) = (tensor(common::Which::Key, Some(11), kv), tensor(common::Which::Value, None, kv));
        step.append(layer, &k, &v).unwrap();
        step.attend(layer, &q, &mut out).unwrap();
        for (token, rows) in out[..tokens * queries].chunks(queries).enumerate() {
            for (head, row) in rows.chunks(g.head_dim()).enumerate() {
                let spoiled = (head < 2 && token >= 11) || (head == 3 && token == 5);
                assert!(row.iter().all(|x| x.is_nan() == spoiled), "layer {layer}, token {token}, head {head}");
            }
        }
        assert!(error_against_dense(&healthy, layer, &out[tokens * queries..], &|_| true) < 1e-5);
    }
    step.finish().unwrap();
    scene.tokens[0] += 1;
    scene.advance([1, 1]);
    // Its slots serve others when it is gone.
    scene.cache.remove(poisoned).unwrap();
    scene.advance([60, 60]);
    scene.advance([1, 1]);
}
