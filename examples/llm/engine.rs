//! Generation: the prompt in chunks, then one token at a time until a mark or the limit ends it.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use super::attention::{Kind, Memory};
use super::model::{Logits, Model};
use super::sampler::Sampler;

/// What to generate.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    pub prompt: &'a [u32],
    /// At most so many new ids.
    pub tokens: usize,
    /// Prompt tokens per forward pass.
    pub chunk: usize,
    /// Ids that end the text. They are not part of the result.
    pub stops: &'a [u32],
}

/// What happens on the way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// So many prompt tokens are in the memory.
    Prefilled(usize),
    /// An id was chosen.
    Token(u32),
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The model said so.
    Stop,
    /// The limit was reached.
    Length,
}

/// What came out.
#[derive(Clone, Debug)]
pub struct Generated {
    pub ids: Vec<u32>,
    pub ending: Ending,
    pub prefill: Phase,
    pub decode: Phase,
}

/// Tokens that went through the model in one part of the work, and the time they took.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Phase {
    pub tokens: usize,
    pub time: Duration,
}

impl Phase {
    /// Tokens per second; 0 where nothing ran.
    pub fn speed(self) -> f64 {
        let seconds = self.time.as_secs_f64();
        if seconds > 0.0 { self.tokens as f64 / seconds } else { 0.0 }
    }
}

/// Runs a request on a sequence's memory, which may hold earlier turns already.
pub fn generate(
    model: &Model,
    memory: &mut dyn Memory,
    sampler: &mut Sampler,
    request: Request<'_>,
    mut on: impl FnMut(Event) -> Result<()>,
) -> Result<Generated> {
    ensure!(!request.prompt.is_empty(), "the prompt is empty");
    ensure!(request.chunk > 0, "a prefill chunk needs at least one token");
    let started = Instant::now();
    let mut logits = prefill(model, memory, request, &mut on)?;
    let prefill = Phase { tokens: request.prompt.len(), time: started.elapsed() };

    let started = Instant::now();
    let mut ids = Vec::new();
    let mut steps = 0;
    let mut ending = Ending::Length;
    while ids.len() < request.tokens {
        let id = sampler.pick(&logits)?;
        if request.stops.contains(&id) {
            ending = Ending::Stop;
            break;
        }
        ids.push(id);
        on(Event::Token(id))?;
        // The last id needs no successor.
        if ids.len() < request.tokens {
            logits = pass(model, memory, Kind::Generated, &[id], Logits::Last)?;
            steps += 1;
        }
    }
    let decode = Phase { tokens: steps, time: started.elapsed() };
    Ok(Generated { ids, ending, prefill, decode })
}

fn prefill(
    model: &Model,
    memory: &mut dyn Memory,
    request: Request<'_>,
    on: &mut impl FnMut(Event) -> Result<()>,
) -> Result<Vec<f32>> {
    let mut logits = Vec::new();
    let mut done = 0;
    for chunk in request.prompt.chunks(request.chunk) {
        logits = pass(model, memory, Kind::Prompt, chunk, Logits::Last)?;
        done += chunk.len();
        on(Event::Prefilled(done))?;
    }
    Ok(logits)
}

/// One forward pass whose keys and values go into `memory`.
pub fn pass(model: &Model, memory: &mut dyn Memory, kind: Kind, tokens: &[u32], wanted: Logits) -> Result<Vec<f32>> {
    let position = memory.len();
    memory.step(kind, tokens.len(), &mut |attention| model.forward(tokens, position, wanted, attention))
}
