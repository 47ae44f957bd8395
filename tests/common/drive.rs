//! Takes a cache through one step.
#![allow(dead_code, reason = "each test uses a part of it")]

use super::device::Tensors;
use super::memory::{Draft, Turn};
use wakekv::{Cache, Entry, Error, PageLists, StepReport};

/// Page lists of one layer, as an engine passes them.
#[derive(Clone, Debug)]
pub struct Lists {
    pub offsets: Vec<u32>,
    pub pages: Vec<u32>,
}

impl Lists {
    pub fn new(lists: &[Vec<u32>]) -> Self {
        let mut offsets = vec![0];
        for list in lists {
            offsets.push(offsets[offsets.len() - 1] + list.len() as u32);
        }
        Lists { offsets, pages: lists.concat() }
    }

    pub fn view(&self) -> PageLists<'_> {
        PageLists { offsets: &self.offsets, pages: &self.pages }
    }
}

/// Where a step is given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stop {
    pub layer: usize,
    pub after: After,
    /// Leaked with `mem::forget` instead of dropped.
    pub leak: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum After {
    Nothing,
    Append,
    Attend,
}

/// Outputs per layer, `[tokens, query_heads, head_dim]`.
pub type Outputs = Vec<Vec<f32>>;

/// Runs a step, with `lists` per layer under an explicit selection. `None` when it was given up as asked. Outputs are poisoned before
/// they are written, and a step that has failed once must go on failing.
pub fn drive<B: Tensors>(
    cache: &mut Cache<B>,
    turns: &[Turn],
    lists: &[Lists],
    stop: Option<Stop>,
) -> Result<Option<(Outputs, StepReport)>, Error> {
    let geometry = *cache.geometry();
    let entries: Vec<Entry> = turns.iter().map(|turn| turn.entry).collect();
    let mut step = cache.step(&entries)?;
    let mut outputs = Vec::new();
    for layer in 0..geometry.layers() {
        let gather = |tensor: fn(&Draft) -> &[Vec<f32>]| -> Vec<f32> {
            turns.iter().flat_map(|turn| tensor(&turn.draft)[layer].iter().copied()).collect()
        };
        let mut out = vec![f32::NAN; geometry.query_elements(step.tokens())];
        for call in [After::Nothing, After::Append, After::Attend] {
            let result = match call {
                After::Nothing => Ok(()),
                After::Append => {
                    B::append_host(&mut step, layer, &gather(|draft| &draft.keys), &gather(|draft| &draft.values))
                }
                After::Attend => {
                    let pages = lists.get(layer).map(Lists::view);
                    B::attend_host(&mut step, layer, &gather(|draft| &draft.queries), pages, &mut out)
                }
            };
            if result.is_err() {
                let keys = gather(|draft| &draft.keys);
                assert!(matches!(B::append_host(&mut step, layer + 1, &keys, &keys), Err(Error::StepFailed)));
                assert!(matches!(step.finish(), Err(Error::StepFailed)));
                return result.map(|()| None);
            }
            if let Some(Stop { leak, .. }) = stop.filter(|stop| stop.layer == layer && stop.after == call) {
                if leak {
                    std::mem::forget(step);
                }
                return Ok(None);
            }
        }
        outputs.push(out);
    }
    let report = step.finish()?;
    Ok(Some((outputs, report)))
}
