//! The protocol between those who submit copies, those who wait for them, and the worker. No memory is touched here.

use std::collections::VecDeque;

use crate::error::Error;
use crate::shim::{AtomicBool, AtomicU64, AtomicUsize, Condvar, Mutex, Ordering, SPINS, fence, spin_loop, wait};

/// Which way a page goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Reservoir to device.
    Fetch,
    /// Device to reservoir.
    Mirror,
    /// Zeros to the reservoir.
    Scrub,
}

/// One page to copy.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Job {
    pub kind: Kind,
    /// Host slot: a page of the reservoir.
    pub host: u32,
    /// Device slot: a page of the arena. Not used by [`Kind::Scrub`].
    pub device: u32,
}

/// The copy that a waiter depends on did not happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Failed;

/// A bounded queue of copies with tickets. Ticket n is the n-th job ever submitted, counted from 1.
#[derive(Debug)]
pub(crate) struct Queue {
    depth: usize,
    jobs: Mutex<Jobs>,
    /// The worker sleeps here for jobs.
    work: Condvar,
    /// Submitters sleep here for room.
    room: Condvar,
    /// The last ticket that is done, well or not.
    done: AtomicU64,
    /// The first ticket that failed since the last [`Queue::clear_failure`]; `u64::MAX` when none has.
    failed: AtomicU64,
    dead: AtomicBool,
    /// Threads that sleep, or are about to, for a ticket.
    waiters: AtomicUsize,
    failure: Mutex<Option<Error>>,
    progress: Condvar,
}

#[derive(Debug, Default)]
struct Jobs {
    queue: VecDeque<Job>,
    submitted: u64,
    closed: bool,
}

impl Queue {
    pub(crate) fn new(depth: usize) -> Self {
        Queue {
            depth,
            jobs: Mutex::new(Jobs { queue: VecDeque::with_capacity(depth), ..Jobs::default() }),
            work: Condvar::new(),
            room: Condvar::new(),
            done: AtomicU64::new(0),
            failed: AtomicU64::new(u64::MAX),
            dead: AtomicBool::new(false),
            waiters: AtomicUsize::new(0),
            failure: Mutex::new(None),
            progress: Condvar::new(),
        }
    }

    /// Queues jobs, waiting for room where the queue is full, and tells `ticketed` each job's ticket before the worker can see the
    /// job.
    pub(crate) fn submit(&self, jobs: &[Job], mut ticketed: impl FnMut(&Job, u64)) -> Result<(), Failed> {
        let mut guard = self.jobs.lock();
        for job in jobs {
            while guard.queue.len() >= self.depth {
                if self.is_dead() {
                    return Err(Failed);
                }
                self.work.notify_one();
                guard = wait(&self.room, guard);
            }
            if self.is_dead() {
                return Err(Failed);
            }
            guard.submitted += 1;
            ticketed(job, guard.submitted);
            guard.queue.push_back(*job);
        }
        drop(guard);
        self.work.notify_one();
        Ok(())
    }

    /// The worker's next job and its ticket; `None` once the queue is closed and empty.
    pub(crate) fn take(&self) -> Option<(Job, u64)> {
        let mut guard = self.jobs.lock();
        loop {
            if let Some(job) = guard.queue.pop_front() {
                let ticket = guard.submitted - guard.queue.len() as u64;
                let had_been_full = guard.queue.len() + 1 == self.depth;
                drop(guard);
                if had_been_full {
                    self.room.notify_all();
                }
                return Some((job, ticket));
            }
            if guard.closed {
                return None;
            }
            guard = wait(&self.work, guard);
        }
    }

    /// The worker has finished a job.
    pub(crate) fn complete(&self, ticket: u64, result: Result<(), Error>) {
        if let Err(error) = result {
            let mut failure = self.failure.lock();
            if failure.is_none() {
                *failure = Some(error);
                self.failed.store(ticket, Ordering::SeqCst);
            }
        }
        self.done.store(ticket, Ordering::Release);
        // A waiter announces itself before it looks at `done` for the last time, so either it sees this ticket or we see it. Fences
        // rather than sequentially consistent accesses, because loom knows only fences to be that strong.
        fence(Ordering::SeqCst);
        if self.waiters.load(Ordering::Relaxed) > 0 {
            drop(self.failure.lock());
            self.progress.notify_all();
        }
    }

    /// The worker is gone. Whoever waits is released.
    pub(crate) fn die(&self) {
        self.dead.store(true, Ordering::SeqCst);
        // Taking each lock once makes sure that whoever has looked at `dead` before is asleep by now.
        drop(self.jobs.lock());
        self.room.notify_all();
        drop(self.failure.lock());
        self.progress.notify_all();
    }

    /// No more jobs will come.
    pub(crate) fn close(&self) {
        self.jobs.lock().closed = true;
        self.work.notify_one();
    }

    /// Whether the worker has died.
    pub(crate) fn is_dead(&self) -> bool {
        self.dead.load(Ordering::SeqCst)
    }

    /// Whether a job has failed since the failures were last cleared.
    pub(crate) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::SeqCst) != u64::MAX
    }

    /// Whether a job is done, without waiting.
    pub(crate) fn is_done(&self, ticket: u64) -> bool {
        self.done.load(Ordering::Acquire) >= ticket
    }

    /// Waits until a job is done. Fails when it, or any job before it since the failures were last cleared, has failed.
    pub(crate) fn wait(&self, ticket: u64) -> Result<(), Failed> {
        self.wait_done(ticket)?;
        if self.failed.load(Ordering::SeqCst) <= ticket { Err(Failed) } else { Ok(()) }
    }

    fn wait_done(&self, ticket: u64) -> Result<(), Failed> {
        for _ in 0..SPINS {
            if self.is_done(ticket) {
                return Ok(());
            }
            spin_loop();
        }
        let mut guard = self.failure.lock();
        self.waiters.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        while !self.is_done(ticket) && !self.is_dead() {
            guard = wait(&self.progress, guard);
        }
        self.waiters.fetch_sub(1, Ordering::Relaxed);
        if self.is_done(ticket) { Ok(()) } else { Err(Failed) }
    }

    /// Waits until nothing is under way, whether jobs fail or not. Fails when the worker has died and left jobs behind; then, too,
    /// nothing is under way.
    pub(crate) fn drain(&self) -> Result<(), Failed> {
        let submitted = self.jobs.lock().submitted;
        self.wait_done(submitted)
    }

    /// Takes the first failure, so that the next step starts afresh. Only when nothing is under way.
    pub(crate) fn clear_failure(&self) -> Option<Error> {
        let mut failure = self.failure.lock();
        self.failed.store(u64::MAX, Ordering::SeqCst);
        failure.take()
    }
}

#[cfg(all(test, loom))]
#[path = "queue_loom.rs"]
mod loom_tests;
