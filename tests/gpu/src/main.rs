//! Checks and measures wakekv on a CUDA device. `wakekv-gpu --help` says how; docs/measured.md says what for.

mod correct;
mod measure;
mod report;

#[path = "../../properties/case.rs"]
mod case;
#[path = "../../common/mod.rs"]
mod common;
#[path = "../../properties/harness.rs"]
mod harness;
#[path = "../../common/replays.rs"]
mod replays;
#[path = "../../../benches/common/cuda/mod.rs"]
mod scenes;
#[path = "../../common/cuda.rs"]
mod tensors;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, ValueEnum};
use correct::Device;
use measure::Plan;
use report::Report;
use wakekv::Cuda;

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum What {
    /// Compares the device with float64 and with the CPU.
    Correct,
    /// Measures bandwidths and the latency of steps.
    Measure,
    /// Both.
    All,
}

/// Checks and measures wakekv on a CUDA device.
#[derive(Parser)]
struct Options {
    #[arg(value_enum, default_value = "all")]
    what: What,
    /// The device's number.
    #[arg(long, default_value_t = 0)]
    device: usize,
    /// Writes gpu.json and gpu.txt into this folder.
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
    /// A module image with all kernels instead of the built-in ones.
    #[arg(long, value_name = "FILE")]
    kernel_image: Option<PathBuf>,
    /// The sizes for a device that is emulated.
    #[arg(long)]
    tiny: bool,
    /// Layers of the measured steps; each takes half a GiB of pinned host memory.
    #[arg(long, default_value_t = 8)]
    layers: usize,
    /// Where random cases start.
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Whether everything was right.
fn run(options: &Options) -> anyhow::Result<bool> {
    let mut cuda = Cuda::new(options.device);
    if let Some(file) = &options.kernel_image {
        cuda = cuda.kernel_image(std::fs::read(file)?);
    }
    if options.tiny {
        // Every block takes an emulated device its time, with or without work.
        cuda = cuda.copy_blocks(2);
    }
    let mut report = Report::default();
    measure::describe(&cuda, &mut report).map_err(anyhow::Error::from_boxed)?;
    if options.what != What::Measure {
        let device = Device { cuda: cuda.clone(), emulated: options.tiny, seed: options.seed };
        report.heading("Correctness");
        let verdicts = correct::run(&device, |verdict| report.verdict(verdict));
        report.failed |= verdicts.iter().any(|verdict| verdict.result.is_err());
    }
    if options.what != What::Correct {
        let plan = if options.tiny { Plan::tiny() } else { Plan::full(options.layers) };
        if let Err(error) = measure::run(&cuda, &plan, &mut report) {
            report.failure(&error.to_string());
        }
    }
    if let Some(folder) = &options.out {
        report.write(folder)?;
    }
    Ok(!report.failed)
}
