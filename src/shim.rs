//! The one place where the primitives of std and those of the model checker `loom` switch.
//!
//! Protocols that are model-checked (`backend/cpu/copy/queue.rs`, `backend/cpu/threads.rs`) take their atomics, locks and
//! threads from here. `RUSTFLAGS="--cfg loom" cargo test --lib loom` checks them.

#[cfg(not(loom))]
mod real {
    pub(crate) use parking_lot::{Condvar, Mutex, MutexGuard};
    pub(crate) use std::hint::spin_loop;
    pub(crate) use std::sync::Arc;
    pub(crate) use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};

    /// Sleeps until notified, giving the lock up meanwhile.
    pub(crate) fn wait<'a, T>(condvar: &Condvar, mut guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        condvar.wait(&mut guard);
        guard
    }

    /// How often a short wait looks again before it sleeps: some ten microseconds.
    pub(crate) const SPINS: usize = 400;
}

#[cfg(loom)]
mod real {
    pub(crate) use loom::hint::spin_loop;
    pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
    pub(crate) use loom::sync::{Arc, Condvar, MutexGuard};

    /// loom's mutex with parking_lot's signature: a poisoned lock means that the model has failed already.
    #[derive(Debug)]
    pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Mutex(loom::sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().unwrap()
        }
    }

    pub(crate) fn wait<'a, T>(condvar: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        condvar.wait(guard).unwrap()
    }

    /// Spinning only multiplies the interleavings; the model checks the sleeping path.
    pub(crate) const SPINS: usize = 0;
}

pub(crate) use real::*;
