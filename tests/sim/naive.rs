//! The rule and its destructive sister, written down a second time: lists and searches.

use std::collections::{HashMap, HashSet};

use crate::common::naive::NaiveTable;
use crate::streams::random;
use wakekv::sim::{Accounting, Policy, Rule, run};
use wakekv::table::{Phase, Pins};
use wakekv::trace::{Mark, Trace};

const PINS: Pins = Pins { sinks: 1, recent: 1 };

fn opens(trace: &Trace, mark: &Mark) -> (usize, usize, Option<u32>) {
    let (before, after) = (trace.shape().pages(mark.start), trace.shape().pages(mark.end()));
    (before, after, (!mark.start.is_multiple_of(16)).then(|| before as u32 - 1))
}

/// (hits, compulsory, capacity, evictions) of decode.
type Counted = (u64, u64, u64, u64);

fn reactive(trace: &Trace, budget: usize) -> Counted {
    let mut counted = (0, 0, 0, 0);
    let mut table = NaiveTable::default();
    for (step, mark) in trace.marks().iter().enumerate() {
        let (before, after, keep) = opens(trace, mark);
        while table.ways() < after.min(budget) {
            table.grant(0);
        }
        let mut evictions = 0;
        for _ in before..after {
            evictions += u64::from(table.open(mark.step, mark.phase, PINS, keep).unwrap().evicted.is_some());
        }
        let (_, tally) = table.demand(mark.step, mark.phase, trace.head(0).demand(step)).unwrap();
        if mark.phase == Phase::Decode {
            counted.0 += u64::from(tally.hits);
            counted.1 += u64::from(tally.compulsory);
            counted.2 += u64::from(tally.capacity);
            counted.3 += u64::from(tally.evictions) + evictions;
        }
    }
    counted
}

/// Pages with stamps; what is in neither `resident` nor `left` is lost.
fn evict(trace: &Trace, budget: usize) -> Counted {
    let mut counted = (0, 0, 0, 0);
    let mut resident: HashMap<u32, u64> = HashMap::new();
    let (mut left, mut prompt): (HashSet<u32>, HashSet<u32>) = Default::default();
    for (step, mark) in trace.marks().iter().enumerate() {
        let decode = mark.phase == Phase::Decode;
        if decode {
            left.extend(prompt.drain().filter(|page| !resident.contains_key(page)));
        }
        let (before, after, keep) = opens(trace, mark);
        let ways = after.min(budget);
        let oldest = |resident: &HashMap<u32, u64>, stays: &dyn Fn(u32) -> bool| {
            let victims = resident.iter().filter(|(page, _)| !stays(**page));
            victims.map(|(&page, &stamp)| (stamp, page)).min().map(|(_, page)| page)
        };
        for page in before as u32..after as u32 {
            if resident.len() == ways {
                let victim = oldest(&resident, &|old| PINS.contain(old, page) || keep == Some(old)).unwrap();
                resident.remove(&victim);
                counted.3 += u64::from(decode);
            }
            resident.insert(page, mark.step);
            if !decode {
                prompt.insert(page);
            }
        }
        let demand = trace.head(0).demand(step);
        let asked: Vec<u32> = demand
            .iter()
            .copied()
            .filter(|page| resident.contains_key(page) || left.contains(page) || prompt.contains(page))
            .collect();
        let hits = asked.iter().filter(|page| resident.contains_key(page)).count() as u64;
        if decode {
            counted.0 += hits;
            counted.1 += asked.len() as u64 - hits;
            counted.2 += (demand.len() - asked.len()) as u64;
        }
        for page in &asked {
            resident.entry(*page).and_modify(|stamp| *stamp = mark.step);
        }
        for page in &asked {
            if decode {
                left.remove(page);
            }
            if resident.contains_key(page) {
                continue;
            }
            if resident.len() == ways {
                let stays = |old: u32| asked.contains(&old) || (old as usize) >= before;
                let Some(victim) = oldest(&resident, &stays) else { continue };
                resident.remove(&victim);
                counted.3 += u64::from(decode);
            }
            resident.insert(*page, mark.step);
        }
    }
    counted
}

/// WakeKV's simulator: a recency list, first touch free, trimmed after the step.
fn paper(trace: &Trace, budget: usize, destroy: bool) -> (u64, u64) {
    let (mut recency, mut reservoir): (Vec<u32>, HashSet<u32>) = Default::default();
    let (mut misses, mut residents) = (0, 0);
    for (step, _) in trace.marks().iter().enumerate().filter(|(_, mark)| mark.phase == Phase::Decode) {
        for &page in trace.head(0).demand(step) {
            if let Some(index) = recency.iter().position(|&old| old == page) {
                recency.remove(index);
            } else if reservoir.contains(&page) {
                misses += 1;
                if destroy {
                    continue;
                }
                reservoir.remove(&page);
            }
            recency.push(page);
        }
        while recency.len() > budget {
            reservoir.insert(recency.remove(0));
        }
        residents += recency.len() as u64;
    }
    (misses, residents)
}

#[test]
fn replays_agree_with_naive_implementations() {
    let mut demanded = 0;
    for seed in 0..60 {
        let trace = random(seed, 1, PINS, 300);
        demanded += trace.demanded();
        for budget in [4, 6, 9, 16, 40] {
            let strict = |policy| {
                let counts = run(&trace, policy, budget, Accounting::Strict).unwrap().counts();
                (counts.hits, counts.compulsory, counts.capacity, counts.evictions)
            };
            assert_eq!(strict(Policy::Reactive(Rule::Lru)), reactive(&trace, budget), "seed {seed}, budget {budget}");
            assert_eq!(strict(Policy::Evict), evict(&trace, budget), "evict, seed {seed}, budget {budget}");
            for (policy, destroy) in [(Policy::Reactive(Rule::Lru), false), (Policy::Evict, true)] {
                let outcome = run(&trace, policy, budget, Accounting::Paper).unwrap();
                let got = (outcome.counts().misses(), outcome.heads[0].resident_tokens / 16);
                assert_eq!(got, paper(&trace, budget, destroy), "{policy:?}, seed {seed}, budget {budget}");
            }
        }
    }
    assert!(demanded > 100_000, "{demanded} pages are too few to tell");
}
