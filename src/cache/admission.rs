//! What a step may take: its plan, admission, and what becomes of it at the end.

use super::{Cache, Entry, MAX_TOKENS, Sequence};
use crate::backend::{Backend, EntryPlan, WayGrant};
use crate::error::Error;
use crate::growth::make_room;
use crate::observe::{Observer, Part};
use crate::stats::{PhaseCounts, StepReport};
use crate::table::Phase;

impl<B: Backend> Cache<B> {
    /// Lays out the batch and checks all that can be wrong with it.
    pub(super) fn plan_entries(&mut self, batch: &[impl Into<Entry> + Copy]) -> Result<(), Error> {
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
    pub(super) fn admit(&self) -> Result<(), Error> {
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
    pub(super) fn grant(&mut self) {
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
        report.counts = self.count_heads();
        self.stats.last_step.copy_from_slice(&self.counts.heads);
        self.stats.steps += 1;
        self.stats.tokens += report.tokens as u64;
        tracing::debug!(
            step = report.step,
            hits = report.counts.decode.hits,
            misses = report.counts.decode.misses(),
            stall_us = report.stall.as_micros() as u64,
            "step finished"
        );
        Ok(report)
    }

    /// Adds what the backend has just counted to the statistics, and returns its sum.
    pub(super) fn count_heads(&mut self) -> PhaseCounts {
        let mut sum = PhaseCounts::default();
        for (total, &counted) in self.stats.heads.iter_mut().zip(&self.counts.heads) {
            *total += counted;
            sum += counted;
        }
        self.stats.counts += sum;
        self.stats.stall += self.counts.stall;
        sum
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

    pub(super) fn release_grants(&mut self) {
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

    /// A [`Step`](crate::Step) that was leaked instead of dropped is undone by the next call that changes anything.
    pub(crate) fn undo_leaked_step(&mut self) {
        if self.open_step {
            self.undo();
        }
    }
}
