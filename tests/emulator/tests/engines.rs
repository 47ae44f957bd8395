//! The cache beside an engine: on the engine's stream, with its tensors, next to other caches, from several threads.

#[path = "../../common/mod.rs"]
mod common;
mod device;

use std::sync::Arc;
use std::time::Duration;

use common::{Part, Tensors, Which, World, error_against_dense, run_step};
use cudarc::driver::{CudaContext, CudaStream};
use device::Device;
use half::f16;
use wakekv::residency::Rule;
use wakekv::{
    Cache, Cpu, Cuda, CudaBackend, CudaTensor, CudaTensorMut, DType, Digest, Error, FetchPath, Geometry, Reservoir,
    Selection,
};

fn geometry() -> Geometry {
    let shape = Geometry::builder().layers(2).query_heads(4).kv_heads(2).head_dim(64);
    shape.page_tokens(8).dtype(DType::F16).build().unwrap()
}

fn build(cuda: Cuda) -> Cache<CudaBackend> {
    let builder = Cache::builder(geometry()).pages_per_head(3).reservoir(Reservoir::memory(1 << 20));
    builder.build(cuda).unwrap()
}

/// A prompt and some tokens, compared with float64.
fn run<B: Tensors>(cache: &mut Cache<B>, seed: u64) {
    let world = World { geometry: geometry(), seed };
    let (sequence, mut start) = (cache.insert(), 0);
    for tokens in [40, 1, 1, 9, 1] {
        let part = Part::new(&world, sequence, start, tokens);
        let (outputs, _) = run_step(cache, &[part]).unwrap();
        for (layer, out) in outputs.iter().enumerate() {
            let error = error_against_dense(&part, layer, out, &|_| true);
            assert!(error < 2e-5, "seed {seed}, {tokens} tokens at {start}, layer {layer}: off by {error}");
        }
        start += tokens;
    }
    cache.check().unwrap();
}

/// The engine's tensors are freed as soon as the calls return, its stream is slow, and nothing is waited for before the end.
#[test]
fn an_engine_may_free_its_tensors_right_after_the_calls() {
    let Some(device) = Device::new() else { return };
    for path in [FetchPath::Gather, FetchPath::Auto] {
        device.session.delay(Duration::from_micros(300));
        let context = CudaContext::new(0).unwrap();
        let stream = context.new_stream().unwrap();
        let cuda = Cuda::from_stream(stream.clone()).kernel_image(device.session.image()).copy_blocks(2);
        let mut cache = build(cuda.fetch_path(path));
        assert_eq!(**cache.stream(), *stream);
        let world = World { geometry: geometry(), seed: 21 };
        let (sequence, mut start) = (cache.insert(), 0);
        let mut outputs = Vec::new();
        let steps = [50, 1, 1, 1, 20, 1, 1];
        for tokens in steps {
            let mut step = cache.step(&[(sequence, tokens)]).unwrap();
            for layer in 0..2 {
                let tensor = |which| to_device(&stream, &world.tensor(which, layer, start..start + tokens));
                let mut out = to_device(&stream, &vec![f32::NAN; geometry().query_elements(tokens)]);
                step.append(layer, &tensor(Which::Key), &tensor(Which::Value)).unwrap();
                step.attend(layer, &tensor(Which::Query), &mut out).unwrap();
                outputs.push((start, tokens, layer, out));
            }
            step.finish().unwrap();
            start += tokens;
        }
        for (start, tokens, layer, out) in outputs {
            let out: Vec<f32> = stream.clone_dtoh(&out).unwrap().into_iter().map(f16::to_f32).collect();
            let part = Part::new(&world, sequence, start, tokens);
            let error = error_against_dense(&part, layer, &out, &|_| true);
            // The output is rounded to f16.
            assert!(error < 2e-3, "{tokens} tokens at {start}, layer {layer}: off by {error}");
        }
        cache.synchronize().unwrap();
        assert!(cache.stats().counts.decode.misses() > 0);
    }
}

fn to_device(stream: &Arc<CudaStream>, values: &[f32]) -> cudarc::driver::CudaSlice<f16> {
    let values: Vec<f16> = values.iter().copied().map(f16::from_f32).collect();
    stream.clone_htod(&values).unwrap()
}

#[test]
fn caches_on_one_device_do_not_meet_whatever_the_order_of_their_ends() {
    let Some(device) = Device::new() else { return };
    let before = device.session.live_bytes();
    let mut caches: Vec<_> = (0..3).map(|_| build(device.cuda())).collect();
    let last = std::thread::scope(|scope| {
        let run_and_keep = |(index, mut cache): (usize, Cache<CudaBackend>)| {
            move || {
                run(&mut cache, 30 + index as u64);
                (index != 0).then_some(cache)
            }
        };
        let threads: Vec<_> = caches.drain(..).enumerate().map(run_and_keep).map(|work| scope.spawn(work)).collect();
        threads.into_iter().filter_map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    // The first has ended on its thread. The others go on here, and end in the order in which they were made.
    for (index, mut cache) in last.into_iter().enumerate() {
        run(&mut cache, 40 + index as u64);
    }
    assert_eq!(device.session.live_bytes(), before);
}

#[test]
fn a_step_left_halfway_ends_with_its_cache() {
    let Some(device) = Device::new() else { return };
    let before = device.session.live_bytes();
    let mut cache = build(device.cuda());
    run(&mut cache, 50);
    let sequence = cache.insert();
    let world = World { geometry: geometry(), seed: 51 };
    let mut step = cache.step(&[(sequence, 30)]).unwrap();
    let tensor = |which| world.tensor(which, 0, 0..30);
    CudaBackend::append_host(&mut step, 0, &tensor(Which::Key), &tensor(Which::Value)).unwrap();
    std::mem::forget(step);
    drop(cache);
    assert_eq!(device.session.live_bytes(), before);
}

/// A copy stream that does not get on holds up the engine's stream, and never makes it wrong.
#[test]
fn a_copy_stream_that_stands_still_delays_and_spoils_nothing() {
    let Some(device) = Device::new() else { return };
    let mut cache = build(device.cuda());
    let world = World { geometry: geometry(), seed: 60 };
    let sequence = cache.insert();
    run_step(&mut cache, &[Part::new(&world, sequence, 0, 60)]).unwrap();
    let stream = cache.stream().clone();
    // The first steps of a size set memory aside, and free memory waits for all streams.
    for start in 60..65 {
        run_step(&mut cache, &[Part::new(&world, sequence, start, 1)]).unwrap();
    }
    for start in 65..70 {
        // All streams that are not the engine's are held while the whole step is put on them.
        let held = device.session.hold_others(stream.cu_stream());
        let mut step = cache.step(&[(sequence, 1)]).unwrap();
        let mut outputs = Vec::new();
        for layer in 0..2 {
            let tensor = |which| stream.clone_htod(&world.tensor(which, layer, start..start + 1)).unwrap();
            let mut out = stream.clone_htod(&vec![f32::NAN; geometry().query_elements(1)]).unwrap();
            step.append(layer, &tensor(Which::Key), &tensor(Which::Value)).unwrap();
            step.attend(layer, &tensor(Which::Query), &mut out).unwrap();
            outputs.push(out);
        }
        step.finish().unwrap();
        std::thread::sleep(Duration::from_millis(20));
        drop(held);
        for (layer, out) in outputs.iter().enumerate() {
            let part = Part::new(&world, sequence, start, 1);
            let error = error_against_dense(&part, layer, &stream.clone_dtoh(out).unwrap(), &|_| true);
            assert!(error < 2e-5, "token {start}, layer {layer}: off by {error}");
        }
    }
    cache.check().unwrap();
}

#[test]
fn what_the_device_cannot_do_is_refused_by_name() {
    let Some(device) = Device::new() else { return };
    let shape = || Geometry::builder().dtype(DType::F16);
    let refused = |geometry: Geometry, reservoir, cuda: Cuda, words: &[&str]| {
        let error = Cache::builder(geometry).reservoir(reservoir).build(cuda).unwrap_err().to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    };
    let memory = || Reservoir::memory(1 << 20);
    refused(
        shape().head_dim(72).build().unwrap(),
        memory(),
        device.cuda(),
        &["head_dim", "72", "64, 80, 96, 128 and 256"],
    );
    refused(shape().page_tokens(128).build().unwrap(), memory(), device.cuda(), &["page_tokens", "128", "64"]);
    refused(shape().dtype(DType::F32).build().unwrap(), memory(), device.cuda(), &["dtype", "f32", "f16 or bf16"]);
    let file = Reservoir::file("never-made", 1 << 20);
    refused(shape().build().unwrap(), file, device.cuda(), &["reservoir", "Reservoir::memory"]);
    refused(shape().build().unwrap(), memory(), device.cuda().copy_blocks(0), &["copy_blocks", "0"]);
    refused(shape().build().unwrap(), memory(), device.cuda().numa_node(4000), &["numa_node", "4000"]);
    refused(shape().build().unwrap(), memory(), Cuda::new(7), &["no device 7"]);
    refused(shape().build().unwrap(), memory(), Cuda::new(0).kernel_image("not an image"), &["image"]);
    let sieve = Cache::builder(geometry()).reservoir(memory()).replacement(Rule::Sieve).build(device.cuda());
    let error = sieve.unwrap_err().to_string();
    assert!(["replacement", "sieve", "lru"].iter().all(|word| error.contains(word)), "{error}");
    let mut few = build(device.cuda().staging_pages(1));
    let sequence = few.insert();
    let error = few.step(&[(sequence, 60)]).map(drop).unwrap_err().to_string();
    assert!(error.contains("staging_pages") && error.contains("needs 2"), "{error}");
}

/// Shared memory bounds how many query heads a KV head scores pages for, and how many waves a step has. What the refusal says would fit does.
#[test]
fn what_shared_memory_cannot_hold_is_refused_by_name() {
    let Some(device) = Device::new() else { return };
    device.session.shared_memory(48 << 10);
    let shape = || Geometry::builder().page_tokens(8).dtype(DType::F16);
    let says = |error: &Error, words: &[&str]| {
        assert!(error.is_refusal() && words.iter().all(|word| error.to_string().contains(word)), "{error}");
    };

    let scoring = |query_heads| {
        let builder = Cache::builder(shape().query_heads(query_heads).head_dim(256).build().unwrap());
        builder.selection(Selection::top_pages(2).scored_by(Digest::MinMax)).reservoir(Reservoir::memory(1 << 20))
    };
    let error = scoring(41).build(device.cuda()).unwrap_err();
    says(&error, &["query_heads is 41", "can have 40", "50176 bytes", "at most 49152"]);
    let mut cache = scoring(40).build(device.cuda()).unwrap();
    let mut twin = scoring(40).build(Cpu::new().threads(1)).unwrap();
    let world = World { geometry: *cache.geometry(), seed: 8 };
    let (sequence, twins) = (cache.insert(), twin.insert());
    for (start, tokens) in [(0, 70), (70, 1)] {
        let (outputs, _) = run_step(&mut cache, &[Part::new(&world, sequence, start, tokens)]).unwrap();
        let (expected, _) = run_step(&mut twin, &[Part::new(&world, twins, start, tokens)]).unwrap();
        assert!(outputs[0].iter().zip(&expected[0]).all(|(got, expected)| (got - expected).abs() < 2e-5));
    }
    device.session.shared_memory(0);
    scoring(41).build(device.cuda()).unwrap();

    device.session.shared_memory(48 << 10);
    let streaming = |pages| {
        let geometry = shape().head_dim(64).build().unwrap();
        let builder = Cache::builder(geometry).pages_per_head(3).reservoir(Reservoir::memory(32 << 20));
        builder.build(device.cuda().staging_pages(pages)).unwrap()
    };
    let mut cache = streaming(1);
    let sequence = cache.insert();
    // A word for each wave, beside 80 bytes; the first two waves are those over the ways.
    let most = 3 + (48 * 1024 - 80) / 4 - 2;
    cache.step(&[(sequence, 8 * most)]).map(drop).unwrap();
    let error = cache.step(&[(sequence, 8 * most + 1)]).map(drop).unwrap_err();
    says(&error, &["staging_pages is 1", "needs 2 at least", "pages_per_head", "49156 bytes", "at most 49152"]);
    cache.check().unwrap();
    assert_eq!(cache.tokens(sequence).unwrap(), 0);
    cache.step(&[(sequence, 20)]).map(drop).unwrap();
    let mut cache = streaming(2);
    let sequence = cache.insert();
    cache.step(&[(sequence, 8 * most + 1)]).map(drop).unwrap();
}

/// The cache could not order its work with that of the engine.
#[test]
fn streams_that_cannot_be_ordered_are_refused() {
    let Some(device) = Device::new() else { return };
    let context = CudaContext::new(0).unwrap();
    let each_thread = Cuda::from_stream(context.per_thread_stream()).kernel_image(device.session.image());
    let builder = Cache::builder(geometry()).reservoir(Reservoir::memory(1 << 20));
    let error = builder.build(each_thread).unwrap_err().to_string();
    assert!(error.contains("per-thread"), "{error}");
    let mut cache = build(device.cuda());
    let sequence = cache.insert();
    let elsewhere = context.new_stream().unwrap().alloc_zeros::<f32>(128).unwrap();
    let mut step = cache.step(&[(sequence, 1)]).unwrap();
    let error = step.append(0, &elsewhere, &elsewhere).unwrap_err().to_string();
    assert!(error.contains("Cache::stream()") && error.contains("from_stream"), "{error}");
    drop(step);
    run(&mut cache, 62);
}

#[test]
fn tensors_that_do_not_fit_fail_the_step_and_nothing_else() {
    let Some(device) = Device::new() else { return };
    let mut cache = build(device.cuda());
    let stream = cache.stream().clone();
    let sequence = cache.insert();
    let long = stream.alloc_zeros::<f32>(1000).unwrap();
    let halves = stream.alloc_zeros::<f16>(128).unwrap();
    let right = stream.alloc_zeros::<f32>(128).unwrap();
    let mut step = cache.step(&[(sequence, 1)]).unwrap();
    let error = step.append(0, &long, &right).unwrap_err();
    assert!(matches!(error, Error::Shape { tensor: "k", expected: 128, got: 1000, .. }), "{error}");
    let error = step.append(0, &right, &halves).unwrap_err();
    assert!(error.to_string().contains("dtype of k, f32"), "{error}");
    assert!(matches!(step.finish(), Err(Error::StepFailed)));
    let mut step = cache.step(&[(sequence, 1)]).unwrap();
    let view = long.slice(1..129);
    let error = step.append(0, &view, &right).unwrap_err();
    assert!(matches!(error, Error::Alignment { tensor: "k", bytes: 16, .. }) && !error.is_refusal(), "{error}");
    drop(step);
    run(&mut cache, 61);
}

/// An engine without cudarc's slices gives addresses.
#[test]
fn raw_addresses_do_as_well() {
    let Some(device) = Device::new() else { return };
    let mut cache = build(device.cuda());
    let stream = cache.stream().clone();
    let world = World { geometry: geometry(), seed: 70 };
    let sequence = cache.insert();
    let mut step = cache.step(&[(sequence, 20)]).unwrap();
    for layer in 0..2 {
        use cudarc::driver::DevicePtr;
        let [k, v, q] = [Which::Key, Which::Value, Which::Query]
            .map(|which| stream.clone_htod(&world.tensor(which, layer, 0..20)).unwrap());
        let out = stream.clone_htod(&vec![f32::NAN; q.len()]).unwrap();
        let address = |slice: &cudarc::driver::CudaSlice<f32>| slice.device_ptr(&stream).0;
        // SAFETY: the slices live until the stream has been waited for, below.
        unsafe {
            let tensor =
                |slice: &cudarc::driver::CudaSlice<f32>| CudaTensor::from_raw(address(slice), slice.len(), DType::F32);
            step.append(layer, tensor(&k), tensor(&v)).unwrap();
            step.attend(layer, tensor(&q), CudaTensorMut::from_raw(address(&out), out.len(), DType::F32)).unwrap();
        }
        let part = Part::new(&world, sequence, 0, 20);
        let error = error_against_dense(&part, layer, &stream.clone_dtoh(&out).unwrap(), &|_| true);
        assert!(error < 2e-5, "layer {layer}: off by {error}");
    }
    step.finish().unwrap();
}

#[test]
fn calibration_measures_every_count_and_leaves_pages_alone() {
    let Some(device) = Device::new() else { return };
    let builder = Cache::builder(Geometry::builder().head_dim(256).page_tokens(64).build().unwrap());
    let mut cache = builder.reservoir(Reservoir::memory(1 << 20)).build(device.cuda()).unwrap();
    let calibration = cache.calibrate().unwrap();
    let pages: Vec<usize> = calibration.measured.iter().map(|at| at.pages).collect();
    assert_eq!(pages, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]);
    for at in &calibration.measured {
        let times = [at.gather_us, at.dma_us, at.mirror_us, at.mirror_dma_us];
        assert!(times.iter().all(|time| time.is_finite() && *time > 0.0), "{at:?}");
    }
    let mut cache = build(device.cuda());
    run(&mut cache, 80);
    cache.calibrate().unwrap();
    run(&mut cache, 81);
}

/// Sequences come, grow and go, so that tables are moved and their places used again; a cache on the CPU does the same.
#[test]
fn tables_move_as_sequences_grow_and_go() {
    let Some(device) = Device::new() else { return };
    let selection = Selection::top_pages(2);
    let builder =
        || Cache::builder(geometry()).pages_per_head(6).selection(selection).reservoir(Reservoir::memory(4 << 20));
    let mut cache = builder().build(device.cuda()).unwrap();
    let mut twin = builder().build(Cpu::new().threads(1)).unwrap();
    let rng = &mut common::Rng::new(90);
    let mut live = Vec::new();
    for round in 0..20 {
        if live.len() < 4 && rng.chance(50) || live.is_empty() {
            live.push((cache.insert(), twin.insert(), World { geometry: geometry(), seed: 900 + round }, 0));
        }
        let tokens = [1, 1, 5, 70][rng.below(4)];
        let index = rng.below(live.len());
        let (sequence, other, world, start) = &mut live[index];
        let (got, _) = run_step(&mut cache, &[Part::new(world, *sequence, *start, tokens)]).unwrap();
        let (expected, _) = run_step(&mut twin, &[Part::new(world, *other, *start, tokens)]).unwrap();
        for (got, expected) in got.iter().flatten().zip(expected.iter().flatten()) {
            assert!((got - expected).abs() < 2e-5, "round {round}: {got}, not {expected}");
        }
        *start += tokens;
        cache.check().unwrap();
        if rng.chance(20) {
            let (sequence, other, ..) = live.swap_remove(rng.below(live.len()));
            cache.remove(sequence).unwrap();
            twin.remove(other).unwrap();
        }
    }
    cache.synchronize().unwrap();
    assert_eq!(cache.stats().counts, twin.stats().counts);
    assert_eq!(cache.occupancy(), twin.occupancy());
}
