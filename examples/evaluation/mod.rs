//! The evaluation: runs of a model on tasks, their replays, and the page that tells what came out.
//!
//! ```text
//! plan       which runs there are
//! work       one run: every way of reading scored, one recorded; and what is kept of it
//! checks     what must hold of every run
//! pace       decoding speed by how often pages are selected anew
//! peer       the replay's speed beside plain Python's
//! regime     all runs of a kind, replayed
//! attentive  policies that look at queries and keys
//! page       docs/results.md
//! ```

pub mod attentive;
pub mod checks;
pub mod pace;
pub mod page;
pub mod peer;
pub mod plan;
pub mod regime;
pub mod work;

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::Result;

/// Does `work` for every item on so many threads. The results are in the order of the items; the first error ends it all.
pub fn parallel<I: Sync, O: Send>(
    workers: usize,
    items: &[I],
    work: impl Fn(&I) -> Result<O> + Sync,
) -> Result<Vec<O>> {
    let next = AtomicUsize::new(0);
    let done: Mutex<Vec<(usize, O)>> = Mutex::new(Vec::new());
    let worker = || -> Result<()> {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(index) else { return Ok(()) };
            let output = work(item).inspect_err(|_| next.store(items.len(), Ordering::Relaxed))?;
            done.lock().unwrap_or_else(|broken| broken.into_inner()).push((index, output));
        }
    };
    std::thread::scope(|scope| -> Result<()> {
        let threads: Vec<_> = (0..workers.max(1)).map(|_| scope.spawn(worker)).collect();
        for thread in threads {
            thread.join().map_err(|_| anyhow::anyhow!("a worker panicked"))??;
        }
        Ok(())
    })?;
    let mut done = done.into_inner().unwrap_or_else(|broken| broken.into_inner());
    done.sort_by_key(|&(index, _)| index);
    Ok(done.into_iter().map(|(_, output)| output).collect())
}
