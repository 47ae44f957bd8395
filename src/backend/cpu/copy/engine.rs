//! The worker thread and the slots' tickets.

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;

use super::queue::{Failed, Job, Kind, Queue};
use crate::backend::cpu::arena::Arena;
use crate::error::Error;
use crate::reservoir::Store;
use crate::shim::Arc;

/// Moves pages between the arena and the reservoir's store, on a thread of its own.
#[derive(Debug)]
pub(crate) struct CopyEngine {
    queue: Arc<Queue>,
    /// Per arena slot the ticket of the last job that touches it.
    last: Vec<AtomicU64>,
    worker: Option<JoinHandle<()>>,
}

impl CopyEngine {
    /// Starts the worker. `slots` is the number of the arena's slots.
    pub(crate) fn start(
        arena: std::sync::Arc<Arena>,
        slots: usize,
        store: Box<dyn Store>,
        depth: usize,
    ) -> Result<Self, Error> {
        let queue = Arc::new(Queue::new(depth));
        let name = "wakekv-copy";
        let worker = std::thread::Builder::new()
            .name(name.into())
            .spawn({
                let queue = queue.clone();
                move || work(&queue, &arena, store)
            })
            .map_err(|cause| Error::Thread { name, cause })?;
        let last = std::iter::repeat_with(|| AtomicU64::new(0)).take(slots).collect();
        Ok(CopyEngine { queue, last, worker: Some(worker) })
    }

    /// Queues copies. Blocks only while more jobs are under way than the queue is deep.
    pub(crate) fn submit(&self, jobs: &[Job]) -> Result<(), Failed> {
        if jobs.is_empty() {
            return Ok(());
        }
        self.queue.submit(jobs, |job, ticket| {
            if job.kind != Kind::Scrub {
                self.last[job.device as usize].store(ticket, Ordering::Relaxed);
            }
        })
    }

    /// Whether no copy touches the slot any more.
    pub(crate) fn is_quiet(&self, slot: u32) -> bool {
        self.queue.is_done(self.last[slot as usize].load(Ordering::Relaxed))
    }

    /// Waits until no copy touches the slot any more. Fails when a copy of this step has failed.
    ///
    /// The slot's jobs were submitted by this thread, or by one that this thread has synchronised with since.
    pub(crate) fn wait_for(&self, slot: u32) -> Result<(), Failed> {
        self.queue.wait(self.last[slot as usize].load(Ordering::Relaxed))
    }

    /// Waits until nothing is under way, and returns the first failure since the last call.
    pub(crate) fn settle(&self) -> Result<(), Error> {
        let drained = self.queue.drain();
        match (self.queue.clear_failure(), drained) {
            (Some(error), _) => Err(error),
            (None, Err(Failed)) => Err(Error::CopyWorkerDead),
            (None, Ok(())) => Ok(()),
        }
    }

    /// Why a wait or a submission has failed.
    pub(crate) fn failure(&self) -> Error {
        self.settle().err().unwrap_or(match self.queue.is_dead() {
            true => Error::CopyWorkerDead,
            false => Error::StepFailed,
        })
    }
}

impl Drop for CopyEngine {
    fn drop(&mut self) {
        self.queue.close();
        if let Some(worker) = self.worker.take() {
            // A worker that died by a panic has told everybody who waited already.
            let _ = worker.join();
        }
    }
}

/// Tells the queue that the worker is gone, also when a store panics.
struct Obituary<'q>(&'q Queue);

impl Drop for Obituary<'_> {
    fn drop(&mut self) {
        self.0.die();
    }
}

fn work(queue: &Queue, arena: &Arena, mut store: Box<dyn Store>) {
    let _obituary = Obituary(queue);
    let bytes = arena.slot_bytes();
    let zeros = vec![0; bytes];
    while let Some((job, ticket)) = queue.take() {
        // After a failure the step is lost, and a page whose mirror has failed must not be read. Scrubbing goes on: each page counts.
        if job.kind != Kind::Scrub && queue.has_failed() {
            queue.complete(ticket, Ok(()));
            continue;
        }
        let offset = u64::from(job.host) * bytes as u64;
        let slot = || arena.slot(job.device);
        let (direction, result) = match job.kind {
            Kind::Fetch => {
                // SAFETY: the slot is inside the arena. Its owner gave it to this job and touches it again only after waiting
                // for the job's ticket; other jobs run before or after this one on this thread.
                let into = unsafe { std::slice::from_raw_parts_mut(slot(), bytes) };
                ("fetch", store.read(offset, into))
            }
            Kind::Mirror => {
                // SAFETY: as above, except that kernels may read the slot meanwhile, as this does.
                let from = unsafe { std::slice::from_raw_parts(slot(), bytes) };
                ("mirror", store.write(offset, from))
            }
            Kind::Scrub => ("scrub", store.write(offset, &zeros)),
        };
        queue.complete(ticket, result.map_err(|cause| Error::Copy { direction, offset, bytes, cause }));
    }
}
