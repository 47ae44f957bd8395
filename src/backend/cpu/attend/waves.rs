//! Cuts the demands of a layer into segments, and the segments into waves.
//!
//! Pages that exceed their head's budget stream through the staging slots. Half of these serve one wave while the other half is
//! being filled for the next, so a wave takes no more such pages than half the slots, and no more copies than half the queue.

use std::ops::Range;

use super::super::Parts;
use super::super::copy::{Job, Kind};
use super::{Lane, MAX_SEGMENT, Scratch, grow};
use crate::geometry::Geometry;
use crate::table::Place;

/// Rows of one task, where a lane has many: a segment of a few hundred KiB stays in the cache while they pass over it.
pub(super) const ROW_BLOCK: usize = 32;

/// Rows above which a lane keeps one running state per row instead of one per segment and row.
const RUNNING_ROWS: usize = 64;

/// Bytes of a segment at most.
const SEGMENT_BYTES: usize = 256 << 10;

/// Segments that a long demand is cut into, so that threads can share a head.
const SEGMENTS: usize = 16;

/// Fewest pages worth a segment of their own.
const MIN_SEGMENT: usize = 4;

/// Pages of one segment at most.
pub(in super::super) fn max_segment(geometry: &Geometry) -> usize {
    (SEGMENT_BYTES / geometry.page_bytes()).clamp(1, MAX_SEGMENT)
}

/// Pages per segment of a demand of `pages`. Depends on nothing else, which is what makes results independent of the budget.
fn segment_pages(geometry: &Geometry, pages: usize) -> usize {
    let max = max_segment(geometry);
    pages.div_ceil(SEGMENTS).clamp(MIN_SEGMENT.min(max), max)
}

/// Some rows of a lane over some of its segments.
#[derive(Clone, Debug)]
pub(super) struct Task {
    pub lane: u32,
    pub segments: Range<u32>,
    pub rows: Range<u32>,
}

/// Tasks and copies in the order of their waves.
#[derive(Debug, Default)]
pub(super) struct Schedule {
    tasks: Vec<Task>,
    jobs: Vec<Job>,
    /// Per wave, where its tasks and its copies end.
    ends: Vec<(usize, usize)>,
}

impl Schedule {
    pub(super) fn waves(&self) -> usize {
        self.ends.len()
    }

    pub(super) fn tasks(&self, wave: usize) -> &[Task] {
        let from = wave.checked_sub(1).map_or(0, |before| self.ends[before].0);
        &self.tasks[from..self.ends[wave].0]
    }

    pub(super) fn jobs(&self, wave: usize) -> &[Job] {
        let from = wave.checked_sub(1).map_or(0, |before| self.ends[before].1);
        &self.jobs[from..self.ends[wave].1]
    }
}

/// Fills waves one after the other.
struct Planner<'a> {
    parts: &'a Parts,
    schedule: &'a mut Schedule,
    /// Copies of the wave at hand, and how many of them go to staging slots.
    jobs: usize,
    staged: u32,
}

impl Planner<'_> {
    /// Whether a segment with these needs has to begin a new wave.
    fn is_full(&self, jobs: usize, staged: u32) -> bool {
        self.jobs + jobs > self.parts.wave_jobs || self.staged + staged > self.parts.staging.count / 2
    }

    fn close_wave(&mut self) {
        self.schedule.ends.push((self.schedule.tasks.len(), self.schedule.jobs.len()));
        (self.jobs, self.staged) = (0, 0);
    }

    fn fetch(&mut self, host: u32, device: u32) {
        self.schedule.jobs.push(Job { kind: Kind::Fetch, host, device });
        self.jobs += 1;
    }

    fn next_staging_slot(&mut self) -> u32 {
        let staging = &self.parts.staging;
        let half = (self.schedule.ends.len() % 2) as u32 * (staging.count / 2);
        self.staged += 1;
        staging.first + half + self.staged - 1
    }
}

impl Scratch {
    /// Plans the layer's waves and makes room for its states.
    pub(super) fn schedule(&mut self, geometry: &Geometry, parts: &Parts, host: impl Fn(&Lane, u32) -> u32) {
        let Scratch { lanes, live, states, schedule, .. } = self;
        let lanes = &mut lanes[..*live];
        let mut floats = 0;
        for lane in &mut *lanes {
            lane.segment = segment_pages(geometry, lane.pages.len());
            lane.running = lane.rows > RUNNING_ROWS;
            lane.states = floats;
            floats += lane.state_floats(geometry.head_dim());
            lane.slots.clear();
            lane.slots.extend(lane.places.iter().map(|&place| match place {
                Place::Hit(slot) | Place::Fetch(slot) => slot,
                Place::Overflow => u32::MAX,
            }));
        }
        grow(states, floats);
        schedule.tasks.clear();
        schedule.jobs.clear();
        schedule.ends.clear();
        let mut planner = Planner { parts, schedule, jobs: 0, staged: 0 };
        for (index, lane) in (0u32..).zip(&*lanes).filter(|(_, lane)| !lane.running) {
            planner.plan_hits(index, lane);
        }
        for (index, lane) in (0u32..).zip(lanes) {
            planner.plan_rest(index, lane, &host);
        }
        planner.close_wave();
    }
}

impl Planner<'_> {
    /// Segments whose pages are all there come first: they are what hides the copies of the others.
    fn plan_hits(&mut self, index: u32, lane: &Lane) {
        for segment in 0..lane.segments() {
            if lane.misses(segment) == (0, 0) {
                let segment = segment as u32;
                self.schedule.tasks.push(Task {
                    lane: index,
                    segments: segment..segment + 1,
                    rows: 0..lane.rows as u32,
                });
            }
        }
    }

    /// Segments that miss pages, and all segments of lanes that run through theirs in order.
    fn plan_rest(&mut self, index: u32, lane: &mut Lane, host: &impl Fn(&Lane, u32) -> u32) {
        let mut pending = 0..0;
        for segment in 0..lane.segments() {
            let (jobs, staged) = lane.misses(segment);
            if jobs == 0 && !lane.running {
                continue;
            }
            if self.is_full(jobs, staged) {
                self.push_running(index, lane, &mut pending);
                self.close_wave();
            }
            for at in lane.segment_pages(segment) {
                match lane.places[at] {
                    Place::Hit(_) => {}
                    Place::Fetch(slot) => self.fetch(host(lane, lane.pages[at]), slot),
                    Place::Overflow => {
                        lane.slots[at] = self.next_staging_slot();
                        self.fetch(host(lane, lane.pages[at]), lane.slots[at]);
                    }
                }
            }
            let segment = segment as u32;
            if lane.running {
                pending = if pending.start == pending.end { segment..segment + 1 } else { pending.start..segment + 1 };
            } else {
                self.schedule.tasks.push(Task {
                    lane: index,
                    segments: segment..segment + 1,
                    rows: 0..lane.rows as u32,
                });
            }
        }
        self.push_running(index, lane, &mut pending);
    }

    /// The segments that a running lane has in this wave, for each block of its rows.
    fn push_running(&mut self, index: u32, lane: &Lane, pending: &mut Range<u32>) {
        if pending.start == pending.end {
            return;
        }
        for from in (0..lane.rows).step_by(ROW_BLOCK) {
            let rows = from as u32..(from + ROW_BLOCK).min(lane.rows) as u32;
            self.schedule.tasks.push(Task { lane: index, segments: pending.clone(), rows });
        }
        *pending = 0..0;
    }
}

impl Lane {
    /// Pages of a segment that have to be copied, and how many of them to staging slots.
    fn misses(&self, segment: usize) -> (usize, u32) {
        let places = &self.places[self.segment_pages(segment)];
        let jobs = places.iter().filter(|place| !matches!(place, Place::Hit(_))).count();
        let staged = places.iter().filter(|place| matches!(place, Place::Overflow)).count();
        (jobs, staged as u32)
    }
}
