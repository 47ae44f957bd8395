//! Policies that destroy tokens: against counts by hand and slow implementations.

use std::collections::BTreeSet;

use crate::common::{Which, World};
use crate::sequences::{Row, SCALE, Sparse, loss, product, record, row, small, softmax, world};
use wakekv::sim::tokens::{LayerShares, RKv, ReasonAlloc, SnapKv, TokenPolicy, destroy_tokens, survivors};
use wakekv::sim::{Replay, SimError, judge};
use wakekv::trace::{Demands, OracleSettings, Tensors};

fn counts(replay: &Replay) -> (u64, u64, u64) {
    let counts = replay.outcome.counts();
    (counts.hits, counts.compulsory, counts.capacity)
}

fn one(query: Row, key: Row) -> [[Row; 3]; 1] {
    [[query, key, vec![]]]
}

#[test]
fn snapkv_keeps_what_the_window_votes_for_and_its_neighbours() {
    let mut run = Sparse::new(1, 8);
    for token in 0..10 {
        let key = match token {
            2 => vec![(0, 5.0)],
            3 => vec![(1, 5.0)],
            5 => vec![(0, 1.0)],
            _ => vec![],
        };
        run.push(&one(vec![(usize::from(token == 9), 1.0)], key));
    }
    let demands = Demands::oracle(&run.tensors, small(1, 1)).unwrap();
    let policy = TokenPolicy::SnapKv(SnapKv { window: 2, kernel: 3 });
    let replay = destroy_tokens(&run.tensors, &demands, policy, 4).unwrap();
    // Votes are greatest for 2, pooled for 1 to 3; 1 and 2 stay with 6 and 7. Page 1 hits for 2, and at last misses for 3.
    assert_eq!(counts(&replay), (5, 0, 1));
    let head = &replay.outcome.heads[0];
    assert_eq!((head.resident_tokens, head.peak_tokens, head.unserved), (4 + 5 + 6, 6, 1));
    assert_eq!((replay.outcome.resident_tokens(), replay.outcome.resident_mean()), (5.0, 2.5));
    assert_eq!(survivors(&run.tensors, policy, 4).unwrap(), [[1, 2, 6, 7]]);
    assert_eq!(survivors(&run.tensors, policy, 8).unwrap(), [[0, 1, 2, 3, 4, 5, 6, 7]]);
    // A prompt no longer than the budget stays whole.
    assert_eq!(counts(&destroy_tokens(&run.tensors, &demands, policy, 8).unwrap()), (6, 0, 0));
}

/// Tokens 0 to 2 have one key, 3 another; 4 is the window. Query 4 likes the first key; 5 asks for token 1, 6 for token 3.
fn near_duplicates() -> (Tensors, Demands) {
    let mut run = Sparse::new(1, 5);
    for token in 0..7 {
        let key = match token {
            0..3 => vec![(0, 2.0)],
            3 => vec![(1, 2.0)],
            _ => vec![(token, 2.0)],
        };
        run.push(&one(vec![(usize::from(token == 6), 1.0)], key));
    }
    let demands = Demands::oracle(&run.tensors, OracleSettings { page_tokens: 1, ..small(1, 1) }).unwrap();
    (run.tensors, demands)
}

#[test]
fn rkv_drops_what_others_say_as_well_and_spares_the_last_of_them() {
    let (tensors, demands) = near_duplicates();
    let demand: Vec<&[u32]> = (1..4).map(|step| demands.trace().head(0).demand(step)).collect();
    assert_eq!(demand, [&[0, 4], &[0, 5], &[3, 6]]);
    let settings = RKv { window: 1, importance: 0.0, kernel: 1, threshold: 0.5, every: 128 };
    let replay = |settings| destroy_tokens(&tensors, &demands, TokenPolicy::RKv(settings), 3).unwrap();
    // Rows 0, 1, 2 spare 2, 2, 1: the columns' sums are 2, 1, 0, 0, 0. Tokens 2 and 3 stay.
    assert_eq!(counts(&replay(settings)), (5, 0, 1));
    assert_eq!(replay(settings).outcome.heads[0].resident_tokens, 3 + 4 + 5);
    // By importance 0 and 1 stay, the first of equals: 3 misses.
    let important = RKv { importance: 1.0, ..settings };
    assert_eq!(counts(&replay(important)), (5, 0, 1));
    assert_eq!(replay(important).outcome.heads[0].counts.decode.capacity, 1);
    // Pruned again at 6 tokens, after token 5: of 2, 3, 4 none is redundant, and the first two stay.
    let again = RKv { every: 6, ..settings };
    assert_eq!(replay(again).outcome.heads[0].resident_tokens, 3 + 3 + 4);
    assert_eq!(counts(&replay(again)), (5, 0, 1));
    // Nothing is near a threshold of 1.5: nothing is spared, 0 to 2 are equally redundant. 0 and 3 stay, then 3 and 4.
    let strict = RKv { threshold: 1.5, ..settings };
    assert_eq!(counts(&replay(strict)), (6, 0, 0));
}

#[test]
fn reasonalloc_gives_more_to_the_head_whose_scores_are_spread() {
    let mut run = Sparse::new(2, 10);
    for token in 0..12 {
        // Head 0 likes all tokens alike. Head 1 likes token 6 alone.
        let spread = [vec![], vec![], vec![]];
        let narrow = [vec![(0, 1.0)], if token == 6 { vec![(0, 30.0)] } else { vec![] }, vec![]];
        run.push(&[spread, narrow]);
    }
    let demands = Demands::oracle(&run.tensors, OracleSettings { page_tokens: 1, ..small(1, 1) }).unwrap();
    let layers = LayerShares::from_depths(&[5.0]);
    let scores = RKv { window: 1, importance: 1.0, kernel: 1, ..RKv::default() };
    let policy = TokenPolicy::ReasonAlloc(ReasonAlloc { scores, layers: &layers, floor: 0.25 });
    let replay = destroy_tokens(&run.tensors, &demands, policy, 4).unwrap();
    // The 8th largest score is 1/9: demands of 10 and 2, a floor of 1, so 1 + 6 × 9/10 and 1 + 6 × 1/10 make 6 and 2.
    let resident: Vec<u64> = replay.outcome.heads.iter().map(|head| head.resident_tokens).collect();
    assert_eq!(resident, [6 + 7 + 8, 2 + 3 + 4]);
    assert_eq!(replay.outcome.counts().misses(), 0);
}

#[test]
fn layers_get_the_root_of_what_they_need() {
    let shares = LayerShares::from_depths(&[1.0, 16.0, 10_000.0]);
    // Roots 1, 4, 100, mean 35, held between 8.75 and 70.
    for (share, expected) in shares.shares().iter().zip([0.1, 0.1, 0.8]) {
        assert!((share - expected).abs() < 1e-12);
    }
    let tensors = record(&world(5), 43, 60);
    let learnt = LayerShares::learn(&[&tensors], 3).unwrap();
    let mut depths = [0.0; 2];
    for (layer, depth) in depths.iter_mut().enumerate() {
        for (token, query_head) in (42..60).step_by(3).flat_map(|token| (0..6).map(move |head| (token, head))) {
            let mut weights = softmax(&crate::sequences::logits(&world(5), layer, query_head, token));
            weights.sort_by(|a, b| b.total_cmp(a));
            let reached = (1..=weights.len()).find(|&count| weights[..count].iter().sum::<f64>() >= 0.93).unwrap();
            *depth += reached as f64 / 36.0;
        }
    }
    let expected = LayerShares::from_depths(&depths);
    assert!(learnt.shares().iter().zip(expected.shares()).all(|(a, b)| (a - b).abs() < 1e-9));
    assert!(LayerShares::learn(&[], 1).is_err());
}

#[test]
fn budgets_and_windows_that_make_no_sense_are_refused() {
    let (tensors, demands) = near_duplicates();
    let layers = LayerShares::from_depths(&[1.0, 1.0]);
    let try_it = |policy, budget| destroy_tokens(&tensors, &demands, policy, budget).unwrap_err();
    let rkv = TokenPolicy::RKv(RKv::default());
    assert_eq!(try_it(TokenPolicy::SnapKv(SnapKv::default()), 32), SimError::Budget { budget: 32, least: 33 });
    assert_eq!(try_it(rkv, 8), SimError::Budget { budget: 8, least: 9 });
    let other = TokenPolicy::ReasonAlloc(ReasonAlloc::new(&layers));
    assert!(matches!(try_it(other, 16), SimError::Tensors { .. }));
    let world = world(1);
    let mut short = Tensors::new(&world.geometry, SCALE, 40, 4);
    for layer in 0..2 {
        let part = |which| world.tensor(which, layer, 0..50);
        short.append(layer, &part(Which::Key), &part(Which::Value)).unwrap();
        short.queries(layer, 0, &part(Which::Query)).unwrap();
    }
    let demands = Demands::oracle(&short, OracleSettings::default()).unwrap();
    assert_eq!(destroy_tokens(&short, &demands, rkv, 20).unwrap_err(), SimError::Unobserved { first: 32 });
}

/// What one head loses: tokens that are left for every query from the last of the prompt on.
type Left = Vec<BTreeSet<usize>>;

const PROMPT: usize = 43;
const TOKENS: usize = 90;
const WINDOW: usize = 4;

fn pooled(values: &[f64], reach: usize) -> Vec<f64> {
    (0..values.len())
        .map(|at| {
            let near = values.iter().enumerate().filter(|(other, _)| other.abs_diff(at) <= reach);
            near.map(|(_, &value)| value).fold(f64::NEG_INFINITY, f64::max)
        })
        .collect()
}

/// The `wanted` best of `tokens`.
fn best(tokens: &[usize], scores: &[f64], wanted: usize) -> BTreeSet<usize> {
    let mut order: Vec<usize> = (0..tokens.len()).collect();
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]).then(a.cmp(&b)));
    order.into_iter().take(wanted).map(|index| tokens[index]).collect()
}

fn slow_snapkv(world: &World, layer: usize, kv_head: usize, budget: usize) -> Left {
    let before: Vec<usize> = (0..PROMPT - WINDOW).collect();
    let mut votes = vec![0.0; before.len()];
    for (token, query_head) in
        (PROMPT - WINDOW..PROMPT).flat_map(|token| (3 * kv_head..3 * kv_head + 3).map(move |head| (token, head)))
    {
        let weights = softmax(&crate::sequences::logits(world, layer, query_head, token));
        votes.iter_mut().zip(weights).for_each(|(vote, weight)| *vote += weight / 3.0);
    }
    let mut kept = best(&before, &pooled(&votes, 3), budget - WINDOW);
    kept.extend(PROMPT - WINDOW..PROMPT);
    let later = (PROMPT..TOKENS).map(|token| kept.iter().copied().chain(PROMPT..=token).collect());
    std::iter::once((0..PROMPT).collect()).chain(later).collect()
}

const RKV: RKv = RKv { window: WINDOW, importance: 0.1, kernel: 7, threshold: 0.3, every: 16 };

fn slow_rkv_scores(world: &World, layer: usize, kv_head: usize, alive: &[usize], token: usize) -> Vec<f64> {
    let before = &alive[..alive.len() - WINDOW];
    let key = |token: usize| row(world, Which::Key, layer, token, kv_head);
    let mut importance = vec![0.0; before.len()];
    for asking in token + 1 - WINDOW..=token {
        let queries: Vec<Vec<f64>> =
            (3 * kv_head..3 * kv_head + 3).map(|head| row(world, Which::Query, layer, asking, head)).collect();
        let logit = |&token: &usize| {
            let logits = queries.iter().map(|query| f64::from(SCALE) * product(query, &key(token)));
            logits.fold(f64::NEG_INFINITY, f64::max)
        };
        let weights = softmax(&before.iter().map(logit).collect::<Vec<_>>());
        importance.iter_mut().zip(weights).for_each(|(sum, weight)| *sum += weight / WINDOW as f64);
    }
    let importance = pooled(&importance, 3);
    let n = alive.len();
    let keys: Vec<Vec<f64>> = alive.iter().map(|&token| key(token)).collect();
    let mut matrix = vec![vec![0.0; n]; n];
    for (i, j) in (0..n).flat_map(|i| (0..n).map(move |j| (i, j))).filter(|(i, j)| i != j) {
        let norms = product(&keys[i], &keys[i]).sqrt() * product(&keys[j], &keys[j]).sqrt();
        matrix[i][j] = product(&keys[i], &keys[j]) / norms;
    }
    for row in &mut matrix {
        if let Some(last) = row.iter().rposition(|&cosine| cosine > 0.3f32 as f64) {
            row[last] = 0.0;
        }
    }
    let means: Vec<f64> = (0..n).map(|j| matrix.iter().map(|row| row[j]).sum::<f64>() / n as f64).collect();
    let redundancy = softmax(&means);
    importance.iter().zip(redundancy).map(|(i, r)| f64::from(0.1f32) * i - (1.0 - f64::from(0.1f32)) * r).collect()
}

/// From a layer's tokens alive and their scores, how many each head keeps, or that none goes.
type Deal<'d> = dyn Fn(&[Vec<usize>], &[Vec<f64>]) -> Option<Vec<usize>> + 'd;

fn slow_pruning(world: &World, layer: usize, deal: &Deal<'_>) -> Vec<Left> {
    let mut alive: Vec<Vec<usize>> = vec![(0..PROMPT - 1).collect(); 2];
    let mut left: Vec<Left> = vec![Vec::new(); 2];
    for token in PROMPT - 1..TOKENS {
        for (alive, left) in alive.iter_mut().zip(&mut left) {
            alive.push(token);
            left.push(alive.iter().copied().collect());
        }
        if token + 1 != PROMPT && (token + 1) % 16 != 0 {
            continue;
        }
        let scores: Vec<Vec<f64>> =
            (0..2).map(|head| slow_rkv_scores(world, layer, head, &alive[head], token)).collect();
        let Some(shares) = deal(&alive, &scores) else { continue };
        for head in 0..2 {
            let (before, window) = alive[head].split_at(alive[head].len() - WINDOW);
            let mut kept = best(before, &scores[head], shares[head] - WINDOW);
            kept.extend(window);
            alive[head] = kept.into_iter().collect();
        }
    }
    left
}

fn compare(world: &World, tensors: &Tensors, demands: &Demands, replay: Replay, expected: &[Left]) {
    let quality = judge(tensors, demands.trace(), std::slice::from_ref(&replay)).unwrap().remove(0);
    let page_tokens = demands.trace().shape().page_tokens;
    for (head, left) in expected.iter().enumerate() {
        let (mut hits, mut misses, mut lost, mut error) = (0, 0, 0.0, 0.0);
        for (step, left) in left.iter().enumerate() {
            for &page in demands.trace().head(head).demand(step + 1) {
                let own = |token: &&u32| **token as usize / page_tokens == page as usize;
                let wanted: Vec<&u32> = demands.tokens(head, step + 1).iter().filter(own).collect();
                assert!(!wanted.is_empty());
                let hit = wanted.iter().all(|token| left.contains(&(**token as usize)));
                *if hit { &mut hits } else { &mut misses } += 1;
            }
            for query_head in head % 2 * 3..head % 2 * 3 + 3 {
                let of = loss(world, head / 2, query_head, PROMPT - 1 + step, &|token| left.contains(&token));
                (lost, error) = (lost + of.0 / 3.0, error + of.1 / 3.0);
            }
        }
        let counts = replay.outcome.heads[head].counts.decode;
        assert_eq!((counts.hits, counts.capacity, counts.compulsory), (hits, misses, 0));
        // After a step there is what the next query finds, but its own token.
        let resident: usize = left[1..].iter().map(|left| left.len() - 1).sum();
        let end = replay.outcome.heads[head].resident_tokens as usize - resident;
        assert!(end <= left[left.len() - 1].len(), "{end}");
        assert!((quality.heads[head].lost_mass - lost).abs() < 1e-4, "{:?} {lost}", quality.heads[head]);
        assert!((quality.heads[head].output_error - error).abs() < 1e-4, "{:?} {error}", quality.heads[head]);
    }
}

#[test]
fn random_sequences_lose_what_slow_arithmetic_says() {
    let world = world(crate::seed());
    let tensors = record(&world, PROMPT, TOKENS);
    let demands =
        Demands::oracle(&tensors, OracleSettings { page_tokens: 4, count: 4, tokens: 6, ..Default::default() });
    let demands = demands.unwrap();
    let heads = || (0..2).flat_map(|layer| (0..2).map(move |head| (layer, head)));
    for budget in [12, 24, 36] {
        let snapkv = TokenPolicy::SnapKv(SnapKv { window: WINDOW, kernel: 7 });
        let replay = destroy_tokens(&tensors, &demands, snapkv, budget).unwrap();
        let expected: Vec<Left> = heads().map(|(layer, head)| slow_snapkv(&world, layer, head, budget)).collect();
        compare(&world, &tensors, &demands, replay, &expected);

        let replay = destroy_tokens(&tensors, &demands, TokenPolicy::RKv(RKV), budget).unwrap();
        let uniform = |_: &[Vec<usize>], _: &[Vec<f64>]| Some(vec![budget; 2]);
        let expected: Vec<Left> = (0..2).flat_map(|layer| slow_pruning(&world, layer, &uniform)).collect();
        compare(&world, &tensors, &demands, replay, &expected);

        let shares = LayerShares::from_depths(&[4.0, 9.0]);
        let policy = TokenPolicy::ReasonAlloc(ReasonAlloc { scores: RKV, layers: &shares, floor: 0.25 });
        let replay = destroy_tokens(&tensors, &demands, policy, budget).unwrap();
        // 2/5 and 3/5 of four budgets.
        let layer_budgets = [(4 * budget * 2 + 2) / 5, (4 * budget * 3 + 2) / 5];
        let expected: Vec<Left> = (0..2)
            .flat_map(|layer| {
                let own = layer_budgets[layer];
                let deal = move |alive: &[Vec<usize>], scores: &[Vec<f64>]| {
                    (alive[0].len() + alive[1].len() > own).then(|| slow_shares(own, scores))
                };
                slow_pruning(&world, layer, &deal)
            })
            .collect();
        compare(&world, &tensors, &demands, replay, &expected);
    }
}

/// Two heads' parts of a layer's budget.
fn slow_shares(budget: usize, scores: &[Vec<f64>]) -> Vec<usize> {
    let mut all: Vec<f64> = scores.concat();
    all.extend([f64::INFINITY; 2 * WINDOW]);
    all.sort_by(|a, b| b.total_cmp(a));
    let least = budget as f64 / 8.0;
    let demand = |scores: &Vec<f64>| {
        let above = WINDOW + scores.iter().filter(|&&score| score >= all[budget - 1]).count();
        (above as f64 - least).max(0.0)
    };
    let (first, second) = (demand(&scores[0]), demand(&scores[1]));
    let quota = least + (budget as f64 - 2.0 * least) * first / (first + second);
    // The larger remainder gets the token that is over.
    let whole = if quota - quota.floor() >= 0.5 { quota.ceil() } else { quota.floor() } as usize;
    vec![whole, budget - whole]
}
