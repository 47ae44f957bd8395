//! Records what the heads of a model demand. `cargo run --features trace --example record -- --help`

mod llm;
mod tasks;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail, ensure};
use clap::Parser;
use wakekv::Digest;

use llm::model::Model;
use llm::opened::Opened;
use llm::process::{self, progress};
use llm::tokenizer::Tokenizer;
use tasks::context::Context;
use tasks::record::record;
use tasks::run::{Answer, Decoding, PINNED, Reads};
use tasks::{Frame, Measure, Rest, Script, Task};

/// Runs a model on a task or a prompt while a live cache decodes, and keeps what every head demanded, hit and missed.
///
/// Each run becomes a folder with trace.npz and trace.json, which `simulate` replays under other policies. The prompt is read exactly
/// and does not count; what is recorded is decoded token by token.
#[derive(Debug, Parser)]
#[command(name = "record", version)]
struct Options {
    /// A GGUF file of the architectures llama or qwen2 [default: SmolLM2-135M-Instruct, fetched once]
    #[arg(long, value_name = "PATH")]
    model: Option<PathBuf>,

    /// needle, distractors, turns, chain, story, copy or prose
    #[arg(long, value_name = "NAME", required_unless_present = "prompt_file", conflicts_with = "prompt_file")]
    task: Option<Task>,

    /// A file with a text for the model to continue, instead of a task
    #[arg(long, value_name = "FILE")]
    prompt_file: Option<PathBuf>,

    /// Tokens of a task's context
    #[arg(long, value_name = "N", default_value_t = 2048)]
    context: usize,

    /// The first seed; a run per seed
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,

    /// Runs
    #[arg(long, value_name = "N", default_value_t = 1)]
    runs: u64,

    /// Decode at least so many tokens: the model writes on when a task is done
    #[arg(long, value_name = "N", default_value_t = 128)]
    tokens: usize,

    /// Pages that a head reads per token, the first and the last two included; 0 reads all
    #[arg(long, value_name = "PAGES", default_value_t = 16)]
    reads: usize,

    /// What pages are scored by: sketch (2-bit keys) or minmax
    #[arg(long, value_name = "NAME", default_value = "sketch", value_parser = digest)]
    digest: Digest,

    /// Pages that each head may keep on the device
    #[arg(long, value_name = "PAGES", default_value_t = 32)]
    budget: usize,

    /// Also write log.npz and meta.json, WakeKV's log: the 64 tokens that each query head attended to most
    #[arg(long)]
    attention: bool,

    /// Also write tensors.npz: queries, keys and values, from which policies that look at attention can be judged
    #[arg(long)]
    tensors: bool,

    /// The folder that the runs' folders go into
    #[arg(long, value_name = "FOLDER", default_value = "traces")]
    out: PathBuf,
}

fn main() -> ExitCode {
    let options = Options::parse();
    process::main(1, || run(&options))
}

fn run(options: &Options) -> Result<()> {
    ensure!(
        options.reads == 0 || options.reads > PINNED,
        "--reads must be 0 or above the {PINNED} pages that are always read"
    );
    let Opened { file, tokenizer, model, .. } = Opened::open(options.model.as_deref())?;
    let frame = Frame { metadata: file.metadata(), tokenizer: &tokenizer };
    for seed in options.seed..options.seed + options.runs {
        let script = script(options, &frame, seed)?;
        let name = options.task.map_or("prompt", Task::name);
        let folder = options.out.join(format!("{name}-{}-{seed}", script.context.len()));
        one(options, &model, &tokenizer, &script, seed, &folder)?;
    }
    Ok(())
}

fn script(options: &Options, frame: &Frame<'_>, seed: u64) -> Result<Script> {
    match (options.task, &options.prompt_file) {
        (Some(task), _) => task.script(frame, options.context, seed),
        (None, Some(path)) => {
            let text = std::fs::read_to_string(path)
                .with_context(|| format!("cannot read the prompt file {}", path.display()))?;
            let mut context = frame.tokenizer.encode(&text)?;
            let question = context.pop().into_iter().collect();
            ensure!(!context.is_empty(), "the prompt has fewer than two tokens");
            let rest = Rest::Write { tokens: options.tokens, temperature: 0.0, answers: Vec::new() };
            Ok(Script { context, question, rest })
        }
        (None, None) => bail!("neither --task nor --prompt-file"),
    }
}

fn one(
    options: &Options,
    model: &Model,
    tokenizer: &Tokenizer,
    script: &Script,
    seed: u64,
    folder: &Path,
) -> Result<()> {
    let decoding = Decoding { model, tokenizer, seed, least: options.tokens };
    let (tokens, room) = (script.context.len(), decoding.room(script));
    let most = model.config().context;
    ensure!(tokens + room <= most, "{tokens} tokens of context and {room} decoded exceed the model's {most}");
    let reading = progress(format!("{}: reading", folder.display()));
    reading.set_length(tokens as u64);
    let context = Context::read(model, &script.context, |done| reading.set_position(done as u64))?;
    reading.finish_and_clear();

    let reads = if options.reads == 0 { Reads::Full } else { Reads::Digest(options.digest, options.reads) };
    let writing = progress(format!("{}: decoding", folder.display()));
    writing.set_length(room as u64);
    let recording = record(decoding, &context, script, (reads, options.budget), || writing.inc(1))?;
    writing.finish_and_clear();
    recording.trace.save(folder)?;
    if options.attention {
        recording.log(&decoding)?.write(folder)?;
    }
    if options.tensors {
        recording.tensors.save(folder.join("tensors.npz"))?;
    }
    let live = recording.live;
    println!(
        "{}: {tokens} tokens read, {} decoded; {} pages demanded, {} hits, {} compulsory and {} capacity misses{}",
        folder.display(),
        recording.trace.marks().len() - 1,
        live.demanded,
        live.hits,
        live.compulsory,
        live.capacity,
        options.task.and_then(Task::measure).map_or(String::new(), |measure| judged(&recording.answer, measure))
    );
    Ok(())
}

fn judged(answer: &Answer, measure: Measure) -> String {
    let value = answer.score(measure).value(measure);
    format!("; {} {value:.3}", measure.name())
}

fn digest(text: &str) -> Result<Digest, String> {
    match text {
        "sketch" => Ok(Digest::KeySketch2),
        "minmax" => Ok(Digest::MinMax),
        _ => Err("neither sketch nor minmax".to_owned()),
    }
}
