//! Candidates judged by what a model does with the pages that they find.

use std::fmt::{self, Write as _};

use anyhow::Result;
use clap::Args;
use wakekv::{Cpu, Digest};

use super::candidate::Candidate;
use super::chosen::Chosen;
use crate::llm::attention::Memory;
use crate::llm::model::Model;
use crate::llm::process::progress;
use crate::tasks::context::Context;
use crate::tasks::run::{Decoding, PINNED, Reads, Score};
use crate::tasks::{Frame, Task};

#[derive(Args)]
pub struct Tasks {
    /// needle, distractors, turns, copy or prose
    #[arg(long, value_delimiter = ',', default_value = "needle,turns,copy")]
    tasks: Vec<Task>,
    /// Tokens of context
    #[arg(long, default_value_t = 2048)]
    context: usize,
    /// Runs of each task
    #[arg(long, default_value_t = 10)]
    runs: u64,
    /// Of the candidates, only those whose digest and score together contain one of these; none by default
    #[arg(long, value_name = "TEXT")]
    also: Vec<String>,
    /// Pages that a head reads, the first and the last two included
    #[arg(long, value_delimiter = ',', default_values_t = [4, 8])]
    pages: Vec<usize>,
}

/// Who chooses the pages.
enum Contender<'a> {
    /// Nobody: all are read.
    Full,
    /// The library, by one of its digests.
    Library(Digest),
    Candidate(&'a Candidate),
}

const LIBRARY: [Digest; 6] = [
    Digest::MinMax,
    Digest::CuboidMean,
    Digest::KeySketch2,
    Digest::RotatedSketch1,
    Digest::RotatedSketch2,
    Digest::RotatedSketch3,
];

pub fn run(settings: &Tasks, candidates: &[Candidate], model: &Model, frame: &Frame<'_>) -> Result<String> {
    let mut contenders = vec![(Contender::Full, 0)];
    let wanted =
        |candidate: &&Candidate| settings.also.iter().any(|also| candidate.to_string().contains(also.as_str()));
    for &pages in &settings.pages {
        contenders.extend(LIBRARY.map(|digest| (Contender::Library(digest), pages)));
        contenders.extend(candidates.iter().filter(wanted).map(|candidate| (Contender::Candidate(candidate), pages)));
    }
    let mut csv = "task,tokens,digest,pages,value,of\n".to_owned();
    for &task in &settings.tasks {
        let Some(measure) = task.measure() else { continue };
        let mut scores = vec![Score::default(); contenders.len()];
        let bar = progress(format!("{task}"));
        bar.set_length(settings.runs * contenders.len() as u64);
        for seed in 0..settings.runs {
            let script = task.script(frame, settings.context, seed)?;
            let context = Context::read(model, &script.context, |_| {})?;
            let decoding = Decoding { model, tokenizer: frame.tokenizer, seed, least: 0 };
            for ((contender, pages), score) in contenders.iter().zip(&mut scores) {
                let mut memory = contender.memory(*pages, model, &context, decoding.room(&script))?;
                *score += decoding.run(&script, memory.as_mut(), || {})?.score(measure);
                bar.inc(1);
            }
        }
        bar.finish_and_clear();
        for ((contender, pages), score) in contenders.iter().zip(scores) {
            let value = score.value(measure);
            println!("{:<12} {:<48} {pages:3} {value:7.3} of {}", task.name(), contender.to_string(), score.count);
            writeln!(csv, "{task},{},{contender},{pages},{value:.4},{}", settings.context, score.count)?;
        }
    }
    Ok(csv)
}

impl Contender<'_> {
    /// A memory that holds the context.
    fn memory(&self, pages: usize, model: &Model, context: &Context, room: usize) -> Result<Box<dyn Memory>> {
        let candidate = match self {
            Contender::Full => return Reads::Full.memory(model.config(), context, room),
            Contender::Library(digest) => return Reads::Digest(*digest, pages).memory(model.config(), context, room),
            Contender::Candidate(candidate) => candidate,
        };
        let cache = Reads::Oracle(pages).cache(model.config(), context.tokens + room)?.build(Cpu::new().threads(1))?;
        let mut memory = Chosen::new(cache, **candidate, pages.saturating_sub(PINNED));
        context.write(&mut memory)?;
        Ok(Box::new(memory))
    }
}

impl fmt::Display for Contender<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Contender::Full => f.write_str("full"),
            Contender::Library(digest) => write!(f, "library: {digest:?}"),
            Contender::Candidate(candidate) => candidate.fmt(f),
        }
    }
}
