//! Random histories of a cache, checked after every operation against float64 attention, against the naive table, and against a cache
//! that never evicts and never fails.
//!
//! `WAKEKV_HISTORIES` says how many, `WAKEKV_SEED` where they start.

#[path = "../common/mod.rs"]
mod common;

mod case;
mod harness;

use case::{Case, Place, Wanted};
use common::faulty::Handle;
use harness::Harness;
use wakekv::{Cache, Cpu, CpuBackend};

struct OnCpu;

impl Place for OnCpu {
    type Backend = CpuBackend;
    const TOLERANCE: f64 = 1e-5;
    const TWIN_TOLERANCE: f32 = 0.0;
    const FORGETS_UNDONE: bool = false;

    fn build(&self, case: &Case) -> (Cache, Option<Handle>) {
        let (handle, reservoir) = case.reservoir();
        let cpu = Cpu::new().threads(case.threads).queue_depth(128);
        let cpu = match case.staging {
            Some(pages) => cpu.staging_pages(pages),
            None => cpu,
        };
        (case.builder().reservoir(reservoir).build(cpu).unwrap(), handle)
    }
}

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).ok().map_or(default, |text| text.parse().expect("a number"))
}

fn histories(wanted: Wanted, default: u64) {
    let first = number("WAKEKV_SEED", 0);
    for seed in first..first + number("WAKEKV_HISTORIES", default) {
        let case = Case::random(wanted, seed);
        let run = std::panic::AssertUnwindSafe(|| Harness::new(&case, &OnCpu).run());
        if let Err(panic) = std::panic::catch_unwind(run) {
            eprintln!("WAKEKV_SEED={seed} WAKEKV_HISTORIES=1 repeats it: {case:#?}");
            std::panic::resume_unwind(panic);
        }
    }
}

#[test]
fn everything_read() {
    histories(Wanted::All, 400);
}

#[test]
fn explicit_pages_read() {
    histories(Wanted::Explicit, 400);
}

#[test]
fn top_pages_read() {
    histories(Wanted::TopPages, 400);
}

#[test]
fn large_pages_stream_in_many_waves() {
    histories(Wanted::LargePages, 30);
}
