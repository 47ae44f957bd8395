//! A task's decoded part: the question, then what the model writes or is given.

use std::ops::AddAssign;

use anyhow::{Context as _, Result};
use wakekv::sim::tokens::{SnapKv, TokenPolicy};
use wakekv::{Cache, CacheBuilder, Cpu, DType, Digest, Reservoir, Selection};

use super::context::Context;
use super::oracle::Oracle;
use super::{Measure, Rest, Script};
use crate::llm::attention::{Kind, Memory, Pass};
use crate::llm::cached::Cached;
use crate::llm::engine;
use crate::llm::model::{Config, Logits, Model};
use crate::llm::sampler::{Sampler, argmax};
use crate::llm::tokenizer::Tokenizer;

/// Which pages a decoded token reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reads {
    /// All.
    Full,
    /// The best by a digest.
    Digest(Digest, usize),
    /// The same, where what the last token read is worth more by [`STICKINESS`].
    Sticky(Digest, usize),
    /// The same, chosen anew every [`RELAXED`] tokens.
    Relaxed(Digest, usize),
    /// The best by the true logits.
    Oracle(usize),
    /// The first page and the last ones.
    Window(usize),
    /// The best by the true logits of those that are left, where a head keeps twice as many pages and destroys what it evicts.
    Evict(usize),
    /// What SnapKV leaves of the context, in as many tokens as the pages hold, and everything after it.
    SnapKv(usize),
}

/// [`CacheBuilder::stickiness`] of [`Reads::Sticky`].
pub const STICKINESS: f32 = 0.5;

/// [`CacheBuilder::reselect_every`] of [`Reads::Relaxed`]: as often as WakeKV's frozen policy ranks its pages.
pub const RELAXED: usize = 16;

/// Pages that every selection holds: the first, the last and the one before it. They are part of the number of pages in [`Reads`].
pub const PINNED: usize = 3;

impl Reads {
    /// What it is called in tables.
    pub fn name(self) -> &'static str {
        match self {
            Reads::Full => "full",
            Reads::Digest(Digest::MinMax, _) => "min/max",
            Reads::Digest(Digest::CuboidMean, _) => "cuboid mean",
            Reads::Digest(Digest::KeySketch2, _) => "2-bit keys",
            Reads::Digest(Digest::RotatedSketch1, _) => "rotated, 1 bit",
            Reads::Digest(Digest::RotatedSketch2, _) => "rotated, 2 bits",
            Reads::Digest(Digest::RotatedSketch3, _) => "rotated, 3 bits",
            Reads::Digest(..) => "digest",
            Reads::Sticky(..) => "sticky",
            Reads::Relaxed(..) => "relaxed",
            Reads::Oracle(_) => "oracle",
            Reads::Window(_) => "window",
            Reads::Evict(_) => "evict",
            Reads::SnapKv(_) => "SnapKV",
        }
    }

    /// Pages that are read at most, where there is a limit.
    pub fn pages(self) -> Option<usize> {
        match self {
            Reads::Full => None,
            Reads::Digest(_, pages) | Reads::Sticky(_, pages) | Reads::Relaxed(_, pages) => Some(pages),
            Reads::Oracle(pages) | Reads::Window(pages) | Reads::Evict(pages) | Reads::SnapKv(pages) => Some(pages),
        }
    }

    /// The settings of a cache for `tokens` tokens that is read in this way.
    pub fn cache(self, model: &Config, tokens: usize) -> Result<CacheBuilder> {
        let geometry = model.geometry().dtype(DType::F16).build()?;
        let selection = match self {
            Reads::Full | Reads::SnapKv(_) => Selection::All,
            Reads::Digest(digest, pages) | Reads::Sticky(digest, pages) | Reads::Relaxed(digest, pages) => {
                Selection::top_pages(pages.saturating_sub(PINNED)).pinned(1, 1).scored_by(digest)
            }
            Reads::Oracle(_) | Reads::Evict(_) => Selection::Explicit { sink_pages: 1, recent_pages: 1 },
            Reads::Window(pages) => Selection::Explicit { sink_pages: 1, recent_pages: pages.saturating_sub(2) },
        };
        let reservoir = Reservoir::memory(geometry.sequence_bytes(tokens) as u64);
        let builder = Cache::builder(geometry).reservoir(reservoir).selection(selection);
        Ok(match self {
            Reads::Sticky(..) => builder.stickiness(STICKINESS),
            Reads::Relaxed(..) => builder.reselect_every(RELAXED),
            _ => builder,
        })
    }

    /// A memory that holds a context and is read in this way, with room for `more` tokens.
    pub fn memory(self, model: &Config, context: &Context, more: usize) -> Result<Box<dyn Memory>> {
        if let Reads::SnapKv(pages) = self {
            let tokens = pages * model.geometry().build()?.page_tokens();
            let kept = context.after(model, TokenPolicy::SnapKv(SnapKv::default()), tokens)?;
            let missing = context.tokens - kept.tokens;
            let inner = Reads::Full.memory(model, &kept, more)?;
            return Ok(Box::new(Shortened { inner, missing }));
        }
        let cache = self.cache(model, context.tokens + more)?.build(Cpu::new().threads(1))?;
        let mut memory: Box<dyn Memory> = match self {
            Reads::Oracle(pages) => Box::new(Oracle::new(cache, pages.saturating_sub(PINNED))),
            Reads::Evict(pages) => Box::new(Oracle::evicting(cache, pages.saturating_sub(PINNED), 2 * pages)),
            Reads::Window(_) => Box::new(Oracle::new(cache, 0)),
            _ => Box::new(Cached::new(cache)),
        };
        context.write(memory.as_mut())?;
        Ok(memory)
    }
}

/// A memory that has lost tokens: what comes next still has the position that it had.
struct Shortened {
    inner: Box<dyn Memory>,
    missing: usize,
}

impl Memory for Shortened {
    fn step(&mut self, kind: Kind, tokens: usize, pass: Pass<'_>) -> Result<Vec<f32>> {
        self.inner.step(kind, tokens, pass)
    }

    fn len(&self) -> usize {
        self.inner.len() + self.missing
    }
}

/// A mean that can be pooled over runs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Score {
    pub sum: f64,
    pub count: f64,
}

impl Score {
    /// The score as its measure says it.
    pub fn value(self, measure: Measure) -> f64 {
        let mean = self.sum / self.count.max(1.0);
        if measure == Measure::Perplexity { mean.exp() } else { mean }
    }

    fn add(&mut self, earned: f64) {
        self.sum += earned;
        self.count += 1.0;
    }
}

impl AddAssign for Score {
    fn add_assign(&mut self, other: Self) {
        self.sum += other.sum;
        self.count += other.count;
    }
}

/// What came of a script.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    /// Every id that was decoded after the question.
    pub ids: Vec<u32>,
    /// What the model wrote, as far as it is judged.
    pub text: String,
    /// Answers found in the text, or given tokens that were the likeliest.
    pub right: Score,
    /// Surprise of the given tokens, in nats.
    pub surprise: Score,
}

impl Answer {
    /// What `measure` looks at.
    pub fn score(&self, measure: Measure) -> Score {
        if measure == Measure::Perplexity { self.surprise } else { self.right }
    }
}

/// How a script is decoded.
#[derive(Clone, Copy)]
pub struct Decoding<'a> {
    pub model: &'a Model,
    pub tokenizer: &'a Tokenizer,
    /// Where draws start from.
    pub seed: u64,
    /// Decoded at least so many tokens, the model writing on when its work is done; for recordings. What it adds is not judged.
    pub least: usize,
}

impl Decoding<'_> {
    /// Tokens that decoding a script takes at most.
    pub fn room(&self, script: &Script) -> usize {
        let rest = match &script.rest {
            Rest::Follow(ids) => ids.len(),
            Rest::Write { tokens, .. } => *tokens,
        };
        (script.question.len() + rest).max(self.least) + 1
    }

    /// Runs the script on a memory that holds its context. `on` is called after each decoded token.
    pub fn run(self, script: &Script, memory: &mut dyn Memory, mut on: impl FnMut()) -> Result<Answer> {
        let mut answer = Answer::default();
        let mut decoded = 0;
        let mut feed = |id: u32| -> Result<Vec<f32>> {
            let logits = engine::pass(self.model, memory, Kind::Generated, &[id], Logits::Last)?;
            decoded += 1;
            on();
            Ok(logits)
        };
        let mut logits = Vec::new();
        for &id in &script.question {
            logits = feed(id)?;
        }
        let mut sampler = Sampler::new(0.0, self.seed);
        match &script.rest {
            Rest::Follow(ids) => {
                for (index, &id) in ids.iter().enumerate() {
                    answer.right.add(f64::from(argmax(&logits) == Some(id as usize)));
                    answer.surprise.add(surprise(&logits, id)?);
                    answer.ids.push(id);
                    // The last id needs no successor, unless more is to be written.
                    if index + 1 < ids.len() || self.least > 0 {
                        logits = feed(id)?;
                    }
                }
            }
            Rest::Write { tokens, temperature, answers } => {
                sampler = Sampler::new(*temperature, self.seed);
                // What is not judged goes on to its limit.
                let endless = answers.is_empty();
                while answer.ids.len() < *tokens {
                    if endless {
                        self.forbid_stops(&mut logits);
                    }
                    let id = sampler.pick(&logits)?;
                    if self.tokenizer.stops().contains(&id) {
                        break;
                    }
                    answer.ids.push(id);
                    if answer.ids.len() < *tokens || self.least > 0 {
                        logits = feed(id)?;
                    }
                }
                answer.text = self.tokenizer.decode(&answer.ids);
                let said = answer.text.to_lowercase();
                for wanted in answers {
                    answer.right.add(f64::from(said.contains(&wanted.to_lowercase())));
                }
            }
        }
        while script.question.len() + answer.ids.len() < self.least {
            self.forbid_stops(&mut logits);
            let id = sampler.pick(&logits)?;
            answer.ids.push(id);
            logits = feed(id)?;
        }
        Ok(answer)
    }

    /// The likeliest that is no stop is picked instead.
    fn forbid_stops(self, logits: &mut [f32]) {
        for &stop in self.tokenizer.stops() {
            if let Some(logit) = logits.get_mut(stop as usize) {
                *logit = f32::MIN;
            }
        }
    }
}

/// −ln of the probability of an id.
fn surprise(logits: &[f32], id: u32) -> Result<f64> {
    let logit = *logits.get(id as usize).context("an id outside of the vocabulary")?;
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - max).exp()).sum();
    Ok(sum.ln() - f64::from(logit - max))
}
