//! What an undone step needs is still there, whatever the selection has demanded.

mod common;

use common::Rng;
use common::drive::{After, Lists, Stop, drive};
use common::memory::{Draft, Turn};
use common::overdue::outputs_after_overdue;
use wakekv::trace::Recorder;
use wakekv::{Cache, Cpu, Entry, Geometry, PageLists, Reservoir, Selection};

fn geometry() -> Geometry {
    Geometry::builder().layers(1).query_heads(1).kv_heads(1).head_dim(32).page_tokens(8).build().unwrap()
}

fn cache(budget: usize) -> Cache {
    Cache::builder(geometry())
        .pages_per_head(budget)
        .reservoir(Reservoir::memory(1 << 20))
        .selection(Selection::Explicit { sink_pages: 0, recent_pages: 0 })
        .build(Cpu::new().threads(1))
        .unwrap()
}

/// A decode step of several tokens fills the open page, opens the next and demands old pages. The page that was open must not
/// make room for those, because undoing the step makes it the open page again.
#[test]
fn the_page_that_was_open_survives_a_dropped_step() {
    let mut cache = cache(2);
    let rng = &mut Rng::new(1);
    let sequence = cache.insert();
    let turn = |entry, tokens, rng: &mut Rng| [Turn { entry, draft: Draft::random(&geometry(), tokens, rng) }];
    let nothing = [Lists::new(&[vec![]])];
    drive(&mut cache, &turn(Entry::prefill(sequence, 20), 20, rng), &nothing, None).unwrap();
    let stop = Stop { layer: 0, after: After::Attend, leak: false };
    let old_pages = [Lists::new(&[vec![0, 1]])];
    drive(&mut cache, &turn(Entry::decode(sequence, 6), 6, rng), &old_pages, Some(stop)).unwrap();
    cache.check().unwrap();
    assert_eq!(cache.tokens(sequence).unwrap(), 20);
}

/// With nothing selected and nothing pinned, each of several new tokens still reads its own page.
#[test]
fn every_new_token_reads_at_least_itself() {
    let mut cache = cache(3);
    let sequence = cache.insert();
    let draft = Draft::random(&geometry(), 12, &mut Rng::new(2));
    let mut step = cache.step(&[Entry::decode(sequence, 12)]).unwrap();
    let mut out = vec![f32::NAN; draft.queries[0].len()];
    step.append(0, &draft.keys[0], &draft.values[0]).unwrap();
    step.attend_pages(0, &draft.queries[0], PageLists { offsets: &[0, 0], pages: &[] }, &mut out).unwrap();
    // The first token sees nothing but itself.
    assert!(out[..32].iter().zip(&draft.values[0]).all(|(out, value)| (out - value).abs() < 1e-6));
    assert_eq!(step.finish().unwrap().counts.decode.demanded, 2);
}

/// An engine that computes the attention of one step by itself leaves the selection that was due in it to the next.
#[test]
fn a_selection_that_was_left_out_is_made_in_the_next_step() {
    let mut cache = Cache::builder(geometry())
        .reservoir(Reservoir::memory(1 << 20))
        .selection(Selection::top_pages(4))
        .reselect_every(100)
        .build(Cpu::new().threads(1))
        .unwrap();
    let rng = &mut Rng::new(3);
    let sequence = cache.insert();
    let turn = |entry, tokens, rng: &mut Rng| [Turn { entry, draft: Draft::random(&geometry(), tokens, rng) }];
    drive(&mut cache, &turn(Entry::prefill(sequence, 100), 100, rng), &[], None).unwrap();
    let draft = Draft::random(&geometry(), 1, rng);
    let mut step = cache.step(&[Entry::decode(sequence, 1)]).unwrap();
    step.append(0, &draft.keys[0], &draft.values[0]).unwrap();
    step.finish().unwrap();
    for _ in 0..2 {
        let (_, report) =
            drive(&mut cache, &turn(Entry::decode(sequence, 1), 1, rng), &[], None).unwrap().expect("not given up");
        // One sink, the recent page, the last one, and four that are selected.
        assert_eq!(report.counts.decode.demanded, 7);
    }
}

/// What each of five decode steps chooses, and reads, when the scores of what was chosen before are raised. With `dropped`, another step is
/// given up before the first and the third of them.
fn chosen(stickiness: f32, dropped: bool) -> (Vec<Vec<u32>>, Vec<Vec<f32>>) {
    let recorder = Recorder::new();
    let mut cache = Cache::builder(geometry())
        .reservoir(Reservoir::memory(1 << 20))
        .selection(Selection::top_pages(3).pinned(0, 0))
        .stickiness(stickiness)
        .observer(recorder.clone())
        .build(Cpu::new().threads(1))
        .unwrap();
    let turn = |entry, tokens, seed| [Turn { entry, draft: Draft::random(&geometry(), tokens, &mut Rng::new(seed)) }];
    let sequence = cache.insert();
    drive(&mut cache, &turn(Entry::prefill(sequence, 200), 200, 4), &[], None).unwrap();
    let mut outputs = Vec::new();
    for step in 0..5 {
        if dropped && (step == 0 || step == 2) {
            let stop = Stop { layer: 0, after: After::Attend, leak: false };
            assert!(
                drive(&mut cache, &turn(Entry::decode(sequence, 1), 1, 90 + step), &[], Some(stop)).unwrap().is_none()
            );
        }
        let (output, _) =
            drive(&mut cache, &turn(Entry::decode(sequence, 1), 1, 5 + step), &[], None).unwrap().unwrap();
        outputs.extend(output);
    }
    let trace = recorder.trace(sequence).unwrap();
    let last = trace.head(0).demands().last().and_then(|demand| demand.last()).copied().unwrap();
    let below_last = |step| trace.head(0).demand(step).iter().copied().filter(|&page| page != last).collect();
    ((1..6).map(below_last).collect(), outputs)
}

#[test]
fn what_was_chosen_stays_chosen_as_far_as_scores_are_sticky() {
    let (free, _) = chosen(0.0, false);
    assert!(free.windows(2).all(|pair| pair[0] != pair[1]), "{free:?}");
    let (sticky, _) = chosen(1e6, false);
    assert!(sticky[0] == free[0] && sticky.iter().all(|chosen| chosen == &sticky[0]), "{sticky:?}");
    let changes = |chosen: &[Vec<u32>]| -> usize {
        chosen.windows(2).map(|pair| pair[1].iter().filter(|page| !pair[0].contains(page)).count()).sum()
    };
    let in_between = |stickiness| (1..changes(&free)).contains(&changes(&chosen(stickiness, false).0));
    assert!([2.0, 3.0, 4.0, 6.0].into_iter().any(in_between));
}

#[test]
fn what_a_dropped_step_chose_is_not_remembered() {
    for stickiness in [0.0, 1.0, 1e6] {
        assert_eq!(chosen(stickiness, true), chosen(stickiness, false));
    }
}

#[test]
fn a_dropped_step_leaves_a_selection_as_due_as_it_was() {
    let outputs = |seen: Option<bool>| {
        let cache = Cache::builder(geometry())
            .reservoir(Reservoir::memory(1 << 20))
            .selection(Selection::top_pages(2))
            .reselect_every(if seen.is_some() { 100 } else { 1 })
            .build(Cpu::new().threads(1))
            .unwrap();
        outputs_after_overdue(cache, seen == Some(true))
    };
    assert_eq!(outputs(Some(true)), outputs(Some(false)));
    assert_ne!(outputs(Some(false)), outputs(None), "it makes a difference which step selects");
}
