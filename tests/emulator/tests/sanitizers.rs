//! What the sanitizers are there for is found. A finding ends the process, so each bug runs in a process of its own.
#![cfg(any(emulator_sanitizer = "address", emulator_sanitizer = "thread"))]

#[cfg(emulator_sanitizer = "thread")]
#[path = "common/attention.rs"]
mod attention;
mod common;

use std::process::Command;

use common::Gpu;
use common::layout::{Tables, WayGrant};

/// Gives each of two heads a way, by one launch per stream; the second waits for the first, or does not.
fn grant(gpu: &Gpu, second_waits: bool) {
    let (slots, pages, stamps) = (gpu.zeros::<u32>(2), gpu.zeros::<u32>(2), gpu.zeros::<u64>(2));
    let heads = gpu.zeros::<common::layout::Head>(1);
    let tables = Tables {
        heads: heads.ptr(),
        slot_of_way: slots.ptr(),
        page_of_way: pages.ptr(),
        stamp_of_way: stamps.ptr(),
        ..Tables::default()
    };
    let grants = [1, 2].map(|ways| gpu.upload(&[WayGrant { way: 1, head: 0, slot: ways, ways, last: 1 }]));
    for (stream, grant) in [&gpu.compute, &gpu.copy].into_iter().zip(&grants) {
        gpu.launch_on(stream, "wakekv_grant", (1, 1, 1), 32, 0, &[&tables, &grant.ptr(), &1u32]).unwrap();
        if second_waits {
            gpu.copy.wait(&stream.record_event(None).unwrap()).unwrap();
        }
    }
    gpu.synchronize().unwrap();
    println!("ended well");
}

/// What this test, run alone with `WAKEKV_BUG`, says on both of its outputs.
fn says(test: &str, bug: &str) -> String {
    let this = std::env::current_exe().unwrap();
    let output = Command::new(this).args(["--exact", test, "--nocapture"]).env("WAKEKV_BUG", bug).output().unwrap();
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

#[test]
#[cfg(emulator_sanitizer = "address")]
fn a_write_behind_an_allocation_is_found() {
    let test = "a_write_behind_an_allocation_is_found";
    match std::env::var("WAKEKV_BUG").as_deref() {
        Ok("none") => grant(&Gpu::new().unwrap(), true),
        Ok(_) => grant(&Gpu::seeded("grant_out_of_bounds").unwrap(), true),
        Err(_) => {
            let (right, wrong) = (says(test, "none"), says(test, "grant_out_of_bounds"));
            assert!(right.contains("ended well") && !right.contains("AddressSanitizer"), "{right}");
            assert!(wrong.contains("AddressSanitizer") && wrong.contains("residency.cu"), "{wrong}");
        }
    }
}

#[test]
#[cfg(emulator_sanitizer = "thread")]
fn a_race_between_streams_is_found() {
    let test = "a_race_between_streams_is_found";
    match std::env::var("WAKEKV_BUG").as_deref() {
        Ok(bug) => grant(&Gpu::new().unwrap(), bug == "none"),
        Err(_) => {
            let (right, wrong) = (says(test, "none"), says(test, "no wait"));
            assert!(right.contains("ended well") && !right.contains("ThreadSanitizer"), "{right}");
            assert!(wrong.contains("data race") && wrong.contains("residency.cu"), "{wrong}");
        }
    }
}

#[test]
#[cfg(emulator_sanitizer = "thread")]
fn a_missing_barrier_is_found() {
    let attend = |gpu: &Gpu| {
        let case = attention::Case {
            stored: common::numbers::DType(common::layout::F16),
            tensor: common::numbers::DType(common::layout::F16),
            dim: 64,
            page_tokens: 16,
            kv_heads: 1,
            group: 4,
            entries: vec![(67, 1)],
            splits: 1,
            waves: 1,
            percent: 100,
            leave_pending: false,
        };
        case.run(gpu, 3).unwrap();
        println!("ended well");
    };
    let test = "a_missing_barrier_is_found";
    match std::env::var("WAKEKV_BUG").as_deref() {
        Ok("none") => attend(&Gpu::new().unwrap()),
        Ok(_) => attend(&Gpu::seeded("attention_missing_barrier").unwrap()),
        Err(_) => {
            let (right, wrong) = (says(test, "none"), says(test, "attention_missing_barrier"));
            assert!(right.contains("ended well") && !right.contains("ThreadSanitizer"), "{right}");
            assert!(wrong.contains("data race") && wrong.contains("attention.cu"), "{wrong}");
        }
    }
}
