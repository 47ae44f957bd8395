//! What the heads of one sequence must find, fetch and evict: [`NaiveTable`]s, taken through the steps of a cache.
#![allow(dead_code, reason = "each test uses a part of it")]

use super::naive::NaiveTable;
use wakekv::table::{Phase, Pins};
use wakekv::{Counts, Geometry};

/// One sequence's part in a step.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    pub step: u64,
    pub phase: Phase,
    pub start: usize,
    pub tokens: usize,
}

#[derive(Clone, Debug)]
pub struct Heads {
    geometry: Geometry,
    budget: usize,
    pins: Pins,
    tables: Vec<NaiveTable>,
}

impl Heads {
    pub fn new(geometry: Geometry, budget: usize, pins: Pins) -> Self {
        Heads { geometry, budget, pins, tables: vec![NaiveTable::default(); geometry.heads()] }
    }

    /// Ways that each head still needs for the step.
    pub fn due(&self, start: usize, tokens: usize) -> usize {
        self.geometry.pages(start + tokens).min(self.budget).saturating_sub(self.tables[0].ways())
    }

    pub fn grant(&mut self, ways: usize) {
        self.tables.iter_mut().for_each(|table| (0..ways).for_each(|way| table.grant(way as u32)));
    }

    pub fn append(&mut self, head: usize, span: Span) -> Counts {
        let (g, mut counts) = (&self.geometry, Counts::default());
        let (before, end) = (g.pages(span.start), span.start + span.tokens);
        let keep = (!span.start.is_multiple_of(g.page_tokens())).then(|| before as u32 - 1);
        for _ in before..g.pages(end) {
            let opened = self.tables[head].open(span.step, span.phase, self.pins, keep).expect("admission saw to it");
            counts.evictions += u64::from(opened.evicted.is_some());
        }
        counts.mirrored_bytes = ((g.sealed_pages(end) - g.sealed_pages(span.start)) * g.page_bytes()) as u64;
        counts
    }

    pub fn attend(&mut self, head: usize, span: Span, demand: &[u32]) -> Counts {
        let (_, tally) = self.tables[head].demand(span.step, span.phase, demand).expect("the demand is sane");
        let mut counts = Counts::default();
        counts.demanded = demand.len() as u64;
        counts.hits = tally.hits.into();
        counts.compulsory = tally.compulsory.into();
        counts.capacity = tally.capacity.into();
        counts.overflow = tally.overflow.into();
        counts.evictions = tally.evictions.into();
        counts.fetched_bytes = counts.misses() * self.geometry.page_bytes() as u64;
        counts
    }

    /// Undoes a step that had granted so many ways.
    pub fn undo(&mut self, start: usize, ways: usize) {
        for table in &mut self.tables {
            while table.pages() > self.geometry.pages(start) {
                table.close();
            }
            (0..ways).for_each(|_| assert!(table.revoke().is_some()));
        }
    }
}
