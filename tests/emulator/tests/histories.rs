//! Random histories of a cache on the emulated device, with the checks of those on the CPU: float64, the naive table, and a cache on the
//! CPU that never evicts. Streams dawdle, and warps run in every order.
//!
//! `WAKEKV_HISTORIES` says how many, `WAKEKV_SEED` where they start.

#[path = "../../properties/case.rs"]
mod case;
#[path = "../../common/mod.rs"]
mod common;
mod device;
#[path = "../../properties/harness.rs"]
mod harness;

use std::time::Duration;

use case::{Case, Place, Wanted};
use common::Rng;
use common::faulty::Handle;
use device::Device;
use harness::Harness;
use wakekv::{Cache, CudaBackend, FetchPath, Reservoir};
use wakekv_emulator::Order;

impl Place for Device {
    type Backend = CudaBackend;
    const TOLERANCE: f64 = 2e-5;
    const TWIN_TOLERANCE: f32 = 2e-5;
    const FORGETS_UNDONE: bool = true;

    fn build(&self, case: &Case) -> (Cache<CudaBackend>, Option<Handle>) {
        let rng = &mut Rng::new(case.seed ^ 0xC0DA);
        let cuda = self.cuda().fetch_path(rng.pick(&[FetchPath::Auto, FetchPath::Gather, FetchPath::Dma]));
        let lanes = 5 * case.geometry.kv_heads();
        let cuda = match case.staging {
            Some(extra) => cuda.staging_pages(lanes * (1 + extra % 3)),
            None => cuda,
        };
        let reservoir = Reservoir::memory(case.bytes() as u64);
        (case.builder().reservoir(reservoir).build(cuda.pin_in_background(rng.chance(30))).unwrap(), None)
    }
}

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).ok().map_or(default, |text| text.parse().expect("a number"))
}

fn histories(wanted: Wanted, default: u64) {
    let Some(device) = Device::new() else { return };
    let first = number("WAKEKV_SEED", 0);
    for seed in first..first + number("WAKEKV_HISTORIES", default) {
        let mut case = Case::random(wanted, seed).on_cuda(&[64, 64, 80]);
        case.operations /= 3;
        device.session.order(Order::ALL[seed as usize % 4]);
        device.session.delay(Duration::from_micros([0, 200, 1000][seed as usize % 3]));
        let live = device.session.live_bytes();
        let run = std::panic::AssertUnwindSafe(|| Harness::new(&case, &device).run());
        if let Err(panic) = std::panic::catch_unwind(run) {
            eprintln!("{}", device.session.last_fault());
            eprintln!("WAKEKV_SEED={seed} WAKEKV_HISTORIES=1 repeats it: {case:#?}");
            std::panic::resume_unwind(panic);
        }
        assert_eq!(device.session.live_bytes(), live, "seed {seed}: memory has been left behind");
    }
}

#[test]
fn everything_read() {
    histories(Wanted::All, 6);
}

#[test]
fn explicit_pages_read() {
    histories(Wanted::Explicit, 6);
}

#[test]
fn top_pages_read() {
    histories(Wanted::TopPages, 6);
}

#[test]
fn large_pages_stream_in_many_waves() {
    histories(Wanted::LargePages, 1);
}
