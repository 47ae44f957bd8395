//! Measures of how heads behave, on sets and heads whose behaviour is known.

use crate::common::Rng;
use crate::streams::{random, short};
use wakekv::sim::Split;
use wakekv::sim::metrics::drift::{drift_events, unstable};
use wakekv::sim::metrics::overlap::*;
use wakekv::sim::metrics::shifted::{null_rate, shifted};
use wakekv::sim::metrics::wake::{Prediction, alarms, entropy, wake_events};
use wakekv::table::Pins;

const A: &[u32] = &[0, 2, 4, 6];
const B: &[u32] = &[2, 3, 4, 7, 9, 11];

#[test]
fn overlaps_of_two_sets() {
    assert_eq!(intersection(A, B), 2);
    assert_eq!(jaccard(A, B), 2.0 / 8.0);
    assert_eq!(churn(A, B), 1.0 - 4.0 / 10.0);
    assert_eq!(overlap_coefficient(A, B), 0.5);
    // Chance alone would give 4 · 6 / 12 = 2 common pages: nothing is left beyond it.
    assert_eq!(kappa(A, B, 12), 0.0);
    assert_eq!(kappa(A, B, 24), (2.0 - 1.0) / (4.0 - 1.0));
    assert_eq!(kappa(A, &[1, 3, 5, 7], 8), (0.0 - 2.0) / (4.0 - 2.0));
    assert_eq!(kappa(&B[..4], B, 40), 1.0, "nested");
    assert!((rco(A, B, 12) - (0.5 - 1.0 / 3.0) / (1.0 - 1.0 / 3.0)).abs() < 1e-12);
    assert_eq!(rco(A, &[1, 3, 5, 7], 8), 0.0, "clamped");
    for overlap in [kappa, rco] {
        assert_eq!(
            [overlap(&[], &[], 9), overlap(A, &[], 9), overlap(&[], A, 9), overlap(A, A, 4)],
            [1.0, 0.0, 0.0, 1.0]
        );
    }
    assert_eq!([jaccard(&[], &[]), churn(&[], &[]), overlap_coefficient(&[], A)], [1.0, 0.0, 0.0]);
    let demands = [A, A, B];
    assert_eq!((adjacent_jaccard(&demands), mean_churn(&demands)), ((1.0 + 0.25) / 2.0, 0.3));
}

fn sample(rng: &mut Rng, pool: usize, count: usize) -> Vec<u32> {
    let mut set: Vec<u32> = Vec::new();
    while set.len() < count {
        let page = rng.below(pool) as u32;
        if !set.contains(&page) {
            set.push(page);
        }
    }
    set.sort_unstable();
    set
}

#[test]
fn kappa_of_random_sets_is_zero_in_the_mean_and_rco_is_not() {
    let mut rng = Rng::new(5);
    for (a, b, pool) in [(8, 8, 64), (4, 20, 64), (30, 40, 64), (2, 2, 10)] {
        let mean = |of: &dyn Fn(&[u32], &[u32]) -> f64, rng: &mut Rng| {
            (0..20_000).map(|_| of(&sample(rng, pool, a), &sample(rng, pool, b))).sum::<f64>() / 20_000.0
        };
        let kappa = mean(&|a, b| kappa(a, b, pool), &mut rng);
        assert!(kappa.abs() < 0.02, "{kappa} for {a} and {b} of {pool}");
        assert!(mean(&|a, b| rco(a, b, pool), &mut rng) > 0.04, "clamping leaves a bias");
    }
}

/// What a head does, given a step.
type Habit = fn(&mut Rng, usize) -> Vec<u32>;

const STEPS: usize = 160;
const PROMPT: usize = 2048;

/// The page that is written at a step.
fn last(step: usize) -> u32 {
    ((PROMPT + step) / 16) as u32
}

fn with_window(step: usize, mut pages: Vec<u32>) -> Vec<u32> {
    pages.extend([0, last(step) - 1, last(step)]);
    pages.sort_unstable();
    pages.dedup();
    pages
}

/// Four fifths of the pages from `from`, as a head that attends steadily but not exactly.
fn noisy(rng: &mut Rng, step: usize, from: u32) -> Vec<u32> {
    with_window(step, (from..from + 10).filter(|_| rng.chance(80)).collect())
}

fn local(_: &mut Rng, step: usize) -> Vec<u32> {
    with_window(step, (last(step) - 4..last(step)).collect())
}

fn stationary(rng: &mut Rng, step: usize) -> Vec<u32> {
    noisy(rng, step, 20)
}

fn at_random(rng: &mut Rng, step: usize) -> Vec<u32> {
    with_window(step, sample(rng, 120, 8))
}

/// Elsewhere for three steps.
fn blip(rng: &mut Rng, step: usize) -> Vec<u32> {
    noisy(rng, step, if (80..83).contains(&step) { 60 } else { 20 })
}

/// Half of the pages are others from step 80 on.
fn half(rng: &mut Rng, step: usize) -> Vec<u32> {
    noisy(rng, step, if step < 80 { 20 } else { 25 })
}

fn replaced(rng: &mut Rng, step: usize) -> Vec<u32> {
    noisy(rng, step, if step < 80 { 20 } else { 60 })
}

fn wake_up(rng: &mut Rng, step: usize) -> Vec<u32> {
    if step < 80 { with_window(step, vec![]) } else { noisy(rng, step, 40) }
}

/// Of 100 heads of a habit, how many the paper's drift rule flags, and how many ours; and where ours did.
fn flagged(habit: Habit) -> (usize, usize, Vec<usize>) {
    let (mut drifting, mut shifting, mut places) = (0, 0, Vec::new());
    for seed in 0..100 {
        let mut rng = Rng::new(seed);
        let demands: Vec<Vec<u32>> = (0..STEPS).map(|step| habit(&mut rng, step)).collect();
        drifting += usize::from(!drift_events(&demands).is_empty());
        let events = shifted(&demands, 16, |step| PROMPT + step);
        shifting += usize::from(!events.is_empty());
        places.extend(events);
    }
    (drifting, shifting, places)
}

#[test]
fn shifted_flags_what_has_shifted_and_nothing_else() {
    let habits: [(&str, Habit); 4] =
        [("local", local), ("stationary", stationary), ("random", at_random), ("blip", blip)];
    for (name, habit) in habits {
        assert_eq!(flagged(habit).1, 0, "{name}");
    }
    for (name, habit) in [("replaced", replaced as Habit), ("wake-up", wake_up)] {
        let (_, shifting, places) = flagged(habit);
        assert_eq!((shifting, places.len()), (100, 100), "{name} shifts once");
        assert!(places.iter().all(|place| (72..=92).contains(place)), "{name} shifts at step 80: {places:?}");
    }
    // The two halves that stay common are above half of what the head has in common with itself.
    assert_eq!(flagged(half).1, 0);
}

#[test]
fn the_papers_drift_rule_flags_heads_that_only_move_on() {
    assert_eq!(flagged(at_random).0, 100);
    assert_eq!(flagged(replaced).0, 100);
    // A head that reads a window alone leaves its first demand behind.
    let demands: Vec<Vec<u32>> = (0..STEPS).map(|step| (last(step) - 3..=last(step)).collect()).collect();
    assert!(!drift_events(&demands).is_empty());
    assert!(shifted(&demands, 16, |step| PROMPT + step).is_empty());
    let same = vec![vec![1, 2, 3]; 40];
    assert!(drift_events(&same).is_empty());
    // Step 10 changes to other pages: at step 13 the sum of four in eight is at the median, at 14 it is below.
    let changed: Vec<Vec<u32>> = (0..40).map(|step| if step < 10 { vec![1, 2] } else { vec![3, 4] }).collect();
    assert_eq!(drift_events(&changed), [14]);
}

#[test]
fn shuffled_steps_have_no_shift() {
    let mut rng = Rng::new(7);
    let demands: Vec<Vec<u32>> = (0..STEPS).map(|step| replaced(&mut rng, step)).collect();
    let context = |step| PROMPT + step;
    assert_eq!(shifted(&demands, 16, context).len(), 1);
    let null = null_rate(&demands, 16, context, 50, 3);
    assert!(null < 0.1, "{null}");
    assert_eq!(null, null_rate(&demands, 16, context, 50, 3), "the seed decides");
}

#[test]
fn unstable_heads_by_the_papers_rule() {
    let pool = |_| 100;
    assert!(!unstable(&vec![vec![1, 2, 3]; 40], pool));
    let alternating: Vec<Vec<u32>> = (0..40).map(|step| if step % 2 == 0 { vec![1, 2] } else { vec![3, 4] }).collect();
    // Of the 15 later steps of a window 7 equal its first.
    assert!(unstable(&alternating, pool));
    let mostly: Vec<Vec<u32>> = (0..32).map(|step| if step % 16 < 12 { vec![1, 2] } else { vec![3, 4] }).collect();
    assert!(!unstable(&mostly, pool));
    assert!(!unstable(&[vec![1]], pool));
}

#[test]
fn the_least_steady_heads_are_split_off() {
    let steady = || vec![vec![0, 3], vec![1, 3], vec![2, 3], vec![0, 3]];
    let step = |index: usize| vec![vec![0, 3], steady()[index].clone(), vec![3], vec![1, 2, 3]];
    let trace = short(4, &(0..4).map(step).collect::<Vec<_>>());
    assert_eq!(Split::learn(&trace, Split::SHARE).unstable(), [false, true, false, false]);
    assert_eq!(Split::learn(&trace, 0.0).unstable(), [false; 4]);
    assert_eq!(Split::learn(&trace, 1.0).unstable(), [true; 4]);
    let other = random(3, 8, Pins::default(), 60);
    assert_eq!(Split::learn(&other, Split::SHARE).unstable().iter().filter(|unstable| **unstable).count(), 2);
}

#[test]
fn waking_and_its_prediction() {
    let mut scores = vec![0.0; 10];
    scores.extend([0.1, 0.3, 0.3, 0.0, 0.3]);
    scores.extend([0.0; 8]);
    scores.push(0.21);
    // It wakes at 11, after ten quiet steps; at 14 it has slept for one only; at 23 for eight.
    assert_eq!(wake_events(&scores), [11, 23]);
    assert!(wake_events(&vec![0.1; 40]).is_empty());

    let mut signal: Vec<f64> = (0..60).map(|step| f64::from(step % 2)).collect();
    // Mean 0.5, deviation 0.5: 1.5 is not above two of them, 1.6 is.
    (signal[40], signal[50]) = (1.5, 1.6);
    assert!(alarms(&signal[..50]).is_empty());
    let mut loud: Vec<f64> = (0..60).map(|step| f64::from(step % 2)).collect();
    loud[50] = 1.6;
    assert_eq!(alarms(&loud), [50]);
    assert!(alarms(&[1.0; 32]).is_empty());

    let mut prediction = Prediction::judge(&[3, 10, 40], &[11, 20, 41], 8);
    // 3 announces 11 within 8 steps, so does 10; nothing announces 20.
    assert_eq!(prediction, Prediction { right: 3, alarms: 3, announced: 2, wakes: 3 });
    prediction += Prediction::judge(&[5], &[5], 8);
    assert_eq!((prediction.precision(), prediction.recall()), (Some(0.75), Some(0.5)));
    assert_eq!((Prediction::default().precision(), Prediction::default().recall()), (None, None));

    assert!((entropy(&[2.0, 2.0, 0.0]) - 2f64.ln()).abs() < 1e-12);
    assert_eq!((entropy(&[5.0]), entropy(&[])), (0.0, 0.0));
}
