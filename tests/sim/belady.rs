//! The optimum is one, and nobody beats it.

use crate::common::Rng;
use crate::streams::{random, short};
use wakekv::residency::BalanceSettings;
use wakekv::sim::{Accounting, Policy, Rule, Split, run};
use wakekv::table::Pins;
use wakekv::trace::Trace;

/// The least misses of one head over all choices of whom to keep, by trying them all: a bit per page.
fn exhaustive(trace: &Trace, budget: u32) -> u64 {
    let pages = trace.shape().pages(trace.marks()[0].end());
    let mut best = vec![Some(0u64); 1];
    best.resize(1 << pages, None);
    for (step, _) in trace.marks().iter().enumerate() {
        let demand = trace.head(0).demand(step).iter().fold(0usize, |set, &page| set | 1 << page);
        let mut next = vec![None; best.len()];
        for (resident, misses) in best.iter().enumerate().filter_map(|(set, best)| Some((set, (*best)?))) {
            // Prefill writes its pages.
            let misses = misses + if step == 0 { 0 } else { u64::from((demand & !resident).count_ones()) };
            let reachable = resident | demand;
            for kept in (0..next.len()).filter(|kept| kept & !reachable == 0 && kept.count_ones() <= budget) {
                next[kept] = Some(next[kept].map_or(misses, |old: u64| old.min(misses)));
            }
        }
        best = next;
    }
    best.into_iter().flatten().min().unwrap()
}

#[test]
fn it_is_the_least_over_all_choices() {
    let mut rng = Rng::new(1);
    let mut misses = 0;
    for _ in 0..200 {
        let steps: Vec<Vec<Vec<u32>>> =
            (0..8).map(|_| vec![(0..6).filter(|&page| page == 5 || rng.chance(35)).collect()]).collect();
        let trace = short(6, &steps);
        for budget in [2, 3, 4] {
            let got = run(&trace, Policy::Belady, budget, Accounting::Strict).unwrap().counts().misses();
            assert_eq!(got, exhaustive(&trace, budget as u32), "{steps:?}");
            misses += got;
        }
    }
    assert!(misses > 500);
}

#[test]
fn nobody_misses_less() {
    let pins = Pins { sinks: 1, recent: 0 };
    for seed in 0..30 {
        let trace = random(seed, 3, pins, 250);
        let split = Split::learn(&trace, 0.0);
        for budget in [4, 7, 12, 25] {
            for accounting in [Accounting::Strict, Accounting::Paper] {
                let misses = |policy| run(&trace, policy, budget, accounting).unwrap();
                let (best, pooled) = (misses(Policy::Belady), misses(Policy::PooledBelady));
                assert!(pooled.counts().misses() <= best.counts().misses());
                let mut others = vec![Policy::Reactive(Rule::Lru), Policy::Evict];
                if accounting == Accounting::Strict {
                    others.push(Policy::Frozen(&split));
                    others.extend(Rule::ALL.map(Policy::Reactive));
                }
                for policy in others {
                    let other = misses(policy);
                    for (head, (best, other)) in best.heads.iter().zip(&other.heads).enumerate() {
                        let (best, other) = (best.counts.total(), other.counts.total());
                        assert_eq!(best.demanded, other.demanded);
                        // Frozen reads prefill for free.
                        if !matches!(policy, Policy::Frozen(_)) {
                            assert!(best.misses() <= other.misses(), "{policy:?}, seed {seed}, head {head}");
                        }
                    }
                }
            }
            let settings = BalanceSettings::default();
            let sharing = Rule::ALL.map(|rule| Policy::Moving(rule, settings)).into_iter().chain([Policy::Pooled]);
            for policy in sharing {
                let moving = run(&trace, policy, budget, Accounting::Strict).unwrap();
                let pooled = run(&trace, Policy::PooledBelady, budget, Accounting::Strict).unwrap();
                let total = |outcome: &wakekv::sim::Outcome| -> u64 {
                    outcome.heads.iter().map(|head| head.counts.total().misses()).sum()
                };
                assert!(total(&pooled) <= total(&moving));
                assert!(moving.resident_mean() <= (3 * budget) as f64 + 1e-9);
            }
        }
    }
}
