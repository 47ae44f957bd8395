//! Sequences come and go; who owns which slot; what a step may take.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::backend::cpu::CpuBackend;
use crate::backend::{Backend, Device, EntryPlan, Setup, StepCounts, StepPlan, WayGrant};
use crate::error::Error;
use crate::geometry::Geometry;
use crate::growth::make_room;
use crate::observe::{Observer, Part};
use crate::pool::{Slot, SlotPool};
use crate::reservoir::Reservoir;
use crate::selection::Selection;
use crate::stats::{Occupancy, Stats, StepReport};
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

/// Sequences at full budget that the default device pool has room for.
const DEFAULT_SEQUENCES: usize = 4;

/// The default reservoir: 1 GiB of host memory.
const DEFAULT_RESERVOIR: u64 = 1 << 30;

/// Settings of a [`Cache`].
#[derive(Debug)]
#[must_use]
pub struct CacheBuilder {
    geometry: Geometry,
    pages_per_head: Option<usize>,
    device_pool: Option<u64>,
    reservoir: Reservoir,
    selection: Selection,
    reselect_every: usize,
    scale: Option<f32>,
    scrub_on_free: bool,
    observer: Option<Box<dyn Observer>>,
}

impl CacheBuilder {
    /// Ways: pages that each head may keep on the device. Default: no limit but the device pool.
    pub fn pages_per_head(mut self, pages: usize) -> Self {
        self.pages_per_head = Some(pages);
        self
    }

    /// Bytes of the device pool that all sequences share. Default: room for four sequences with all their ways, or, without a
    /// limit per head, for all that the reservoir can hold.
    pub fn device_pool(mut self, bytes: u64) -> Self {
        self.device_pool = Some(bytes);
        self
    }

    /// Where every sealed page also lives. Default: 1 GiB of host memory.
    pub fn reservoir(mut self, reservoir: Reservoir) -> Self {
        self.reservoir = reservoir;
        self
    }

    /// What decode steps demand. Default [`Selection::All`].
    pub fn selection(mut self, selection: Selection) -> Self {
        self.selection = selection;
        self
    }

    /// Decode steps from one selection of pages to the next. Default 1, the strict mode; larger values reuse the last selection
    /// in between.
    pub fn reselect_every(mut self, steps: usize) -> Self {
        self.reselect_every = steps;
        self
    }

    /// Factor on q·k before the softmax. Default 1/√head_dim.
    pub fn scale(mut self, scale: f32) -> Self {
        self.scale = Some(scale);
        self
    }

    /// Overwrites slots with zeros when a sequence is removed. Default off: generations already keep other sequences from
    /// reading them.
    pub fn scrub_on_free(mut self, scrub: bool) -> Self {
        self.scrub_on_free = scrub;
        self
    }

    /// Shows every demand to an observer, a [`Recorder`](crate::trace::Recorder) for one. Default: none.
    pub fn observer(mut self, observer: impl Observer + 'static) -> Self {
        self.observer = Some(Box::new(observer));
        self
    }

    /// Builds the cache on a device. All memory is set aside here.
    ///
    /// # Errors
    /// Settings that do not fit each other or the device, or memory that could not be had.
    pub fn build<D: Device>(self, device: D) -> Result<Cache<D::Backend>, Error> {
        let geometry = self.geometry;
        let pins = self.selection.pins().ok_or_else(|| Error::Setting {
            knob: "selection",
            value: format!("{:?}", self.selection),
            rule: "sinks and recent pages must fit a page number".into(),
        })?;
        if let Some(budget) = self.pages_per_head.filter(|&budget| budget < pins.ways()) {
            return Err(Error::BudgetBelowPins { budget, pinned: pins.ways() });
        }
        if self.reselect_every == 0 {
            return setting("reselect_every", 0, "must be at least 1");
        }
        let scale = self.scale.unwrap_or(1.0 / (geometry.head_dim() as f32).sqrt());
        if !scale.is_finite() {
            return setting("scale", scale, "must be finite");
        }
        let reservoir_groups = slots("reservoir", self.reservoir.bytes(), geometry.group_bytes())?;
        let device_bytes = self.device_pool.unwrap_or_else(|| {
            let ways = match self.pages_per_head {
                Some(budget) => budget.saturating_mul(DEFAULT_SEQUENCES),
                None => usize::MAX,
            };
            // No sequence can have more pages than are reserved, and an open one.
            let useful = reservoir_groups as usize + DEFAULT_SEQUENCES;
            (ways.min(useful) as u64).saturating_mul(geometry.group_bytes() as u64)
        });
        let device_slots = slots("device_pool", device_bytes, geometry.page_bytes())?;
        let backend = device.open(Setup {
            geometry,
            scale,
            device_slots,
            reservoir_groups,
            reservoir: self.reservoir,
            selection: self.selection,
            pins,
            scrub_on_free: self.scrub_on_free,
        })?;
        let mut observer = self.observer;
        if let Some(observer) = &mut observer {
            observer.built(&geometry, pins, self.pages_per_head);
        }
        static CACHES: AtomicU32 = AtomicU32::new(0);
        let mut counts = StepCounts::default();
        counts.heads.resize_with(geometry.heads(), Default::default);
        Ok(Cache {
            id: CACHES.fetch_add(1, Ordering::Relaxed),
            geometry,
            budget: self.pages_per_head.unwrap_or(usize::MAX),
            selection: self.selection,
            reselect_every: self.reselect_every,
            backend,
            observer,
            device: SlotPool::new(device_slots),
            reservoir: SlotPool::new(reservoir_groups),
            places: Vec::new(),
            vacant: Vec::new(),
            plan: StepPlan::default(),
            named: Vec::new(),
            open_step: false,
            stats: Stats { heads: counts.heads.clone(), last_step: counts.heads.clone(), ..Stats::default() },
            counts,
        })
    }
}

fn setting<T>(knob: &'static str, value: impl ToString, rule: &str) -> Result<T, Error> {
    Err(Error::Setting { knob, value: value.to_string(), rule: rule.into() })
}

fn slots(knob: &'static str, bytes: u64, unit: usize) -> Result<u32, Error> {
    match u32::try_from(bytes / unit as u64) {
        Ok(0) => setting(knob, format!("{bytes} bytes"), &format!("one unit of it takes {unit} bytes")),
        Ok(slots) if slots < u32::MAX => Ok(slots),
        _ => setting(knob, format!("{bytes} bytes"), "must be fewer than 2^32 − 1 units"),
    }
}

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
        CacheBuilder {
            geometry,
            pages_per_head: None,
            device_pool: None,
            reservoir: Reservoir::memory(DEFAULT_RESERVOIR),
            selection: Selection::All,
            reselect_every: 1,
            scale: None,
            scrub_on_free: false,
            observer: None,
        }
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

    /// Lays out the batch and checks all that can be wrong with it.
    fn plan_entries(&mut self, batch: &[impl Into<Entry> + Copy]) -> Result<(), Error> {
        self.plan.entries.clear();
        self.plan.tokens = 0;
        if batch.is_empty() {
            return Err(Error::Batch { entry: 0, reason: "the batch is empty" });
        }
        for (index, &entry) in batch.iter().enumerate() {
            let entry: Entry = entry.into();
            let state = self.state(entry.sequence)?;
            if entry.tokens == 0 {
                return Err(Error::Batch { entry: index, reason: "zero tokens: leave the sequence out of the batch" });
            }
            let tokens = state.tokens.saturating_add(entry.tokens);
            if tokens > MAX_TOKENS {
                return Err(Error::TooLong { tokens, limit: MAX_TOKENS });
            }
            let phase = entry.phase.unwrap_or(match (state.tokens, entry.tokens) {
                (1.., 1) => Phase::Decode,
                _ => Phase::Prefill,
            });
            let reselect = state.since_selection.is_none_or(|steps| steps >= self.reselect_every);
            let plan = EntryPlan {
                sequence: entry.sequence.index,
                start: state.tokens,
                tokens: entry.tokens,
                row: self.plan.tokens,
                phase,
                reselect,
                groups: 0..0,
                ways: 0..0,
            };
            self.plan.entries.push(plan);
            self.plan.tokens += entry.tokens;
        }
        // Quadratic, but over a batch, and without a table to keep.
        for (index, entry) in self.plan.entries.iter().enumerate() {
            if self.plan.entries[..index].iter().any(|other| other.sequence == entry.sequence) {
                return Err(Error::Batch { entry: index, reason: "the sequence is in the batch already" });
            }
        }
        Ok(())
    }

    /// Whether the pools have what the batch needs.
    fn admit(&self) -> Result<(), Error> {
        let (mut groups, mut ways) = (0, 0);
        for entry in &self.plan.entries {
            groups += self.sealed_by(entry);
            let due = self.ways_due(entry);
            let owned = &self.live(entry.sequence).ways_of_head;
            ways += owned.iter().map(|&owned| due.saturating_sub(owned) as usize).sum::<usize>();
        }
        if groups > self.reservoir.free() {
            return Err(Error::ReservoirFull {
                needed: groups,
                free: self.reservoir.free(),
                total: self.reservoir.total(),
                heads: self.geometry.heads(),
                bytes: (self.reservoir.total() as u64) * self.geometry.group_bytes() as u64,
            });
        }
        if ways > self.device.free() {
            return Err(Error::DevicePoolFull { needed: ways, free: self.device.free(), total: self.device.total() });
        }
        Ok(())
    }

    /// Sets aside what [`admit`](Self::admit) has found to be there.
    fn grant(&mut self) {
        self.plan.groups.clear();
        self.plan.ways.clear();
        for index in 0..self.plan.entries.len() {
            let entry = &self.plan.entries[index];
            let (sealed, due, sequence) = (self.sealed_by(entry), self.ways_due(entry), entry.sequence);
            let (groups_from, ways_from) = (self.plan.groups.len(), self.plan.ways.len());
            let Some(state) = self.places[sequence as usize].sequence.as_mut() else { continue };
            make_room(&mut state.groups, sealed);
            for slot in std::iter::from_fn(|| self.reservoir.take()).take(sealed) {
                state.groups.push(slot);
                self.plan.groups.push(slot.index());
            }
            for (head, owned) in state.ways_of_head.iter_mut().enumerate() {
                make_room(&mut state.ways, due.saturating_sub(*owned) as usize);
                while *owned < due {
                    let Some(slot) = self.device.take() else { break };
                    *owned += 1;
                    state.ways.push((head as u32, slot));
                    self.plan.ways.push(WayGrant { head: head as u32, slot: slot.index() });
                }
            }
            let entry = &mut self.plan.entries[index];
            entry.groups = groups_from..self.plan.groups.len();
            entry.ways = ways_from..self.plan.ways.len();
        }
    }

    /// Pages that an entry's tokens fill.
    fn sealed_by(&self, entry: &EntryPlan) -> usize {
        self.geometry.sealed_pages(entry.start + entry.tokens) - self.geometry.sealed_pages(entry.start)
    }

    /// Ways that each head of an entry's sequence has to own for the step.
    fn ways_due(&self, entry: &EntryPlan) -> u32 {
        self.geometry.pages(entry.start + entry.tokens).min(self.budget) as u32
    }

    /// Makes the step's tokens part of their sequences.
    pub(crate) fn commit(&mut self) -> Result<StepReport, Error> {
        self.counts.stall = Default::default();
        self.counts.heads.fill(Default::default());
        self.backend.finish(&self.plan, &mut self.counts)?;
        self.open_step = false;
        self.observe(|observer, part| observer.finished(part));
        for entry in &self.plan.entries {
            let Some(state) = self.places[entry.sequence as usize].sequence.as_mut() else { continue };
            state.tokens += entry.tokens;
            state.since_selection = match entry.phase {
                Phase::Decode => Some(state.since_selection.filter(|_| !entry.reselect).unwrap_or(0) + 1),
                // What was selected before the new prompt tokens says little about what they ask for.
                Phase::Prefill => None,
            };
        }
        let mut report = StepReport {
            step: self.plan.number,
            sequences: self.plan.entries.len(),
            tokens: self.plan.tokens,
            stall: self.counts.stall,
            occupancy: self.occupancy(),
            ..StepReport::default()
        };
        for (total, &step) in self.stats.heads.iter_mut().zip(&self.counts.heads) {
            *total += step;
            report.counts += step;
        }
        self.stats.last_step.copy_from_slice(&self.counts.heads);
        self.stats.steps += 1;
        self.stats.tokens += report.tokens as u64;
        self.stats.counts += report.counts;
        self.stats.stall += report.stall;
        tracing::debug!(
            step = report.step,
            hits = report.counts.decode.hits,
            misses = report.counts.decode.misses(),
            stall_us = report.stall.as_micros() as u64,
            "step finished"
        );
        Ok(report)
    }

    /// Shows the observer, if there is one, what the heads of a layer have just demanded.
    pub(crate) fn observe_layer(&mut self, layer: usize) {
        let Some(mut observer) = self.observer.take() else { return };
        let kv_heads = self.geometry.kv_heads();
        for lane in 0..self.plan.entries.len() * kv_heads {
            if let Some(demand) = self.backend.demand(lane) {
                let part = self.part(&self.plan.entries[lane / kv_heads]);
                observer.attended(part, self.geometry.head(layer, lane % kv_heads), demand);
            }
        }
        self.observer = Some(observer);
    }

    /// Tells the observer, if there is one, of every entry.
    fn observe(&mut self, tell: impl Fn(&mut dyn Observer, Part)) {
        let Some(mut observer) = self.observer.take() else { return };
        for entry in &self.plan.entries {
            tell(&mut *observer, self.part(entry));
        }
        self.observer = Some(observer);
    }

    fn part(&self, entry: &EntryPlan) -> Part {
        let generation = self.places[entry.sequence as usize].generation;
        let sequence = Sequence { index: entry.sequence, generation, cache: self.id };
        let &EntryPlan { start, tokens, phase, .. } = entry;
        Part { step: self.plan.number, sequence, start, tokens, phase }
    }

    /// Leaves every sequence of the step as it was before.
    pub(crate) fn undo(&mut self) {
        self.backend.abort(&self.plan);
        self.observe(|observer, part| observer.undone(part));
        self.release_grants();
        tracing::debug!(step = self.plan.number, "step undone");
    }

    fn release_grants(&mut self) {
        self.open_step = false;
        for entry in &self.plan.entries {
            let Some(state) = self.places[entry.sequence as usize].sequence.as_mut() else { continue };
            for slot in state.groups.drain(state.groups.len() - entry.groups.len()..) {
                self.reservoir.give_back(slot);
            }
            for (head, slot) in state.ways.drain(state.ways.len() - entry.ways.len()..) {
                state.ways_of_head[head as usize] -= 1;
                self.device.give_back(slot);
            }
        }
    }

    /// A [`Step`] that was leaked instead of dropped is undone by the next call that changes anything.
    fn undo_leaked_step(&mut self) {
        if self.open_step {
            self.undo();
        }
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
