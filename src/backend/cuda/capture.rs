//! Steps as CUDA graphs: recorded once, replayed with one launch for every token.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaGraph, CudaStream};

use super::copies::{FetchPath, order};
use super::driver::Called;
use super::shape::StepShape;
use super::{Copies, CudaBackend};
use crate::error::Error;
use crate::selection::Selection;
use crate::step::Step;
use crate::table::Phase;

/// A decode step that can be replayed, with whatever the engine has put on the stream between the cache's calls.
///
/// It fits steps with as many sequences, each with one new token, that are not longer than [`max_tokens`](Self::max_tokens).
pub struct CapturedStep {
    graph: CudaGraph,
    /// Whose memory it uses.
    backend: u64,
    shape: StepShape,
    max_tokens: usize,
    /// Where tables and scratch memory were.
    generations: [u64; 2],
}

impl CapturedStep {
    /// Tokens that the longest sequence may have after a step.
    pub fn max_tokens(&self) -> usize {
        self.max_tokens
    }
}

impl std::fmt::Debug for CapturedStep {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CapturedStep")
            .field("max_tokens", &self.max_tokens)
            .field("shape", &self.shape)
            .finish_non_exhaustive()
    }
}

impl Step<'_, CudaBackend> {
    /// Records the whole step as a CUDA graph without running it: `forward` appends and attends every layer, and may put kernels of its
    /// own on [`Cache::stream`](crate::Cache::stream) between. The step is open afterwards as if nothing had been called;
    /// [`replay`](Self::replay) runs it.
    ///
    /// Tensors have to lie at the same addresses in every replay. Slices whose context tracks events cannot be used, because the
    /// recording would wait for events from outside of it.
    ///
    /// # Errors
    /// [`Error::Capture`] when the step is not a decode step with one new token per sequence, names its pages, or copies by
    /// [`FetchPath::Dma`]. Otherwise what `forward` returns, or the driver's refusal; the step has failed then.
    pub fn capture(&mut self, forward: impl FnOnce(&mut Self) -> Result<(), Error>) -> Result<CapturedStep, Error> {
        self.check_untouched("capture")?;
        let (shape, stream) = self.prepare_capture()?;
        let (backend, _) = self.parts();
        let (eager, generations) = (std::mem::replace(&mut backend.shape, shape), backend.generations());
        backend.copies = Copies { capturing: true, ..Copies::default() };
        // Of this thread alone: others may pin memory meanwhile.
        let begun = stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
        let mut panic = None;
        let recorded = begun.called("cuStreamBeginCapture").and_then(|()| {
            let outcome = catch_unwind(AssertUnwindSafe(|| forward(self))).unwrap_or_else(|payload| {
                panic = Some(payload);
                Err(Error::StepFailed)
            });
            let recorded =
                outcome.and_then(|()| self.check_complete()).and_then(|()| self.parts().0.join_for_capture());
            // Also where something has failed or panicked: the stream must not go on recording.
            let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
            let graph = stream.end_capture(flags).called("cuStreamEndCapture");
            recorded.and(graph)
        });
        let (backend, _) = self.parts();
        backend.shape = eager;
        backend.copies = Copies::default();
        if let Some(payload) = panic {
            self.fail(Error::StepFailed);
            resume_unwind(payload);
        }
        match recorded {
            Ok(Some(graph)) => {
                self.rewind();
                let max_tokens = shape.room * self.geometry().page_tokens();
                let backend = self.backend().id;
                Ok(CapturedStep { graph, backend, shape, max_tokens, generations })
            }
            Ok(None) => Err(self.fail(Error::Capture { reason: "nothing was recorded".into() })),
            Err(error) => Err(self.fail(error)),
        }
    }

    /// Runs a recorded step in place of all calls of this one: [`finish`](Self::finish) is next.
    ///
    /// # Errors
    /// [`Error::Capture`] when the recording does not fit this step: more sequences, or longer ones, or memory that has moved.
    /// Nothing has changed then, and the step can be recorded anew. Otherwise the driver's refusal; the step has failed then.
    ///
    /// # Safety
    /// All tensors that the recording uses, those of the engine's own kernels too, are still allocated where they were, and are used in the
    /// order of the stream.
    pub unsafe fn replay(&mut self, captured: &CapturedStep) -> Result<(), Error> {
        self.check_untouched("replay")?;
        let (backend, _) = self.parts();
        backend.check_fits(captured)?;
        backend.copies = Copies::default();
        match captured.graph.launch().called("cuGraphLaunch") {
            Ok(()) => {
                self.complete();
                Ok(())
            }
            Err(error) => Err(self.fail(error)),
        }
    }

    /// Looks whether the step can be captured, and makes room for the longest step that the recording is to fit.
    fn prepare_capture(&mut self) -> Result<(StepShape, Arc<CudaStream>), Error> {
        let (backend, plan) = self.parts();
        let refuse = |reason: &str| Err(Error::Capture { reason: reason.into() });
        if backend.compute.cu_stream() as usize <= 1 {
            return refuse("CUDA captures no default stream: give Cuda::from_stream one that was created");
        }
        if plan.entries.iter().any(|entry| entry.phase != Phase::Decode || entry.tokens != 1) {
            return refuse("only decode steps with one new token per sequence can be captured");
        }
        if matches!(backend.selection, Selection::Explicit { .. }) {
            return refuse("the selection is explicit, and page lists lie on the host");
        }
        if backend.engine.path == FetchPath::Dma {
            return refuse("FetchPath::Dma has the host read what to copy: choose FetchPath::Gather or Auto");
        }
        backend.reservoir.wait_for(usize::MAX)?;
        let shape = backend.shape_for(plan, Some(backend.shape.room))?;
        let (context, compute, geometry) = (backend.context.clone(), backend.compute.clone(), backend.geometry);
        // The part that has been uploaded for this step does not move, for it is large enough already.
        backend.scratch.reserve(&context, &compute, &geometry, &shape)?;
        Ok((shape, compute))
    }
}

impl CudaBackend {
    fn generations(&self) -> [u64; 2] {
        [self.tables.generation, self.scratch.generation]
    }

    /// What the copy stream has been given becomes part of the recording.
    fn join_for_capture(&mut self) -> Result<(), Error> {
        self.mirror_if_due()?;
        order(&self.engine.stream, &self.events.copied, &self.compute)
    }

    fn check_fits(&self, captured: &CapturedStep) -> Result<(), Error> {
        let (now, then) = (&self.shape, &captured.shape);
        let refuse = |reason: String| Err(Error::Capture { reason: format!("{reason}: capture the step anew") });
        if captured.backend != self.id {
            return refuse("the step was captured from another cache".into());
        }
        if (now.entries, now.tokens) != (then.entries, 1) {
            return refuse(format!("{} sequences were captured with one new token each", then.entries));
        }
        if now.room > then.room || now.ways > then.ways || now.waves > then.waves {
            return refuse(format!("a sequence has grown beyond {} tokens", captured.max_tokens));
        }
        if self.generations() != captured.generations {
            return refuse("memory that the captured step uses has moved".into());
        }
        Ok(())
    }
}
