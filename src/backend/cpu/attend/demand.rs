//! What each head reads in this layer, and what its table says to that.

use std::ops::Range;

use super::super::tables::Head;
use super::super::threads::Shares;
use super::super::{CpuBackend, CpuTensor, Parts};
use super::Lane;
use crate::backend::{EntryPlan, StepPlan};
use crate::error::Error;
use crate::geometry::Geometry;
use crate::residency::Scores;
use crate::selection::{PageLists, Selection};
use crate::table::{Phase, Pins};

/// Room for the scores of one lane's pages.
#[derive(Debug, Default)]
pub(super) struct Scoring {
    /// Host slots of the candidates.
    hosts: Vec<u32>,
    scores: Vec<f32>,
    /// Candidates, to be partitioned by score.
    order: Vec<u32>,
    /// The first candidate, if this step has scored any.
    first: Option<u32>,
}

impl Scoring {
    /// What this step has scored.
    pub(super) fn scores(&self) -> Option<Scores<'_>> {
        self.first.map(|first| Scores { first, scores: &self.scores })
    }
}

impl CpuBackend {
    /// Fills in each lane's queries, demand and places.
    pub(super) fn ask(
        &mut self,
        plan: &StepPlan,
        layer: usize,
        q: CpuTensor<'_>,
        lists: Option<PageLists<'_>>,
    ) -> Result<(), Error> {
        let live = self.scratch.live;
        let (heads, groups) = self.tables.all();
        let heads = Shares::new(heads);
        let lanes = Shares::new(&mut self.scratch.lanes[..live]);
        let queries = Shares::new(&mut self.scratch.queries);
        let (geometry, parts, selection) = (&self.geometry, &self.parts, self.selection);
        let stickiness = self.stickiness;
        let dim = geometry.head_dim();
        self.threads.run(live, &|_, task| {
            // SAFETY: each task runs once, and lanes have distinct heads and disjoint queries.
            let (lane, head, rows) = unsafe {
                let lane = lanes.element(task);
                let (head, queries) = (heads.element(lane.head), queries.range(lane.queries, lane.rows * dim));
                (lane, head, queries)
            };
            let entry = &plan.entries[lane.entry];
            gather_queries(geometry, parts.scale, entry, lane, q, rows);
            lane.pages.clear();
            lane.scoring.first = None;
            let last = geometry.pages(entry.start + entry.tokens) as u32 - 1;
            let pinned = Pinned::new(parts.pins, geometry.sealed_pages(entry.start) as u32, last);
            match (entry.phase, selection) {
                (Phase::Prefill, _) | (_, Selection::All) => lane.pages.extend(0..=last),
                (_, Selection::Explicit { .. }) => {
                    let list = lists.map_or(&[][..], |lists| lists.list(task));
                    lane.pages.extend(list.iter().filter(|&&page| !pinned.contain(page)));
                    lane.pages.sort_unstable();
                    pinned.add_to(&mut lane.pages);
                }
                (_, Selection::TopPages { count, .. }) => {
                    if std::mem::take(&mut head.selection_due) {
                        let groups = &groups[entry.sequence as usize];
                        let host = |page: u32| {
                            groups[page as usize] * geometry.heads() as u32 + geometry.head(layer, lane.kv_head) as u32
                        };
                        let wanted = Wanted { candidates: pinned.between(), count, kept: &head.kept, stickiness };
                        select(parts, wanted, host, rows, &mut lane.scoring, &mut head.selected);
                        head.chosen = true;
                    }
                    // What has become pinned since the selection is demanded anyway.
                    lane.pages.extend(head.selected.iter().filter(|&&page| !pinned.contain(page)));
                    pinned.add_to(&mut lane.pages);
                }
            }
            ask_table(plan.number, entry, head, lane);
        })?;
        match self.scratch.lanes[..live].iter_mut().find_map(|lane| lane.error.take()) {
            Some(error) => Err(error.into()),
            None => Ok(()),
        }
    }
}

/// The lane's rows of `q`, scaled: `[tokens, group, head_dim]`.
fn gather_queries(geometry: &Geometry, scale: f32, entry: &EntryPlan, lane: &Lane, q: CpuTensor<'_>, rows: &mut [f32]) {
    let width = geometry.group() * geometry.head_dim();
    for (token, rows) in rows.chunks_exact_mut(width).enumerate() {
        let at = ((entry.row + token) * geometry.kv_heads() + lane.kv_head) * width;
        q.read(at, rows);
        rows.iter_mut().for_each(|x| *x *= scale);
    }
}

/// The pages that a decode entry reads whatever is selected: the sinks, and all from the recent window on. Pages that the step
/// itself writes are among them, for each new token reads at least its own; and the page that was open before stays on the device
/// for as long as the step may be undone.
#[derive(Clone, Copy)]
struct Pinned {
    /// Pages below are pinned.
    sinks: u32,
    /// Pages from here on to the last one are pinned.
    recent: u32,
    last: u32,
}

impl Pinned {
    fn new(pins: Pins, first_written: u32, last: u32) -> Self {
        let sinks = pins.sinks.min(last);
        let recent = last.saturating_sub(pins.recent).min(first_written).max(sinks);
        Pinned { sinks, recent, last }
    }

    fn contain(self, page: u32) -> bool {
        page < self.sinks || page >= self.recent
    }

    /// The pages that are not pinned.
    fn between(self) -> Range<u32> {
        self.sinks..self.recent
    }

    /// Adds the pinned pages to an ascending list that holds none of them.
    fn add_to(self, pages: &mut Vec<u32>) {
        pages.splice(0..0, 0..self.sinks);
        pages.extend(self.recent..=self.last);
    }
}

/// What a selection chooses from.
struct Wanted<'a> {
    /// Sealed pages.
    candidates: Range<u32>,
    count: usize,
    /// Pages whose score is raised by `stickiness`.
    kept: &'a [u32],
    stickiness: f32,
}

/// The best `count` candidates by digest, ascending. NaN counts as the best, so that it shows in the output
/// as it would without a selection; of equal scores the lower page wins.
fn select(
    parts: &Parts,
    wanted: Wanted<'_>,
    host: impl Fn(u32) -> u32,
    queries: &[f32],
    scoring: &mut Scoring,
    selected: &mut Vec<u32>,
) {
    let Scoring { hosts, scores, order, first } = scoring;
    let Wanted { candidates, count, kept, stickiness } = wanted;
    selected.clear();
    if count >= candidates.len() {
        selected.extend(candidates);
        return;
    }
    let Some(digests) = &parts.digests else { return };
    hosts.clear();
    hosts.extend(candidates.clone().map(host));
    scores.clear();
    scores.resize(hosts.len(), 0.0);
    // SAFETY: the candidates are sealed, so each has left a digest, and digests are written in `append` only.
    unsafe { digests.score(queries, hosts, scores) };
    if stickiness > 0.0 {
        for &page in kept.iter().filter(|page| candidates.contains(page)) {
            scores[(page - candidates.start) as usize] += stickiness;
        }
    }
    for score in &mut *scores {
        if score.is_nan() {
            *score = f32::INFINITY;
        }
    }
    *first = Some(candidates.start);
    order.clear();
    order.extend(0..hosts.len() as u32);
    if count > 0 {
        order.select_nth_unstable_by(count - 1, |&a, &b| {
            scores[b as usize].total_cmp(&scores[a as usize]).then(a.cmp(&b))
        });
    }
    selected.extend(order[..count].iter().map(|&index| candidates.start + index));
    selected.sort_unstable();
}

fn ask_table(step: u64, entry: &EntryPlan, head: &mut Head, lane: &mut Lane) {
    if let Some(scores) = lane.scoring.scores() {
        head.table.rate(scores, &lane.pages);
    }
    match head.table.demand(step, entry.phase, &lane.pages, &mut lane.places) {
        Ok(tally) => lane.tally = tally,
        Err(error) => lane.error = Some(error),
    }
}
