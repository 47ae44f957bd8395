//! Every interleaving of the queue's protocol, with few threads and jobs.

use super::*;
use crate::shim::Arc;
use loom::cell::UnsafeCell;
use loom::thread::{self, JoinHandle};

fn job(host: u32) -> Job {
    Job { kind: Kind::Fetch, host, device: 0 }
}

/// A page for each of three jobs. loom fails a model in which one is read while it is written, or without having been synchronised.
struct Pages([UnsafeCell<u32>; 3]);

// SAFETY: the queue's protocol is what keeps accesses apart; that it does is what the models check.
unsafe impl Sync for Pages {}
// SAFETY: as above.
unsafe impl Send for Pages {}

impl Pages {
    fn new() -> Arc<Pages> {
        Arc::new(Pages(std::array::from_fn(|_| UnsafeCell::new(0))))
    }

    fn write(&self, page: u32, value: u32) {
        // SAFETY: checked by loom.
        self.0[page as usize].with_mut(|page| unsafe { *page = value });
    }

    fn read(&self, page: u32) -> u32 {
        // SAFETY: checked by loom.
        self.0[page as usize].with(|page| unsafe { *page })
    }
}

/// A worker that fills the page of every job and fails the job of `failing`, until the queue closes.
fn worker(queue: &Arc<Queue>, pages: &Arc<Pages>, failing: Option<u32>) -> JoinHandle<()> {
    let (queue, pages) = (queue.clone(), pages.clone());
    thread::spawn(move || {
        while let Some((job, ticket)) = queue.take() {
            pages.write(job.host, 7);
            let result = if failing == Some(job.host) { Err(Error::StepFailed) } else { Ok(()) };
            queue.complete(ticket, result);
        }
        queue.die();
    })
}

fn model(run: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    // All interleavings with up to two forced switches: enough for every race between two critical sections.
    builder.preemption_bound = Some(2);
    builder.check(run);
}

#[test]
fn loom_a_waiter_sees_what_the_worker_wrote() {
    model(|| {
        let (queue, pages) = (Arc::new(Queue::new(1)), Pages::new());
        let worker = worker(&queue, &pages, None);
        let mut tickets = Vec::new();
        // Two jobs for a queue of depth 1: the submitter has to wait for room.
        queue.submit(&[job(0), job(1)], |job, ticket| tickets.push((job.host, ticket))).unwrap();
        assert_eq!(tickets, [(0, 1), (1, 2)]);
        queue.wait(1).unwrap();
        assert_eq!(pages.read(0), 7);
        queue.wait(2).unwrap();
        assert!(queue.is_done(2));
        assert_eq!(pages.read(1), 7);
        queue.close();
        worker.join().unwrap();
    });
}

#[test]
fn loom_two_threads_submit_and_wait() {
    model(|| {
        let (queue, pages) = (Arc::new(Queue::new(1)), Pages::new());
        let worker = worker(&queue, &pages, None);
        let other = {
            let (queue, pages) = (queue.clone(), pages.clone());
            thread::spawn(move || submit_and_read(&queue, &pages, 1))
        };
        submit_and_read(&queue, &pages, 0);
        other.join().unwrap();
        queue.drain().unwrap();
        queue.close();
        worker.join().unwrap();
    });
}

fn submit_and_read(queue: &Queue, pages: &Pages, page: u32) {
    let mut mine = 0;
    queue.submit(&[job(page)], |_, ticket| mine = ticket).unwrap();
    queue.wait(mine).unwrap();
    assert_eq!(pages.read(page), 7);
}

#[test]
fn loom_a_failure_is_seen_by_those_it_concerns() {
    model(|| {
        let (queue, pages) = (Arc::new(Queue::new(4)), Pages::new());
        let worker = worker(&queue, &pages, Some(1));
        queue.submit(&[job(0), job(1), job(2)], |_, _| {}).unwrap();
        assert_eq!(queue.wait(1), Ok(()));
        assert_eq!(queue.wait(3), Err(Failed));
        assert_eq!(queue.wait(2), Err(Failed));
        assert!(queue.has_failed());
        queue.drain().unwrap();
        assert!(matches!(queue.clear_failure(), Some(Error::StepFailed)));
        // The next step starts afresh.
        queue.submit(&[job(0)], |_, _| {}).unwrap();
        assert_eq!(queue.wait(4), Ok(()));
        assert!(queue.clear_failure().is_none());
        queue.close();
        worker.join().unwrap();
    });
}

#[test]
fn loom_a_death_releases_waiters() {
    model(|| {
        let queue = Arc::new(Queue::new(2));
        queue.submit(&[job(0), job(1)], |_, _| {}).unwrap();
        let worker = {
            let queue = queue.clone();
            thread::spawn(move || {
                let (_, ticket) = queue.take().unwrap();
                queue.complete(ticket, Ok(()));
                queue.die();
            })
        };
        let other = {
            let queue = queue.clone();
            thread::spawn(move || assert_eq!(queue.wait(2), Err(Failed)))
        };
        // What was done before the death is done.
        assert_eq!(queue.wait(1), Ok(()));
        assert_eq!(queue.drain(), Err(Failed));
        other.join().unwrap();
        worker.join().unwrap();
        assert!(queue.is_dead());
    });
}

#[test]
fn loom_a_death_releases_submitters() {
    model(|| {
        let queue = Arc::new(Queue::new(1));
        let worker = {
            let queue = queue.clone();
            thread::spawn(move || {
                queue.take().unwrap();
                queue.die();
            })
        };
        // The third job never finds room.
        assert_eq!(queue.submit(&[job(0), job(1), job(2)], |_, _| {}), Err(Failed));
        assert_eq!(queue.submit(&[job(0)], |_, _| {}), Err(Failed));
        assert_eq!(queue.wait(1), Err(Failed));
        worker.join().unwrap();
    });
}
