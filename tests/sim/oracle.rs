//! Demands by true attention, against slow ones.

use std::collections::BTreeSet;

use crate::common::Rng;
use crate::sequences::{Sparse, logits, record, small, softmax, world};
use wakekv::table::{Phase, Pins};
use wakekv::trace::{Demands, OracleSettings, Worth};

#[test]
fn the_best_pages_and_the_last_are_demanded_for_their_best_tokens() {
    let mut run = Sparse::new(1, 6);
    // Token 1 is loud in channel 0, token 3 in channel 1.
    for (token, key) in [vec![], vec![(0, 4.0)], vec![(1, 2.0)], vec![(1, 4.0)], vec![], vec![]].into_iter().enumerate()
    {
        run.push(&[[if token == 5 { vec![(0, 1.0)] } else { vec![] }, key, vec![]]]);
    }
    run.push(&[[vec![(1, 1.0)], vec![], vec![]]]);
    let demands = Demands::oracle(&run.tensors, small(1, 2)).unwrap();
    let stream = demands.trace().head(0);
    assert_eq!(
        demands.trace().marks().iter().map(|mark| (mark.start, mark.tokens)).collect::<Vec<_>>(),
        [(0, 5), (5, 1), (6, 1)]
    );
    assert_eq!([stream.demand(0), stream.demand(1), stream.demand(2)], [&[0, 1, 2][..], &[0, 2], &[1, 3]]);
    // Of equal tokens the first is better: token 0 beside 1. The last page is demanded for its own sake.
    assert_eq!(demands.tokens(0, 0), [0; 0]);
    assert_eq!(demands.tokens(0, 1), [0, 1, 4]);
    assert_eq!(demands.tokens(0, 2), [2, 3, 6]);
    let (loud, rest) = (4f32.exp(), 5.0);
    let masses = stream.masses(1).unwrap();
    assert!((masses[0] - (loud + 1.0) / (loud + rest)).abs() < 1e-6);
    assert!((masses[1] - 2.0 / (loud + rest)).abs() < 1e-6);
}

#[test]
fn oracle_demands_are_those_of_slow_arithmetic() {
    let seed = crate::seed();
    let world = world(seed);
    let tensors = record(&world, 43, 75);
    let mut rng = Rng::new(seed);
    for (worth, stickiness) in [(Worth::Logit, 0.0), (Worth::Attention, 0.0), (Worth::Logit, 0.4)] {
        let pins = Pins { sinks: rng.below(2) as u32, recent: rng.below(2) as u32 };
        let settings = OracleSettings {
            page_tokens: 4,
            count: 1 + rng.below(5),
            worth,
            stickiness,
            pins,
            tokens: 1 + rng.below(9),
        };
        let demands = Demands::oracle(&tensors, settings).unwrap();
        assert_eq!(demands.trace().marks()[0].phase, Phase::Prefill);
        let mut chosen: BTreeSet<usize> = BTreeSet::new();
        for (layer, kv_head, token) in (0..4).flat_map(|head| (42..75).map(move |token| (head / 2, head % 2, token))) {
            let (head, step) = (2 * layer + kv_head, token - 41);
            if step == 1 {
                chosen.clear();
            }
            let group: Vec<Vec<f64>> =
                (3 * kv_head..3 * kv_head + 3).map(|query_head| logits(&world, layer, query_head, token)).collect();
            let weights: Vec<Vec<f64>> = group.iter().map(|logits| softmax(logits)).collect();
            let pages = token / 4 + 1;
            let of = |page: usize, rows: &[Vec<f64>], join: fn(f64, f64) -> f64, zero: f64| {
                let own = |row: &Vec<f64>| row[4 * page..(4 * page + 4).min(token + 1)].to_vec();
                rows.iter().flat_map(own).fold(zero, join)
            };
            let mass = |page: usize| of(page, &weights, |a, b| a + b, 0.0);
            let rank = |page: usize| match worth {
                Worth::Logit => of(page, &group, f64::max, f64::NEG_INFINITY),
                Worth::Attention => mass(page),
            };
            let pinned = |page: usize| pins.contain(page as u32, pages as u32 - 1);
            let mut others: Vec<usize> = (0..pages).filter(|&page| !pinned(page)).collect();
            let sticky = |page: usize| rank(page) + if chosen.contains(&page) { f64::from(stickiness) } else { 0.0 };
            others.sort_by(|&a, &b| sticky(b).total_cmp(&sticky(a)));
            chosen = others.into_iter().take(settings.count).collect();
            let best = chosen.iter().copied();
            let expected: BTreeSet<usize> = (0..pages).filter(|&page| pinned(page)).chain(best).collect();
            let got = demands.trace().head(head).demand(step);
            assert_eq!(got, expected.iter().map(|&page| page as u32).collect::<Vec<_>>());
            for (&page, got) in expected.iter().zip(demands.trace().head(head).masses(step).unwrap()) {
                assert!((f64::from(*got) - mass(page) / 3.0).abs() < 1e-6);
            }
            let mut wanted = BTreeSet::new();
            for weights in &weights {
                let mut order: Vec<usize> = (0..=token).collect();
                order.sort_by(|&a, &b| weights[b].total_cmp(&weights[a]));
                wanted.extend(order.into_iter().take(settings.tokens).filter(|token| expected.contains(&(token / 4))));
            }
            let total = |token: usize| weights.iter().map(|weights| weights[token]).sum::<f64>();
            for &page in &expected {
                let tokens = 4 * page..(4 * page + 4).min(token + 1);
                if !tokens.clone().any(|token| wanted.contains(&token)) {
                    wanted.extend(tokens.max_by(|&a, &b| total(a).total_cmp(&total(b))));
                }
            }
            assert_eq!(demands.tokens(head, step), wanted.iter().map(|&token| token as u32).collect::<Vec<_>>());
        }
    }
}

#[cfg(feature = "trace")]
#[test]
fn a_logs_demands_are_for_the_logged_tokens() {
    let tensors = record(&world(3), 43, 60);
    let log = tensors.log(5).unwrap();
    let pins = Pins { sinks: 1, recent: 0 };
    let demands = Demands::of_log(&log, 4, pins).unwrap();
    assert_eq!(demands.trace(), &log.trace(4, wakekv::trace::Lanes::Kv, pins).unwrap());
    for (head, step) in (0..4).flat_map(|head| (0..18).map(move |step| (head, step))) {
        let first = head % 2 * 3;
        let logged: BTreeSet<u32> =
            (first..first + 3).flat_map(|query| log.attended(step, head / 2, query)).map(|(token, _)| token).collect();
        assert_eq!(demands.tokens(head, step + 1), logged.into_iter().collect::<Vec<_>>());
    }
    assert!(demands.tokens(0, 0).is_empty() && demands.tokens(4, 1).is_empty());
    assert!(Demands::of_log(&log, 0, pins).is_err());
    assert!(Demands::oracle(&tensors, OracleSettings { page_tokens: 0, ..OracleSettings::default() }).is_err());
}
