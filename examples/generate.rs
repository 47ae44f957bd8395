//! Text from a language model whose attention runs through the cache. `cargo run --release --example generate -- --help`

mod llm;

use std::io::{ErrorKind, Write};
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};

use llm::cached::Cached;
use llm::engine::{Event, Generated, Request, generate};
use llm::gguf::Gguf;
use llm::model::Model;
use llm::options::Options;
use llm::report::Summary;
use llm::sampler::Sampler;
use llm::tokenizer::Tokenizer;
use llm::{chat, download};

fn main() -> ExitCode {
    let options = Options::parse();
    let done = with_threads(&options).and_then(|elsewhere| match elsewhere {
        Some(code) => Ok(code),
        None => run(&options).map(|()| ExitCode::SUCCESS),
    });
    done.unwrap_or_else(|error| {
        // A reader that has seen enough, such as `head`, closes the pipe: no failure of ours.
        if error.downcast_ref().map(std::io::Error::kind) == Some(ErrorKind::BrokenPipe) {
            return ExitCode::SUCCESS;
        }
        eprintln!("error: {}", one_line(&error));
        ExitCode::FAILURE
    })
}

/// What failed and why, without the stack that candle's errors print below their first line, and without a cause that
/// the error above it has told already.
fn one_line(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for cause in error.chain() {
        let cause = cause.to_string();
        let first = cause.lines().next().unwrap_or_default();
        if line.is_empty() {
            line.push_str(first);
        } else if !line.ends_with(first) {
            line.push_str(": ");
            line.push_str(first);
        }
    }
    line
}

/// candle reads its numbers of threads from the environment, which a program cannot safely change for itself. So it
/// starts itself again where they are not as they should be; the exit code is given where that was not a replacement.
fn with_threads(options: &Options) -> Result<Option<ExitCode>> {
    let threads = options.threads();
    // The pool for quantised products spins while it waits, and stalls where it has to share a core: it leaves one to
    // the cache's copies.
    let wanted = [("CANDLE_NUM_THREADS", (threads - 1).max(1)), ("RAYON_NUM_THREADS", threads)];
    let wanted = wanted.map(|(name, threads)| (name, threads.to_string()));
    if wanted.iter().all(|(name, threads)| std::env::var(name).as_ref() == Ok(threads)) {
        return Ok(None);
    }
    let program = std::env::current_exe().context("cannot find the running program")?;
    let mut again = Command::new(program);
    again.args(std::env::args_os().skip(1)).envs(wanted);
    become_or_run(again).context("cannot start the program again with --threads set")
}

#[cfg(unix)]
fn become_or_run(mut command: Command) -> Result<Option<ExitCode>> {
    use std::os::unix::process::CommandExt;
    Err(command.exec().into())
}

#[cfg(not(unix))]
fn become_or_run(mut command: Command) -> Result<Option<ExitCode>> {
    let code = command.status()?.code().and_then(|code| u8::try_from(code).ok());
    Ok(Some(code.map_or(ExitCode::FAILURE, ExitCode::from)))
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

    let mut memory = Cached::new(options.cache(model.config(), prompt.len() + options.tokens)?);
    let (generated, text) = speak(options, &model, &tokenizer, &mut memory, &prompt)?;
    let summary = Summary {
        options,
        model: &path,
        prompt_tokens: prompt.len(),
        generated: &generated,
        text: &text,
        load,
        memory: &memory,
    };
    if options.json {
        writeln!(std::io::stdout(), "{}", summary.json())?;
    } else {
        eprint!("{}", summary.table());
    }
    Ok(())
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
    memory: &mut Cached,
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

/// A line on standard error, if that is a terminal.
fn progress(what: &'static str) -> ProgressBar {
    let bar = ProgressBar::new(0).with_message(what);
    if let Ok(style) = ProgressStyle::with_template("{msg} {wide_bar} {pos}/{len} {elapsed}") {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}
