//! A run whose demands are recorded by a live cache, and whose queries, keys and values can be kept.

use anyhow::{Context as _, Result, bail};
#[cfg(feature = "trace")]
use wakekv::trace::Log;
use wakekv::trace::{Recorder, Tensors, Trace};
use wakekv::{Counts, Cpu};

use super::Script;
use super::context::{Context, Tap, Tapped};
use super::run::{Answer, Decoding, Reads};
use crate::llm::cached::Cached;

/// Tokens that WakeKV's logs hold per query head and step.
#[cfg(feature = "trace")]
pub const LOGGED: usize = 64;

/// What a recorded run left.
pub struct Recording {
    pub trace: Trace,
    pub answer: Answer,
    /// What the live cache counted in decode.
    pub live: Counts,
    pub tensors: Tensors,
}

#[cfg(feature = "trace")]
impl Recording {
    /// The run as a log in WakeKV's format: what every query head attended to most, over all that there was to attend to.
    pub fn log(&self, decoding: &Decoding<'_>) -> Result<Log> {
        let mut log = self.tensors.log(LOGGED)?;
        log.gen_token_ids = self.answer.ids.iter().map(|&id| i64::from(id)).collect();
        log.meta.generated_text = decoding.tokenizer.decode(&self.answer.ids);
        Ok(log)
    }
}

/// Decodes the script on a cache that holds the context, whose heads may keep `budget` pages each.
pub fn record(
    decoding: Decoding<'_>,
    context: &Context,
    script: &Script,
    (reads, budget): (Reads, usize),
    on: impl FnMut(),
) -> Result<Recording> {
    if !matches!(reads, Reads::Full | Reads::Digest(..) | Reads::Sticky(..) | Reads::Relaxed(..)) {
        bail!("only what the cache chooses itself can be recorded");
    }
    let recorder = Recorder::with_scores();
    let builder = reads.cache(decoding.model.config(), context.tokens + decoding.room(script))?;
    let cache = builder.pages_per_head(budget).observer(recorder.clone()).build(Cpu::new().threads(1))?;
    let tensors = context.tensors(decoding.model.config())?;
    let mut memory = Tapped { inner: Cached::new(cache), tap: tensors };
    context.write(&mut memory.inner)?;
    let answer = decoding.run(script, &mut memory, on)?;
    let Tapped { inner, tap: tensors } = memory;
    let trace = recorder.take(inner.sequence()).context("the cache showed nothing to the recorder")?;
    Ok(Recording { trace, answer, live: inner.decode().counts, tensors })
}

impl Tap for Tensors {
    fn see(&mut self, layer: usize, q: &[f32], k: &[f32], v: &[f32]) -> Result<()> {
        let start = self.keys(layer, 0).len() / self.head_dim();
        self.append(layer, k, v)?;
        self.queries(layer, start, q)?;
        Ok(())
    }
}
