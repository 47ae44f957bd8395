//! FlexiCache against counts by hand and a slow one.

use crate::common::Which;
use crate::sequences::{Sparse, record, row, small, world};
use wakekv::sim::{FlexiCache, SimError, Split, flexicache, judge};
use wakekv::trace::Demands;

/// Page 0 answers to channel 0, page 1 to channel 1. The prompt has pages 0 to 2; pages 3 and 4 open at tokens 6 and 8.
fn run() -> Sparse {
    let mut run = Sparse::new(1, 6);
    for token in 0..9 {
        let key = match token / 2 {
            page @ (0 | 1) => vec![(page, 3.0)],
            _ => vec![],
        };
        let query = vec![(usize::from(token > 6), 1.0)];
        run.push(&[[query, key, vec![(token, 1.0)]]]);
    }
    run
}

#[test]
fn the_set_is_ranked_every_so_often_and_what_opens_takes_the_lowest_place() {
    let run = run();
    let demands = Demands::oracle(&run.tensors, small(1, 1)).unwrap();
    let demand: Vec<&[u32]> = (1..5).map(|step| demands.trace().head(0).demand(step)).collect();
    assert_eq!(demand, [&[0, 2], &[0, 3], &[1, 3], &[1, 4]]);
    let settings = FlexiCache { pages: 2, rerank_every: 2 };
    let stable = flexicache(&run.tensors, demands.trace(), &Split::new(vec![false]), settings).unwrap();
    // {2, 0}, {3, 2}, ranked anew {3, 1}, {4, 3}: 0 misses once, 1 as it is ranked, and when page 4 has taken its place.
    let counts = stable.outcome.counts();
    assert_eq!((counts.hits, counts.compulsory, counts.capacity), (5, 0, 3));
    let head = &stable.outcome.heads[0];
    assert_eq!((head.refreshed, head.unserved, stable.outcome.resident_mean()), (1, 3, 2.0));
    assert_eq!(
        head.traffic.iter().map(|moved| (moved.hits, moved.fetched)).collect::<Vec<_>>(),
        [(2, 0), (1, 0), (1, 1), (1, 0)]
    );
    let unstable = flexicache(&run.tensors, demands.trace(), &Split::new(vec![true]), settings).unwrap();
    assert_eq!((unstable.outcome.counts().misses(), unstable.outcome.resident_peak()), (0, 5));
    assert_eq!(unstable.outcome.resident_mean(), (3 + 4 + 4 + 5) as f64 / 4.0);
    // Ranked in every step it reads the oracle's pages here; the other one does not.
    let [unstable, stable]: [_; 2] =
        judge(&run.tensors, demands.trace(), &[unstable, stable]).unwrap().try_into().unwrap();
    assert!(unstable.lost_mass() < 0.5 * stable.lost_mass());
}

#[test]
fn settings_that_make_no_sense_are_refused() {
    let run = run();
    let demands = Demands::oracle(&run.tensors, small(1, 1)).unwrap();
    let split = Split::new(vec![false]);
    let try_it = |pages, rerank_every, split: &Split| {
        flexicache(&run.tensors, demands.trace(), split, FlexiCache { pages, rerank_every }).unwrap_err()
    };
    assert_eq!(try_it(0, 1, &split), SimError::Budget { budget: 0, least: 1 });
    assert_eq!(try_it(1, 0, &split), SimError::Budget { budget: 0, least: 1 });
    assert_eq!(try_it(1, 1, &Split::new(vec![])), SimError::Split { split: 0, heads: 1 });
    let other = record(&world(1), 43, 50);
    let settings = FlexiCache { pages: 1, rerank_every: 1 };
    assert!(matches!(flexicache(&other, demands.trace(), &split, settings), Err(SimError::Tensors { .. })));
}

/// (hits, misses, refreshed, lost mass, output error) of a head.
pub type Counted = (u64, u64, u64, f64, f64);

#[test]
fn random_sequences_come_to_what_slow_arithmetic_says() {
    let seed = crate::seed();
    let (world, prompt, tokens, page_tokens) = (world(seed), 43, 80, 4);
    let tensors = record(&world, prompt, tokens);
    let oracle = wakekv::trace::OracleSettings { page_tokens, count: 3, ..Default::default() };
    let demands = Demands::oracle(&tensors, oracle).unwrap();
    let split = Split::new(vec![false, true, false, false]);
    for (pages, rerank_every) in [(1, 1), (4, 1), (5, 3), (6, 8), (40, 4)] {
        let settings = FlexiCache { pages, rerank_every };
        let replay = flexicache(&tensors, demands.trace(), &split, settings).unwrap();
        let quality = judge(&tensors, demands.trace(), std::slice::from_ref(&replay)).unwrap().remove(0);
        for head in 0..4 {
            let (layer, kv_head, unstable) = (head / 2, head % 2, head == 1);
            let mut set: Vec<usize> = Vec::new();
            let mut expected: Counted = (0, 0, 0, 0.0, 0.0);
            for token in prompt - 1..tokens {
                let decoded = token + 1 - prompt;
                let last = token / page_tokens;
                if token.is_multiple_of(page_tokens) {
                    set.insert(0, last);
                    set.truncate(pages);
                }
                let before = set.clone();
                if unstable || decoded.is_multiple_of(rerank_every) {
                    let score = |page: usize| -> f64 {
                        let keys: Vec<Vec<f64>> = (page * page_tokens..(page + 1) * page_tokens)
                            .map(|token| row(&world, Which::Key, layer, token, kv_head))
                            .collect();
                        let bound = |query: &[f64]| -> f64 {
                            let channels = query.iter().enumerate();
                            channels
                                .map(|(d, q)| keys.iter().map(|key| q * key[d]).fold(f64::NEG_INFINITY, f64::max))
                                .sum()
                        };
                        let group = 3 * kv_head..3 * kv_head + 3;
                        let queries = group.map(|head| row(&world, Which::Query, layer, token, head));
                        queries.map(|query| bound(&query)).fold(f64::NEG_INFINITY, f64::max)
                    };
                    let mut others: Vec<(f64, usize)> = (0..last).map(|page| (score(page), page)).collect();
                    others.sort_by(|a, b| b.0.total_cmp(&a.0));
                    set = [last].into_iter().chain(others.into_iter().map(|(_, page)| page)).take(pages).collect();
                }
                let resident = if decoded == 0 { &set } else { &before };
                expected.2 += set.iter().filter(|page| !unstable && !resident.contains(page)).count() as u64;
                for &page in demands.trace().head(head).demand(decoded + 1) {
                    let hit = unstable || resident.contains(&(page as usize));
                    *if hit { &mut expected.0 } else { &mut expected.1 } += 1;
                }
                for query_head in 3 * kv_head..3 * kv_head + 3 {
                    let read = |other: usize| set.contains(&(other / page_tokens));
                    let (lost, error) = crate::sequences::loss(&world, layer, query_head, token, &read);
                    expected.3 += lost / 3.0;
                    expected.4 += error / 3.0;
                }
            }
            let (counts, outcome) = (replay.outcome.heads[head].counts.decode, &replay.outcome.heads[head]);
            assert_eq!((counts.hits, counts.capacity, outcome.refreshed), (expected.0, expected.1, expected.2));
            let quality = quality.heads[head];
            assert_eq!(quality.tokens, (tokens - prompt + 1) as u64);
            assert!((quality.lost_mass - expected.3).abs() < 1e-4, "{quality:?} {expected:?}");
            assert!((quality.output_error - expected.4).abs() < 1e-4, "{quality:?} {expected:?}");
        }
    }
}
