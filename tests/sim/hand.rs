//! Miss counts that were computed on paper.

use crate::common::{Part, World, run_step};
use crate::streams::short;
use wakekv::residency::BalanceSettings;
use wakekv::sim::{Accounting, Outcome, Point, Policy, Rule, SimError, Split, at_memory, run};
use wakekv::table::{Phase, Pins};
use wakekv::trace::{Mark, Recorder, Shape, Trace, TraceError};
use wakekv::{Cache, Cpu, Geometry, Selection};

/// (hits, compulsory, capacity) of decode.
fn counts(outcome: &Outcome) -> (u64, u64, u64) {
    let counts = outcome.counts();
    assert_eq!(counts.demanded, counts.hits + counts.compulsory + counts.capacity);
    (counts.hits, counts.compulsory, counts.capacity)
}

/// One head whose prompt has pages 0 to 3.
fn stream() -> Trace {
    short(4, &[vec![vec![0, 3]], vec![vec![2, 3]], vec![vec![0, 3]], vec![vec![0, 3]]])
}

fn replay(policy: Policy<'_>, accounting: Accounting) -> Outcome {
    run(&stream(), policy, 2, accounting).unwrap()
}

#[test]
fn the_rule_fetches_keeps_and_evicts_the_oldest() {
    // Prefill leaves 2 and 3. Page 0 for 2: compulsory. 2 for 0, 0 for 2: capacity. Then nothing moves.
    let outcome = replay(Policy::Reactive(Rule::Lru), Accounting::Strict);
    assert_eq!(counts(&outcome), (5, 1, 2));
    assert_eq!(outcome.counts().evictions, 3);
    assert_eq!((outcome.resident_mean(), outcome.resident_peak()), (2.0, 2));
    assert_eq!(outcome.miss_rate(), 3.0 / 8.0);
    // Three pages come in four steps, in each of which two are there.
    assert_eq!(outcome.churn(), 3.0 / 8.0);
}

#[test]
fn only_what_was_there_and_leaves_is_churn() {
    // Frozen on {3, 0}: it fetches 2 and does not keep it.
    let frozen = replay(Policy::Frozen(&Split::new(vec![false])), Accounting::Strict);
    assert_eq!((frozen.counts().misses(), frozen.churn()), (1, 0.0));
    // The optimum keeps 0 and 3 of the prompt, and lets 2 pass by.
    let best = replay(Policy::Belady, Accounting::Strict);
    assert_eq!((best.counts().misses(), best.churn()), (1, 0.0));
    // A page that opens takes a place as well: of 0 to 3 the budget of 2 leaves 2 and 3, and 4 opens in the first step.
    let mut trace = Trace::new(crate::streams::shape(1, Pins::default()));
    trace.push(Mark { step: 1, phase: Phase::Prefill, start: 0, tokens: 64 }, &[[0, 1, 2, 3]]).unwrap();
    for (step, start) in [(2, 64), (3, 65)] {
        trace.push(Mark { step, phase: Phase::Decode, start, tokens: 1 }, &[[4]]).unwrap();
    }
    for policy in [Policy::Reactive(Rule::Lru), Policy::Evict, Policy::Belady, Policy::Pooled] {
        let outcome = run(&trace, policy, 2, Accounting::Strict).unwrap();
        let left = if matches!(policy, Policy::Belady) { 0..=1 } else { 1..=1 };
        assert!(left.contains(&(outcome.heads[0].left_tokens / 16)), "{policy:?}: {outcome:?}");
    }
}

#[test]
fn only_what_is_destroyed_is_lost() {
    let mut trace = Trace::new(crate::streams::shape(1, Pins::default()));
    let prompt = Mark { step: 1, phase: Phase::Prefill, start: 0, tokens: 60 };
    trace.push_weighted(prompt, &[[0, 1, 2, 3]], &[[0.25; 4]]).unwrap();
    for (step, page) in [(2, 0), (3, 1), (4, 0)] {
        let mark = Mark { step, phase: Phase::Decode, start: 58 + step as usize, tokens: 1 };
        trace.push_weighted(mark, &[[page, 3]], &[[0.5, 0.25]]).unwrap();
    }
    // 0 and 1 are fetched once each; when 1 comes 0 goes, and cannot come back.
    let evict = run(&trace, Policy::Evict, 2, Accounting::Strict).unwrap();
    assert_eq!((evict.lost_mass(), evict.unserved_mass()), (0.5, 0.5 / 3.0));
    let rule = run(&trace, Policy::Reactive(Rule::Lru), 2, Accounting::Strict).unwrap();
    assert_eq!((rule.lost_mass(), rule.unserved_mass()), (0.5, 0.0));
}

#[test]
fn in_a_pool_heads_that_are_left_out_grow_old_as_the_others() {
    // Both use page 2 for long; then the second head is left out for 28 steps, in which the first head's numbers are scaled down.
    let mut trace = Trace::new(Shape { page_tokens: 1024, ..crate::streams::shape(2, Pins::default()) });
    let all: Vec<u32> = (0..4).collect();
    trace.push(Mark { step: 1, phase: Phase::Prefill, start: 0, tokens: 3073 }, &vec![all; 2]).unwrap();
    let mut push = |step: u64, demands: [Vec<u32>; 2]| {
        trace.push(Mark { step, phase: Phase::Decode, start: 3071 + step as usize, tokens: 1 }, &demands).unwrap();
    };
    (2..473).for_each(|step| push(step, [vec![2, 3], vec![2, 3]]));
    (473..501).for_each(|step| push(step, [vec![2, 3], vec![]]));
    push(501, [vec![1, 3], vec![3]]);
    push(502, [vec![2, 3], vec![2, 3]]);
    let outcome = run(&trace, Policy::Pooled, 2, Accounting::Strict).unwrap();
    // 1 takes the place of the second head's 2.
    let misses: Vec<u64> = outcome.heads.iter().map(|head| head.counts.decode.misses()).collect();
    assert_eq!(misses, [1, 1]);
}

#[test]
fn a_pool_of_one_head_looks_at_scores_as_the_rule_does() {
    let geometry = Geometry::builder().head_dim(32).page_tokens(128).build().unwrap();
    let mut differ = 0;
    for seed in 0..6 {
        let recorder = Recorder::with_scores();
        let builder = Cache::builder(geometry).selection(Selection::top_pages(2)).observer(recorder.clone());
        let mut cache = builder.build(Cpu::new().threads(1)).unwrap();
        let (world, sequence) = (World { geometry, seed }, cache.insert());
        // 12 pages, the last of which is not full when the run ends.
        let prompt = 11 * 128 + 1;
        run_step(&mut cache, &[Part::new(&world, sequence, 0, prompt)]).unwrap();
        (0..60)
            .for_each(|step| run_step(&mut cache, &[Part::new(&world, sequence, prompt + step, 1)]).map(drop).unwrap());
        let trace = recorder.take(sequence).unwrap();
        assert!(trace.head(0).scores(60).is_some());
        let counts = |policy| run(&trace, policy, 6, Accounting::Strict).unwrap().counts();
        assert_eq!(counts(Policy::Pooled), counts(Policy::Reactive(Rule::Standing)), "seed {seed}");
        differ += usize::from(counts(Policy::Pooled) != counts(Policy::Reactive(Rule::Frequency)));
    }
    assert!(differ > 0, "scores make a difference");
}

#[test]
fn in_a_pool_a_head_takes_from_another() {
    let one = [vec![0, 3], vec![1, 3], vec![0, 3], vec![1, 3]];
    let trace = short(4, &one.map(|pages| vec![pages, vec![3]]));
    // Alone, the first head fetches one of 0 and 1 in every step.
    assert_eq!(counts(&run(&trace, Policy::Reactive(Rule::Standing), 2, Accounting::Strict).unwrap()), (8, 2, 2));
    // Page 0 takes the place of its own head's 2; then 1 takes that of the other head's 2, which has not been used like 0.
    let pooled = run(&trace, Policy::Pooled, 2, Accounting::Strict).unwrap();
    assert_eq!(counts(&pooled), (10, 2, 0));
    assert_eq!((pooled.counts().evictions, pooled.resident_mean()), (2, 4.0));
    assert!(run(&trace, Policy::Pooled, 2, Accounting::Paper).is_err());
}

#[test]
fn a_pool_of_one_head_is_that_head() {
    // No page opens in decode, so it makes no difference that the pool looks at its pages only when all have been served.
    for seed in 0..20 {
        let mut rng = crate::common::Rng::new(seed);
        let mut trace = Trace::new(Shape { page_tokens: 64, ..crate::streams::shape(1, Pins::default()) });
        let all: Vec<u32> = (0..12).collect();
        trace.push(Mark { step: 1, phase: Phase::Prefill, start: 0, tokens: 11 * 64 + 1 }, &[all]).unwrap();
        for step in 0..60 {
            let demand: Vec<u32> = (0..12).filter(|&page| page == 11 || rng.chance(25)).take(5).collect();
            let demand = if demand.contains(&11) { demand } else { vec![11] };
            let mark = Mark { step: step + 2, phase: Phase::Decode, start: 11 * 64 + 1 + step as usize, tokens: 1 };
            trace.push(mark, &[demand]).unwrap();
        }
        let counts = |policy| run(&trace, policy, 5, Accounting::Strict).unwrap().counts();
        assert_eq!(counts(Policy::Pooled), counts(Policy::Reactive(Rule::Standing)), "seed {seed}");
        assert!(counts(Policy::Pooled).capacity > 0);
    }
}

#[test]
fn a_cache_of_everything_misses_nothing() {
    let outcome = replay(Policy::Full, Accounting::Strict);
    assert_eq!((counts(&outcome), outcome.resident_peak()), ((8, 0, 0), 4));
}

#[test]
fn destroyed_pages_miss_for_ever() {
    // Page 0 comes for 2, which is lost; 0 is never asked to go again.
    assert_eq!(counts(&replay(Policy::Evict, Accounting::Strict)), (6, 1, 1));
    let again = short(4, &[vec![vec![0, 3]], vec![vec![2, 3]], vec![vec![2, 3]], vec![vec![1, 3]], vec![vec![0, 3]]]);
    // 2 misses twice; 1 is still there for its first demand and costs page 0 its place.
    assert_eq!(counts(&run(&again, Policy::Evict, 2, Accounting::Strict).unwrap()), (5, 2, 3));
}

#[test]
fn stable_heads_hold_a_frozen_set_and_the_last_page() {
    let stable = Split::new(vec![false]);
    // Frozen on {0}, by the first demand; with the last page, 2 alone misses.
    assert_eq!(counts(&replay(Policy::Frozen(&stable), Accounting::Strict)), (7, 1, 0));
    let unstable = Split::new(vec![true]);
    assert_eq!(counts(&replay(Policy::Frozen(&unstable), Accounting::Strict)), (8, 0, 0));
    let wrong = run(&stream(), Policy::Frozen(&Split::new(vec![])), 2, Accounting::Strict);
    assert_eq!(wrong, Err(SimError::Split { split: 0, heads: 1 }));
}

#[test]
fn frozen_sets_are_refreshed_every_16_steps() {
    let mut trace = Trace::new(Shape { page_tokens: 128, ..*stream().shape() });
    trace.push(Mark { step: 1, phase: Phase::Prefill, start: 0, tokens: 300 }, &[[0, 1, 2]]).unwrap();
    for step in 0..20 {
        let page = if step < 4 { 0 } else { 1 };
        let mark = Mark { step: 2 + step, phase: Phase::Decode, start: 300 + step as usize, tokens: 1 };
        trace.push(mark, &[[page, 2]]).unwrap();
    }
    let stable = Split::new(vec![false]);
    let outcome = run(&trace, Policy::Frozen(&stable), 2, Accounting::Strict).unwrap();
    // Steps 4 to 15 miss page 1, the first of them for the first time. At step 16 it is the most demanded.
    assert_eq!(counts(&outcome), (28, 1, 11));
    assert_eq!(outcome.heads[0].refreshed, 1);
}

#[test]
fn the_optimum_knows_what_comes() {
    // It leaves prefill with 0 and 3, and never keeps 2.
    assert_eq!(counts(&replay(Policy::Belady, Accounting::Strict)), (7, 1, 0));
    assert_eq!(counts(&replay(Policy::Belady, Accounting::Paper)), (8, 0, 0));
}

#[test]
fn a_pool_lends_what_one_head_does_not_need() {
    let step = || vec![vec![3], vec![0, 1, 3]];
    let trace = short(4, &[step(), step(), step()]);
    assert_eq!(run(&trace, Policy::Belady, 2, Accounting::Strict).unwrap().counts().misses(), 3);
    assert_eq!(run(&trace, Policy::PooledBelady, 2, Accounting::Strict).unwrap().counts().misses(), 0);
}

#[test]
fn the_papers_first_touch_is_free_and_its_budget_holds_between_steps() {
    // Three pages in the second step, of which 0 goes after it; it misses once, and under evict twice.
    let reactive = replay(Policy::Reactive(Rule::Lru), Accounting::Paper);
    assert_eq!(counts(&reactive), (7, 0, 1));
    assert_eq!(counts(&replay(Policy::Evict, Accounting::Paper)), (6, 0, 2));
    assert_eq!(counts(&replay(Policy::Full, Accounting::Paper)), (8, 0, 0));
    // Without the last page: 3 is not in the set of the most demanded two of {0, 3}? It is; 2 is not.
    let stable = Split::new(vec![false]);
    assert_eq!(counts(&replay(Policy::Frozen(&stable), Accounting::Paper)), (7, 0, 1));
}

#[test]
fn ways_move_from_a_head_that_has_cooled_to_one_that_misses() {
    let step = || vec![vec![3], vec![0, 1, 2, 3]];
    let trace = short(4, &vec![step(); 6]);
    let settings = BalanceSettings { every: 2, floor: 1, ..BalanceSettings::default() };
    let moving = run(&trace, Policy::Moving(Rule::Lru, settings), 3, Accounting::Strict).unwrap();
    // Page 0 misses in the first two steps, gets a way after the second, and misses a last time.
    assert_eq!(counts(&moving), (6 + 24 - 3, 1, 2));
    assert_eq!(moving.resident_peak(), 3 + 4);
    assert_eq!(run(&trace, Policy::Reactive(Rule::Lru), 3, Accounting::Strict).unwrap().counts().misses(), 6);
}

#[test]
fn mass_is_lost_by_weight() {
    let mut trace = Trace::new(*stream().shape());
    trace.push(Mark { step: 1, phase: Phase::Prefill, start: 0, tokens: 56 }, &[[0, 1, 2, 3]]).unwrap();
    let mark = |step: u64| Mark { step, phase: Phase::Decode, start: 54 + step as usize, tokens: 1 };
    trace.push_weighted(mark(2), &[[0, 3]], &[[0.25, 0.5]]).unwrap();
    assert_eq!(run(&trace, Policy::Full, 2, Accounting::Strict).unwrap().missed_mass(), 0.0, "prefill has no masses");
    let mut weighted = Trace::new(*stream().shape());
    weighted
        .push_weighted(Mark { step: 1, phase: Phase::Prefill, start: 0, tokens: 56 }, &[[0, 1, 2, 3]], &[[0.0; 4]])
        .unwrap();
    weighted.push_weighted(mark(2), &[[0, 3]], &[[0.25, 0.5]]).unwrap();
    weighted.push_weighted(mark(3), &[[0, 3]], &[[0.125, 0.125]]).unwrap();
    for policy in [Policy::Reactive(Rule::Lru), Policy::Evict] {
        let outcome = run(&weighted, policy, 2, Accounting::Strict).unwrap();
        assert_eq!((outcome.missed_mass(), outcome.lost_mass()), (0.25, 0.125));
    }
    assert_eq!(run(&weighted, Policy::Belady, 2, Accounting::Strict).unwrap().missed_mass(), 0.0);
}

#[test]
fn budgets_and_demands_that_make_no_sense_are_refused() {
    let refused = run(&stream(), Policy::Reactive(Rule::Lru), 1, Accounting::Strict);
    assert_eq!(refused, Err(SimError::Budget { budget: 1, least: Pins::default().ways() }));
    assert!(run(&stream(), Policy::Reactive(Rule::Sieve), 2, Accounting::Paper).is_err());
    let mut trace = stream();
    let before = trace.clone();
    let mark = Mark { step: 9, phase: Phase::Decode, start: 60, tokens: 1 };
    for wrong in [vec![1, 1], vec![2, 1], vec![4]] {
        assert!(matches!(trace.push(mark, &[wrong]), Err(TraceError::Demand { head: 0, pages: 4, .. })));
    }
    assert!(matches!(trace.push(mark, &[[0], [0]]), Err(TraceError::Heads { got: 2, heads: 1 })));
    assert!(matches!(trace.push(Mark { start: 61, ..mark }, &[[0]]), Err(TraceError::Gap { expected: 60, .. })));
    assert!(matches!(trace.push(Mark { step: 5, ..mark }, &[[0]]), Err(TraceError::Gap { last_step: 5, .. })));
    assert!(trace.push_weighted(mark, &[[0]], &[vec![]]).is_err());
    assert_eq!(trace, before);
}

#[test]
fn curves_are_read_between_their_points_only() {
    let curve = [(8.0, 0.4), (16.0, 0.2), (32.0, 0.0)].map(|(memory, miss_rate)| Point { memory, miss_rate });
    assert_eq!(at_memory(&curve, 16.0), Some(0.2));
    assert!((at_memory(&curve, 10.0).unwrap() - 0.35).abs() < 1e-12);
    assert!((at_memory(&curve, 24.0).unwrap() - 0.1).abs() < 1e-12);
    assert_eq!((at_memory(&curve, 7.9), at_memory(&curve, 33.0), at_memory(&[], 1.0)), (None, None, None));
}
