//! The page that tells what came out: text, tables and charts, all of it made here.

mod attentive;
mod heads;
mod misses;
mod published;
mod quality;
mod rules;
mod summary;

use std::fmt::Write;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use wakekv::sim::Rule;

use super::attentive::Judged;
use super::checks::Checked;
use super::pace::{self, Pace};
use super::peer::Speeds;
use super::plan::Plan;
use super::regime::Regime;
use crate::study::grid::Contender;
use crate::study::table::Table;
use crate::tasks::Measure;

const LRU: Contender = Contender::Reactive(Rule::Lru);

/// Misses per demanded page below which a ratio says nothing: almost everything is resident.
const FEW: f64 = 0.01;

/// Everything there is to tell.
pub struct Findings<'a> {
    pub plan: &'a Plan,
    pub model: String,
    pub command: String,
    /// Whether runs of an earlier call were kept, whose time is not part of `time`.
    pub resumed: bool,
    pub workers: usize,
    pub time: Duration,
    pub regimes: &'a [Regime],
    pub checked: Checked,
    pub attentive: Vec<Judged>,
    pub speeds: Vec<Speeds>,
    pub paces: Vec<Pace>,
}

/// Writes `results.md` into a folder and the charts into `results` beside it.
pub fn write(findings: &Findings<'_>, folder: &Path) -> Result<()> {
    let charts = folder.join("results");
    std::fs::create_dir_all(&charts).with_context(|| format!("cannot create {}", charts.display()))?;
    let mut page = head(findings);
    page += &summary::section(findings);
    page += &quality::section(findings, &charts)?;
    page += &heads::section(findings, &charts)?;
    page += &misses::section(findings, &charts)?;
    page += &rules::section(findings);
    page += &published::section(findings);
    page += &attentive::section(findings);
    page += &speed(findings);
    let path = folder.join("results.md");
    std::fs::write(&path, page).with_context(|| format!("cannot write {}", path.display()))
}

fn head(findings: &Findings<'_>) -> String {
    let Findings { plan, checked, .. } = findings;
    let mut runs = Table::new(["task", "runs", "context tokens", "decoded tokens", "judged by"]);
    for regime in findings.regimes {
        let range = |of: fn(&super::work::Done) -> usize| {
            let numbers = || regime.runs.iter().map(of);
            let (least, most) = (numbers().min().unwrap_or(0), numbers().max().unwrap_or(0));
            if least == most { least.to_string() } else { format!("{least} to {most}") }
        };
        let judged = regime.task.measure().map_or("not judged: demand only", Measure::name);
        runs.row([
            regime.task.to_string(),
            regime.runs.len().to_string(),
            range(|run| run.context),
            range(|run| run.decoded),
            judged.to_owned(),
        ]);
    }
    let (reads, budget) = plan.recorded;
    format!(
        "# Results\n\n\
         Written by `{command}` in {minutes:.0} minutes{resumed} with {workers} runs at a time on {machine}. Nothing here was edited by hand. \
         The model is {model}, its weights at 8 bits in decode, keys and values in f16, pages of 16 tokens. Every run is made from a \
         seed; the context is read exactly and written into every cache that is compared, and everything after it, the question \
         included, is decoded token by token under the policy that is judged.\n\n{runs}\n\
         Each run was also recorded while a live cache decoded at least {least} tokens with {reads} (the first page and the last \
         two among the {pages} that a head reads), each head keeping {budget} pages.\n\n\
         What was checked before this was written: {replays} of {replays} replays count exactly the hits, compulsory and capacity misses, \
         streamed pages and evictions that the live cache counted; {same} of {same} runs wrote the same tokens under the budget and \
         without one; {bounded} policies at a budget missed no less than their bound.\n\n",
        command = findings.command,
        resumed = if findings.resumed { ", runs of an earlier call being kept," } else { "" },
        minutes = (findings.time.as_secs_f64() / 60.0).max(1.0),
        workers = findings.workers,
        machine = machine(),
        model = findings.model,
        runs = runs.markdown(),
        least = plan.least,
        reads = reads.name(),
        pages = reads.pages().unwrap_or(0),
        replays = checked.replays,
        same = checked.same,
        bounded = checked.bounded,
    )
}

fn speed(findings: &Findings<'_>) -> String {
    let mut text = String::new();
    if !findings.speeds.is_empty() {
        text += "## Speed of a replay\n\nThe same recorded stream through the replay and through plain Python \
                 (`benches/peers/replay.py`), which count the same hits and misses. One thread, the best of five, built by the command above.\n\n";
        let mut table =
            Table::new(["budget", "pages replayed", "replay, pages/s", "plain Python, pages/s", "times as fast"]);
        for speed in &findings.speeds {
            table.row([
                speed.budget.to_string(),
                speed.pages.to_string(),
                format!("{:.1} million", speed.ours / 1e6),
                format!("{:.2} million", speed.python / 1e6),
                format!("{:.0}", speed.ours / speed.python),
            ]);
        }
        text += &table.markdown();
        text.push('\n');
    }
    if !findings.paces.is_empty() {
        let _ = write!(
            text,
            "## Speed of decoding\n\nTokens per second on one thread, model included; medians of interleaved rounds, the ratio within \
             a round. Selected pages are read from {} that each head may keep. The paper's strict mode gains 34 % over its stock system \
             on a GPU.\n\n",
            pace::BUDGET
        );
        let mut table = Table::new(["context", "attention", "selected every", "tokens/s", "of dense"]);
        for pace in &findings.paces {
            let (attention, every) = match pace.reads.pages() {
                Some(pages) => (format!("{}, {pages} pages", pace.reads.name()), format!("{} tokens", pace.every)),
                None => ("dense".to_owned(), "–".to_owned()),
            };
            table.row([
                pace.context.to_string(),
                attention,
                every,
                format!("{:.1}", pace.speed),
                format!("{:.2}", pace.ratio),
            ]);
        }
        text += &table.markdown();
    }
    text
}

/// The processor's name and the number of cores, where the system tells.
fn machine() -> String {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name =
        cpu.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": ").map(|(_, name)| name.trim()));
    format!("{cores} cores of {}", name.unwrap_or("an unnamed processor"))
}

/// `97.3 %`.
fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

/// A heading, a chart and nothing else.
fn chart(title: &str, file: &str) -> String {
    format!("![{title}](results/{file})\n\n")
}
