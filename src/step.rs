//! One forward pass of a batch.

use crate::backend::Backend;
use crate::cache::Cache;
use crate::error::Error;
use crate::selection::{PageLists, Selection};
use crate::stats::StepReport;
use crate::table::Phase;

/// One forward pass of a batch: for each layer in order [`append`](Self::append), then [`attend`](Self::attend), and at the end
/// [`finish`](Self::finish). A step that is dropped instead leaves every sequence with the tokens it had before.
///
/// An engine that computes the attention of a layer by itself may leave `attend` out.
#[derive(Debug)]
#[must_use = "a step that is dropped is undone"]
pub struct Step<'c, B: Backend> {
    cache: &'c mut Cache<B>,
    /// Layers that have been appended.
    appended: usize,
    /// Whether the last of them has been attended.
    attended: bool,
    state: State,
}

#[derive(Debug, PartialEq)]
enum State {
    Open,
    Failed,
    Finished,
}

impl<'c, B: Backend> Step<'c, B> {
    pub(crate) fn new(cache: &'c mut Cache<B>) -> Self {
        Step { cache, appended: 0, attended: false, state: State::Open }
    }

    /// The step's number.
    pub fn number(&self) -> u64 {
        self.cache.plan.number
    }

    /// New tokens of the batch: the first dimension of every tensor.
    pub fn tokens(&self) -> usize {
        self.cache.plan.tokens
    }

    /// Stores the keys and values of the batch's new tokens in `layer`: `[tokens, kv_heads, head_dim]` each, sequences in the order
    /// of the batch. Values are rounded to the geometry's dtype.
    ///
    /// # Errors
    /// [`Error::Order`] and [`Error::Shape`] leave the step as it was; any other error has failed it.
    pub fn append<'t>(
        &mut self,
        layer: usize,
        k: impl Into<B::Tensor<'t>>,
        v: impl Into<B::Tensor<'t>>,
    ) -> Result<(), Error> {
        self.check_open()?;
        let layers = self.cache.geometry().layers();
        if layer != self.appended || layer >= layers {
            return Err(self.out_of_order("append", layer));
        }
        let (k, v) = (k.into(), v.into());
        let expected = self.cache.geometry().kv_elements(self.tokens());
        check_shape("k", "[tokens, kv_heads, head_dim]", expected, B::elements(&k))?;
        check_shape("v", "[tokens, kv_heads, head_dim]", expected, B::elements(&v))?;
        let Cache { backend, plan, .. } = &mut *self.cache;
        let result = backend.append(plan, layer, k, v);
        self.appended += 1;
        self.attended = false;
        self.fail_on_error(result)
    }

    /// Attends the batch's new tokens in `layer`, causally: `q` and `out` are `[tokens, query_heads, head_dim]`. What a decode entry
    /// reads is the cache's selection; a prefill entry reads everything before and in it.
    ///
    /// # Errors
    /// [`Error::Order`], [`Error::Shape`] and [`Error::PageLists`] leave the step as it was; any other error has failed it, and `out`
    /// holds nothing to be used.
    pub fn attend<'t>(
        &mut self,
        layer: usize,
        q: impl Into<B::Tensor<'t>>,
        out: impl Into<B::TensorMut<'t>>,
    ) -> Result<(), Error> {
        let explicit = matches!(self.cache.selection(), Selection::Explicit { .. });
        if explicit && self.cache.plan.entries.iter().any(|entry| entry.phase == Phase::Decode) {
            return Err(Error::PageLists {
                reason: "the selection is explicit and the batch decodes: call attend_pages".into(),
            });
        }
        self.attend_with(layer, q.into(), None, out.into())
    }

    /// [`attend`](Self::attend) over the pages that the engine names, beside the pinned ones. Only under [`Selection::Explicit`].
    ///
    /// # Errors
    /// As [`attend`](Self::attend).
    pub fn attend_pages<'t>(
        &mut self,
        layer: usize,
        q: impl Into<B::Tensor<'t>>,
        pages: PageLists<'_>,
        out: impl Into<B::TensorMut<'t>>,
    ) -> Result<(), Error> {
        if !matches!(self.cache.selection(), Selection::Explicit { .. }) {
            return Err(Error::PageLists {
                reason: "the selection is not explicit: build the cache with Selection::Explicit".into(),
            });
        }
        self.check_lists(pages)?;
        self.attend_with(layer, q.into(), Some(pages), out.into())
    }

    fn attend_with(
        &mut self,
        layer: usize,
        q: B::Tensor<'_>,
        pages: Option<PageLists<'_>>,
        out: B::TensorMut<'_>,
    ) -> Result<(), Error> {
        self.check_open()?;
        if layer + 1 != self.appended || self.attended {
            return Err(self.out_of_order("attend", layer));
        }
        let expected = self.cache.geometry().query_elements(self.tokens());
        check_shape("q", "[tokens, query_heads, head_dim]", expected, B::elements(&q))?;
        check_shape("out", "[tokens, query_heads, head_dim]", expected, B::elements_mut(&out))?;
        let Cache { backend, plan, .. } = &mut *self.cache;
        let result = backend.attend(plan, layer, q, pages, out);
        self.attended = true;
        if result.is_ok() {
            self.cache.observe_layer(layer);
        }
        self.fail_on_error(result)
    }

    /// Ends the step: its tokens are part of their sequences, and every page that it filled is in the reservoir.
    ///
    /// # Errors
    /// [`Error::Order`] when layers are missing, or the failure of a mirror. Every sequence is as it was before the step.
    pub fn finish(mut self) -> Result<StepReport, Error> {
        self.check_open()?;
        if self.appended != self.cache.geometry().layers() {
            return Err(self.out_of_order("finish", self.appended));
        }
        let report = self.cache.commit()?;
        self.state = State::Finished;
        Ok(report)
    }

    /// Whether nothing has been called yet.
    #[cfg(feature = "cuda")]
    pub(crate) fn check_untouched(&self, call: &'static str) -> Result<(), Error> {
        self.check_open()?;
        match self.appended {
            0 => Ok(()),
            _ => Err(Error::Order {
                call,
                layer: self.appended - 1,
                expected: "only a step in which nothing was called can be".into(),
            }),
        }
    }

    /// Whether all layers have been appended.
    #[cfg(feature = "cuda")]
    pub(crate) fn check_complete(&self) -> Result<(), Error> {
        self.check_open()?;
        match self.appended == self.geometry().layers() {
            true => Ok(()),
            false => Err(self.out_of_order("finish", self.appended)),
        }
    }

    /// The calls so far were only recorded.
    #[cfg(feature = "cuda")]
    pub(crate) fn rewind(&mut self) {
        (self.appended, self.attended) = (0, false);
    }

    /// All layers have been run at once.
    #[cfg(feature = "cuda")]
    pub(crate) fn complete(&mut self) {
        (self.appended, self.attended) = (self.geometry().layers(), true);
    }

    /// The step cannot go on.
    #[cfg(feature = "cuda")]
    pub(crate) fn fail(&mut self, error: Error) -> Error {
        self.state = State::Failed;
        error
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn parts(&mut self) -> (&mut B, &crate::backend::StepPlan) {
        (&mut self.cache.backend, &self.cache.plan)
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn backend(&self) -> &B {
        &self.cache.backend
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn geometry(&self) -> &crate::geometry::Geometry {
        &self.cache.geometry
    }

    fn check_open(&self) -> Result<(), Error> {
        match self.state {
            State::Open => Ok(()),
            _ => Err(Error::StepFailed),
        }
    }

    fn fail_on_error(&mut self, result: Result<(), Error>) -> Result<(), Error> {
        if let Err(error) = &result {
            self.state = State::Failed;
            tracing::warn!(step = self.number(), %error, "step failed");
        }
        result
    }

    fn out_of_order(&self, call: &'static str, layer: usize) -> Error {
        let layers = self.cache.geometry().layers();
        let append = match self.appended {
            appended if appended == layers => "finish".to_owned(),
            appended => format!("append of layer {appended}"),
        };
        let expected = match self.appended {
            1.. if !self.attended => format!("attend of layer {} or {append} is next", self.appended - 1),
            _ => format!("{append} is next"),
        };
        Error::Order { call, layer, expected: format!("{expected} (the geometry has {layers} layers)") }
    }

    /// Checks what [`PageLists`] promises.
    fn check_lists(&mut self, lists: PageLists<'_>) -> Result<(), Error> {
        let reject = |reason: String| Err(Error::PageLists { reason });
        let Cache { plan, named, geometry, .. } = &mut *self.cache;
        let kv_heads = geometry.kv_heads();
        let expected = plan.entries.len() * kv_heads + 1;
        let PageLists { offsets, pages } = lists;
        if offsets.len() != expected {
            return reject(format!("{} offsets, but entries × kv_heads + 1 is {expected}", offsets.len()));
        }
        if offsets[0] != 0 || !offsets.is_sorted() || offsets[expected - 1] as usize != pages.len() {
            return reject(format!("offsets must ascend from 0 to the number of pages, {}", pages.len()));
        }
        for (index, entry) in plan.entries.iter().enumerate() {
            let count = geometry.pages(entry.start + entry.tokens);
            for kv_head in 0..kv_heads {
                let list = lists.list(index * kv_heads + kv_head);
                if entry.phase == Phase::Prefill && !list.is_empty() {
                    return reject(format!(
                        "entry {index} is prefill, which reads everything: its lists must be empty"
                    ));
                }
                if let Some(&page) = list.iter().find(|&&page| page as usize >= count) {
                    return reject(format!(
                        "entry {index}, KV head {kv_head} names page {page}, but the sequence has {count} pages"
                    ));
                }
                if let Some(page) = repeated(list, count, named) {
                    return reject(format!("entry {index}, KV head {kv_head} names page {page} twice"));
                }
            }
        }
        Ok(())
    }
}

/// The first page that a list names for the second time. Pages are below `count`; `named` is scratch.
fn repeated(list: &[u32], count: usize, named: &mut Vec<u64>) -> Option<u32> {
    if list.is_sorted_by(|a, b| a < b) {
        return None;
    }
    named.clear();
    named.resize(count.div_ceil(64), 0);
    list.iter().copied().find(|&page| {
        let (word, bit) = (&mut named[page as usize / 64], 1 << (page % 64));
        let seen = *word & bit != 0;
        *word |= bit;
        seen
    })
}

impl<B: Backend> Drop for Step<'_, B> {
    fn drop(&mut self) {
        if self.state != State::Finished {
            self.cache.undo();
        }
    }
}

fn check_shape(tensor: &'static str, shape: &'static str, expected: usize, got: usize) -> Result<(), Error> {
    if got == expected { Ok(()) } else { Err(Error::Shape { tensor, shape, expected, got }) }
}
