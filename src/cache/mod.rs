//! Sequences come and go, and who owns which slot. [`builder`] has the settings, [`admission`] what a step may take.

mod admission;
mod builder;

pub use builder::CacheBuilder;

use crate::backend::cpu::CpuBackend;
use crate::backend::{Backend, StepCounts, StepPlan};
use crate::error::Error;
use crate::geometry::Geometry;
use crate::observe::Observer;
use crate::pool::{Slot, SlotPool};
use crate::selection::Selection;
use crate::stats::{Occupancy, Stats};
use crate::step::Step;
use crate::table::Phase;

/// A sequence of a cache. The handle is stale once the sequence is removed, also after its place is used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sequence {
    index: u32,
    generation: u32,
    cache: u32,
}

/// One sequence's part in a step: how many new tokens it has, and whether they are prompt or generated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    sequence: Sequence,
    tokens: usize,
    phase: Option<Phase>,
}

impl Entry {
    /// Prompt tokens: attended exactly, whatever the selection.
    pub const fn prefill(sequence: Sequence, tokens: usize) -> Self {
        Entry { sequence, tokens, phase: Some(Phase::Prefill) }
    }

    /// Generated tokens: attended over what the selection demands. Several at once share one demand, as when drafted tokens are
    /// verified.
    pub const fn decode(sequence: Sequence, tokens: usize) -> Self {
        Entry { sequence, tokens, phase: Some(Phase::Decode) }
    }
}

/// One token of a sequence that has tokens already is decode, everything else prefill. Where that is not meant, say
/// [`Entry::prefill`] or [`Entry::decode`].
impl From<(Sequence, usize)> for Entry {
    fn from((sequence, tokens): (Sequence, usize)) -> Self {
        Entry { sequence, tokens, phase: None }
    }
}

/// The longest sequence, in tokens. Positions are 32-bit in the tables and kernels.
const MAX_TOKENS: usize = u32::MAX as usize / 2;

/// The KV cache of a model: sequences, their pages, and the steps that fill and read them.
///
/// See the [crate's documentation](crate) for how it is used.
#[derive(Debug)]
pub struct Cache<B: Backend = CpuBackend> {
    id: u32,
    pub(crate) geometry: Geometry,
    budget: usize,
    selection: Selection,
    reselect_every: usize,
    pub(crate) backend: B,
    observer: Option<Box<dyn Observer>>,
    device: SlotPool,
    reservoir: SlotPool,
    places: Vec<Seat>,
    vacant: Vec<u32>,
    pub(crate) plan: StepPlan,
    /// Room for the check of page lists: a bit per page.
    pub(crate) named: Vec<u64>,
    /// A step has begun and has neither been finished nor undone. Outlives a leaked [`Step`].
    open_step: bool,
    stats: Stats,
    counts: StepCounts,
}

/// A place for a sequence, with the generation of its present or last occupant.
#[derive(Debug)]
struct Seat {
    generation: u32,
    sequence: Option<State>,
}

/// What the cache knows of a live sequence. Slots are in the order in which they were granted.
#[derive(Debug, Default)]
struct State {
    tokens: usize,
    /// Decode steps since pages were last selected; `None` before the first selection.
    since_selection: Option<usize>,
    groups: Vec<Slot>,
    /// (head, device slot).
    ways: Vec<(u32, Slot)>,
    ways_of_head: Vec<u32>,
}

impl Cache {
    /// Starts the settings of a cache for a model of this shape.
    pub fn builder(geometry: Geometry) -> CacheBuilder {
        CacheBuilder::new(geometry)
    }
}

impl<B: Backend> Cache<B> {
    /// The shape of the model.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// What decode steps demand.
    pub fn selection(&self) -> Selection {
        self.selection
    }

    /// A new sequence without tokens.
    pub fn insert(&mut self) -> Sequence {
        self.insert_with_capacity(0)
    }

    /// A new sequence without tokens whose tables have room for `tokens` tokens, so that they need not grow in a step. No page is
    /// taken from any pool.
    pub fn insert_with_capacity(&mut self, tokens: usize) -> Sequence {
        self.undo_leaked_step();
        // No sequence has more pages than the reservoir, and an open one.
        let pages = tokens.div_ceil(self.geometry.page_tokens()).min(self.reservoir.total() + 1);
        let heads = self.geometry.heads();
        let ways = pages.min(self.budget).min(self.device.total() / heads);
        let state = State {
            groups: Vec::with_capacity(pages),
            ways: Vec::with_capacity(ways * heads),
            ways_of_head: vec![0; heads],
            ..State::default()
        };
        let index = self.vacant.pop().unwrap_or_else(|| {
            self.places.push(Seat { generation: 0, sequence: None });
            self.places.len() as u32 - 1
        });
        let seat = &mut self.places[index as usize];
        seat.generation = seat.generation.wrapping_add(1);
        seat.sequence = Some(state);
        self.backend.insert(index, pages * self.geometry.page_tokens(), ways);
        Sequence { index, generation: self.places[index as usize].generation, cache: self.id }
    }

    /// Removes a sequence. Its pages are free for others.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`]; with `scrub_on_free` also a failure to overwrite the reservoir, after which the sequence is gone
    /// all the same.
    pub fn remove(&mut self, sequence: Sequence) -> Result<(), Error> {
        self.undo_leaked_step();
        self.state(sequence)?;
        let seat = &mut self.places[sequence.index as usize];
        let Some(state) = seat.sequence.take() else { return Ok(()) };
        let scrubbed = self.backend.remove(sequence.index);
        for slot in state.groups {
            self.reservoir.give_back(slot);
        }
        for (_, slot) in state.ways {
            self.device.give_back(slot);
        }
        self.vacant.push(sequence.index);
        scrubbed
    }

    /// Tokens of a sequence.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn tokens(&self, sequence: Sequence) -> Result<usize, Error> {
        self.state(sequence).map(|state| state.tokens)
    }

    /// Live sequences.
    pub fn sequences(&self) -> usize {
        self.places.len() - self.vacant.len()
    }

    /// Counters since the cache was built.
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// Waits for everything that is under way on the device, and brings [`stats`](Self::stats) up to date. On the CPU they always
    /// are; a CUDA device counts by itself, and its counters come in a step or two later.
    ///
    /// # Errors
    /// Something that was under way has failed.
    pub fn synchronize(&mut self) -> Result<(), Error> {
        self.undo_leaked_step();
        self.counts.stall = Default::default();
        self.counts.heads.fill(Default::default());
        self.backend.synchronize(&mut self.counts)?;
        self.count_heads();
        Ok(())
    }

    /// How full the pools are.
    pub fn occupancy(&self) -> Occupancy {
        Occupancy {
            device_owned: self.device.owned(),
            device_total: self.device.total(),
            reservoir_owned: self.reservoir.owned(),
            reservoir_total: self.reservoir.total(),
        }
    }

    /// Bytes of host memory that page tables and pools take for the live sequences, beside the pages and digests themselves.
    pub fn table_bytes(&self) -> usize {
        let states = self.places.iter().filter_map(|seat| seat.sequence.as_ref());
        let own: usize = states
            .map(|state| {
                state.groups.capacity() * size_of::<Slot>()
                    + state.ways.capacity() * size_of::<(u32, Slot)>()
                    + state.ways_of_head.capacity() * size_of::<u32>()
            })
            .sum();
        own + self.backend.table_bytes() + self.device.table_bytes() + self.reservoir.table_bytes()
    }

    /// Begins a step. `batch` says how many new tokens each sequence has; see [`Entry`] for prefill and decode.
    ///
    /// Admission is decided here: on success everything the step needs has been set aside.
    ///
    /// # Errors
    /// A batch that makes no sense, [`Error::UnknownSequence`], [`Error::TooLong`], [`Error::ReservoirFull`],
    /// [`Error::DevicePoolFull`]. Nothing has changed then.
    pub fn step(&mut self, batch: &[impl Into<Entry> + Copy]) -> Result<Step<'_, B>, Error> {
        self.undo_leaked_step();
        self.plan.number += 1;
        self.plan_entries(batch)?;
        self.admit()?;
        self.grant();
        self.open_step = true;
        if let Err(error) = self.backend.begin(&self.plan) {
            self.release_grants();
            return Err(error);
        }
        tracing::debug!(
            step = self.plan.number,
            sequences = self.plan.entries.len(),
            tokens = self.plan.tokens,
            sealed = self.plan.groups.len(),
            ways = self.plan.ways.len(),
            "step admitted"
        );
        Ok(Step::new(self))
    }

    fn state(&self, sequence: Sequence) -> Result<&State, Error> {
        self.places
            .get(sequence.index as usize)
            .filter(|seat| sequence.cache == self.id && seat.generation == sequence.generation)
            .and_then(|seat| seat.sequence.as_ref())
            .ok_or(Error::UnknownSequence { index: sequence.index, generation: sequence.generation })
    }

    /// The state of a sequence that a plan names. Plans name live sequences only.
    fn live(&self, sequence: u32) -> &State {
        static NOBODY: State =
            State { tokens: 0, since_selection: None, groups: Vec::new(), ways: Vec::new(), ways_of_head: Vec::new() };
        self.places[sequence as usize].sequence.as_ref().unwrap_or(&NOBODY)
    }

    /// Checks the design's invariants over pools, sequences and the backend's tables. Meant for tests; costs time in proportion to
    /// everything that is live.
    ///
    /// # Errors
    /// What does not hold, in words.
    pub fn check(&self) -> Result<(), String> {
        let states = || self.places.iter().filter_map(|seat| seat.sequence.as_ref());
        let groups: usize = states().map(|state| state.groups.len()).sum();
        let ways: usize = states().map(|state| state.ways.len()).sum();
        if (groups, ways) != (self.reservoir.owned(), self.device.owned()) {
            return Err(format!(
                "sequences own {groups} groups and {ways} ways, the pools say {} and {}",
                self.reservoir.owned(),
                self.device.owned()
            ));
        }
        for state in states() {
            if !state.groups.iter().all(|&slot| self.reservoir.is_live(slot)) {
                return Err("a sequence holds a stale reservoir group".into());
            }
            if !state.ways.iter().all(|&(_, slot)| self.device.is_live(slot)) {
                return Err("a sequence holds a stale device slot".into());
            }
            if state.ways_of_head.iter().any(|&ways| ways as usize > self.budget) {
                return Err(format!("a head owns more than its budget of {} ways", self.budget));
            }
            if !self.open_step && state.groups.len() != self.geometry.sealed_pages(state.tokens) {
                return Err(format!("{} tokens, but {} reserved pages", state.tokens, state.groups.len()));
            }
        }
        let live: Vec<(u32, usize)> = (0u32..)
            .zip(&self.places)
            .filter_map(|(index, seat)| Some((index, seat.sequence.as_ref()?.tokens)))
            .collect();
        self.backend.check(&live)
    }
}
