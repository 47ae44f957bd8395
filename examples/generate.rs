//! Text from a language model whose attention runs through the cache. `cargo run --release --example generate -- --help`

mod llm;

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use clap::Parser;

use llm::attention::Memory;
use llm::cached::{Cached, OnHost};
use llm::engine::{Event, Generated, Request, generate};
use llm::gguf::Gguf;
use llm::model::Model;
use llm::options::{Options, Place};
use llm::process::{self, progress};
use llm::report::Summary;
use llm::sampler::Sampler;
use llm::tokenizer::Tokenizer;
use llm::{chat, download};

fn main() -> ExitCode {
    let options = Options::parse();
    process::main(options.threads(), || run(&options))
}

fn run(options: &Options) -> Result<()> {
    let (prompt, wants_chat) = options.prompt()?;
    let path = match &options.model {
        Some(path) => path.clone(),
        None => download::fetch(|what| eprintln!("{what}"))?,
    };
    let started = Instant::now();
    let (model, tokenizer, prompt) = load(options, &path, &prompt, wants_chat)?;
    let load = started.elapsed();

    let room = prompt.len() + options.tokens;
    let run = Run { options, path: &path, model: &model, tokenizer: &tokenizer, prompt: &prompt, load };
    match options.backend {
        Place::Cpu => run.through(Cached::new(options.cache(model.config(), room)?)),
        #[cfg(feature = "cuda")]
        Place::Cuda(ordinal) => run.through(Cached::new(options.cuda_cache(ordinal, model.config(), room)?)),
        #[cfg(not(feature = "cuda"))]
        Place::Cuda(_) => unreachable!("the command line refuses it"),
    }
}

/// Everything but the cache.
struct Run<'a> {
    options: &'a Options,
    path: &'a Path,
    model: &'a Model,
    tokenizer: &'a Tokenizer,
    prompt: &'a [u32],
    load: Duration,
}

impl Run<'_> {
    /// Generates with the attention through `memory`, and tells what that took.
    fn through<B: OnHost>(&self, mut memory: Cached<B>) -> Result<()> {
        let &Run { options, path, model, tokenizer, prompt, load } = self;
        let (generated, text) = speak(options, model, tokenizer, &mut memory, prompt)?;
        memory.settle()?;
        let summary = Summary {
            options,
            model: path,
            prompt_tokens: prompt.len(),
            generated: &generated,
            text: &text,
            load,
            prefill: memory.prefill(),
            decode: memory.decode(),
            reservoir_bytes: memory.reservoir_bytes(),
        };
        if options.json {
            writeln!(std::io::stdout(), "{}", summary.json())?;
        } else {
            eprint!("{}", summary.table());
        }
        Ok(())
    }
}

/// The model, its tokenizer and the prompt's ids.
fn load(options: &Options, path: &Path, prompt: &str, wants_chat: bool) -> Result<(Model, Tokenizer, Vec<u32>)> {
    let mut file = Gguf::open(path)?;
    let tokenizer = Tokenizer::from_metadata(file.metadata())?;
    // The default question is put plainly to a model that has no template; --chat insists on one.
    let framed = match chat::render(file.metadata(), &tokenizer, prompt) {
        Ok(framed) if wants_chat => framed,
        Err(error) if options.chat => return Err(error),
        _ => prompt.to_owned(),
    };
    let ids = tokenizer.encode(&framed)?;

    let bar = progress("loading layers");
    let model = Model::load(&mut file, options.weights, |done, all| {
        bar.set_length(all as u64);
        bar.set_position(done as u64);
    })?;
    bar.finish_and_clear();
    let (total, context) = (ids.len().saturating_add(options.tokens), model.config().context);
    ensure!(
        total <= context,
        "the prompt's {} tokens and --tokens {} exceed the model's context of {context}",
        ids.len(),
        options.tokens
    );
    Ok((model, tokenizer, ids))
}

/// Generates, and prints the text as it comes unless it is to go into the JSON object.
fn speak(
    options: &Options,
    model: &Model,
    tokenizer: &Tokenizer,
    memory: &mut dyn Memory,
    prompt: &[u32],
) -> Result<(Generated, String)> {
    let mut sampler = Sampler::new(options.temperature, options.seed);
    let request = Request { prompt, tokens: options.tokens, chunk: options.chunk.get(), stops: tokenizer.stops() };
    let bar = progress("reading the prompt");
    bar.set_length(prompt.len() as u64);
    let mut text = String::new();
    let mut say = |piece: &str| -> Result<()> {
        text.push_str(piece);
        if !options.json {
            let mut out = std::io::stdout().lock();
            out.write_all(piece.as_bytes())?;
            out.flush()?;
        }
        Ok(())
    };
    let mut decoder = tokenizer.decoder();
    let generated = generate(model, memory, &mut sampler, request, |event| match event {
        Event::Prefilled(tokens) => {
            bar.set_position(tokens as u64);
            if tokens == prompt.len() {
                bar.finish_and_clear();
            }
            Ok(())
        }
        Event::Token(id) => say(&decoder.push(id)),
    })?;
    say(&decoder.finish())?;
    if !options.json {
        writeln!(std::io::stdout())?;
    }
    Ok((generated, text))
}
