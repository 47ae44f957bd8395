//! What it costs to read less: against counts by hand and slow arithmetic.

use crate::sequences::{Sparse, loss, record, small, world};
use wakekv::residency::BalanceSettings;
use wakekv::sim::{Accounting, Policy, Rule, SimError, Split, judge, replay};
use wakekv::trace::{Demands, OracleSettings};

#[test]
fn unread_tokens_weigh_what_they_are_attended() {
    let mut run = Sparse::new(1, 4);
    // Queries of 0 attend to everything alike; token t has value t.
    for token in 0..5 {
        run.push(&[[vec![], vec![], vec![(0, token as f32)]]]);
    }
    // Of pages {0, 1} and then {0, 1, 2} the first and the last are demanded.
    let demands = Demands::oracle(&run.tensors, small(1, 9)).unwrap();
    let full = replay(demands.trace(), Policy::Full, 2, Accounting::Strict).unwrap();
    let quality = judge(&run.tensors, demands.trace(), &[full]).unwrap().remove(0);
    // Token 3 reads everything. Token 4 misses 2 of 5 tokens, and finds the mean of 0, 1, 4 instead of 2.
    assert!((quality.lost_mass() - 0.4 / 2.0).abs() < 1e-6, "{quality:?}");
    assert!((quality.output_error() - (1.0 / 6.0) / 2.0).abs() < 1e-6, "{quality:?}");
    assert_eq!(quality.heads[0].tokens, 2);
}

#[test]
fn whoever_fetches_loses_nothing_that_is_demanded() {
    let world = world(crate::seed());
    let tensors = record(&world, 43, 90);
    let everything = OracleSettings { page_tokens: 4, count: 100, ..OracleSettings::default() };
    let some = OracleSettings { count: 4, ..everything };
    let split = Split::new(vec![true, false, false, false]);
    for settings in [everything, some] {
        let demands = Demands::oracle(&tensors, settings).unwrap();
        let policies = [
            Policy::Full,
            Policy::Reactive(Rule::Lru),
            Policy::Reactive(Rule::Arc),
            Policy::Moving(Rule::Lru, BalanceSettings::default()),
            Policy::Frozen(&split),
            Policy::Belady,
            Policy::Evict,
        ];
        let replays: Vec<_> = policies
            .into_iter()
            .map(|policy| replay(demands.trace(), policy, 7, Accounting::Strict).unwrap())
            .collect();
        let mut qualities = judge(&tensors, demands.trace(), &replays).unwrap();
        let evict = qualities.pop().unwrap();
        assert!(qualities.iter().all(|quality| quality == &qualities[0]));
        assert!(evict.lost_mass() > qualities[0].lost_mass() + 0.01);
        assert!(evict.output_error() > qualities[0].output_error() + 0.01);
        if settings == everything {
            assert!((qualities[0].lost_mass(), qualities[0].output_error()) <= (0.0, 1e-6));
        }
        for (head, got) in qualities[0].heads.iter().enumerate() {
            let (mut lost, mut error) = (0.0, 0.0);
            for (step, token) in (42..90).enumerate() {
                let demand = demands.trace().head(head).demand(step + 1);
                for query_head in head % 2 * 3..head % 2 * 3 + 3 {
                    let read = |other: usize| demand.contains(&(other as u32 / 4));
                    let of = loss(&world, head / 2, query_head, token, &read);
                    (lost, error) = (lost + of.0 / 3.0, error + of.1 / 3.0);
                }
            }
            assert!((got.lost_mass - lost).abs() < 1e-4 && (got.output_error - error).abs() < 1e-4);
        }
    }
}

#[test]
fn evict_reads_what_it_has_not_destroyed() {
    let mut run = Sparse::new(1, 6);
    // Pages 0, 1, 2 answer to channels 0, 1, 2; each decode step asks for one of them, and for the last page.
    let asks = [9, 9, 9, 9, 9, 0, 1, 0];
    for (token, channel) in asks.into_iter().enumerate() {
        run.push(&[[vec![(channel, 20.0)], vec![(token / 2, 1.0)], vec![(token, 1.0)]]]);
    }
    let demands = Demands::oracle(&run.tensors, small(1, 2)).unwrap();
    let demand: Vec<&[u32]> = (1..4).map(|step| demands.trace().head(0).demand(step)).collect();
    assert_eq!(demand, [&[0, 2], &[1, 3], &[0, 3]]);
    // Prefill leaves 1 and 2. Page 0 comes for 1, which is lost, and goes for 3. The paper's budget holds only after the second step.
    for (accounting, counted, lost) in [(Accounting::Strict, (3, 1, 2), 2), (Accounting::Paper, (5, 0, 1), 1)] {
        let replay = replay(demands.trace(), Policy::Evict, 2, accounting).unwrap();
        let counts = replay.outcome.counts();
        assert_eq!((counts.hits, counts.compulsory, counts.capacity), counted);
        assert_eq!(replay.outcome.heads[0].unserved, lost);
        let quality = judge(&run.tensors, demands.trace(), &[replay]).unwrap().remove(0);
        // All that a step is after is gone.
        assert!((quality.heads[0].lost_mass - lost as f64).abs() < 1e-3, "{accounting:?} {quality:?}");
        assert!(quality.heads[0].output_error > lost as f64);
    }
}

#[test]
fn tensors_of_another_run_are_refused() {
    let tensors = record(&world(1), 43, 60);
    let longer = record(&world(1), 43, 61);
    let demands = Demands::oracle(&longer, OracleSettings::default()).unwrap();
    let replays = [replay(demands.trace(), Policy::Full, 4, Accounting::Strict).unwrap()];
    assert!(matches!(judge(&tensors, demands.trace(), &replays), Err(SimError::Tensors { .. })));
    let mut other = Sparse::new(1, 2);
    (0..3).for_each(|_| other.push(&[[vec![], vec![], vec![]]]));
    assert!(matches!(judge(&other.tensors, demands.trace(), &replays), Err(SimError::Tensors { .. })));
    let below = replay(demands.trace(), Policy::Evict, 3, Accounting::Strict).unwrap_err();
    assert_eq!(below, SimError::Budget { budget: 3, least: 4 });
}
