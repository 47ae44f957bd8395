//! `HeadTable` makes the decisions of the rule: compared, after every operation, with a table that searches through everything.

mod common;

use common::Rng;
use common::naive::NaiveTable;
use proptest::prelude::*;
use wakekv::table::{HeadTable, Phase, Pins, Place, TableError, Tally};

/// One thing that happens to a head. Numbers are reduced to what the head has when it happens.
#[derive(Clone, Debug)]
enum Op {
    Grant(u8),
    Revoke,
    /// A step: opens pages, asks for a demand unless that is left out, and is undone if it `fails`.
    Step {
        opens: u8,
        phase: Phase,
        keep_last: bool,
        ways: u8,
        demand: Option<Wish>,
        fails: bool,
    },
    /// A fetch fails.
    Drop(u16),
    /// A demand that no table may accept.
    Nonsense(u16, bool),
}

/// Which pages a demand names, beside the pinned ones and those that the step has opened.
#[derive(Clone, Debug)]
enum Wish {
    All,
    Each { percent: u8, seed: u64 },
}

/// The table and its model, side by side.
struct Pair {
    table: HeadTable,
    naive: NaiveTable,
    pins: Pins,
    step: u64,
    next_slot: u32,
    places: Vec<Place>,
    residents: Vec<(u32, u32, u64)>,
    /// Calls of the table that change it.
    operations: u64,
}

/// Longer heads only slow the naive table down.
const MOST_PAGES: usize = 70;

impl Pair {
    fn new(pins: Pins) -> Self {
        let (table, naive, places, residents) = Default::default();
        Pair { table, naive, pins, step: 0, next_slot: 1000, places, residents, operations: 0 }
    }

    fn apply(&mut self, op: &Op) {
        match *op {
            Op::Grant(ways) => (0..ways).for_each(|_| self.grant()),
            Op::Revoke => self.revoke(),
            Op::Step { opens, phase, keep_last, ways, ref demand, fails } => {
                self.step += 1;
                (0..ways).for_each(|_| self.grant());
                let before = self.table.pages();
                let keep = (before as u32).checked_sub(1).filter(|_| keep_last);
                let room = MOST_PAGES.saturating_sub(before).min(usize::from(opens));
                let opened = (0..room).take_while(|_| self.open(phase, keep)).count();
                if let Some(wish) = demand {
                    self.demand(phase, &self.named(wish, opened));
                }
                if fails {
                    (0..opened).for_each(|_| self.close());
                    (0..ways).for_each(|_| self.revoke());
                }
            }
            Op::Drop(page) => {
                let page = u32::from(page) % (self.table.pages() as u32 + 2);
                self.table.drop_page(page);
                self.naive.drop_page(page);
                self.compare();
            }
            Op::Nonsense(page, twice) => {
                self.step += 1;
                let page = u32::from(page) % (self.table.pages() as u32 + 1);
                let demand = if twice { vec![page, page] } else { vec![page, self.table.pages() as u32] };
                self.demand(Phase::Decode, &demand);
            }
        }
    }

    fn grant(&mut self) {
        self.table.grant(self.next_slot);
        self.naive.grant(self.next_slot);
        self.next_slot += 1;
        self.compare();
    }

    fn revoke(&mut self) {
        assert_eq!(self.table.revoke(), self.naive.revoke());
        self.compare();
    }

    fn close(&mut self) {
        self.table.close();
        self.naive.close();
        self.compare();
    }

    /// Whether there was a way for the page.
    fn open(&mut self, phase: Phase, keep: Option<u32>) -> bool {
        let got = self.table.open(self.step, phase, self.pins, keep);
        assert_eq!(got, self.naive.open(self.step, phase, self.pins, keep));
        self.compare();
        got.is_ok()
    }

    fn demand(&mut self, phase: Phase, pages: &[u32]) {
        let got = self.table.demand(self.step, phase, pages, &mut self.places);
        match self.naive.demand(self.step, phase, pages) {
            Ok((places, tally)) => {
                assert_eq!(got, Ok(tally), "demand {pages:?}");
                assert_eq!(self.places, places, "demand {pages:?}");
                assert_eq!(tally.hits + tally.compulsory + tally.capacity, pages.len() as u32);
            }
            Err(error) => assert_eq!(got, Err(error), "demand {pages:?}"),
        }
        self.compare();
    }

    fn named(&self, wish: &Wish, opened: usize) -> Vec<u32> {
        let pages = self.table.pages() as u32;
        let pinned = |page| self.pins.contain(page, pages - 1) || page + opened as u32 >= pages;
        match *wish {
            Wish::All => (0..pages).collect(),
            Wish::Each { percent, seed } => {
                let mut rng = Rng::new(seed);
                (0..pages).filter(|&page| rng.chance(usize::from(percent)) || pinned(page)).collect()
            }
        }
    }

    fn compare(&mut self) {
        self.operations += 1;
        self.table.check().unwrap();
        assert_eq!((self.table.pages(), self.table.ways()), (self.naive.pages(), self.naive.ways()));
        let residents = self.naive.residents();
        assert!(residents.iter().all(|&(page, slot, _)| self.table.slot_of(page) == Some(slot)));
        self.residents.clear();
        self.residents.extend(self.table.residents());
        self.residents.sort_unstable();
        assert_eq!(self.residents, residents);
    }
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let phase = prop_oneof![Just(Phase::Prefill), Just(Phase::Decode)];
    let wish = prop_oneof![
        Just(Wish::All),
        (0u8..=100, any::<u64>()).prop_map(|(percent, seed)| Wish::Each { percent, seed })
    ];
    let step = (0u8..6, phase, any::<bool>(), 0u8..3, prop::option::of(wish), any::<bool>()).prop_map(
        |(opens, phase, keep_last, ways, demand, fails)| Op::Step { opens, phase, keep_last, ways, demand, fails },
    );
    let op = prop_oneof![
        2 => (0u8..4).prop_map(Op::Grant),
        1 => Just(Op::Revoke),
        8 => step,
        1 => any::<u16>().prop_map(Op::Drop),
        1 => (any::<u16>(), any::<bool>()).prop_map(|(page, twice)| Op::Nonsense(page, twice)),
    ];
    prop::collection::vec(op, 0..60)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn short_histories_follow_the_rule(sinks in 0u32..3, recent in 0u32..3, ops in ops()) {
        let mut pair = Pair::new(Pins { sinks, recent });
        ops.iter().for_each(|op| pair.apply(op));
    }
}

fn random_op(rng: &mut Rng, budget: usize, ways: usize) -> Op {
    let percent = rng.below(101) as u8;
    match rng.below(40) {
        0 => Op::Revoke,
        1 => Op::Drop(rng.next() as u16),
        2 => Op::Nonsense(rng.next() as u16, rng.chance(50)),
        3..6 if ways < budget => Op::Grant(1),
        _ => Op::Step {
            opens: if rng.chance(5) { rng.below(20) as u8 } else { rng.chance(20) as u8 },
            phase: if rng.chance(15) { Phase::Prefill } else { Phase::Decode },
            keep_last: rng.chance(80),
            ways: (ways < budget && rng.chance(30)) as u8,
            demand: match rng.below(10) {
                0 => None,
                1 => Some(Wish::All),
                _ => Some(Wish::Each { percent, seed: rng.next() }),
            },
            fails: rng.chance(10),
        },
    }
}

#[test]
fn millions_of_operations_follow_the_rule() {
    let mut operations = 0;
    for seed in 0.. {
        let mut rng = Rng::new(seed);
        let pins = Pins { sinks: rng.below(3) as u32, recent: rng.below(3) as u32 };
        let budget = pins.ways() + rng.pick(&[0, 0, 1, 2, 4, 12]);
        let mut pair = Pair::new(pins);
        let history = std::panic::AssertUnwindSafe(|| {
            for _ in 0..1000 {
                let op = random_op(&mut rng, budget, pair.table.ways());
                pair.apply(&op);
            }
        });
        if let Err(panic) = std::panic::catch_unwind(history) {
            eprintln!("the history of seed {seed} ends with this");
            std::panic::resume_unwind(panic);
        }
        operations += pair.operations;
        if operations > 2_000_000 {
            return;
        }
    }
}

/// A head with so many ways, in slots 10, 11, ..
fn head(ways: u32) -> HeadTable {
    let mut table = HeadTable::new();
    (0..ways).for_each(|way| table.grant(10 + way));
    table
}

fn open(table: &mut HeadTable, step: u64, phase: Phase, pages: usize) {
    (0..pages).for_each(|_| assert!(table.open(step, phase, Pins::default(), None).is_ok()));
}

fn ask(table: &mut HeadTable, step: u64, phase: Phase, pages: &[u32]) -> (Vec<Place>, Tally) {
    let mut places = Vec::new();
    let tally = table.demand(step, phase, pages, &mut places).unwrap();
    table.check().unwrap();
    (places, tally)
}

fn resident(table: &HeadTable) -> Vec<u32> {
    let mut pages: Vec<u32> = table.residents().map(|(page, ..)| page).collect();
    pages.sort_unstable();
    pages
}

#[test]
fn only_the_first_decode_demand_of_a_page_that_prefill_left_behind_is_compulsory() {
    let mut table = head(3);
    open(&mut table, 1, Phase::Prefill, 5);
    assert_eq!(resident(&table), [2, 3, 4]);
    // Prefill itself reads pages 0 and 1 again: nobody calls that compulsory.
    let (_, tally) = ask(&mut table, 1, Phase::Prefill, &[0, 1, 2, 3, 4]);
    assert_eq!(tally, Tally { hits: 3, compulsory: 0, capacity: 2, overflow: 2, evictions: 0 });
    let (_, tally) = ask(&mut table, 2, Phase::Decode, &[0, 4]);
    assert_eq!(tally, Tally { hits: 1, compulsory: 1, capacity: 0, overflow: 0, evictions: 1 });
    // Page 2 has gone for page 0. It was resident when generation began, so its return is a matter of capacity.
    let (_, tally) = ask(&mut table, 3, Phase::Decode, &[2, 4]);
    assert_eq!(tally, Tally { hits: 1, compulsory: 0, capacity: 1, overflow: 0, evictions: 1 });
    // Page 0 again, after page 1 for the first time.
    let (_, tally) = ask(&mut table, 4, Phase::Decode, &[1, 2, 4]);
    assert_eq!((tally.compulsory, tally.capacity), (1, 0));
    let (_, tally) = ask(&mut table, 5, Phase::Decode, &[0, 2, 4]);
    assert_eq!((tally.compulsory, tally.capacity), (0, 1));
}

#[test]
fn a_page_that_prefill_fetched_again_and_decode_hit_is_not_compulsory_later() {
    let mut table = head(2);
    open(&mut table, 1, Phase::Prefill, 3);
    ask(&mut table, 2, Phase::Decode, &[2]);
    table.grant(12);
    // The second turn reads everything, and there is a way for page 0 now.
    assert_eq!(ask(&mut table, 3, Phase::Prefill, &[0, 1, 2]).0[0], Place::Fetch(12));
    assert_eq!(ask(&mut table, 4, Phase::Decode, &[0, 2]).1.hits, 2);
    assert_eq!(table.revoke(), Some(12));
    assert_eq!(
        ask(&mut table, 5, Phase::Decode, &[0, 2]).1,
        Tally { hits: 1, capacity: 1, evictions: 1, ..Tally::default() }
    );
}

#[test]
fn a_demand_beyond_the_ways_overflows_and_flushes_nothing() {
    let mut table = head(3);
    open(&mut table, 1, Phase::Decode, 6);
    let (places, tally) = ask(&mut table, 1, Phase::Decode, &[0, 1, 2, 3, 4, 5]);
    assert_eq!(tally, Tally { hits: 3, compulsory: 0, capacity: 3, overflow: 3, evictions: 0 });
    assert_eq!(places[..3], [Place::Overflow; 3]);
    assert_eq!(resident(&table), [3, 4, 5]);
    // With one page out of the demand there is one way to have, for the lowest page that misses.
    let (places, tally) = ask(&mut table, 2, Phase::Decode, &[0, 1, 3, 5]);
    assert_eq!(places, [Place::Fetch(11), Place::Overflow, Place::Hit(10), Place::Hit(12)]);
    assert_eq!(tally, Tally { hits: 2, compulsory: 0, capacity: 2, overflow: 1, evictions: 1 });
}

#[test]
fn of_pages_last_used_in_the_same_step_the_lowest_goes_first() {
    let mut table = head(4);
    open(&mut table, 1, Phase::Decode, 6);
    ask(&mut table, 2, Phase::Decode, &[0, 1, 3, 5]);
    // Ways 0 to 3 were given to pages 0 to 3, then 4 and 5 took those of 0 and 1, and 0 and 1 those of 2 and 4.
    assert_eq!(resident(&table), [0, 1, 3, 5]);
    ask(&mut table, 3, Phase::Decode, &[3]);
    let victims = [(2, 0), (4, 1), (0, 5), (1, 3)];
    for (step, (page, victim)) in (4..).zip(victims) {
        let before = resident(&table);
        ask(&mut table, step, Phase::Decode, &[page]);
        let gone: Vec<u32> = before.into_iter().filter(|page| !resident(&table).contains(page)).collect();
        assert_eq!(gone, [victim], "step {step}");
    }
}

#[test]
fn a_refused_call_changes_nothing() {
    let mut table = head(2);
    open(&mut table, 1, Phase::Prefill, 3);
    let state = |table: &HeadTable| format!("{table:?}");
    let before = state(&table);
    let mut places = vec![Place::Hit(1)];
    let demand = |table: &mut HeadTable, pages: &[u32], places: &mut Vec<Place>| {
        table.demand(2, Phase::Decode, pages, places).unwrap_err()
    };
    assert_eq!(demand(&mut table, &[0, 3], &mut places), TableError::OutOfRange { page: 3, pages: 3 });
    assert_eq!(demand(&mut table, &[1, 1], &mut places), TableError::NotAscending { page: 1 });
    assert_eq!(demand(&mut table, &[0, 2, 1], &mut places), TableError::NotAscending { page: 1 });
    let pins = Pins { sinks: 0, recent: 2 };
    assert_eq!(table.open(2, Phase::Decode, pins, None).unwrap_err(), TableError::NoWay { ways: 2 });
    assert_eq!(state(&table), before);
    assert_eq!(places, [Place::Hit(1)]);
    let no_ways = &mut HeadTable::<wakekv::residency::Lru>::new();
    assert_eq!(no_ways.open(1, Phase::Prefill, Pins::default(), None), Err(TableError::NoWay { ways: 0 }));
}

#[test]
fn the_page_that_undoing_needs_is_kept_while_many_open() {
    let mut table = head(2);
    open(&mut table, 1, Phase::Prefill, 1);
    for page in 1..9 {
        let opened = table.open(2, Phase::Prefill, Pins::default(), Some(0)).unwrap();
        assert_eq!((opened.page, opened.evicted), (page, (page > 1).then(|| page - 1)));
    }
    (1..9).for_each(|_| table.close());
    assert_eq!((resident(&table), table.pages()), (vec![0], 1));
    table.check().unwrap();
}

#[test]
fn a_conversation_in_chunks_and_turns_counts_as_the_rule_says() {
    let mut table = head(4);
    let all = |pages| (0..pages).collect::<Vec<u32>>();
    // The prompt comes in three chunks of three pages. They find 3 pages of 3, then 4 of 6, then 4 of 9.
    for (chunk, hits) in (1..=3).zip([3, 4, 4]) {
        open(&mut table, chunk, Phase::Prefill, 3);
        let pages = 3 * chunk as u32;
        let (_, tally) = ask(&mut table, chunk, Phase::Prefill, &all(pages));
        assert_eq!((tally.hits, tally.compulsory, tally.capacity), (hits, 0, pages - hits), "chunk {chunk}");
    }
    // The first generated token reads everything: five prompt pages were left in the reservoir.
    let (_, tally) = ask(&mut table, 4, Phase::Decode, &all(9));
    assert_eq!(tally, Tally { hits: 4, compulsory: 5, capacity: 0, overflow: 5, evictions: 0 });
    // The second one misses the same pages, but it is not the first time.
    let (_, tally) = ask(&mut table, 5, Phase::Decode, &all(9));
    assert_eq!(tally, Tally { hits: 4, compulsory: 0, capacity: 5, overflow: 5, evictions: 0 });
    // A second turn of two pages pushes out pages 5 and 6 of the first, and leaves none of its own behind.
    open(&mut table, 6, Phase::Prefill, 2);
    assert_eq!(resident(&table), [7, 8, 9, 10]);
    let (_, tally) = ask(&mut table, 7, Phase::Decode, &all(11));
    assert_eq!(tally, Tally { hits: 4, compulsory: 0, capacity: 7, overflow: 7, evictions: 0 });
    // A third turn of five pages leaves one behind, page 11, and that is the only compulsory one.
    open(&mut table, 8, Phase::Prefill, 5);
    let (_, tally) = ask(&mut table, 9, Phase::Decode, &all(16));
    assert_eq!(tally, Tally { hits: 4, compulsory: 1, capacity: 11, overflow: 12, evictions: 0 });
}
