//! The speed of replays beside plain Python, which counts independently.

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use wakekv::sim::{self, Accounting, Policy, Rule};
use wakekv::table::Phase;
use wakekv::trace::Trace;

/// Demanded pages per second, on the same stream.
#[derive(Clone, Copy, Debug)]
pub struct Speeds {
    pub budget: usize,
    pub pages: u64,
    pub ours: f64,
    pub python: f64,
}

const PEER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/peers/replay.py");

/// Replays a trace by both, and fails when they count differently.
pub fn compare(trace: &Trace, budget: usize, work: &Path) -> Result<Speeds> {
    let path = work.join("stream.json");
    std::fs::write(&path, stream(trace).to_string()).with_context(|| format!("cannot write {}", path.display()))?;
    let output = Command::new("python3").arg(PEER).arg(&path).arg(budget.to_string()).output();
    let output = output.context("cannot run python3, which the replay is compared with")?;
    ensure!(output.status.success(), "replay.py failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    let peer: Value = serde_json::from_slice(&output.stdout).context("replay.py printed no JSON")?;

    let mut seconds = f64::MAX;
    let mut counts = Default::default();
    for _ in 0..5 {
        let started = Instant::now();
        counts = sim::run(trace, Policy::Reactive(Rule::Lru), budget, Accounting::Strict)?.counts();
        seconds = seconds.min(started.elapsed().as_secs_f64());
    }
    let theirs = (peer["hits"].as_u64(), peer["misses"].as_u64());
    ensure!(
        theirs == (Some(counts.hits), Some(counts.misses())),
        "plain Python counts {theirs:?} hits and misses at {budget} pages, the replay {} and {}",
        counts.hits,
        counts.misses()
    );
    let python = peer["pages_per_second"].as_f64().context("replay.py told no speed")?;
    Ok(Speeds { budget, pages: trace.demanded(), ours: trace.demanded() as f64 / seconds, python })
}

fn stream(trace: &Trace) -> Value {
    let shape = trace.shape();
    let marks = trace.marks().iter();
    let marks: Vec<_> = marks.map(|mark| [usize::from(mark.phase == Phase::Decode), mark.start, mark.tokens]).collect();
    let heads: Vec<Vec<&[u32]>> = trace.heads().iter().map(|head| head.demands().collect()).collect();
    json!({
        "page_tokens": shape.page_tokens,
        "sinks": shape.pins.sinks,
        "recent": shape.pins.recent,
        "marks": marks,
        "heads": heads,
    })
}
