//! Which summary of a page finds the pages that a head reads? `cargo run --release --features trace --example digests -- --help`

#[path = "../llm/mod.rs"]
mod llm;
#[path = "../tasks/mod.rs"]
mod tasks;

mod basis;
mod candidate;
mod chosen;
mod judge;
mod pages;
mod quality;
mod recording;
mod sketch;
mod study;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

use llm::opened::Opened;
use llm::process;
use tasks::Frame;

/// Compares page digests: by the pages that they find, and by what a model does with these.
#[derive(Parser)]
#[command(name = "digests", version)]
struct Options {
    /// A GGUF file of the architectures llama or qwen2 [default: SmolLM2-135M-Instruct, fetched once]
    #[arg(long, value_name = "PATH", global = true)]
    model: Option<PathBuf>,
    /// Write the table here too
    #[arg(long, value_name = "FILE", global = true)]
    csv: Option<PathBuf>,
    /// Only candidates whose name contains one of these
    #[arg(long, value_name = "TEXT", global = true)]
    only: Vec<String>,
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Records queries and keys, and counts the pages and the attention that each candidate finds
    Pages(study::Pages),
    /// Lets a model work with the pages that each candidate finds
    Tasks(quality::Tasks),
}

fn main() -> ExitCode {
    let options = Options::parse();
    process::main(1, || run(&options))
}

fn run(options: &Options) -> Result<()> {
    let Opened { file, tokenizer, model, .. } = Opened::open(options.model.as_deref())?;
    let frame = Frame { metadata: file.metadata(), tokenizer: &tokenizer };
    let mut candidates = candidate::all(model.config().head_dim);
    candidates.retain(|candidate| {
        options.only.is_empty() || options.only.iter().any(|only| candidate.to_string().contains(only.as_str()))
    });
    let csv = match &options.what {
        What::Pages(settings) => study::run(settings, &candidates, model, &frame)?,
        What::Tasks(settings) => quality::run(settings, &candidates, &model, &frame)?,
    };
    if let Some(path) = &options.csv {
        std::fs::write(path, csv)?;
    }
    Ok(())
}
