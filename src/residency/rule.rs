//! A policy that is chosen at run time.

use std::fmt;

use super::{Arc, Frequency, Lru, Replacement, S3Fifo, Scores, Sieve, Standing};

/// Who goes when a page needs a way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Rule {
    /// [`Lru`], the published rule.
    #[default]
    Lru,
    /// [`Frequency`].
    Frequency,
    /// [`Standing`], which looks at scores.
    Standing,
    /// [`S3Fifo`].
    S3Fifo,
    /// [`Sieve`].
    Sieve,
    /// [`Arc`].
    Arc,
}

impl Rule {
    /// All of them, the published one first.
    pub const ALL: [Rule; 6] = [Rule::Lru, Rule::Frequency, Rule::Standing, Rule::S3Fifo, Rule::Sieve, Rule::Arc];

    /// The order of a head that owns no ways yet.
    pub fn order(self) -> Ruled {
        match self {
            Rule::Lru => Ruled::Lru(Lru::new()),
            Rule::Frequency => Ruled::Frequency(Frequency::new()),
            Rule::Standing => Ruled::Standing(Standing::new()),
            Rule::S3Fifo => Ruled::S3Fifo(S3Fifo::new()),
            Rule::Sieve => Ruled::Sieve(Sieve::new()),
            Rule::Arc => Ruled::Arc(Arc::new()),
        }
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Rule::Lru => "lru",
            Rule::Frequency => "frequency",
            Rule::Standing => "standing",
            Rule::S3Fifo => "s3fifo",
            Rule::Sieve => "sieve",
            Rule::Arc => "arc",
        })
    }
}

/// The order of a [`Rule`]. It decides as the policy of that name does; a call costs one branch more.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Ruled {
    /// Of [`Rule::Lru`].
    Lru(Lru),
    /// Of [`Rule::Frequency`].
    Frequency(Frequency),
    /// Of [`Rule::Standing`].
    Standing(Standing),
    /// Of [`Rule::S3Fifo`].
    S3Fifo(S3Fifo),
    /// Of [`Rule::Sieve`].
    Sieve(Sieve),
    /// Of [`Rule::Arc`].
    Arc(Arc),
}

/// The same for every policy.
macro_rules! each {
    ($ruled:expr, $order:ident => $call:expr) => {
        match $ruled {
            Ruled::Lru($order) => $call,
            Ruled::Frequency($order) => $call,
            Ruled::Standing($order) => $call,
            Ruled::S3Fifo($order) => $call,
            Ruled::Sieve($order) => $call,
            Ruled::Arc($order) => $call,
        }
    };
}

impl Replacement for Ruled {
    /// [`Rule::Lru`].
    fn new() -> Self {
        Rule::default().order()
    }

    fn reserve(&mut self, pages: usize, ways: usize) {
        each!(self, order => order.reserve(pages, ways));
    }

    fn grow(&mut self) {
        each!(self, order => order.grow());
    }

    fn shrink(&mut self) {
        each!(self, order => order.shrink());
    }

    fn admit(&mut self, way: u32, page: u32) {
        each!(self, order => order.admit(way, page));
    }

    fn touch(&mut self, ways: impl Iterator<Item = u32>) {
        each!(self, order => order.touch(ways));
    }

    fn touch_prompt(&mut self, ways: impl Iterator<Item = u32>) {
        each!(self, order => order.touch_prompt(ways));
    }

    fn rate(&mut self, scores: Scores<'_>, pages: &[u32]) {
        each!(self, order => order.rate(scores, pages));
    }

    fn rename(&mut self, from: u32, to: u32) {
        each!(self, order => order.rename(from, to));
    }

    fn remove(&mut self, way: u32) {
        each!(self, order => order.remove(way));
    }

    fn evict(&mut self, wanted: usize, eligible: impl FnMut(u32) -> bool, take: impl FnMut(u32)) {
        each!(self, order => order.evict(wanted, eligible, take));
    }

    fn table_bytes(&self) -> usize {
        each!(self, order => order.table_bytes())
    }
}
