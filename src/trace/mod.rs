//! Recorded runs: what every head of a sequence demanded, step by step.
//!
//! A [`Trace`] comes from a live cache through a [`Recorder`], or is pushed step by step. [`sim`](crate::sim) replays it under other
//! policies and budgets.
//!
//! [`Tensors`] hold what a run's attention was computed from.
//!
//! With the cargo feature `trace` runs can be kept on disk, as arrays in the npz format with a description beside them in JSON: traces by
//! `Trace::save` and `Trace::load`, tensors likewise, and the attention of single tokens as a `Log` in the format of WakeKV (arXiv
//! 2610.02713).

#![forbid(unsafe_code)]

#[cfg(feature = "trace")]
mod arrays;
mod demands;
mod lane;
#[cfg(feature = "trace")]
mod log;
mod recorder;
#[cfg(feature = "trace")]
mod saved;
mod stream;
mod tensors;
#[cfg(feature = "trace")]
mod tensors_saved;

pub(crate) use demands::greatest;
pub use demands::{Demands, OracleSettings, Worth};
pub(crate) use lane::Lane;
#[cfg(feature = "trace")]
pub use log::{Array, Lanes, Log, Meta};
pub use recorder::Recorder;
pub use stream::Stream;
pub use tensors::Tensors;
pub(crate) use tensors::{dot, softmax};

use crate::table::{Phase, Pins, Tally};

/// What a trace is a trace of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Transformer layers.
    pub layers: usize,
    /// Heads per layer: KV heads when the run comes from a cache.
    pub heads_per_layer: usize,
    /// Tokens per page.
    pub page_tokens: usize,
    /// Pages that every demand holds.
    pub pins: Pins,
    /// Ways per head of the cache that was recorded, if it had a limit.
    pub budget: Option<usize>,
}

impl Shape {
    /// Heads in all.
    pub const fn heads(&self) -> usize {
        self.layers * self.heads_per_layer
    }

    /// Pages that `tokens` tokens occupy, the open one included.
    pub const fn pages(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.page_tokens)
    }
}

/// One step of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// The step's number. Only its growth has a meaning.
    pub step: u64,
    /// Prefill or decode.
    pub phase: Phase,
    /// Tokens before the step.
    pub start: usize,
    /// New tokens.
    pub tokens: usize,
}

impl Mark {
    /// Tokens after the step.
    pub const fn end(&self) -> usize {
        self.start.saturating_add(self.tokens)
    }
}

/// Why a trace was not taken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// A step does not follow the one before it.
    #[error("step {step} begins at token {start}, but must come after step {last_step} and begin at token {expected}")]
    Gap {
        /// The step's number.
        step: u64,
        /// Where it begins.
        start: usize,
        /// The number of the step before it.
        last_step: u64,
        /// Where it should begin.
        expected: usize,
    },
    /// A demand is not an ascending list of pages that the head has, or its weights are not as many.
    #[error(
        "step {step}, head {head}: the demand must be strictly ascending pages below {pages}, one weight each if any"
    )]
    Demand {
        /// The step's number.
        step: u64,
        /// The head.
        head: usize,
        /// Pages that it has.
        pages: usize,
    },
    /// Not one demand per head.
    #[error("{got} lists for {heads} heads")]
    Heads {
        /// Lists that were given.
        got: usize,
        /// Heads of the trace.
        heads: usize,
    },
    /// Tensors of a layer that the model does not have.
    #[error("layer {layer}, but there are {layers}")]
    Layer {
        /// The layer.
        layer: usize,
        /// Layers of the model.
        layers: usize,
    },
    /// A tensor is not a whole number of rows, or not as long as the one it goes with.
    #[error("{tensor} have {len} elements, which is not what rows of {row} make")]
    Rows {
        /// Which tensor.
        tensor: &'static str,
        /// Its elements.
        len: usize,
        /// Elements of a row; of the other tensor, if the two differ.
        row: usize,
    },
    /// A number is none, or too large for half precision.
    #[error("{tensor} hold {value}, which half precision cannot")]
    Half {
        /// Which tensor.
        tensor: &'static str,
        /// The number.
        value: f32,
    },
    /// Queries do not follow those before them.
    #[error("layer {layer}: queries begin at token {start}, but must at {expected}")]
    Queries {
        /// The layer.
        layer: usize,
        /// The first token of what would be kept.
        start: usize,
        /// The one that comes next.
        expected: usize,
    },
    /// Attention of a query that was not kept, or over keys that are not there.
    #[error("layer {layer}, query head {query_head}: the query of token {token} or a key up to it was not recorded")]
    Unknown {
        /// The layer.
        layer: usize,
        /// The query head.
        query_head: usize,
        /// The token.
        token: usize,
    },
    /// More tokens than any sequence may have.
    #[error("{tokens} tokens, but a sequence has at most {most}")]
    Length {
        /// Tokens after the step.
        tokens: usize,
        /// The most.
        most: usize,
    },
    /// Pages of no tokens.
    #[error("page_tokens is 0, but must be at least 1")]
    PageTokens,
    /// Reading or writing failed.
    #[cfg(feature = "trace")]
    #[error("{what}: {source}")]
    Io {
        /// Which file or array.
        what: String,
        /// Why.
        source: std::io::Error,
    },
    /// A file is not what it should be.
    #[cfg(feature = "trace")]
    #[error("{what}: {reason}")]
    Format {
        /// Which file or array.
        what: String,
        /// What is wrong with it.
        reason: String,
    },
}

/// Pages are numbered in 32 bits.
const MOST_TOKENS: usize = u32::MAX as usize / 2;

/// What every head of one sequence demanded in every step.
///
/// ```
/// use wakekv::table::{Phase, Pins};
/// use wakekv::trace::{Mark, Shape, Trace};
/// let shape = Shape { layers: 1, heads_per_layer: 2, page_tokens: 16, pins: Pins::default(), budget: None };
/// let mut trace = Trace::new(shape);
/// trace.push(Mark { step: 1, phase: Phase::Prefill, start: 0, tokens: 40 }, &[[0, 1, 2], [0, 1, 2]])?;
/// trace.push(Mark { step: 2, phase: Phase::Decode, start: 40, tokens: 1 }, &[vec![0, 2], vec![2]])?;
/// assert_eq!(trace.head(0).demand(1), [0, 2]);
/// # Ok::<(), wakekv::trace::TraceError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Trace {
    shape: Shape,
    marks: Vec<Mark>,
    heads: Vec<Stream>,
}

impl Trace {
    /// A run without steps.
    pub fn new(shape: Shape) -> Self {
        Trace { shape, marks: Vec::new(), heads: vec![Stream::default(); shape.heads()] }
    }

    /// What this is a trace of.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The steps, in their order.
    pub fn marks(&self) -> &[Mark] {
        &self.marks
    }

    /// The demands of one head, one per step. The head of KV head `h` in layer `l` is `l × heads_per_layer + h`; a head that the
    /// trace does not have demanded nothing.
    pub fn head(&self, head: usize) -> &Stream {
        static NOTHING: Stream = Stream::new();
        self.heads.get(head).unwrap_or(&NOTHING)
    }

    /// All heads.
    pub fn heads(&self) -> &[Stream] {
        &self.heads
    }

    /// Demanded pages over all steps and heads.
    pub fn demanded(&self) -> u64 {
        self.heads.iter().map(|head| head.demanded() as u64).sum()
    }

    /// Adds a step with one list of pages per head, each strictly ascending. An empty list means that the head was not attended.
    ///
    /// # Errors
    /// The step does not follow the last one, or a demand makes no sense. The trace has not changed then.
    pub fn push(&mut self, mark: Mark, demands: &[impl AsRef<[u32]>]) -> Result<(), TraceError> {
        self.check(mark, demands)?;
        for (head, pages) in self.heads.iter_mut().zip(demands) {
            head.extend(pages.as_ref(), &[]);
        }
        self.end_step(mark, None);
        Ok(())
    }

    /// The same with the attention mass of each page.
    ///
    /// # Errors
    /// As [`push`](Self::push), and when there are not as many masses as pages.
    pub fn push_weighted(
        &mut self,
        mark: Mark,
        demands: &[impl AsRef<[u32]>],
        masses: &[impl AsRef<[f32]>],
    ) -> Result<(), TraceError> {
        self.check(mark, demands)?;
        if masses.len() != demands.len() {
            return Err(TraceError::Heads { got: masses.len(), heads: self.shape.heads() });
        }
        let pairs = || demands.iter().map(AsRef::as_ref).zip(masses.iter().map(AsRef::as_ref));
        if let Some(head) = pairs().position(|(pages, masses)| pages.len() != masses.len()) {
            return Err(TraceError::Demand { step: mark.step, head, pages: self.shape.pages(mark.end()) });
        }
        for (head, (pages, masses)) in self.heads.iter_mut().zip(pairs()) {
            head.extend(pages, masses);
        }
        self.end_step(mark, None);
        Ok(())
    }

    /// The same steps with other demands: per head one list for each of them.
    pub(crate) fn with_heads(&self, heads: Vec<Stream>) -> Trace {
        Trace { shape: self.shape, marks: self.marks.clone(), heads }
    }

    fn check(&self, mark: Mark, demands: &[impl AsRef<[u32]>]) -> Result<(), TraceError> {
        if self.shape.page_tokens == 0 {
            return Err(TraceError::PageTokens);
        }
        if mark.end() > MOST_TOKENS {
            return Err(TraceError::Length { tokens: mark.end(), most: MOST_TOKENS });
        }
        let (last_step, expected) = self.marks.last().map_or((0, 0), |last| (last.step, last.end()));
        if mark.start != expected || mark.step <= last_step {
            return Err(TraceError::Gap { step: mark.step, start: mark.start, last_step, expected });
        }
        if demands.len() != self.heads.len() {
            return Err(TraceError::Heads { got: demands.len(), heads: self.heads.len() });
        }
        let pages = self.shape.pages(mark.end());
        let sane = |demand: &[u32]| {
            demand.is_sorted_by(|a, b| a < b) && demand.last().is_none_or(|&page| (page as usize) < pages)
        };
        match demands.iter().position(|demand| !sane(demand.as_ref())) {
            Some(head) => Err(TraceError::Demand { step: mark.step, head, pages }),
            None => Ok(()),
        }
    }

    /// Closes every head's list for the step, after its pages have been added.
    fn end_step(&mut self, mark: Mark, tallies: Option<&[Tally]>) {
        for (index, head) in self.heads.iter_mut().enumerate() {
            head.end_step(tallies.and_then(|tallies| tallies.get(index)).copied());
        }
        self.marks.push(mark);
    }
}
