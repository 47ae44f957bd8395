//! Whatever the driver refuses, at whichever call: a typed error, and a cache that holds every sequence or says that it cannot.

#[path = "../../common/mod.rs"]
mod common;
mod device;

use common::{Part, World, error_against_dense, run_step};
use device::Device;
use wakekv::{Cache, Cuda, CudaBackend, DType, Error, FetchPath, Geometry, Reservoir, Selection, Sequence};
use wakekv_emulator::Fault;

fn geometry() -> Geometry {
    let shape = Geometry::builder().layers(2).query_heads(2).kv_heads(1).head_dim(64);
    shape.page_tokens(8).dtype(DType::F16).build().unwrap()
}

fn build(cuda: Cuda) -> Result<Cache<CudaBackend>, Error> {
    let builder = Cache::builder(geometry()).pages_per_head(3).selection(Selection::All);
    builder.device_pool(8 * geometry().group_bytes() as u64).reservoir(Reservoir::memory(1 << 18)).build(cuda)
}

/// Steps that prefill past the budget, decode with misses, seal pages and grow tables.
const STEPS: [usize; 5] = [30, 1, 1, 40, 1];

/// Runs a step, and compares it with float64.
fn step(
    cache: &mut Cache<CudaBackend>,
    world: &World,
    sequence: Sequence,
    start: usize,
    tokens: usize,
) -> Result<(), Error> {
    let part = Part::new(world, sequence, start, tokens);
    let (outputs, _) = run_step(cache, &[part])?;
    cache.synchronize()?;
    for (layer, out) in outputs.iter().enumerate() {
        let error = error_against_dense(&part, layer, out, &|_| true);
        assert!(error < 2e-5, "{tokens} tokens at {start}, layer {layer}: off by {error}");
    }
    Ok(())
}

fn is_of(fault: Fault, error: &Error) -> bool {
    match fault {
        Fault::DeviceMemory => matches!(error, Error::OutOfMemory { .. }),
        Fault::PinnedMemory => matches!(error, Error::Pinning { .. } | Error::Cuda { call: "cuMemHostAlloc", .. }),
        Fault::Copy => matches!(error, Error::Cuda { .. }),
        Fault::Launch | Fault::DeviceLost => matches!(error, Error::Cuda { .. } | Error::DeviceLost { .. }),
    }
}

/// Lets the `nth` operation of a kind fail, and returns whether it came to that.
fn fails_once(device: &Device, fault: Fault, nth: usize, path: FetchPath) -> bool {
    let world = World { geometry: geometry(), seed: 9 };
    let cuda = device.cuda().fetch_path(path).staging_pages(4);
    let mut cache = build(cuda).unwrap();
    let sequence = cache.insert();
    let (mut start, mut met) = (0, false);
    device.session.plant(fault, nth);
    for tokens in STEPS {
        let mut result = step(&mut cache, &world, sequence, start, tokens);
        if let Err(error) = &result {
            met = true;
            assert!(is_of(fault, error), "{fault:?} {nth}: {error}");
            assert!(!error.to_string().is_empty());
            // Nothing is left of the step: its next try is right, unless the cache says that nothing works any more.
            result = step(&mut cache, &world, sequence, start, tokens);
        }
        match result {
            Ok(()) => start += tokens,
            Err(error) => {
                let said = matches!(error, Error::DeviceLost { .. } | Error::Cuda { .. });
                assert!(met && said && matches!(fault, Fault::Launch | Fault::DeviceLost), "{fault:?} {nth}: {error}");
                assert!(cache.step(&[(sequence, 1)]).is_err());
                return true;
            }
        }
        assert_eq!(cache.tokens(sequence).unwrap(), start);
        if let Err(what) = cache.check() {
            // The check's own copies have met it.
            met = true;
            assert!(what.contains("CUDA_ERROR"), "{fault:?} {nth}: {what}");
            if fault == Fault::DeviceLost {
                assert!(cache.step(&[(sequence, 1)]).is_err());
                return true;
            }
            cache.check().unwrap();
        }
    }
    met
}

fn at_every_call(fault: Fault) {
    let Some(device) = Device::new() else { return };
    for path in [FetchPath::Gather, FetchPath::Dma] {
        let before = device.session.live_bytes();
        let mut count = 0;
        // The emulator counts operations; the first one that is not reached ends the search. Steps of many launches are sampled.
        let mut nth = 1;
        while fails_once(&device, fault, nth, path) {
            device.session.heal();
            assert_eq!(device.session.live_bytes(), before, "{fault:?} {nth}: memory has been left behind");
            count += 1;
            nth += 1 + nth / 8;
        }
        device.session.heal();
        assert!(count > 0, "{fault:?} was never met");
    }
}

#[test]
fn device_memory_runs_out() {
    at_every_call(Fault::DeviceMemory);
}

#[test]
fn pinned_memory_is_refused() {
    at_every_call(Fault::PinnedMemory);
}

#[test]
fn copies_are_refused() {
    at_every_call(Fault::Copy);
}

#[test]
fn kernels_fail() {
    at_every_call(Fault::Launch);
}

#[test]
fn the_device_is_lost() {
    at_every_call(Fault::DeviceLost);
}

#[test]
fn a_cache_that_cannot_be_built_says_why_and_leaves_nothing_behind() {
    let Some(device) = Device::new() else { return };
    let before = device.session.live_bytes();
    for fault in [Fault::DeviceMemory, Fault::PinnedMemory] {
        let mut nth = 1;
        loop {
            device.session.plant(fault, nth);
            match build(device.cuda()) {
                Ok(_) => break,
                Err(error) => assert!(is_of(fault, &error), "{error}"),
            }
            device.session.heal();
            assert_eq!(device.session.live_bytes(), before, "{fault:?} {nth}");
            nth += 1;
        }
        device.session.heal();
        assert!(nth > 3, "{fault:?} was met {} times only", nth - 1);
    }
}

#[test]
fn a_reservoir_that_cannot_be_pinned_in_the_background_stops_the_step_that_needs_it() {
    let Some(device) = Device::new() else { return };
    let world = World { geometry: geometry(), seed: 9 };
    // The frames' four buffers and the copy engine's one are pinned before the reservoir or beside it; whichever refusal comes,
    // it is typed.
    for nth in 1..12 {
        device.session.plant(Fault::PinnedMemory, nth);
        let built = build(device.cuda().pin_in_background(true));
        let error = match built {
            Err(error) => error,
            Ok(mut cache) => {
                let sequence = cache.insert();
                match step(&mut cache, &world, sequence, 0, 30) {
                    Err(error) => error,
                    Ok(()) => continue,
                }
            }
        };
        assert!(is_of(Fault::PinnedMemory, &error), "{error}");
        device.session.heal();
    }
    device.session.heal();
}
