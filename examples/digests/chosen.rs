//! Attention over the pages that a candidate chooses.

use anyhow::Result;
use wakekv::{Cache, CpuBackend, Entry, Geometry, PageLists, Sequence, Step};

use super::candidate::Candidate;
use super::pages::Pages;
use crate::llm::attention::{Attention, Kind, Memory, Pass};

/// A sequence in a cache whose selection is explicit: the pinned pages and the `count` best others.
pub struct Chosen {
    cache: Cache,
    sequence: Sequence,
    candidate: Candidate,
    count: usize,
    heads: Vec<Head>,
}

/// One KV head's keys `[tokens, head_dim]`, and the summaries of its sealed pages once it decodes.
#[derive(Default)]
struct Head {
    keys: Vec<f32>,
    pages: Option<Pages>,
}

impl Chosen {
    /// An empty sequence in a cache of [`Selection::Explicit`](wakekv::Selection::Explicit) with one sink and one recent page.
    pub fn new(mut cache: Cache, candidate: Candidate, count: usize) -> Self {
        let sequence = cache.insert();
        let heads = (0..cache.geometry().heads()).map(|_| Head::default()).collect();
        Self { cache, sequence, candidate, count, heads }
    }
}

impl Memory for Chosen {
    fn step(&mut self, kind: Kind, tokens: usize, pass: Pass<'_>) -> Result<Vec<f32>> {
        let entry = match kind {
            Kind::Prompt => Entry::prefill(self.sequence, tokens),
            Kind::Generated => Entry::decode(self.sequence, tokens),
        };
        let geometry = *self.cache.geometry();
        let mut step = self.cache.step(&[entry])?;
        let mut choosing = Choosing {
            step: &mut step,
            kind,
            geometry,
            candidate: self.candidate,
            count: self.count,
            heads: &mut self.heads,
        };
        let logits = pass(&mut choosing)?;
        step.finish()?;
        Ok(logits)
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
    candidate: Candidate,
    count: usize,
    heads: &'a mut [Head],
}

impl Attention for Choosing<'_, '_> {
    fn attend(&mut self, layer: usize, q: &[f32], k: &[f32], v: &[f32], out: &mut [f32]) -> Result<()> {
        self.append(layer, k, v)?;
        let (mut offsets, mut pages) = (vec![0], Vec::new());
        for kv_head in 0..self.geometry.kv_heads() {
            if self.kind == Kind::Generated && self.count > 0 {
                pages.extend(self.best(layer, kv_head, q)?);
            }
            offsets.push(pages.len() as u32);
        }
        self.step.attend_pages(layer, q, PageLists { offsets: &offsets, pages: &pages }, out)?;
        Ok(())
    }

    fn append(&mut self, layer: usize, k: &[f32], v: &[f32]) -> Result<()> {
        let kv_heads = self.geometry.kv_heads();
        for (index, key) in k.chunks_exact(self.geometry.head_dim()).enumerate() {
            self.heads[layer * kv_heads + index % kv_heads].keys.extend_from_slice(key);
        }
        Ok(self.step.append(layer, k, v)?)
    }
}

impl Choosing<'_, '_> {
    /// The best sealed pages that are not pinned.
    fn best(&mut self, layer: usize, kv_head: usize, q: &[f32]) -> Result<Vec<u32>> {
        let (g, candidate) = (self.geometry, self.candidate);
        let (dim, page) = (g.head_dim(), g.page_tokens());
        let head = &mut self.heads[layer * g.kv_heads() + kv_head];
        let pages = head.pages.get_or_insert_with(|| Pages::new(candidate.digest, &head.keys, dim, page));
        pages.extend(&head.keys[pages.count() * page * dim..]);
        let group = g.group() * dim;
        let scale = (dim as f32).sqrt().recip();
        let queries: Vec<f32> = q[kv_head * group..(kv_head + 1) * group].iter().map(|x| x * scale).collect();
        let scores = pages.score(&queries, candidate.score.sums())?;
        let scores = candidate.score.combine(&scores.scores, scores.pages);
        let last = (head.keys.len() / dim).div_ceil(page) - 1;
        let mut order: Vec<usize> = (1..scores.len().min(last - 1)).collect();
        order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]).then(a.cmp(&b)));
        Ok(order.iter().take(self.count).map(|&page| page as u32).collect())
    }
}
