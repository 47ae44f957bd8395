//! What a live cache counted, a replay of its recording counts as well.

use crate::common::{Part, World, run_step};
use wakekv::residency::Lru;
use wakekv::sim::{Accounting, Policy, Rule, run};
use wakekv::table::HeadTable;
use wakekv::trace::{Recorder, Trace};
use wakekv::{Cache, Cpu, Entry, Geometry, PhaseCounts, Selection};

fn geometry() -> Geometry {
    Geometry::builder().layers(2).query_heads(4).kv_heads(2).head_dim(32).page_tokens(8).build().unwrap()
}

fn cache(selection: Selection, rule: Rule, budget: usize, recorder: &Recorder) -> Cache {
    let builder = Cache::builder(geometry()).pages_per_head(budget).selection(selection).observer(recorder.clone());
    builder.replacement(rule).build(Cpu::new().threads(2)).unwrap()
}

/// Bytes are the cache's affair.
fn without_bytes(mut counts: PhaseCounts) -> PhaseCounts {
    for counts in [&mut counts.decode, &mut counts.prefill] {
        (counts.fetched_bytes, counts.mirrored_bytes) = (0, 0);
    }
    counts
}

fn compare(traces: &[Trace], rule: Rule, budget: usize, live: &[PhaseCounts]) {
    let mut total = vec![PhaseCounts::default(); live.len()];
    for trace in traces {
        let outcome = run(trace, Policy::Reactive(rule), budget, Accounting::Strict).unwrap();
        outcome.heads.iter().zip(&mut total).for_each(|(head, total)| *total += head.counts);
    }
    assert_eq!(total, live.iter().copied().map(without_bytes).collect::<Vec<_>>());
    assert!(total.iter().all(|head| head.decode.hits > 0 && head.decode.capacity > 0));
}

#[test]
fn a_replay_counts_what_the_cache_counted() {
    let selections = [Selection::top_pages(3), Selection::top_pages(5).pinned(2, 1), Selection::All];
    let lru = selections.into_iter().zip([6, 7, 5]).map(|(selection, budget)| (selection, Rule::Lru, budget));
    let others = Rule::ALL.into_iter().skip(1).map(|rule| (selections[0], rule, 6));
    let mut missed = Vec::new();
    for (selection, rule, budget) in lru.chain(others) {
        let recorder = Recorder::with_scores();
        let mut cache = cache(selection, rule, budget, &recorder);
        let worlds = [1, 2].map(|seed| World { geometry: geometry(), seed });
        let sequences = [cache.insert(), cache.insert()];
        let mut tokens = [0, 0];
        // Two conversations in one batch: prompts in chunks, answers, another turn, several tokens at once.
        for new in [[70, 33], [20, 1], [1, 1], [1, 9], [1, 1], [3, 1], [40, 1]].into_iter().chain([[1, 1]; 60]) {
            let parts: Vec<Part<'_>> = (0..2)
                .map(|index| {
                    let mut part = Part::new(&worlds[index], sequences[index], tokens[index], new[index]);
                    if new[index] == 3 {
                        part.entry = Entry::decode(sequences[index], 3);
                    }
                    part
                })
                .collect();
            run_step(&mut cache, &parts).unwrap();
            tokens = [tokens[0] + new[0], tokens[1] + new[1]];
        }
        let traces = sequences.map(|sequence| recorder.trace(sequence).unwrap());
        compare(&traces, rule, budget, &cache.stats().heads);
        if selection == selections[0] {
            missed.push(cache.stats().counts.decode.misses());
        }
        for trace in &traces {
            assert_eq!(trace.shape().budget, Some(budget));
            if rule == Rule::Lru {
                check_step_by_step(trace, budget);
            }
        }
        assert_eq!(recorder.take(sequences[0]).as_ref(), Some(&traces[0]));
        assert_eq!(recorder.take(sequences[0]), None);
    }
    // Rules that look at different things decide differently: at least four of the six.
    assert_eq!(missed.len(), Rule::ALL.len());
    missed.sort_unstable();
    missed.dedup();
    assert!(missed.len() >= 4, "{missed:?}");
}

/// Each recorded tally is what a table says in that very step.
fn check_step_by_step(trace: &Trace, budget: usize) {
    for stream in trace.heads() {
        let mut table = HeadTable::<Lru>::new();
        let mut places = Vec::new();
        for (step, mark) in trace.marks().iter().enumerate() {
            let (before, after) = (trace.shape().pages(mark.start), trace.shape().pages(mark.end()));
            (table.ways()..after.min(budget)).for_each(|way| table.grant(way as u32));
            let keep = (mark.start % trace.shape().page_tokens != 0).then(|| before as u32 - 1);
            for _ in before..after {
                table.open(mark.step, mark.phase, trace.shape().pins, keep).unwrap();
            }
            let tally = table.demand(mark.step, mark.phase, stream.demand(step), &mut places).unwrap();
            assert_eq!(Some(tally), stream.tally(step));
        }
    }
}

#[test]
fn undone_steps_are_left_out_and_missing_beginnings_are_not_made_up() {
    let recorder = Recorder::new();
    let mut cache = cache(Selection::top_pages(2), Rule::Lru, 6, &recorder);
    let world = World { geometry: geometry(), seed: 3 };
    let sequence = cache.insert();
    run_step(&mut cache, &[Part::new(&world, sequence, 0, 50)]).unwrap();
    {
        let (k, q) =
            (world.tensor(crate::common::Which::Key, 0, 50..51), world.tensor(crate::common::Which::Query, 0, 50..51));
        let mut step = cache.step(&[(sequence, 1)]).unwrap();
        step.append(0, &k, &k).unwrap();
        step.attend(0, &q, &mut vec![0f32; q.len()]).unwrap();
        assert_eq!(recorder.trace(sequence).unwrap().marks().len(), 1, "a step under way is not shown");
    }
    run_step(&mut cache, &[Part::new(&world, sequence, 50, 1)]).unwrap();
    let trace = recorder.take(sequence).unwrap();
    assert_eq!(trace.marks().iter().map(|mark| (mark.start, mark.tokens)).collect::<Vec<_>>(), [(0, 50), (50, 1)]);
    assert!(trace.heads().iter().all(|head| head.steps() == 2 && head.demand(0).len() == 7));
    // What follows a taken trace follows nothing.
    run_step(&mut cache, &[Part::new(&world, sequence, 51, 1)]).unwrap();
    assert_eq!(recorder.trace(sequence), None);
}
