//! Rebuilds docs/results.md and its charts. `cargo run --release --features trace --example results -- --help`

mod evaluation;
mod llm;
mod study;
mod tasks;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use clap::Parser;
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use wakekv::trace::Trace;

use evaluation::attentive::{self, Judged};
use evaluation::page::{self, Findings};
use evaluation::plan::{self, Job, Plan};
use evaluation::regime::Regime;
use evaluation::work::{Bench, Done};
use evaluation::{checks, pace, parallel, peer};
use llm::opened::Opened;
use llm::process;
use tasks::{Frame, Task};

/// Runs a model on tasks, replays what it demanded under every policy, and writes tables and charts.
///
/// It fails when a replay does not count what the live cache counted, when a
/// budget changes what the model writes, or when a policy beats its bound.
#[derive(Debug, Parser)]
#[command(name = "results", version)]
struct Options {
    /// A GGUF file of the architectures llama or qwen2 [default: SmolLM2-135M-Instruct, fetched once]
    #[arg(long, value_name = "PATH")]
    model: Option<PathBuf>,

    /// A few short runs, to see that everything works
    #[arg(long)]
    short: bool,

    /// Runs at a time, each on one thread [default: one per core]
    #[arg(long, value_name = "N")]
    workers: Option<usize>,

    /// Where traces and logs are kept
    #[arg(long, value_name = "FOLDER", default_value = "target/results")]
    work: PathBuf,

    /// Keep the runs that the work folder has already, from an evaluation that was stopped
    #[arg(long)]
    resume: bool,

    /// Begin no more runs after so many minutes: the page says how many there were
    #[arg(long, value_name = "N")]
    minutes: Option<u64>,

    /// Where results.md goes, and a folder of charts beside it [default: docs, or the work folder with --short]
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
}

fn main() -> ExitCode {
    let options = Options::parse();
    // Runs go side by side, so that each has one thread.
    process::main(1, || run(&options))
}

fn run(options: &Options) -> Result<()> {
    let started = Instant::now();
    let workers = options.workers.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    let work = if options.short { options.work.join("short") } else { options.work.clone() };
    std::fs::create_dir_all(&work).with_context(|| format!("cannot create {}", work.display()))?;
    let Opened { name, file, tokenizer, model } = Opened::open(options.model.as_deref())?;
    let frame = Frame { metadata: file.metadata(), tokenizer: &tokenizer };
    let plan = if options.short { plan::short() } else { plan::full() };

    let bench = Bench { model: &model, name: &name, frame, plan: &plan, work: &work, resume: options.resume };
    let until = options.minutes.map(|minutes| started + Duration::from_secs(60 * minutes));
    let runs = make_runs(&bench, workers, until)?;
    let regimes = replay(runs, &plan, workers)?;
    let checked = checks::check(&regimes, &plan.reads)?;
    let out = options.out.clone().unwrap_or_else(|| if options.short { work.clone() } else { PathBuf::from("docs") });
    let mut findings = Findings {
        plan: &plan,
        model: name,
        command: command(options),
        resumed: options.resume,
        workers,
        time: started.elapsed(),
        regimes: &regimes,
        checked,
        attentive: Vec::new(),
        speeds: peer_speeds(&regimes, &plan, &work)?,
        paces: Vec::new(),
    };
    // What is known by now, in case that the rest takes longer than somebody wants to wait.
    page::write(&findings, &out)?;
    findings.attentive = look_at_tensors(&regimes, &plan, workers)?;
    for &context in &plan.pace {
        eprintln!("decoding speed at {context} tokens");
        let script = Task::Prose.script(&frame, context, 0)?;
        findings.paces.extend(pace::measure(&model, &script.context)?);
    }
    findings.time = started.elapsed();
    page::write(&findings, &out)?;
    println!(
        "{} runs, {} exact replays, {} equal texts, {} policies within their bounds; {} written in {:.0} s",
        regimes.iter().map(|regime| regime.runs.len()).sum::<usize>(),
        checked.replays,
        checked.same,
        checked.bounded,
        out.join("results.md").display(),
        started.elapsed().as_secs_f64()
    );
    Ok(())
}

/// How this was called, folders and files left out.
fn command(options: &Options) -> String {
    let mut command = "cargo run ".to_owned();
    command += if cfg!(debug_assertions) { "" } else { "--release " };
    command += "--features trace --example results";
    let number = |flag: &str, value: Option<String>| value.map(|value| format!("{flag} {value}"));
    let flags = [
        options.short.then(|| "--short".to_owned()),
        options.resume.then(|| "--resume".to_owned()),
        number("--workers", options.workers.map(|workers| workers.to_string())),
        number("--minutes", options.minutes.map(|minutes| minutes.to_string())),
    ];
    for (index, flag) in flags.into_iter().flatten().enumerate() {
        command += if index == 0 { " -- " } else { " " };
        command += &flag;
    }
    command
}

/// Every run of the plan, with a line of progress for each that is under way.
fn make_runs(bench: &Bench<'_>, workers: usize, until: Option<Instant>) -> Result<Vec<Done>> {
    let lines = MultiProgress::new();
    let all = lines.add(bar("{msg} {wide_bar} {pos}/{len} {elapsed}", "runs"));
    all.set_length(bench.plan.jobs.len() as u64);
    let runs = parallel(workers, &bench.plan.jobs, |&job: &Job| {
        if until.is_some_and(|until| Instant::now() > until) {
            return bench.kept(job);
        }
        let line = lines.add(bar("  {msg} {elapsed}", ""));
        let name = format!("{} {} seed {}", job.task, job.context, job.seed);
        let done = bench.run(job, |what| line.set_message(format!("{name}: {what}")));
        line.finish_and_clear();
        all.inc(1);
        done.map(Some)
    });
    all.finish_and_clear();
    Ok(runs?.into_iter().flatten().collect())
}

fn bar(template: &str, message: &'static str) -> ProgressBar {
    let bar = ProgressBar::new(0).with_message(message);
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(500));
    bar
}

/// The runs by task, in the order of the tasks.
fn replay(runs: Vec<Done>, plan: &Plan, workers: usize) -> Result<Vec<Regime>> {
    let tasks: Vec<(Task, Vec<Done>)> = Task::ALL
        .into_iter()
        .map(|task| (task, runs.iter().filter(|run| run.job.task == task).cloned().collect::<Vec<_>>()))
        .filter(|(_, runs)| !runs.is_empty())
        .collect();
    let bar = process::progress("replaying");
    bar.set_length(tasks.len() as u64);
    let regimes = parallel(workers, &tasks, |(task, runs)| {
        let regime = Regime::new(*task, runs.clone(), plan);
        bar.inc(1);
        regime
    });
    bar.finish_and_clear();
    regimes
}

/// One run of some tasks under policies that look at queries and keys.
fn look_at_tensors(regimes: &[Regime], plan: &Plan, workers: usize) -> Result<Vec<Judged>> {
    let pairs: Vec<(&Done, &Done)> = plan
        .attentive
        .iter()
        .filter_map(|task| regimes.iter().find(|regime| regime.task == *task))
        .filter_map(|regime| {
            let mut kept = regime.runs.iter().filter(|run| run.job.tensors);
            kept.next().zip(kept.next())
        })
        .collect();
    let bar = process::progress("judging by attention");
    bar.set_length(pairs.len() as u64);
    let judged = parallel(workers, &pairs, |(run, other)| {
        let judged = attentive::compare(run, other, plan);
        bar.inc(1);
        judged
    });
    bar.finish_and_clear();
    Ok(judged?.concat())
}

/// The longest generation through the replay and its peer.
fn peer_speeds(regimes: &[Regime], plan: &Plan, work: &Path) -> Result<Vec<peer::Speeds>> {
    let Some(run) = regimes.iter().flat_map(|regime| &regime.runs).max_by_key(|run| run.decoded) else {
        return Ok(Vec::new());
    };
    let trace = Trace::load(&run.folder)?;
    let budgets = plan.budgets.iter().filter(|&&budget| budget == plan.recorded.1 || budget == 64);
    budgets.map(|&budget| peer::compare(&trace, budget, work)).collect()
}
