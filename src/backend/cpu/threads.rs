//! A small pool of threads that share out the tasks of one call at a time.
//!
//! An own pool because a decode step runs a few short parallel loops per layer: starting one must not allocate, and a thread that
//! is slow to wake must not hold up a loop that the others have finished already.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::error::Error;
use crate::shim::{Arc, AtomicBool, AtomicU64, AtomicUsize, Condvar, Mutex, Ordering, SPINS, spin_loop, wait};

/// `threads − 1` workers beside the calling thread.
#[derive(Debug)]
pub(crate) struct Threads {
    shared: Arc<Shared>,
    #[cfg(not(loom))]
    handles: Vec<std::thread::JoinHandle<()>>,
    #[cfg(loom)]
    handles: Vec<loom::thread::JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// Workers sleep here for the next loop.
    start: Condvar,
    /// The caller sleeps here for workers that are still at it.
    finish: Condvar,
    /// Changes with every loop and at the end, so that a worker can look for work without the lock.
    epoch: AtomicU64,
    /// The next task that nobody has taken.
    next: AtomicUsize,
    panicked: AtomicBool,
}

#[derive(Debug)]
struct State {
    /// The loop under way, as long as workers may join it.
    body: Option<Body>,
    /// Workers that have joined it and are not done.
    joined: usize,
    closed: bool,
}

/// A loop: the closure `f(thread, task)` behind an erased lifetime, and the number of tasks.
#[derive(Clone, Copy)]
struct Body {
    run: *const (dyn Fn(usize, usize) + Sync),
    tasks: usize,
}

impl std::fmt::Debug for Body {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} tasks", self.tasks)
    }
}

// SAFETY: the closure is `Sync`, and `Threads::run` does not return before every thread that has the pointer is done with it.
unsafe impl Send for Body {}

impl Threads {
    /// Starts the workers. `threads` counts the calling thread and is at least 1.
    pub(crate) fn start(threads: usize) -> Result<Self, Error> {
        let shared = Arc::new(Shared {
            state: Mutex::new(State { body: None, joined: 0, closed: false }),
            start: Condvar::new(),
            finish: Condvar::new(),
            epoch: AtomicU64::new(0),
            next: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
        });
        let mut pool = Threads { shared, handles: Vec::new() };
        for thread in 1..threads {
            let shared = pool.shared.clone();
            pool.handles.push(spawn(move || shared.work(thread))?);
        }
        Ok(pool)
    }

    /// Threads that share a loop, the calling one included.
    pub(crate) fn count(&self) -> usize {
        self.handles.len() + 1
    }

    /// Calls `f(thread, task)` for every task below `tasks`, each once, on any thread; threads count from 0, which is the caller.
    /// Tasks start in ascending order.
    ///
    /// One call at a time: `&mut self` because a second caller would take the first one's tasks.
    pub(crate) fn run(&mut self, tasks: usize, f: &(dyn Fn(usize, usize) + Sync)) -> Result<(), Error> {
        if self.handles.is_empty() || tasks <= 1 {
            let alone = AssertUnwindSafe(|| (0..tasks).for_each(|task| f(0, task)));
            return catch_unwind(alone).map_err(|_| Error::ThreadPanicked);
        }
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes. `run` waits below for every worker that has joined, and none can join once the body is
        // taken away, so the pointer is not used after `f` has ended.
        let run = unsafe {
            std::mem::transmute::<
                *const (dyn Fn(usize, usize) + Sync + '_),
                *const (dyn Fn(usize, usize) + Sync + 'static),
            >(f)
        };
        let body = Body { run, tasks };
        {
            let mut state = shared.state.lock();
            shared.next.store(0, Ordering::Relaxed);
            state.body = Some(body);
            shared.epoch.fetch_add(1, Ordering::Release);
        }
        shared.start.notify_all();
        shared.take_tasks(0, body);
        let mut state = shared.state.lock();
        state.body = None;
        while state.joined > 0 {
            state = wait(&shared.finish, state);
        }
        drop(state);
        if shared.panicked.swap(false, Ordering::Relaxed) { Err(Error::ThreadPanicked) } else { Ok(()) }
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shared.state.lock().closed = true;
        self.shared.epoch.fetch_add(1, Ordering::Release);
        self.shared.start.notify_all();
        for handle in self.handles.drain(..) {
            let _ = handle.join();
        }
    }
}

impl Shared {
    fn work(&self, thread: usize) {
        let mut seen = 0;
        loop {
            for _ in 0..SPINS {
                if self.epoch.load(Ordering::Acquire) != seen {
                    break;
                }
                spin_loop();
            }
            let mut state = self.state.lock();
            let body = loop {
                if state.closed {
                    return;
                }
                let epoch = self.epoch.load(Ordering::Acquire);
                match state.body {
                    Some(body) if epoch != seen => {
                        seen = epoch;
                        break body;
                    }
                    // Either nothing has begun, or it is over already.
                    _ => state = wait(&self.start, state),
                }
            };
            state.joined += 1;
            drop(state);
            self.take_tasks(thread, body);
            let mut state = self.state.lock();
            state.joined -= 1;
            if state.joined == 0 {
                self.finish.notify_one();
            }
        }
    }

    fn take_tasks(&self, thread: usize, body: Body) {
        let tasks = || {
            loop {
                let task = self.next.fetch_add(1, Ordering::Relaxed);
                if task >= body.tasks {
                    return;
                }
                // SAFETY: this thread has joined the loop, or is its caller, so the closure is still there; see `run`.
                unsafe { (*body.run)(thread, task) };
            }
        };
        if catch_unwind(AssertUnwindSafe(tasks)).is_err() {
            self.panicked.store(true, Ordering::Relaxed);
        }
    }
}

#[cfg(not(loom))]
fn spawn(work: impl FnOnce() + Send + 'static) -> Result<std::thread::JoinHandle<()>, Error> {
    let name = "wakekv-cpu";
    std::thread::Builder::new().name(name.into()).spawn(work).map_err(|cause| Error::Thread { name, cause })
}

#[cfg(loom)]
fn spawn(work: impl FnOnce() + Send + 'static) -> Result<loom::thread::JoinHandle<()>, Error> {
    Ok(loom::thread::spawn(work))
}

/// A slice whose elements the tasks of one loop share out among them.
#[derive(Debug)]
pub(crate) struct Shares<'a, T> {
    first: *mut T,
    count: usize,
    slice: std::marker::PhantomData<&'a mut [T]>,
}

// SAFETY: elements are reached through `element` and `range` only, whose callers promise that no two threads hold the same one.
unsafe impl<T: Send> Send for Shares<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Shares<'_, T> {}

impl<'a, T> Shares<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Shares { first: slice.as_mut_ptr(), count: slice.len(), slice: std::marker::PhantomData }
    }

    /// # Safety
    /// No other borrow of the element is alive.
    #[allow(clippy::mut_from_ref, reason = "exclusion is the caller's promise")]
    pub(crate) unsafe fn element(&self, index: usize) -> &mut T {
        // SAFETY: the range has this one element, and is exclusive by the caller's promise.
        unsafe { &mut self.range(index, 1)[0] }
    }

    /// # Safety
    /// No other borrow of these elements is alive.
    #[allow(clippy::mut_from_ref, reason = "exclusion is the caller's promise")]
    pub(crate) unsafe fn range(&self, from: usize, count: usize) -> &mut [T] {
        assert!(from <= self.count && count <= self.count - from, "a task reaches outside of what is shared out");
        // SAFETY: inside the slice, which `self` borrows mutably for 'a; exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.first.add(from), count) }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once_on_a_known_thread() {
        for threads in 1..5 {
            let mut pool = Threads::start(threads).unwrap();
            for tasks in [0, 1, 2, 3, 100, 1000] {
                let mut runs = vec![0; tasks];
                let shares = Shares::new(&mut runs);
                pool.run(tasks, &|thread, task| {
                    assert!(thread < threads);
                    // SAFETY: each task runs once.
                    unsafe { *shares.element(task) += 1 };
                })
                .unwrap();
                assert!(runs.iter().all(|&runs| runs == 1));
            }
        }
    }

    #[test]
    fn a_panic_is_an_error_and_the_pool_lives_on() {
        for threads in [1, 3] {
            let mut pool = Threads::start(threads).unwrap();
            let result = pool.run(50, &|_, task| assert!(task != 7, "on purpose"));
            assert!(matches!(result, Err(Error::ThreadPanicked)));
            pool.run(50, &|_, _| {}).unwrap();
        }
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;

    #[test]
    fn loom_threads_share_loops() {
        loom::model(|| {
            let mut pool = Threads::start(2).unwrap();
            for _ in 0..2 {
                let runs = [AtomicUsize::new(0), AtomicUsize::new(0)];
                pool.run(2, &|_, task| {
                    runs[task].fetch_add(1, Ordering::Relaxed);
                })
                .unwrap();
                assert!(runs.iter().all(|runs| runs.load(Ordering::Relaxed) == 1));
            }
        });
    }
}
