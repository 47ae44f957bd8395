//! Recorded runs under other policies and budgets. `cargo run --features trace --example simulate -- --help`

#[path = "llm/process.rs"]
mod process;
mod study;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, Result, ensure};
use clap::Parser;
use wakekv::sim::{Accounting, Bandwidths, Split};
use wakekv::table::Pins;
use wakekv::trace::{Lanes, Log, Trace};

use study::behaviour;
use study::chart::{Chart, Lines, Map, Series};
use study::grid::{Cell, Contender, Device, Run, curve, grid};
use study::table::Table;

/// Replays traces under other policies and budgets, and says what each would have held and missed.
///
/// A trace is a folder that `record` has written, or a log of WakeKV (log.npz and meta.json). The runs are added up, so they should be of
/// one model and one kind of work.
#[derive(Debug, Parser)]
#[command(name = "simulate", version)]
struct Options {
    /// Folders of traces
    #[arg(required = true, value_name = "FOLDER")]
    traces: Vec<PathBuf>,

    /// Pages per head
    #[arg(long, value_name = "PAGES", value_delimiter = ',', default_value = "16,24,32,48,64,96")]
    budgets: Vec<usize>,

    /// Another run that the policy `frozen` learns from which heads are unstable [default: each trace learns from the next one; a single
    /// one goes without that policy]
    #[arg(long, value_name = "FOLDER", conflicts_with = "own_split")]
    split: Option<PathBuf>,

    /// Learn the split of `frozen` on the very run that is judged, as the paper does
    #[arg(long)]
    own_split: bool,

    /// Count as the paper's simulator does: a first demand is free, and a head may exceed its budget within a step
    #[arg(long)]
    paper: bool,

    /// Read WakeKV's log even where a folder has a trace as well: demand is what the 64 tokens with the most attention lie in
    #[arg(long)]
    logs: bool,

    /// GB/s from the reservoir to the device. With --attention and --page-bytes, a column says how much of a step's fetches attention
    /// over the hits does not hide, layer by layer
    #[arg(long, value_name = "GB/S", requires_all = ["attention", "page_bytes"], value_parser = speed)]
    link: Option<f64>,

    /// GB/s of keys and values that attention reads on the device
    #[arg(long, value_name = "GB/S", requires = "link", value_parser = speed)]
    attention: Option<f64>,

    /// Bytes of a page of one head: 2 × tokens × channels × bytes of a number
    #[arg(long, value_name = "N", requires = "link", value_parser = clap::value_parser!(u32).range(1..))]
    page_bytes: Option<u32>,

    /// Write simulate.csv and charts into this folder
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
}

impl Options {
    /// What a step's fetches are told against.
    fn device(&self) -> Option<Device> {
        let (fetch, attention) = self.link.zip(self.attention)?;
        Some(Device { page_bytes: self.page_bytes? as usize, bandwidths: Bandwidths { fetch, attention } })
    }
}

fn speed(text: &str) -> Result<f64, String> {
    let speed = text.parse().map_err(|_| "not a number".to_owned())?;
    if f64::is_finite(speed) && speed > 0.0 { Ok(speed) } else { Err("must be more than 0".to_owned()) }
}

fn main() -> ExitCode {
    process::exit(run(&Options::parse()).map(|()| ExitCode::SUCCESS))
}

fn run(options: &Options) -> Result<()> {
    let traces: Vec<Trace> = options.traces.iter().map(|path| load(path, options.logs)).collect::<Result<_>>()?;
    let splits = splits(options, &traces)?;
    let runs: Vec<Run<'_>> =
        traces.iter().enumerate().map(|(index, trace)| Run { trace, split: splits.get(index) }).collect();
    let accounting = if options.paper { Accounting::Paper } else { Accounting::Strict };
    let mut contenders = Contender::all();
    contenders.retain(|contender| !options.paper || contender.has_paper_accounting());
    if splits.is_empty() {
        contenders.retain(|&contender| contender != Contender::Frozen);
        eprintln!("one trace and no --split: frozen is left out");
    }

    let bar = process::progress("replaying");
    bar.set_length((contenders.len() * options.budgets.len()) as u64);
    let cells = grid(&runs, &contenders, &options.budgets, accounting, options.device(), || bar.inc(1))?;
    bar.finish_and_clear();
    let table = table(&cells);
    print!("{}", table.terminal());
    if let Some(folder) = &options.out {
        std::fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
        table.write_csv(&folder.join("simulate.csv"))?;
        draw(folder, &contenders, &cells, &traces)?;
    }
    Ok(())
}

fn load(folder: &Path, logs: bool) -> Result<Trace> {
    let trace = if folder.join("trace.npz").exists() && !logs {
        Trace::load(folder)?
    } else {
        Log::read(folder)?.trace(16, Lanes::Kv, Pins::default())?
    };
    ensure!(!trace.marks().is_empty(), "{} is a trace without steps", folder.display());
    Ok(trace)
}

/// One split per trace, or none at all.
fn splits(options: &Options, traces: &[Trace]) -> Result<Vec<Split>> {
    let learn = |trace: &Trace| Split::learn(trace, Split::SHARE);
    if options.own_split {
        return Ok(traces.iter().map(learn).collect());
    }
    if let Some(path) = &options.split {
        return Ok(vec![learn(&load(path, options.logs)?); traces.len()]);
    }
    let next = |index: usize| learn(&traces[(index + 1) % traces.len()]);
    Ok(if traces.len() > 1 { (0..traces.len()).map(next).collect() } else { Vec::new() })
}

fn table(cells: &[Cell]) -> Table {
    // Logs know what each page's attention is, demands of a cache do not; and not everybody says how fast the device is.
    let (has_mass, has_stall) =
        (cells.iter().any(|cell| cell.missed_mass > 0.0), cells.iter().any(|cell| cell.stall.is_some()));
    let head = [
        "policy",
        "budget",
        "resident/head",
        "peak",
        "demanded",
        "hits",
        "compulsory",
        "capacity",
        "miss rate",
        "churn",
        "refreshed",
    ];
    let more = [(has_mass, "missed mass"), (has_stall, "stall, KiB/step")];
    let more = more.into_iter().filter(|&(shown, _)| shown).map(|(_, name)| name);
    let mut table = Table::new(head.into_iter().chain(more));
    for cell in cells {
        let mut row = vec![
            cell.contender.to_string(),
            cell.budget.to_string(),
            format!("{:.2}", cell.resident),
            format!("{:.2}", cell.peak),
            cell.counts.demanded.to_string(),
            cell.counts.hits.to_string(),
            cell.counts.compulsory.to_string(),
            cell.counts.capacity.to_string(),
            format!("{:.4}", cell.miss_rate()),
            format!("{:.4}", cell.churn),
            cell.refreshed.to_string(),
        ];
        row.extend(has_mass.then(|| format!("{:.4}", cell.missed_mass)));
        row.extend(cell.stall.map(|bytes| format!("{:.1}", bytes / 1024.0)));
        table.row(row);
    }
    table
}

fn draw(folder: &Path, contenders: &[Contender], cells: &[Cell], traces: &[Trace]) -> Result<()> {
    let series = contenders.iter().map(|&contender| Series {
        name: contender.to_string(),
        points: curve(cells, contender).iter().map(|cell| (cell.resident, cell.miss_rate())).collect(),
        bound: contender.is_bound(),
    });
    let lines = Lines {
        title: "Misses against memory".into(),
        x: "resident pages per head".into(),
        y: "misses per demanded page".into(),
        series: series.collect(),
    };
    lines.write(&folder.join("misses"))?;
    const WIDTH: usize = 4;
    for (index, trace) in traces.iter().enumerate() {
        let map = Map {
            title: format!("Turnover of demand, run {index}"),
            x: "decode step".into(),
            y: "head".into(),
            column_width: WIDTH,
            rows: behaviour::turnover(trace, WIDTH),
        };
        map.write(&folder.join(format!("turnover-{index}")))?;
    }
    Ok(())
}
