//! Records what a live cache demands.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use super::{Mark, Shape, Trace};
use crate::backend::HeadDemand;
use crate::cache::Sequence;
use crate::geometry::Geometry;
use crate::observe::{Observer, Part};
use crate::table::{Pins, Tally};

/// Records the demands of every sequence of a cache. Clones share what is recorded: one goes to
/// [`CacheBuilder::observer`](crate::CacheBuilder::observer), the other keeps the traces.
///
/// ```
/// use wakekv::trace::Recorder;
/// use wakekv::{Cache, Cpu, Geometry};
/// let recorder = Recorder::new();
/// let geometry = Geometry::builder().build()?;
/// let mut cache = Cache::builder(geometry).pages_per_head(4).observer(recorder.clone()).build(Cpu::new().threads(1))?;
/// let sequence = cache.insert();
/// for tokens in [100, 1] {
///     let (kv, q) = (vec![0.1f32; tokens * 64], vec![0.2f32; tokens * 64]);
///     let mut step = cache.step(&[(sequence, tokens)])?;
///     step.append(0, &kv, &kv)?;
///     step.attend(0, &q, &mut vec![0f32; tokens * 64])?;
///     step.finish()?;
/// }
/// let trace = recorder.take(sequence).expect("a recorded sequence");
/// assert_eq!(trace.head(0).demand(1), [0, 1, 2, 3, 4, 5, 6]);
/// assert_eq!(trace.head(0).tally(1).map(|tally| (tally.hits, tally.compulsory)), Some((4, 3)));
/// # Ok::<(), wakekv::Error>(())
/// ```
///
/// Steps that are undone are left out. They may have moved pages, so a replay gives the very hits and misses of the cache only
/// where no step of the sequence was undone, under the [`Rule`](crate::residency::Rule) that the cache had; for
/// [`Rule::Standing`](crate::residency::Rule::Standing) only if [scores](Recorder::with_scores) were recorded.
#[derive(Clone, Debug, Default)]
pub struct Recorder(Arc<Mutex<Recording>>);

#[derive(Debug, Default)]
struct Recording {
    /// Whether the scores of all pages are kept.
    scores: bool,
    shape: Option<Shape>,
    runs: HashMap<Sequence, Run>,
}

#[derive(Debug)]
struct Run {
    trace: Trace,
    /// Of the step at hand, per head.
    tallies: Vec<Tally>,
}

impl Recorder {
    /// A recorder that has recorded nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// A recorder that also keeps what every selection found every page to be worth: 4 bytes per page, head and step.
    pub fn with_scores() -> Self {
        Recorder(Arc::new(Mutex::new(Recording { scores: true, ..Recording::default() })))
    }

    /// The finished steps of a sequence, which are forgotten. A sequence that goes on must not be taken: its next steps would not follow
    /// anything, and are not recorded.
    pub fn take(&self, sequence: Sequence) -> Option<Trace> {
        self.0.lock().runs.remove(&sequence).map(|run| run.trace)
    }

    /// A copy of what has been recorded of a sequence up to here.
    pub fn trace(&self, sequence: Sequence) -> Option<Trace> {
        let mut trace = self.0.lock().runs.get(&sequence)?.trace.clone();
        trace.heads.iter_mut().for_each(|head| head.forget_open());
        Some(trace)
    }
}

impl Recording {
    /// The run that a part of a step continues: a new one at a sequence's first token, and none where the beginning is missing.
    fn run(&mut self, part: Part) -> Option<&mut Run> {
        let shape = self.shape?;
        if part.start == 0 {
            self.runs
                .entry(part.sequence)
                .or_insert_with(|| Run { trace: Trace::new(shape), tallies: vec![Tally::default(); shape.heads()] });
        }
        self.runs.get_mut(&part.sequence)
    }
}

impl Observer for Recorder {
    fn built(&mut self, geometry: &Geometry, pins: Pins, budget: Option<usize>) {
        self.0.lock().shape = Some(Shape {
            layers: geometry.layers(),
            heads_per_layer: geometry.kv_heads(),
            page_tokens: geometry.page_tokens(),
            pins,
            budget,
        });
    }

    fn attended(&mut self, part: Part, head: usize, demand: HeadDemand<'_>) {
        let mut recording = self.0.lock();
        let keep_scores = recording.scores;
        let Some(run) = recording.run(part) else { return };
        if let (Some(stream), Some(tally)) = (run.trace.heads.get_mut(head), run.tallies.get_mut(head)) {
            stream.extend(demand.pages, &[]);
            if keep_scores {
                stream.scored.push(demand.scores);
            }
            *tally = demand.tally;
        }
    }

    fn finished(&mut self, part: Part) {
        let mut recording = self.0.lock();
        let keep_scores = recording.scores;
        let Some(run) = recording.run(part) else { return };
        if keep_scores {
            run.trace.heads.iter_mut().for_each(|head| head.end_scores());
        }
        let mark = Mark { step: part.step, phase: part.phase, start: part.start, tokens: part.tokens };
        run.trace.end_step(mark, Some(&run.tallies));
        run.tallies.fill(Tally::default());
    }

    fn undone(&mut self, part: Part) {
        let mut recording = self.0.lock();
        let Some(run) = recording.run(part) else { return };
        run.trace.heads.iter_mut().for_each(|head| head.forget_open());
        run.tallies.fill(Tally::default());
    }
}
