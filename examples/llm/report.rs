//! What a run did, as a table for people and as JSON for programs.

use std::fmt::Write;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use wakekv::Counts;

use super::cached::Tally;
use super::engine::{Ending, Generated, Phase};
use super::linear::Weights;
use super::options::{Options, Place};

/// Everything there is to say about a finished run.
pub struct Summary<'a> {
    pub options: &'a Options,
    pub model: &'a Path,
    pub prompt_tokens: usize,
    pub generated: &'a Generated,
    pub text: &'a str,
    pub load: Duration,
    pub prefill: &'a Tally,
    pub decode: &'a Tally,
    pub reservoir_bytes: u64,
}

impl Summary<'_> {
    /// One object: settings, what came out, and what it took.
    pub fn json(&self) -> Value {
        let o = self.options;
        let budget = (o.budget > 0).then_some(o.budget);
        json!({
            "model": self.model.display().to_string(),
            "settings": {
                "budget": budget,
                "page_tokens": o.page_tokens,
                "selection": o.selection.to_string(),
                "sinks": o.sinks,
                "recent": o.recent,
                "stickiness": o.stickiness,
                "replacement": o.replacement.to_string(),
                "reservoir": o.reservoir.to_string(),
                "reservoir_bytes": self.reservoir_bytes,
                "dtype": o.dtype.to_string(),
                "backend": match o.backend { Place::Cpu => "cpu".into(), Place::Cuda(ordinal) => format!("cuda:{ordinal}") },
                "threads": o.threads(),
                "chunk": o.chunk,
                "weights": match o.weights { Weights::Fast => "fast", Weights::F32 => "f32" },
                "temperature": o.temperature,
                "seed": o.seed,
            },
            "prompt_tokens": self.prompt_tokens,
            "ids": self.generated.ids,
            "text": self.text,
            "ending": match self.generated.ending { Ending::Stop => "stop", Ending::Length => "length" },
            "report": {
                "prefill": phase(self.generated.prefill, self.prefill),
                "decode": phase(self.generated.decode, self.decode),
            },
            "load_seconds": self.load.as_secs_f64(),
            "peak_memory_bytes": peak_memory(),
        })
    }

    /// Prefill beside decode.
    pub fn table(&self) -> String {
        let (prefill, decode) = (self.prefill, self.decode);
        let generated = self.generated;
        let mut table = String::new();
        let mut row = |what: &str, prefill: String, decode: String| {
            // Writing to a string does not fail.
            let _ = writeln!(table, "{what:<22}{prefill:>14}{decode:>14}");
        };
        let mut count = |what: &str, number: fn(&Counts) -> u64| {
            row(what, number(&prefill.counts).to_string(), number(&decode.counts).to_string());
        };
        count("pages demanded", |counts| counts.demanded);
        count("  hits", |counts| counts.hits);
        count("  compulsory misses", |counts| counts.compulsory);
        count("  capacity misses", |counts| counts.capacity);
        count("  not admitted", |counts| counts.overflow);
        count("evictions", |counts| counts.evictions);
        row("fetched", bytes(prefill.counts.fetched_bytes), bytes(decode.counts.fetched_bytes));
        row("mirrored", bytes(prefill.counts.mirrored_bytes), bytes(decode.counts.mirrored_bytes));
        row("stalled", seconds(prefill.stall), seconds(decode.stall));
        row("tokens", generated.prefill.tokens.to_string(), generated.decode.tokens.to_string());
        row("time", seconds(generated.prefill.time), seconds(generated.decode.time));
        let speed = |phase: Phase| format!("{:.1}", phase.speed());
        row("tokens/s", speed(generated.prefill), speed(generated.decode));
        let peak = peak_memory().map_or(String::new(), |peak| format!(", peak memory {}", bytes(peak)));
        let reservoir = bytes(self.reservoir_bytes);
        format!("\n{:<22}{:>14}{:>14}\n{table}reservoir {reservoir}{peak}\n", "", "prefill", "decode")
    }
}

fn phase(phase: Phase, tally: &Tally) -> Value {
    let counts = &tally.counts;
    json!({
        "tokens": phase.tokens,
        "seconds": phase.time.as_secs_f64(),
        "tokens_per_second": phase.speed(),
        "steps": tally.steps,
        "demanded": counts.demanded,
        "hits": counts.hits,
        "compulsory_misses": counts.compulsory,
        "capacity_misses": counts.capacity,
        "not_admitted": counts.overflow,
        "evictions": counts.evictions,
        "fetched_bytes": counts.fetched_bytes,
        "mirrored_bytes": counts.mirrored_bytes,
        "stall_seconds": tally.stall.as_secs_f64(),
    })
}

/// The most memory the process has held at once, where the system tells.
pub fn peak_memory() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kilobytes| kilobytes * 1024)
}

fn bytes(bytes: u64) -> String {
    let mut amount = bytes as f64;
    for unit in ["B", "KiB", "MiB", "GiB"] {
        if amount < 1024.0 {
            return if unit == "B" { format!("{bytes} B") } else { format!("{amount:.1} {unit}") };
        }
        amount /= 1024.0;
    }
    format!("{amount:.1} TiB")
}

fn seconds(time: Duration) -> String {
    format!("{:.3} s", time.as_secs_f64())
}
