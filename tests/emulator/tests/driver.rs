//! The emulated driver does what a CUDA driver does, as far as wakekv relies on it.

mod common;

use std::time::Duration;

use common::Gpu;
use cudarc::driver::{result, sys};
use wakekv_emulator::Fault;

/// A copy to the device that is made when its stream gets there.
fn copy_to(stream: &cudarc::driver::CudaStream, to: u64, from: &[u32]) {
    // SAFETY: both ranges are alive until the test has synchronised.
    unsafe { result::memcpy_htod_async(to, from, stream.cu_stream()) }.unwrap();
}

fn pinned_slice(pinned: &common::Pinned<u32>, len: usize) -> &[u32] {
    // SAFETY: the memory is as long as that.
    unsafe { std::slice::from_raw_parts(pinned.ptr() as *const u32, len) }
}

#[test]
fn pinned_sources_are_read_when_the_stream_gets_there() {
    let Some(gpu) = Gpu::new() else { return };
    let (mut pinned, device) = (gpu.pin::<u32>(4), gpu.zeros::<u32>(4));
    pinned.write(0, &[1, 2, 3, 4]);
    let held = gpu.session.hold(gpu.copy.cu_stream());
    copy_to(&gpu.copy, device.ptr(), pinned_slice(&pinned, 4));
    pinned.write(0, &[9]);
    drop(held);
    gpu.synchronize().unwrap();
    assert_eq!(device.read(), [9, 2, 3, 4]);
}

#[test]
fn a_stream_waits_for_an_event_of_another() {
    let Some(gpu) = Gpu::new() else { return };
    let (mut pinned, device) = (gpu.pin::<u32>(1), gpu.zeros::<u32>(1));
    pinned.write(0, &[7]);
    let held = gpu.session.hold(gpu.copy.cu_stream());
    copy_to(&gpu.copy, device.ptr(), pinned_slice(&pinned, 1));
    let copied = gpu.copy.record_event(None).unwrap();
    gpu.compute.wait(&copied).unwrap();
    let done = gpu.compute.record_event(None).unwrap();
    std::thread::sleep(Duration::from_millis(10));
    assert!(!copied.is_complete() && !done.is_complete());
    drop(held);
    done.synchronize().unwrap();
    assert_eq!(device.read(), [7]);
}

#[test]
fn a_captured_step_with_a_fork_and_a_join_runs_again_and_again() {
    let Some(gpu) = Gpu::new() else { return };
    let (mut pinned, device) = (gpu.pin::<u32>(2), gpu.zeros::<u32>(3));
    gpu.compute.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL).unwrap();
    let begun = gpu.compute.record_event(None).unwrap();
    gpu.copy.wait(&begun).unwrap();
    copy_to(&gpu.copy, device.at(1), &pinned_slice(&pinned, 2)[1..]);
    let copied = gpu.copy.record_event(None).unwrap();
    copy_to(&gpu.compute, device.at(0), &pinned_slice(&pinned, 2)[..1]);
    gpu.compute.wait(&copied).unwrap();
    // SAFETY: both are device memory of four bytes.
    unsafe { result::memcpy_dtod_async(device.at(2), device.at(1), 4, gpu.compute.cu_stream()) }.unwrap();
    let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let graph = gpu.compute.end_capture(flags).unwrap().expect("something was captured");
    assert_eq!(device.read(), [0, 0, 0], "capturing runs nothing");
    gpu.session.delay(Duration::from_millis(2));
    for round in 1..4 {
        pinned.write(0, &[round, 10 * round]);
        graph.launch().unwrap();
        gpu.synchronize().unwrap();
        assert_eq!(device.read(), [round, 10 * round, 10 * round]);
    }
}

#[test]
fn a_capture_that_is_not_joined_is_refused() {
    let Some(gpu) = Gpu::new() else { return };
    let (pinned, device) = (gpu.pin::<u32>(1), gpu.zeros::<u32>(1));
    let outside = gpu.copy.record_event(None).unwrap();
    gpu.compute.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL).unwrap();
    assert!(gpu.compute.wait(&outside).is_err(), "an event from outside of the capture");
    assert!(gpu.compute.synchronize().is_err(), "a capturing stream cannot be waited for");
    let begun = gpu.compute.record_event(None).unwrap();
    gpu.copy.wait(&begun).unwrap();
    copy_to(&gpu.copy, device.ptr(), pinned_slice(&pinned, 1));
    // SAFETY: the stream is capturing.
    let ended = unsafe { result::stream::end_capture(gpu.compute.cu_stream()) };
    assert_eq!(ended.unwrap_err().0, sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
}

#[test]
fn planted_failures_come_at_the_nth_operation() {
    let Some(gpu) = Gpu::new() else { return };
    // SAFETY: the size is not zero; what succeeds is freed.
    let allocate = || unsafe { result::malloc_sync(64) }.map(|address| unsafe { result::free_sync(address) }.unwrap());
    // SAFETY: as above.
    let pin = || unsafe { result::malloc_host(64, 0) }.map(|address| unsafe { result::free_host(address) }.unwrap());
    gpu.session.plant(Fault::DeviceMemory, 2);
    assert!(allocate().is_ok() && allocate().is_err() && allocate().is_ok());
    gpu.session.plant(Fault::PinnedMemory, 1);
    assert!(pin().is_err() && pin().is_ok());
    let device = gpu.zeros::<u32>(1);
    gpu.session.plant(Fault::Copy, 1);
    // SAFETY: both are four bytes.
    assert!(unsafe { result::memcpy_htod_sync(device.ptr(), &[1u32]) }.is_err());
    assert_eq!(device.read(), [0], "the copy that failed has not been made");
    gpu.session.plant(Fault::DeviceLost, 1);
    assert!(gpu.compute.synchronize().is_err());
    assert!(allocate().is_err(), "a lost device stays lost");
    assert_eq!(gpu.session.last_fault(), "the device is lost");
}

#[test]
fn a_new_session_finds_a_whole_device() {
    let Some(gpu) = Gpu::new() else { return };
    gpu.session.plant(Fault::DeviceLost, 1);
    assert!(gpu.compute.synchronize().is_err());
    drop(gpu);
    let gpu = Gpu::new().unwrap();
    gpu.synchronize().unwrap();
    assert_eq!(gpu.session.last_fault(), "");
}

#[test]
fn images_whose_parameters_differ_from_the_kernel_are_refused() {
    let Some(gpu) = Gpu::new() else { return };
    let sizes = gpu.session.parameter_sizes(None, "wakekv_grant");
    let ptx = |sizes: &[usize]| {
        let parameters: Vec<_> =
            sizes.iter().enumerate().map(|(i, size)| format!("\t.param .align 4 .b8 p{i}[{size}]")).collect();
        format!(
            ".version 8.0\n.target sm_80\n.visible .entry wakekv_grant(\n{}\n)\n{{ ret; }}\n\0",
            parameters.join(",\n")
        )
    };
    let function = |ptx: String| {
        // SAFETY: the text ends with a zero byte.
        let module = unsafe { result::module::load_data(ptx.as_ptr().cast()) }.unwrap();
        // SAFETY: the module is loaded.
        unsafe { result::module::get_function(module, c"wakekv_grant".into()) }
    };
    assert!(function(ptx(&sizes)).is_ok());
    let mut drifted = sizes.clone();
    *drifted.last_mut().unwrap() += 4;
    assert_eq!(function(ptx(&drifted)).unwrap_err().0, sys::CUresult::CUDA_ERROR_INVALID_IMAGE);
}

#[test]
fn a_kernel_that_gets_freed_memory_breaks_the_context() {
    let Some(gpu) = Gpu::new() else { return };
    let grants = gpu.zeros::<common::layout::WayGrant>(1);
    let address = grants.ptr();
    drop(grants);
    gpu.launch("wakekv_grant", (1, 1, 1), 32, 0, &[&common::layout::Tables::default(), &address, &1u32]);
    let fault = gpu.synchronize().unwrap_err();
    assert!(fault.contains("freed"), "{fault}");
}
