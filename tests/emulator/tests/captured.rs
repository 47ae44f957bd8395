//! Captured steps: recorded once, replayed token after token, and equal to steps that are not.

#[path = "../../common/mod.rs"]
mod common;
mod device;
#[path = "../../common/replays.rs"]
mod replays;

use std::time::Duration;

use common::{Rng, World};
use device::Device;
use replays::Scene;
use wakekv::{Cache, CapturedStep, DType, Digest, Error, FetchPath, Geometry, PageLists, Reservoir, Selection};

fn geometry() -> Geometry {
    let shape = Geometry::builder().layers(3).query_heads(4).kv_heads(2).head_dim(64);
    shape.page_tokens(8).dtype(DType::F16).build().unwrap()
}

fn selection() -> Selection {
    Selection::top_pages(3).pinned(1, 1).scored_by(Digest::KeySketch2)
}

fn scene_on(device: &Device, budget: usize, prompt: usize, selection: Selection) -> Scene {
    let builder = || Cache::builder(geometry()).selection(selection).reservoir(Reservoir::memory(4 << 20));
    Scene::new(device.cuda(), builder, budget, prompt, 2e-5)
}

#[test]
fn replays_equal_the_cpu_until_a_sequence_outgrows_them_and_then_say_so() {
    let Some(device) = Device::new() else { return };
    device.session.delay(Duration::from_micros(100));
    let mut scene = scene_on(&device, 6, 50, selection());
    let captured = scene.capture();
    assert_eq!(captured.max_tokens(), 64);
    while scene.position < captured.max_tokens() {
        scene.replay(&captured).unwrap();
        scene.cache.check().unwrap();
    }
    // Page 8 is one too many. The step itself is fine, and can be run call by call or captured anew.
    let before = scene.cache.tokens(scene.sequences[0].0).unwrap();
    let error = scene.replay(&captured).unwrap_err();
    assert!(matches!(&error, Error::Capture { reason } if reason.contains("64 tokens")), "{error}");
    assert_eq!(scene.cache.tokens(scene.sequences[0].0).unwrap(), before);
    let captured = scene.capture();
    for _ in 0..20 {
        scene.replay(&captured).unwrap();
    }
    scene.cache.synchronize().unwrap();
    let decode = scene.cache.stats().counts.decode;
    assert!(decode.misses() > 20 && decode.hits > 500, "{decode:?}");
    assert_eq!(decode.demanded, decode.hits + decode.misses());
}

#[test]
fn calls_and_replays_may_alternate() {
    let Some(device) = Device::new() else { return };
    let mut scene = scene_on(&device, 5, 33, Selection::All);
    let captured = scene.capture();
    let rng = &mut Rng::new(5);
    while scene.position < 60 {
        match rng.below(3) {
            0 => scene.replay(&captured).unwrap(),
            1 => scene.call().unwrap(),
            _ => scene.give_up(&captured).unwrap(),
        }
        scene.cache.check().unwrap();
    }
}

#[test]
fn a_step_that_cannot_be_captured_is_refused_and_goes_on() {
    let Some(device) = Device::new() else { return };
    let mut scene = scene_on(&device, 6, 20, selection());
    let refused = |result: Result<CapturedStep, Error>, words: &str| {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    };
    let sequence = scene.sequences[0].0;
    let mut step = scene.cache.step(&[(sequence, 2)]).unwrap();
    refused(step.capture(|_| Ok(())), "one new token");
    drop(step);
    // Captures of fewer sequences, or from another cache, do not fit.
    let captured = scene.capture();
    let mut other = scene_on(&device, 6, 20, selection());
    let error = other.replay(&captured).unwrap_err();
    assert!(error.to_string().contains("another cache"), "{error}");
    let mut step = scene.cache.step(&[(sequence, 1)]).unwrap();
    // SAFETY: the tensors are the scene's, which does not move them.
    let error = unsafe { step.replay(&captured) }.unwrap_err();
    assert!(error.to_string().contains("2 sequences"), "{error}");
    drop(step);
    scene.replay(&captured).unwrap();

    let explicit = Selection::Explicit { sink_pages: 0, recent_pages: 0 };
    for (cuda, selection, words) in
        [(device.cuda(), explicit, "explicit"), (device.cuda().fetch_path(FetchPath::Dma), selection(), "Dma")]
    {
        let builder = Cache::builder(geometry()).selection(selection).reservoir(Reservoir::memory(1 << 20));
        let mut cache = builder.build(cuda).unwrap();
        let sequence = cache.insert();
        let world = World { geometry: geometry(), seed: 3 };
        common::run_step(&mut cache, &[common::Part::new(&world, sequence, 0, 9)]).unwrap();
        let mut step = cache.step(&[(sequence, 1)]).unwrap();
        refused(step.capture(|_| Ok(())), words);
    }
}

#[test]
fn a_forward_pass_that_fails_or_stops_early_leaves_the_stream_usable() {
    let Some(device) = Device::new() else { return };
    let mut scene = scene_on(&device, 6, 20, selection());
    for failure in 0..3 {
        let (mut step, tensors) = scene.step();
        let error = step
            .capture(|step| match failure {
                0 => Err(Error::StepFailed),
                1 => step.append(0, &tensors.k[0], &tensors.v[0]),
                _ => {
                    step.append(0, &tensors.k[0], &tensors.v[0])?;
                    let lists = PageLists { offsets: &[0; 5], pages: &[] };
                    step.attend_pages(0, &tensors.q[0], lists, &mut tensors.out[0])
                }
            })
            .unwrap_err();
        assert!(!error.to_string().is_empty());
        assert!(matches!(step.finish(), Err(Error::StepFailed)));
    }
    scene.cache.check().unwrap();
    let captured = scene.capture();
    scene.replay(&captured).unwrap();
}

/// A forward pass that panics leaves a stream that does not record any more, and a step that is undone.
#[test]
fn a_forward_pass_that_panics_leaves_the_stream_usable() {
    let Some(device) = Device::new() else { return };
    let mut scene = scene_on(&device, 6, 20, selection());
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let (mut step, tensors) = scene.step();
        let _ = step.capture(|step| {
            step.append(0, &tensors.k[0], &tensors.v[0])?;
            panic!("the engine's own")
        });
    }));
    assert!(panicked.is_err());
    scene.cache.check().unwrap();
    let captured = scene.capture();
    scene.replay(&captured).unwrap();
}

/// Steps of a size that has been seen neither set memory aside nor wait for the device, whether they are called or replayed.
#[test]
fn steady_steps_allocate_pin_and_wait_for_nothing() {
    let Some(device) = Device::new() else { return };
    let mut scene = scene_on(&device, 6, 40, selection());
    let captured = scene.capture();
    // The frames of a step grow when it first seals a page.
    for _ in 0..16 {
        scene.replay(&captured).unwrap();
    }
    let names = [
        "cuMemAlloc_v2",
        "cuMemAllocAsync",
        "cuMemFree_v2",
        "cuMemHostAlloc",
        "cuMemFreeHost",
        "cuStreamSynchronize",
        "cuCtxSynchronize",
        "cuEventCreate",
        "cuModuleLoadData",
    ];
    for replayed in [true, false].into_iter().cycle().take(6) {
        let calls = |device: &Device| names.map(|name| device.session.calls(name));
        scene.fill();
        let before = calls(&device);
        scene.run(replayed.then_some(&captured)).unwrap();
        assert_eq!(calls(&device), before, "replayed: {replayed}, of {names:?}");
        scene.compare();
    }
}
