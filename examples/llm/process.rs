//! What the examples' programs have in common as programs: threads, errors, exit codes, progress.

// `simulate` has no model, and needs no more of this than errors and progress.
#![allow(dead_code)]

use std::io::ErrorKind;
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressStyle};

/// Runs a program with so many threads for the model, and turns its error into one line.
pub fn main(threads: usize, run: impl FnOnce() -> Result<()>) -> ExitCode {
    let done = with_threads(threads).and_then(|elsewhere| match elsewhere {
        Some(code) => Ok(code),
        None => run().map(|()| ExitCode::SUCCESS),
    });
    exit(done)
}

/// The code to exit with; says on standard error what failed.
pub fn exit(done: Result<ExitCode>) -> ExitCode {
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
fn with_threads(threads: usize) -> Result<Option<ExitCode>> {
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

/// A line on standard error, if that is a terminal.
pub fn progress(what: impl Into<std::borrow::Cow<'static, str>>) -> ProgressBar {
    let bar = ProgressBar::new(0).with_message(what);
    if let Ok(style) = ProgressStyle::with_template("{msg} {wide_bar} {pos}/{len} {elapsed}") {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}
