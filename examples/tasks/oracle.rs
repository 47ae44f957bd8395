//! Attention over the pages that a head's true logits choose: what any digest is measured against.

use anyhow::Result;
use wakekv::table::{HeadTable, Phase, Pins};
use wakekv::{Cache, CpuBackend, Entry, Geometry, PageLists, Sequence, Step};

use crate::llm::attention::{Attention, Kind, Memory, Pass};

/// A sequence in a cache whose selection is explicit: the pinned pages, and the `count` others with the largest logit of any query of
/// the group. With a `count` of 0 it is a window over the text's end.
pub struct Oracle {
    cache: Cache,
    sequence: Sequence,
    count: usize,
    /// Per layer and KV head `[tokens, head_dim]`.
    keys: Vec<Vec<f32>>,
    /// Where what is evicted is destroyed: per layer and KV head what is left.
    mortal: Option<Vec<Mortal>>,
}

impl Oracle {
    /// An empty sequence in a cache of [`Selection::Explicit`](wakekv::Selection::Explicit).
    pub fn new(mut cache: Cache, count: usize) -> Self {
        let sequence = cache.insert();
        let keys = vec![Vec::new(); cache.geometry().heads()];
        Self { cache, sequence, count, keys, mortal: None }
    }

    /// The same where a page that loses its way, of `budget` per head, is destroyed. As in the replay, what the prompt leaves behind
    /// is there until it is first read.
    pub fn evicting(cache: Cache, count: usize, budget: usize) -> Self {
        let heads = cache.geometry().heads();
        Self { mortal: Some((0..heads).map(|_| Mortal::new(budget)).collect()), ..Self::new(cache, count) }
    }
}

impl Memory for Oracle {
    fn step(&mut self, kind: Kind, tokens: usize, pass: Pass<'_>) -> Result<Vec<f32>> {
        let entry = match kind {
            Kind::Prompt => Entry::prefill(self.sequence, tokens),
            Kind::Generated => Entry::decode(self.sequence, tokens),
        };
        let before: Vec<usize> = self.keys.iter().map(Vec::len).collect();
        let geometry = *self.cache.geometry();
        let mut step = self.cache.step(&[entry])?;
        let mut choosing = Choosing {
            step: &mut step,
            kind,
            geometry,
            count: self.count,
            keys: &mut self.keys,
            mortal: self.mortal.as_deref_mut(),
        };
        let logits = pass(&mut choosing).and_then(|logits| step.finish().map(|_| logits).map_err(Into::into));
        if logits.is_err() {
            self.keys.iter_mut().zip(before).for_each(|(keys, len)| keys.truncate(len));
        }
        logits
    }

    fn len(&self) -> usize {
        // The sequence lives as long as its cache, so this cannot fail.
        self.cache.tokens(self.sequence).unwrap_or(0)
    }
}

struct Choosing<'a, 'c> {
    step: &'a mut Step<'c, CpuBackend>,
    kind: Kind,
    geometry: Geometry,
    count: usize,
    keys: &'a mut Vec<Vec<f32>>,
    mortal: Option<&'a mut [Mortal]>,
}

impl Attention for Choosing<'_, '_> {
    fn attend(&mut self, layer: usize, q: &[f32], k: &[f32], v: &[f32], out: &mut [f32]) -> Result<()> {
        self.append(layer, k, v)?;
        let (mut offsets, mut pages) = (vec![0], Vec::new());
        for kv_head in 0..self.geometry.kv_heads() {
            if self.kind == Kind::Generated && self.count > 0 {
                let best = self.best(layer, kv_head, q);
                let head = layer * self.geometry.kv_heads() + kv_head;
                if let Some(mortal) = &mut self.mortal {
                    let pages = self.keys[head].len().div_ceil(self.geometry.page_tokens() * self.geometry.head_dim());
                    mortal[head].read(pages as u32, &best)?;
                }
                pages.extend(best);
            }
            offsets.push(pages.len() as u32);
        }
        self.step.attend_pages(layer, q, PageLists { offsets: &offsets, pages: &pages }, out)?;
        Ok(())
    }

    fn append(&mut self, layer: usize, k: &[f32], v: &[f32]) -> Result<()> {
        let kv_heads = self.geometry.kv_heads();
        for (index, key) in k.chunks_exact(self.geometry.head_dim()).enumerate() {
            self.keys[layer * kv_heads + index % kv_heads].extend_from_slice(key);
        }
        Ok(self.step.append(layer, k, v)?)
    }
}

impl Choosing<'_, '_> {
    /// The best pages that are not pinned: pinned are the first and the last two.
    fn best(&self, layer: usize, kv_head: usize, q: &[f32]) -> Vec<u32> {
        let (g, keys) = (&self.geometry, &self.keys[layer * self.geometry.kv_heads() + kv_head]);
        let group = g.query_heads() / g.kv_heads();
        let queries = &q[kv_head * group * g.head_dim()..(kv_head + 1) * group * g.head_dim()];
        let score = |page: &[f32]| {
            let logits = page.chunks_exact(g.head_dim()).flat_map(|key| {
                queries
                    .chunks_exact(g.head_dim())
                    .map(move |query| query.iter().zip(key).map(|(a, b)| a * b).sum::<f32>())
            });
            logits.fold(f32::NEG_INFINITY, f32::max)
        };
        let mut scored: Vec<(f32, u32)> =
            keys.chunks(g.page_tokens() * g.head_dim()).zip(0..).map(|(page, number)| (score(page), number)).collect();
        let last = scored.len() as u32 - 1;
        let mortal = self.mortal.as_ref().map(|mortal| &mortal[layer * self.geometry.kv_heads() + kv_head]);
        let is_left = |page: u32| mortal.is_none_or(|mortal| mortal.has(page));
        scored.retain(|&(_, page)| page > 0 && page + 1 < last && is_left(page));
        scored.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        scored.iter().take(self.count).map(|&(_, page)| page).collect()
    }
}

/// What is left of one head's pages where eviction destroys.
struct Mortal {
    table: HeadTable,
    budget: usize,
    steps: u64,
    /// Pages that a decode step has read or opened. Others are left from the prompt.
    seen: Vec<bool>,
}

/// The first page and the two last ones are always read.
const PINS: Pins = Pins { sinks: 1, recent: 1 };

impl Mortal {
    fn new(budget: usize) -> Self {
        Mortal { table: HeadTable::new(), budget, steps: 0, seen: Vec::new() }
    }

    fn has(&self, page: u32) -> bool {
        self.table.slot_of(page).is_some() || !self.seen.get(page as usize).is_some_and(|&seen| seen)
    }

    /// A decode step that ends with so many pages reads the pinned ones and `best`.
    fn read(&mut self, pages: u32, best: &[u32]) -> Result<()> {
        self.steps += 1;
        let phase = if self.steps == 1 { Phase::Prefill } else { Phase::Decode };
        while (self.table.pages() as u32) < pages {
            if self.table.ways() < self.budget {
                self.table.grant(self.table.ways() as u32);
            }
            self.table.open(self.steps, phase, PINS, None)?;
            self.seen.push(phase == Phase::Decode);
        }
        if phase == Phase::Prefill {
            // What is resident when the prompt ends has no other copy.
            (0..pages).for_each(|page| self.seen[page as usize] = self.table.slot_of(page).is_some());
        }
        let mut demand: Vec<u32> =
            best.iter().copied().chain((0..pages).filter(|&page| PINS.contain(page, pages - 1))).collect();
        demand.sort_unstable();
        demand.dedup();
        demand.iter().for_each(|&page| self.seen[page as usize] = true);
        self.steps += 1;
        self.table.demand(self.steps, Phase::Decode, &demand, &mut Vec::new())?;
        Ok(())
    }
}
