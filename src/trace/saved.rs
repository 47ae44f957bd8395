//! Traces on disk: a folder with `trace.npz` and `trace.json`.

use std::path::Path;

use serde_json::{Value, json};

use super::arrays::{Reader, Writer, format, io};
use super::{Mark, Shape, Trace, TraceError};
use crate::residency::Scores;
use crate::table::{Phase, Pins, Tally};

impl Trace {
    /// Writes the trace into a folder, which is made if it is not there. `trace.json` holds the [`Shape`]; `trace.npz` holds
    ///
    /// | array | dtype | shape | |
    /// |---|---|---|---|
    /// | `marks` | uint64 | steps, 4 | number, 0 for prefill or 1 for decode, tokens before, new tokens |
    /// | `ends` | uint64 | heads, steps | where each demand ends in the head's list |
    /// | `pages` | uint32 | demanded pages | the heads' lists, one after the other |
    /// | `masses` | float32 | demanded pages | attention mass, where it is known |
    /// | `tallies` | uint32 | heads, steps, 5 | hits, compulsory, capacity, overflow, evictions, where they were counted live |
    /// | `scored` | uint32 | heads, steps, 2 | the first page that was scored and how many, where scores were recorded |
    /// | `scores` | float32 | scored pages | their scores, heads outermost |
    ///
    /// # Errors
    /// [`TraceError::Io`].
    pub fn save(&self, folder: impl AsRef<Path>) -> Result<(), TraceError> {
        let folder = folder.as_ref();
        std::fs::create_dir_all(folder).map_err(io(folder))?;
        let (heads, steps) = (self.heads.len() as u64, self.marks.len() as u64);
        let mut arrays = Writer::create(&folder.join("trace.npz"))?;
        let marks = self.marks.iter().flat_map(|mark| {
            [mark.step, u64::from(mark.phase == Phase::Decode), mark.start as u64, mark.tokens as u64]
        });
        arrays.array("marks", &[steps, 4], marks)?;
        let ends = self.heads.iter().flat_map(|head| head.ends.iter().map(|&end| end as u64));
        arrays.array("ends", &[heads, steps], ends)?;
        arrays.array("pages", &[self.demanded()], self.heads.iter().flat_map(|head| head.pages.iter().copied()))?;
        if self.heads.iter().all(|head| head.masses.len() == head.pages.len()) {
            arrays.array(
                "masses",
                &[self.demanded()],
                self.heads.iter().flat_map(|head| head.masses.iter().copied()),
            )?;
        }
        if self.heads.iter().all(|head| head.tallies.len() == head.ends.len()) {
            let tallies = self.heads.iter().flat_map(|head| &head.tallies);
            let tallies = tallies.flat_map(|t| [t.hits, t.compulsory, t.capacity, t.overflow, t.evictions]);
            arrays.array("tallies", &[heads, steps, 5], tallies)?;
        }
        if self.heads.iter().all(|head| head.scored.rows.len() == head.ends.len()) {
            let rows = self.heads.iter().flat_map(|head| &head.scored.rows);
            arrays.array("scored", &[heads, steps, 2], rows.flatten().copied())?;
            let scores = self.heads.iter().map(|head| head.scored.scores.len() as u64).sum();
            arrays.array("scores", &[scores], self.heads.iter().flat_map(|head| head.scored.scores.iter().copied()))?;
        }
        arrays.finish()?;
        let Shape { layers, heads_per_layer, page_tokens, pins, budget } = self.shape;
        let description = json!({
            "layers": layers,
            "heads_per_layer": heads_per_layer,
            "page_tokens": page_tokens,
            "sink_pages": pins.sinks,
            "recent_pages": pins.recent,
            "pages_per_head": budget,
        });
        let path = folder.join("trace.json");
        std::fs::write(&path, format!("{description:#}\n")).map_err(io(&path))
    }

    /// Reads what [`save`](Self::save) has written.
    ///
    /// # Errors
    /// [`TraceError::Io`] and [`TraceError::Format`]; and the errors of [`push`](Self::push), for every demand is checked.
    pub fn load(folder: impl AsRef<Path>) -> Result<Self, TraceError> {
        let folder = folder.as_ref();
        let mut trace = Trace::new(read_shape(&folder.join("trace.json"))?);
        let what = folder.join("trace.npz");
        let mut arrays = Reader::open(&what)?;
        let wrong = |reason: &str| format(what.display(), reason);
        let (marks_shape, marks) = arrays.array::<u64>("marks")?;
        let (_, ends) = arrays.array::<u64>("ends")?;
        let (_, pages) = arrays.array::<u32>("pages")?;
        let masses = arrays.optional::<f32>("masses")?.map(|(_, masses)| masses);
        let tallies = arrays.optional::<u32>("tallies")?.map(|(_, tallies)| tallies);
        let (heads, steps) = (trace.heads.len(), marks.len() / 4);
        if marks_shape.get(1) != Some(&4) || Some(ends.len()) != heads.checked_mul(steps) {
            return Err(wrong("marks and ends do not fit each other"));
        }
        if masses.as_ref().is_some_and(|masses| masses.len() != pages.len())
            || tallies.as_ref().is_some_and(|tallies| tallies.len() != 5 * ends.len())
        {
            return Err(wrong("masses or tallies are not as many as demands"));
        }
        // Where each head's list begins.
        let mut bases = Vec::with_capacity(heads);
        let mut base = 0usize;
        for head in 0..heads {
            bases.push(base);
            let own = (head * steps + steps).checked_sub(1).filter(|_| steps > 0).and_then(|last| ends.get(last));
            base = base.saturating_add(own.map_or(0, |&end| end as usize));
        }
        if base != pages.len() {
            return Err(wrong("ends and pages do not fit each other"));
        }
        for (step, mark) in marks.chunks_exact(4).enumerate() {
            let phase = if mark[1] == 0 { Phase::Prefill } else { Phase::Decode };
            let mark = Mark { step: mark[0], phase, start: mark[2] as usize, tokens: mark[3] as usize };
            let mut demands = Vec::with_capacity(heads);
            let mut weights = Vec::with_capacity(heads);
            for (head, &base) in bases.iter().enumerate() {
                let at = |step: usize| ends.get(head * steps + step).map_or(0, |&end| end as usize);
                let from = if step > 0 { at(step - 1) } else { 0 };
                let range = base.saturating_add(from)..base.saturating_add(at(step));
                demands.push(pages.get(range.clone()).ok_or_else(|| wrong("ends do not ascend"))?);
                weights.push(masses.as_deref().and_then(|masses| masses.get(range)).unwrap_or(&[]));
            }
            match masses {
                Some(_) => trace.push_weighted(mark, &demands, &weights)?,
                None => trace.push(mark, &demands)?,
            }
        }
        for (head, tallies) in
            trace.heads.iter_mut().zip(tallies.iter().flat_map(|all| all.chunks_exact(5 * steps.max(1))))
        {
            head.tallies.extend(tallies.chunks_exact(5).map(|t| Tally {
                hits: t[0],
                compulsory: t[1],
                capacity: t[2],
                overflow: t[3],
                evictions: t[4],
            }));
        }
        if let Some((_, rows)) = arrays.optional::<u32>("scored")? {
            let (_, scores) = arrays.array::<f32>("scores")?;
            trace.take_scores(&rows, &scores).ok_or_else(|| wrong("scored pages and scores do not fit each other"))?;
        }
        Ok(trace)
    }

    /// Takes the arrays `scored` and `scores`, unless they do not fit.
    fn take_scores(&mut self, rows: &[u32], mut scores: &[f32]) -> Option<()> {
        let steps = self.marks.len();
        if rows.len() != 2 * steps * self.heads.len() {
            return None;
        }
        for (head, rows) in self.heads.iter_mut().zip(rows.chunks_exact((2 * steps).max(1))) {
            for row in rows.chunks_exact(2) {
                let own = scores.split_off(..row[1] as usize)?;
                head.scored.push(Some(Scores { first: row[0], scores: own }));
            }
        }
        scores.is_empty().then_some(())
    }
}

fn read_shape(path: &Path) -> Result<Shape, TraceError> {
    let description = read_json(path)?;
    let number = |key: &str| read_number(path, &description, key);
    let page = |key: &str| number(key).and_then(|value| u32::try_from(value).map_err(|error| format(key, error)));
    let shape = Shape {
        layers: number("layers")?,
        heads_per_layer: number("heads_per_layer")?,
        page_tokens: number("page_tokens")?,
        pins: Pins { sinks: page("sink_pages")?, recent: page("recent_pages")? },
        budget: description.get("pages_per_head").and_then(Value::as_u64).map(|budget| budget as usize),
    };
    if shape.page_tokens == 0 || shape.layers.checked_mul(shape.heads_per_layer).is_none_or(|heads| heads > 1 << 24) {
        return Err(format(path.display(), "there must be tokens in a page and at most 2^24 heads"));
    }
    Ok(shape)
}

pub(super) fn read_json(path: &Path) -> Result<Value, TraceError> {
    let text = std::fs::read(path).map_err(io(path))?;
    serde_json::from_slice(&text).map_err(|error| format(path.display(), error))
}

pub(super) fn read_number(path: &Path, description: &Value, key: &str) -> Result<usize, TraceError> {
    let number = description.get(key).and_then(Value::as_u64).and_then(|number| usize::try_from(number).ok());
    number.ok_or_else(|| format(path.display(), format_args!("{key} is missing or no whole number")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_that_do_not_fit_the_steps_are_refused() {
        let shape = Shape { layers: 1, heads_per_layer: 2, page_tokens: 16, pins: Pins::default(), budget: None };
        let mut trace = Trace::new(shape);
        for step in 0..2 {
            let mark = Mark { step: step + 1, phase: Phase::Decode, start: 32 * step as usize, tokens: 32 };
            trace.push(mark, &[[0], [1]]).unwrap();
        }
        let rows = [0, 1, 0, 0, 1, 2, 0, 0];
        let take = |rows: &[u32], scores: &[f32]| trace.clone().take_scores(rows, scores);
        assert_eq!(take(&rows, &[1.0, 2.0, 3.0]), Some(()));
        assert_eq!(take(&rows[..6], &[1.0, 2.0, 3.0]), None, "a row too few");
        assert_eq!(take(&rows, &[1.0, 2.0]), None, "a score too few");
        assert_eq!(take(&rows, &[1.0; 4]), None, "a score too many");
        assert_eq!(take(&[0, u32::MAX, 0, 0, 0, 0, 0, 0], &[1.0; 3]), None, "more than there are");
        trace.take_scores(&rows, &[1.0, 2.0, 3.0]).unwrap();
        assert_eq!(trace.head(1).scores(0), Some(Scores { first: 1, scores: &[2.0, 3.0] }));
        assert_eq!((trace.head(0).scores(1), trace.head(1).scores(1)), (None, None));
    }
}
