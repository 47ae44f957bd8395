//! Plays a random history and knows what must come of it.

use crate::case::{Case, Place};
use crate::common::Rng;
use crate::common::Tensors;
use crate::common::drive::{After, Lists, Outputs, Stop, drive};
use crate::common::faulty::{Fault, Handle};
use crate::common::heads::{Heads, Span};
use crate::common::memory::{Draft, Memory, Turn};
use wakekv::residency::Rule;
use wakekv::{Cache, Counts, Entry, Error, Phase, PhaseCounts, Selection, Sequence, StepReport};

/// A live sequence, here and in the cache that never evicts.
struct Live {
    sequence: Sequence,
    twin: Sequence,
    memory: Memory,
    heads: Heads,
    /// Whether `heads` still knows what is resident. After a failed copy it does not: which heads had asked by then, and for what, is
    /// a matter of timing.
    known: bool,
}

pub struct Harness<'c, P: Place> {
    case: &'c Case,
    rng: Rng,
    cache: Cache<P::Backend>,
    /// A cache on the CPU that never evicts and never fails.
    twin: Cache,
    faults: Option<Handle>,
    live: Vec<Live>,
    step: u64,
    /// What the statistics said before the step at hand.
    told: Vec<PhaseCounts>,
    /// Whether every write of zeros has had its chance.
    scrubbed: bool,
}

/// A step that is about to be tried.
struct Attempt {
    /// Which of the live sequences, ascending.
    who: Vec<usize>,
    turns: Vec<Turn>,
    spans: Vec<Span>,
    /// Per layer, under an explicit selection.
    lists: Vec<Lists>,
    /// Per layer and (entry, KV head), ascending; without meaning for decode under `TopPages`.
    demands: Vec<Vec<Vec<u32>>>,
}

impl<'c, P: Place> Harness<'c, P> {
    pub fn new(case: &'c Case, place: &P) -> Self {
        let (cache, faults) = place.build(case);
        let twin = case.build_twin();
        Harness {
            case,
            rng: Rng::new(case.seed ^ 0xCA5E),
            cache,
            twin,
            faults,
            live: Vec::new(),
            step: 0,
            told: vec![PhaseCounts::default(); case.geometry.heads()],
            scrubbed: case.scrub,
        }
    }

    pub fn run(mut self) {
        for _ in 0..self.case.operations {
            match self.rng.below(100) {
                0..12 if self.live.len() < 5 => self.insert(),
                12..18 if !self.live.is_empty() => self.remove(),
                _ if self.live.is_empty() => self.insert(),
                18..30 => self.give_up(),
                30..45 if self.faults.is_some() => self.fail(),
                _ => self.step(),
            }
            self.check();
        }
        while !self.live.is_empty() {
            self.remove();
            self.check();
        }
        let occupancy = self.cache.occupancy();
        assert_eq!((occupancy.device_owned, occupancy.reservoir_owned), (0, 0));
        if let Some(store) = self.faults.as_ref().filter(|_| self.scrubbed) {
            assert!(store.lock().bytes.iter().all(|&byte| byte == 0), "scrubbing has left something behind");
        }
    }

    fn check(&self) {
        self.cache.check().unwrap();
        assert_eq!(self.cache.sequences(), self.live.len());
        for live in &self.live {
            assert_eq!(self.cache.tokens(live.sequence).unwrap(), live.memory.tokens);
        }
        if let Some(store) = &self.faults {
            assert!(store.lock().broken.is_empty(), "{:?}", store.lock().broken);
        }
    }

    fn insert(&mut self) {
        let capacity = self.rng.pick(&[0, 0, 100]);
        let heads = Heads::new(self.case.geometry, self.case.budget.unwrap_or(usize::MAX), self.case.pins);
        self.live.push(Live {
            sequence: self.cache.insert_with_capacity(capacity),
            twin: self.twin.insert(),
            memory: Memory::new(self.case.geometry),
            heads,
            known: !matches!(self.case.selection, Selection::TopPages { .. }) && self.case.replacement == Rule::Lru,
        });
    }

    fn remove(&mut self) {
        let live = self.live.swap_remove(self.rng.below(self.live.len()));
        self.cache.remove(live.sequence).unwrap();
        self.twin.remove(live.twin).unwrap();
        assert!(matches!(self.cache.remove(live.sequence), Err(Error::UnknownSequence { .. })));
    }

    /// A step that is carried through, unless the pools refuse it.
    fn step(&mut self) {
        let attempt = self.attempt();
        let result = drive(&mut self.cache, &attempt.turns, &attempt.lists, None);
        if let Some((outputs, report)) = self.admitted(&attempt, result).unwrap() {
            self.finished(attempt, outputs, report);
        }
    }

    /// A step that is dropped or leaked halfway.
    fn give_up(&mut self) {
        let attempt = self.attempt();
        let stop = Stop {
            layer: self.rng.below(self.case.geometry.layers()),
            after: self.rng.pick(&[After::Nothing, After::Append, After::Attend]),
            leak: self.rng.chance(30),
        };
        let result = drive(&mut self.cache, &attempt.turns, &attempt.lists, Some(stop));
        if matches!(result, Ok(None)) {
            self.expect_counts(&attempt, Some(stop));
            if P::FORGETS_UNDONE && (stop.layer, stop.after) != (0, After::Nothing) {
                attempt.who.iter().for_each(|&who| self.live[who].known = false);
            }
        }
        assert!(self.admitted(&attempt, result).unwrap().is_none());
    }

    /// A step in which some copy fails, unless it does not come to that copy.
    fn fail(&mut self) {
        let attempt = self.attempt();
        let store = self.faults.clone().unwrap();
        // Ends a leaked step, whose copies are not meant to fail.
        let nobody = self.cache.insert();
        self.cache.remove(nobody).unwrap();
        let at = self.rng.below(12);
        let once = self.rng.chance(70);
        store.arm(if once { Fault::Fail(at) } else { Fault::FailFrom(at) });
        // A store that goes on failing cannot be scrubbed either.
        self.scrubbed &= once;
        let result = drive(&mut self.cache, &attempt.turns, &attempt.lists, None);
        let calls = store.disarm();
        match self.admitted(&attempt, result) {
            Ok(Some((outputs, report))) => {
                assert!(calls <= at, "copy {at} of {calls} has failed, and the step has not");
                self.finished(attempt, outputs, report);
            }
            Ok(None) => {}
            Err(error) => {
                assert!(matches!(error, Error::Copy { .. }) && error.to_string().contains("injected"), "{error}");
                attempt.who.iter().for_each(|&who| self.live[who].known = false);
            }
        }
    }

    /// Passes on what has been admitted; a refusal must have had a reason.
    fn admitted<T>(&self, attempt: &Attempt, result: Result<Option<T>, Error>) -> Result<Option<T>, Error> {
        let (geometry, occupancy) = (&self.case.geometry, self.cache.occupancy());
        let (mut groups, mut ways) = (0, 0);
        for (&who, span) in attempt.who.iter().zip(&attempt.spans) {
            groups += geometry.sealed_pages(span.start + span.tokens) - geometry.sealed_pages(span.start);
            ways += self.live[who].heads.due(span.start, span.tokens) * geometry.heads();
        }
        let known = attempt.who.iter().all(|&who| self.live[who].known);
        match result {
            Err(Error::ReservoirFull { needed, free, .. }) => {
                assert_eq!(needed, groups);
                assert!(needed > free && free == occupancy.reservoir_total - occupancy.reservoir_owned);
                Ok(None)
            }
            Err(Error::DevicePoolFull { needed, free, .. }) => {
                assert!(!known || needed == ways);
                assert!(needed > free && free == occupancy.device_total - occupancy.device_owned);
                Ok(None)
            }
            result => result,
        }
    }

    fn attempt(&mut self) -> Attempt {
        self.step += 1;
        let mut who: Vec<usize> = (0..self.live.len()).filter(|_| self.rng.chance(60)).collect();
        if who.is_empty() {
            who.push(self.rng.below(self.live.len()));
        }
        let (mut turns, mut spans) = (Vec::new(), Vec::new());
        for &index in &who {
            let (sequence, start) = (self.live[index].sequence, self.live[index].memory.tokens);
            let (entry, phase, tokens): (Entry, _, _) = match self.rng.below(10) {
                0..5 if start > 0 => ((sequence, 1).into(), Phase::Decode, 1),
                0..3 => {
                    let tokens = 1 + self.rng.below(60);
                    (Entry::prefill(sequence, tokens), Phase::Prefill, tokens)
                }
                3..5 => {
                    // More than 64 rows, so that states are kept per row.
                    let tokens = 2 + self.rng.below(150);
                    ((sequence, tokens).into(), Phase::Prefill, tokens)
                }
                5..7 => {
                    let tokens = 1 + self.rng.below(4);
                    (Entry::decode(sequence, tokens), Phase::Decode, tokens)
                }
                7 => {
                    let tokens = 1 + self.rng.below(40);
                    (Entry::decode(sequence, tokens), Phase::Decode, tokens)
                }
                _ => (Entry::prefill(sequence, 1), Phase::Prefill, 1),
            };
            turns.push(Turn { entry, draft: Draft::random(&self.case.geometry, tokens, &mut self.rng) });
            spans.push(Span { step: self.step, phase, start, tokens });
        }
        let mut attempt = Attempt { who, turns, spans, lists: Vec::new(), demands: Vec::new() };
        (0..self.case.geometry.layers()).for_each(|_| self.choose_pages(&mut attempt));
        attempt
    }

    /// The pages of one layer more: what the engine names, and what is demanded for it.
    fn choose_pages(&mut self, attempt: &mut Attempt) {
        let (geometry, pins) = (&self.case.geometry, self.case.pins);
        let explicit = matches!(self.case.selection, Selection::Explicit { .. });
        let (mut lists, mut demands) = (Vec::new(), Vec::new());
        for span in &attempt.spans {
            let pages = geometry.pages(span.start + span.tokens) as u32;
            let (last, first_new) = (pages - 1, (span.start / geometry.page_tokens()) as u32);
            for _ in 0..geometry.kv_heads() {
                let percent = self.rng.pick(&[0, 20, 60, 100]);
                let mut list: Vec<u32> = Vec::new();
                if explicit && span.phase == Phase::Decode {
                    list.extend((0..pages).filter(|_| self.rng.chance(percent)));
                    for index in (1..list.len()).rev() {
                        list.swap(index, self.rng.below(index + 1));
                    }
                }
                let demanded = |&page: &u32| {
                    let pinned = pins.contain(page, last) || page >= first_new;
                    !explicit || span.phase == Phase::Prefill || pinned || list.contains(&page)
                };
                demands.push((0..pages).filter(demanded).collect());
                lists.push(list);
            }
        }
        attempt.demands.push(demands);
        if explicit {
            attempt.lists.push(Lists::new(&lists));
        }
    }

    /// A step is done: its outputs are right to float64 and to the bit, its counters are those of the rule.
    fn finished(&mut self, attempt: Attempt, outputs: Outputs, report: StepReport) {
        self.cache.synchronize().unwrap();
        let counted = self.counted();
        let mut sum = PhaseCounts::default();
        counted.iter().for_each(|&counts| sum += counts);
        if P::Backend::COUNTS_AT_ONCE {
            assert_eq!(report.counts, sum);
            assert_eq!(self.cache.stats().last_step, counted);
        }
        assert_eq!(report.occupancy, self.cache.occupancy());
        for counts in [sum.decode, sum.prefill] {
            assert_eq!(counts.demanded, counts.hits + counts.misses());
            assert_eq!(counts.fetched_bytes, counts.misses() * self.case.geometry.page_bytes() as u64);
            assert!(counts.overflow <= counts.misses());
        }
        let known = attempt.who.iter().all(|&who| self.live[who].known);
        let expected = self.expect_counts(&attempt, None);
        if known {
            assert_eq!(counted, expected);
        }
        for (&who, turn) in attempt.who.iter().zip(&attempt.turns) {
            self.live[who].memory.extend(&turn.draft);
        }
        self.compare_with_float64(&attempt, &outputs);
        self.compare_with_twin(attempt, outputs);
    }

    /// What each head has counted since this was asked last.
    fn counted(&mut self) -> Vec<PhaseCounts> {
        let told = std::mem::replace(&mut self.told, self.cache.stats().heads.clone());
        self.told.iter().zip(told).map(|(&now, before)| since(now, before)).collect()
    }

    /// Takes the naive tables through the step, up to where it was given up, and returns what each head has counted.
    fn expect_counts(&mut self, attempt: &Attempt, stop: Option<Stop>) -> Vec<PhaseCounts> {
        let geometry = &self.case.geometry;
        let kv_heads = geometry.kv_heads();
        let mut counts = vec![PhaseCounts::default(); geometry.heads()];
        for (entry, (&who, &span)) in attempt.who.iter().zip(&attempt.spans).enumerate() {
            let Live { heads, known, .. } = &mut self.live[who];
            let ways = heads.due(span.start, span.tokens);
            heads.grant(ways);
            for layer in 0..geometry.layers() {
                let reached = |after| stop.is_none_or(|stop| (layer, after as u8) <= (stop.layer, stop.after as u8));
                for kv_head in (0..kv_heads).filter(|_| *known) {
                    let head = geometry.head(layer, kv_head);
                    let of_phase = match span.phase {
                        Phase::Decode => &mut counts[head].decode,
                        Phase::Prefill => &mut counts[head].prefill,
                    };
                    if reached(After::Append) {
                        *of_phase += heads.append(head, span);
                    }
                    if reached(After::Attend) {
                        *of_phase += heads.attend(head, span, &attempt.demands[layer][entry * kv_heads + kv_head]);
                    }
                }
            }
            if stop.is_some() {
                heads.undo(span.start, ways);
            }
        }
        counts
    }

    fn compare_with_float64(&mut self, attempt: &Attempt, outputs: &Outputs) {
        let geometry = self.case.geometry;
        let (dim, query_heads) = (geometry.head_dim(), geometry.query_heads());
        let mut row = 0;
        for (entry, span) in attempt.spans.iter().enumerate() {
            let Turn { draft, .. } = &attempt.turns[entry];
            let exact = span.phase == Phase::Prefill || !matches!(self.case.selection, Selection::TopPages { .. });
            // All of a long chunk would take long; its ends and some between are as good.
            let some: Vec<usize> = (0..6).map(|_| self.rng.below(span.tokens)).chain([0, span.tokens - 1]).collect();
            for token in some.into_iter().filter(|_| exact) {
                for (layer, out) in outputs.iter().enumerate() {
                    for head in 0..query_heads {
                        let query = &draft.queries[layer][(token * query_heads + head) * dim..][..dim];
                        let reads = &attempt.demands[layer][entry * geometry.kv_heads() + head / geometry.group()];
                        let memory = &self.live[attempt.who[entry]].memory;
                        let expected = memory.attend(layer, span.start + token, head, query, reads);
                        let got = &out[((row + token) * query_heads + head) * dim..][..dim];
                        for (&got, expected) in got.iter().zip(expected) {
                            let error = (f64::from(got) - expected).abs();
                            assert!(
                                error < P::TOLERANCE,
                                "entry {entry}, token {token}, layer {layer}, head {head}: {got}, not {expected}"
                            );
                        }
                    }
                }
            }
            row += span.tokens;
        }
    }

    fn compare_with_twin(&mut self, attempt: Attempt, outputs: Outputs) {
        let mut turns = attempt.turns;
        for ((turn, span), &who) in turns.iter_mut().zip(&attempt.spans).zip(&attempt.who) {
            turn.entry = match span.phase {
                Phase::Prefill => Entry::prefill(self.live[who].twin, span.tokens),
                Phase::Decode => Entry::decode(self.live[who].twin, span.tokens),
            };
        }
        let (expected, _) = drive(&mut self.twin, &turns, &attempt.lists, None).unwrap().unwrap();
        // NaN is what has not been written.
        let close = |(&got, &expected): (&f32, &f32)| (got - expected).abs() <= P::TWIN_TOLERANCE;
        let same = outputs.iter().zip(&expected).all(|(got, expected)| got.iter().zip(expected).all(close));
        assert!(
            same && outputs.len() == expected.len(),
            "the outputs differ from those of the cache that never evicts"
        );
    }
}

fn since(now: PhaseCounts, before: PhaseCounts) -> PhaseCounts {
    let minus = |now: Counts, before: Counts| {
        let mut counts = now;
        counts.demanded -= before.demanded;
        counts.hits -= before.hits;
        counts.compulsory -= before.compulsory;
        counts.capacity -= before.capacity;
        counts.overflow -= before.overflow;
        counts.evictions -= before.evictions;
        counts.fetched_bytes -= before.fetched_bytes;
        counts.mirrored_bytes -= before.mirrored_bytes;
        counts
    };
    let mut counts = now;
    counts.decode = minus(now.decode, before.decode);
    counts.prefill = minus(now.prefill, before.prefill);
    counts
}
