//! The settings of a cache, checked together.

use std::sync::atomic::{AtomicU32, Ordering};

use super::Cache;
use crate::backend::{Device, Setup, StepCounts, StepPlan};
use crate::error::Error;
use crate::geometry::Geometry;
use crate::observe::Observer;
use crate::pool::SlotPool;
use crate::reservoir::Reservoir;
use crate::residency::Rule;
use crate::selection::Selection;
use crate::stats::Stats;

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
    stickiness: f32,
    replacement: Rule,
    scale: Option<f32>,
    scrub_on_free: bool,
    observer: Option<Box<dyn Observer>>,
}

impl CacheBuilder {
    pub(super) fn new(geometry: Geometry) -> Self {
        CacheBuilder {
            geometry,
            pages_per_head: None,
            device_pool: None,
            reservoir: Reservoir::memory(DEFAULT_RESERVOIR),
            selection: Selection::All,
            reselect_every: 1,
            stickiness: 0.0,
            replacement: Rule::Lru,
            scale: None,
            scrub_on_free: false,
            observer: None,
        }
    }

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

    /// What a page's score is raised by if the last selection chose it, with [`Selection::TopPages`]: a page of about the same
    /// score then does not take its place. Scores are logits, so raising by s passes over pages with up to e^s times its weight.
    /// Default 0.
    ///
    /// Attention hovers around the last place: pages just above and below it change places all the time, to nobody's gain, and
    /// each change may be a miss. What was chosen is remembered per head and finished step, so the output still does not depend
    /// on the budget, nor on steps that were dropped.
    pub fn stickiness(mut self, stickiness: f32) -> Self {
        self.stickiness = stickiness;
        self
    }

    /// Who goes when a page needs a way. Default [`Rule::Lru`], the published rule. No output depends on it, only what has to be
    /// fetched. With [`Selection::TopPages`] [`Rule::Standing`] has missed least on what we have recorded (`docs/results.md`); it
    /// takes 4 bytes per logical page of each head and twice LRU's 8 bytes per way, looks at all scores when a step selects, and at all ways
    /// when a step evicts. CUDA knows LRU only.
    pub fn replacement(mut self, rule: Rule) -> Self {
        self.replacement = rule;
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
        if !(self.stickiness >= 0.0 && self.stickiness.is_finite()) {
            return setting("stickiness", self.stickiness, "must be a finite number that is not negative");
        }
        let scale = self.scale.unwrap_or(1.0 / (geometry.head_dim() as f32).sqrt());
        if !scale.is_finite() {
            return setting("scale", scale, "must be finite");
        }
        let reservoir_groups = slots("reservoir", self.reservoir.bytes(), geometry.group_bytes(), &geometry)?;
        let device_bytes = self.device_pool.unwrap_or_else(|| {
            let ways = match self.pages_per_head {
                Some(budget) => budget.saturating_mul(DEFAULT_SEQUENCES),
                None => usize::MAX,
            };
            // No sequence can have more pages than are reserved, and an open one.
            let useful = reservoir_groups as usize + DEFAULT_SEQUENCES;
            (ways.min(useful) as u64).saturating_mul(geometry.group_bytes() as u64)
        });
        let device_slots = slots("device_pool", device_bytes, geometry.page_bytes(), &geometry)?;
        let backend = device.open(Setup {
            geometry,
            scale,
            device_slots,
            reservoir_groups,
            reservoir: self.reservoir,
            selection: self.selection,
            stickiness: self.stickiness,
            replacement: self.replacement,
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

/// Whole slots of `unit` bytes in `bytes`. A pool that cannot give every head a page would admit no step.
fn slots(knob: &'static str, bytes: u64, unit: usize, geometry: &Geometry) -> Result<u32, Error> {
    let refuse = |rule: String| Err(Error::Setting { knob, value: format!("{bytes} bytes"), rule });
    let (heads, least) = (geometry.heads(), geometry.group_bytes());
    if bytes < least as u64 {
        return refuse(format!("must hold a page of each of the {heads} heads, which takes {least} bytes"));
    }
    match u32::try_from(bytes / unit as u64) {
        Ok(slots) if slots < u32::MAX => Ok(slots),
        _ => refuse(format!("must be fewer than 2^32 − 1 times {unit} bytes")),
    }
}
