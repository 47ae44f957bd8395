//! A run whose demands are recorded by a live cache.

use anyhow::{Context as _, Result, bail};
use wakekv::trace::{Recorder, Trace};
use wakekv::{Counts, Cpu};

use super::Script;
use super::context::Context;
use super::run::{Answer, Decoding, Reads};
use crate::llm::cached::Cached;

/// What a recorded run left.
pub struct Recording {
    pub trace: Trace,
    pub answer: Answer,
    /// What the live cache counted in decode.
    pub live: Counts,
}

/// Decodes the script on a cache that holds the context, whose heads may keep `budget` pages each.
pub fn record(
    decoding: Decoding<'_>,
    context: &Context,
    script: &Script,
    (reads, budget): (Reads, usize),
    on: impl FnMut(),
) -> Result<Recording> {
    if matches!(reads, Reads::Oracle(_) | Reads::Window(_)) {
        bail!("only what the cache chooses itself can be recorded");
    }
    let recorder = Recorder::new();
    let builder = reads.cache(decoding.model.config(), context.tokens + decoding.room(script))?;
    let cache = builder.pages_per_head(budget).observer(recorder.clone()).build(Cpu::new().threads(1))?;
    let mut memory = Cached::new(cache);
    context.write(&mut memory)?;
    let answer = decoding.run(script, &mut memory, on)?;
    let trace = recorder.take(memory.sequence()).context("the cache showed nothing to the recorder")?;
    Ok(Recording { trace, answer, live: memory.decode().counts })
}
