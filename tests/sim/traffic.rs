//! Memory and bytes that steps wait for, by hand.

use crate::streams::short;
use wakekv::sim::{Accounting, Bandwidths, Outcome, Policy, Rule, Split, Traffic, run};

fn traffic(outcome: &Outcome, head: usize) -> Vec<(u32, u32)> {
    outcome.heads[head].traffic.iter().map(|&Traffic { hits, fetched }| (hits, fetched)).collect()
}

/// Two heads. The first wants pages 0 and 2 in turn, the second always the same.
fn outcome(policy: Policy<'_>) -> Outcome {
    let step = |page| vec![vec![page, 3], vec![2, 3]];
    run(&short(4, &[step(0), step(2), step(2)]), policy, 2, Accounting::Strict).unwrap()
}

#[test]
fn bytes_that_do_not_hide_behind_the_hits_are_waited_for() {
    let reactive = outcome(Policy::Reactive(Rule::Lru));
    assert_eq!(traffic(&reactive, 0), [(1, 1), (1, 1), (2, 0)]);
    assert_eq!(traffic(&reactive, 1), [(2, 0); 3]);
    let stall = |fetch, attention| reactive.stall_bytes(1000, Bandwidths { fetch, attention });
    // Three hits in the layer hide three quarters of the page that is fetched, in two steps of three.
    assert_eq!(stall(1.0, 4.0), 2.0 * 0.25 * 1000.0 / 3.0);
    assert_eq!(stall(1.0, 3.0), 0.0);
    // Nothing hides behind attention that takes no time.
    assert_eq!(stall(1.0, f64::INFINITY), 2.0 * 1000.0 / 3.0);
}

#[test]
fn layers_hide_only_their_own_fetches() {
    let mut shape = *short(4, &[vec![vec![0], vec![0]]]).shape();
    (shape.layers, shape.heads_per_layer) = (2, 1);
    let mut trace = wakekv::trace::Trace::new(shape);
    for mark in short(4, &[vec![vec![0], vec![0]]]).marks() {
        let step = if mark.start == 0 { vec![vec![0, 1, 2, 3]; 2] } else { vec![vec![0, 3], vec![2, 3]] };
        trace.push(*mark, &step).unwrap();
    }
    let outcome = run(&trace, Policy::Reactive(Rule::Lru), 2, Accounting::Strict).unwrap();
    // One hit of the first layer; the two of the second come too late.
    assert_eq!(outcome.stall_bytes(1000, Bandwidths { fetch: 1.0, attention: 4.0 }), 750.0);
}

#[test]
fn only_what_moves_is_traffic() {
    // Page 2 is destroyed when 0 comes, and cannot be fetched again.
    let evict = outcome(Policy::Evict);
    assert_eq!(traffic(&evict, 0), [(1, 1), (1, 0), (1, 0)]);
    assert_eq!((evict.heads[0].unserved, evict.heads[1].unserved), (2, 0));
    // The frozen set {3, 0} never changes: page 2 is fetched and not kept.
    let frozen = outcome(Policy::Frozen(&Split::new(vec![false, false])));
    assert_eq!(traffic(&frozen, 0), [(2, 0), (1, 1), (1, 1)]);
    assert_eq!((frozen.resident_tokens(), frozen.resident_mean(), frozen.resident_peak()), (64.0, 4.0, 4));
}
