//! Whom each replacement policy sends away.

use crate::common::Rng;
use wakekv::residency::{Arc, Frequency, Lru, Replacement, Rule, S3Fifo, Scores, Sieve, Standing};
use wakekv::table::{HeadTable, Phase, Pins, Place};

struct Head<R> {
    table: HeadTable<R>,
    step: u64,
}

impl<R: Replacement> Head<R> {
    /// Pages 0, 1 and 2 in three ways, each used once.
    fn new() -> Self {
        let mut head = Head { table: HeadTable::new(), step: 0 };
        (0..3).for_each(|slot| head.table.grant(slot));
        (0..3).for_each(|_| head.open());
        head
    }

    /// The next page opens and is used.
    fn open(&mut self) {
        self.table.open(self.step + 1, Phase::Decode, Pins::default(), None).unwrap();
        self.ask(&[self.table.pages() as u32 - 1]);
    }

    fn ask(&mut self, pages: &[u32]) {
        self.step += 1;
        self.table.demand(self.step, Phase::Decode, pages, &mut Vec::new()).unwrap();
        self.table.check().unwrap();
    }

    fn resident(&self) -> Vec<u32> {
        let mut pages: Vec<u32> = self.table.residents().map(|(page, ..)| page).collect();
        pages.sort_unstable();
        pages
    }
}

/// Everybody is used again, page 0 most often but least recently.
fn frequent_but_old<R: Replacement>() -> Vec<u32> {
    let mut head = Head::<R>::new();
    [0, 0, 1, 2].into_iter().for_each(|page| head.ask(&[page]));
    head.open();
    head.resident()
}

#[test]
fn recency_and_frequency_differ() {
    assert_eq!(frequent_but_old::<Lru>(), [1, 2, 3]);
    // Used at steps (1, 4, 5), (2, 6) and (3, 7): page 1 has the least left.
    assert_eq!(frequent_but_old::<Frequency>(), [0, 2, 3]);
}

#[test]
fn uses_fade() {
    let mut head = Head::<Frequency>::new();
    // Page 0 is used 4 times, then 33 steps go by, then page 1 twice and 2 once more often.
    (0..4).for_each(|_| head.ask(&[0]));
    (0..33).for_each(|_| head.ask(&[2]));
    (0..2).for_each(|_| head.ask(&[1]));
    head.open();
    assert_eq!(head.resident(), [1, 2, 3]);
}

#[test]
fn heat_survives_very_long_runs() {
    let mut head = Head::<Frequency>::new();
    for _ in 0..40_000 {
        head.ask(&[0]);
        head.ask(&[1]);
    }
    head.open();
    assert_eq!(head.resident(), [0, 1, 3]);
}

#[test]
fn near_misses_count_as_far_as_they_were_near() {
    // Pages 0, 1 and 2 were used in this order. Page 0 is chosen, with a score of 5; page 1 falls short of it by less than page 2, or by more.
    let sent_away = |scores: [f32; 3]| {
        let mut head = Head::<Standing>::new();
        head.table.rate(Scores { first: 0, scores: &scores }, &[0]);
        head.ask(&[0]);
        head.open();
        (0..3).find(|page| !head.resident().contains(page))
    };
    assert_eq!(sent_away([5.0, 4.5, 1.0]), Some(2));
    assert_eq!(sent_away([5.0, 1.0, 4.5]), Some(1));
    assert_eq!(sent_away([5.0, f32::NEG_INFINITY, f32::NEG_INFINITY]), Some(1), "use decides where no score does");
    // One that cannot be compared with gives nobody anything.
    assert_eq!(sent_away([f32::INFINITY; 3]), Some(1));
    // Two near misses count more than the use of a step long past, and more pages may be scored than there are.
    let mut head = Head::<Standing>::new();
    for _ in 0..2 {
        head.table.rate(Scores { first: 1, scores: &[0.0, 3.0, 3.0, 9.0] }, &[2]);
        head.ask(&[2]);
    }
    head.open();
    assert_eq!(head.resident(), [1, 2, 3]);
}

#[test]
fn a_near_miss_counts_what_the_formula_says() {
    // Page 1 has been used once and has missed by 1 nat n times, which makes n thirds; page 0 has been used once more instead.
    let sent_away = |near: usize| {
        let mut head = Head::<Standing>::new();
        for step in 0..near {
            head.table.rate(Scores { first: 1, scores: &[2.0, 3.0] }, &[2]);
            head.ask(if step == 0 { &[0, 2] } else { &[2] });
        }
        head.open();
        (0..3).find(|page| !head.resident().contains(page))
    };
    assert_eq!(sent_away(2), Some(1));
    assert_eq!(sent_away(4), Some(0));
}

#[test]
fn scores_that_make_no_sense_change_nothing_but_who_goes() {
    let mut head = Head::<Standing>::new();
    // Pages out of order, and none that was scored.
    head.table.rate(Scores { first: 1, scores: &[1.0, 2.0] }, &[2, 0]);
    head.table.rate(Scores { first: 2, scores: &[1.0] }, &[0, 1]);
    head.table.rate(Scores { first: u32::MAX, scores: &[1.0] }, &[0]);
    head.table.rate(Scores { first: 0, scores: &[f32::NAN; 3] }, &[1]);
    head.ask(&[2]);
    head.open();
    assert!(head.resident().contains(&3));
}

/// However a prompt is cut into chunks, its last pages are left, and what came before goes on to count.
#[test]
fn chunks_of_a_prompt_make_no_difference() {
    fn left<R: Replacement>(chunk: usize) -> Vec<u32> {
        let pins = Pins { sinks: 1, recent: 1 };
        let mut table = HeadTable::<R>::new();
        (0..12).for_each(|slot| table.grant(slot));
        for step in 0..60 / chunk {
            let step = step as u64 + 1;
            (0..chunk).for_each(|_| _ = table.open(step, Phase::Prefill, pins, None).unwrap());
            let all: Vec<u32> = (0..table.pages() as u32).collect();
            table.demand(step, Phase::Prefill, &all, &mut Vec::new()).unwrap();
        }
        let mut pages: Vec<u32> = table.residents().map(|(page, ..)| page).collect();
        pages.sort_unstable();
        pages
    }
    let last: Vec<u32> = [0].into_iter().chain(49..60).collect();
    for chunk in [60, 20, 5] {
        assert_eq!(left::<Lru>(chunk), last, "in chunks of {chunk} pages");
        assert_eq!(left::<Frequency>(chunk), last, "in chunks of {chunk} pages");
        assert_eq!(left::<Standing>(chunk), last, "in chunks of {chunk} pages");
    }
}

#[test]
fn sieve_spares_what_was_used_since_the_hand_came_by() {
    let mut head = Head::<Sieve>::new();
    head.ask(&[0]);
    head.ask(&[2]);
    // The hand spares 0 and takes 1; it stands at 2, spares it, and takes 3, which nobody has used again.
    head.open();
    assert_eq!(head.resident(), [0, 2, 3]);
    head.ask(&[1]);
    assert_eq!(head.resident(), [0, 1, 2]);
}

#[test]
fn s3_fifo_lets_single_uses_go_first_and_knows_them_when_they_return() {
    let mut head = Head::<S3Fifo>::new();
    head.ask(&[0]);
    // 0 moves on to the main queue, 1 goes; it returns to the main queue while 2 goes; 2 returns and 3 goes.
    head.open();
    assert_eq!(head.resident(), [0, 2, 3]);
    head.ask(&[1]);
    assert_eq!(head.resident(), [0, 1, 3]);
    head.ask(&[2]);
    assert_eq!(head.resident(), [0, 1, 2]);
}

#[test]
fn arc_shortens_the_list_that_is_missed_less() {
    let mut head = Head::<Arc>::new();
    head.ask(&[0]);
    // Once: 1, 2. Often: 0. First 1 goes, then 2 for 1, whose name moves the target to 1. So for 2 the often used 0 goes.
    head.open();
    assert_eq!(head.resident(), [0, 2, 3]);
    head.ask(&[1]);
    assert_eq!(head.resident(), [0, 1, 3]);
    head.ask(&[2]);
    assert_eq!(head.resident(), [1, 2, 3]);
}

/// Whatever the policy: ways are never wasted, demanded and pinned pages stay, and ways can come and go.
fn keeps_the_table_whole<R: Replacement>(seed: u64) {
    keeps_it_whole(HeadTable::<R>::new(), seed);
}

fn keeps_it_whole<R: Replacement>(mut table: HeadTable<R>, seed: u64) {
    let mut rng = Rng::new(seed);
    let pins = Pins { sinks: rng.below(2) as u32, recent: rng.below(2) as u32 };
    let mut places = Vec::new();
    let mut slot = 0;
    for step in 1..600 {
        while table.ways() < pins.ways() || (table.ways() < 20 && rng.chance(20)) {
            table.grant(slot);
            slot += 1;
        }
        if table.pages() < 60 && rng.chance(40) || table.pages() == 0 {
            table.open(step, Phase::Decode, pins, None).unwrap();
        }
        let last = table.pages() as u32 - 1;
        let dense = rng.below(100);
        let demand: Vec<u32> = (0..=last).filter(|&page| rng.chance(dense) || pins.contain(page, last)).collect();
        let before: Vec<bool> = demand.iter().map(|&page| table.slot_of(page).is_some()).collect();
        if rng.chance(50) {
            let scores: Vec<f32> =
                (0..rng.below(70)).map(|_| rng.pick(&[-3.0, 0.0, 1.0, 2.5, f32::INFINITY])).collect();
            table.rate(Scores { first: rng.below(4) as u32, scores: &scores }, &demand);
        }
        let tally = table.demand(step, Phase::Decode, &demand, &mut places).unwrap();
        table.check().unwrap();
        assert_eq!(tally.overflow as usize, demand.len().saturating_sub(table.ways()));
        assert_eq!(tally.hits as usize, before.iter().filter(|hit| **hit).count());
        for (&page, place) in demand.iter().zip(&places) {
            assert_eq!(table.slot_of(page).is_none(), *place == Place::Overflow);
        }
        if table.ways() > pins.ways() && rng.chance(20) {
            let (ways, resident) = (table.ways(), table.resident());
            let released = table.release(pins).unwrap();
            table.check().unwrap();
            assert_eq!(table.ways(), ways - 1);
            assert!(table.slots().all(|slot| slot != released.slot));
            match released.evicted {
                Some(page) => assert!(resident == ways && !pins.contain(page, last) && table.slot_of(page).is_none()),
                None => assert!(resident < ways && table.resident() == resident),
            }
        }
        if rng.chance(5) {
            table.drop_page(rng.below(table.pages()) as u32);
            table.check().unwrap();
        }
        if rng.chance(5) && table.ways() > pins.ways() {
            table.revoke();
            table.check().unwrap();
        }
    }
}

#[test]
fn every_policy_keeps_the_table_whole() {
    for seed in 0..40 {
        keeps_the_table_whole::<Lru>(seed);
        keeps_the_table_whole::<Frequency>(seed);
        keeps_the_table_whole::<Standing>(seed);
        keeps_the_table_whole::<S3Fifo>(seed);
        keeps_the_table_whole::<Sieve>(seed);
        keeps_the_table_whole::<Arc>(seed);
    }
    for (seed, rule) in (0..).zip(Rule::ALL) {
        keeps_it_whole(HeadTable::with_order(rule.order()), seed);
    }
}

#[test]
fn a_way_that_is_released_is_that_of_the_oldest_page() {
    let mut head = Head::<Lru>::new();
    head.ask(&[0]);
    assert_eq!(head.table.release(Pins::default()).unwrap().evicted, Some(1));
    assert_eq!((head.resident(), head.table.ways()), (vec![0, 2], 2));
    // The order of the others is what it was: 2 is older than 0, but the last page stays.
    assert_eq!(head.table.release(Pins::default()).unwrap().evicted, Some(0));
    assert_eq!(head.table.release(Pins::default()), None);
}
