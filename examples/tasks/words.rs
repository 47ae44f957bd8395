//! Names, numbers and prose out of a seed.

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

pub const NAMES: [&str; 24] = [
    "Anna", "Boris", "Clara", "David", "Elena", "Felix", "Grace", "Henry", "Irene", "Jakob", "Karin", "Lukas", "Maria",
    "Nadia", "Oscar", "Paula", "Quentin", "Rosa", "Simon", "Tessa", "Ulrich", "Vera", "Walter", "Yvonne",
];
pub const TRADES: [&str; 16] = [
    "baker",
    "carpenter",
    "doctor",
    "farmer",
    "fisherman",
    "gardener",
    "judge",
    "miller",
    "painter",
    "pilot",
    "potter",
    "sailor",
    "singer",
    "tailor",
    "teacher",
    "weaver",
];
pub const THINGS: [&str; 24] = [
    "basket", "bell", "book", "bottle", "candle", "chain", "clock", "coat", "drum", "hammer", "kettle", "key",
    "ladder", "lamp", "letter", "map", "mirror", "needle", "purse", "ring", "rope", "saddle", "violin", "wheel",
];
pub const KINDS: [&str; 16] = [
    "black", "blue", "broken", "brown", "cheap", "copper", "golden", "green", "heavy", "little", "old", "painted",
    "red", "silver", "white", "wooden",
];
pub const PLACES: [&str; 20] = [
    "bakery",
    "barn",
    "bridge",
    "cellar",
    "chapel",
    "garden",
    "harbour",
    "inn",
    "island",
    "library",
    "lighthouse",
    "market",
    "mill",
    "orchard",
    "quarry",
    "school",
    "station",
    "tower",
    "village",
    "well",
];
pub const CITIES: [&str; 12] =
    ["Lisbon", "Vienna", "Oslo", "Madrid", "Prague", "Athens", "Dublin", "Warsaw", "Berlin", "Rome", "Paris", "London"];
pub const PETS: [&str; 12] =
    ["Biscuit", "Shadow", "Pepper", "Rocky", "Ginger", "Bruno", "Daisy", "Lucky", "Molly", "Oscar", "Ruby", "Toby"];
const TIMES: [&str; 10] = [
    "In the morning",
    "At noon",
    "In the evening",
    "At night",
    "On Monday",
    "On Friday",
    "In spring",
    "In winter",
    "After the storm",
    "Before the feast",
];

/// Draws from a seed. The same seed and calls draw the same.
pub struct Words(StdRng);

impl Words {
    /// `purpose` keeps tasks of one seed apart.
    pub fn new(purpose: u64, seed: u64) -> Self {
        Words(StdRng::seed_from_u64(purpose << 32 ^ seed))
    }

    /// One of some words.
    pub fn pick<'w>(&mut self, words: &[&'w str]) -> &'w str {
        words[self.0.random_range(0..words.len())]
    }

    /// So many different ones of some words.
    pub fn several<'w>(&mut self, words: &[&'w str], count: usize) -> Vec<&'w str> {
        let mut left = words.to_vec();
        (0..count.min(left.len())).map(|_| left.swap_remove(self.0.random_range(0..left.len()))).collect()
    }

    /// A number of a range.
    pub fn number(&mut self, range: std::ops::Range<u64>) -> u64 {
        self.0.random_range(range)
    }

    /// A number of five digits.
    pub fn code(&mut self) -> u64 {
        self.number(10_000..100_000)
    }

    /// A sentence of a story. Which words meet in it nobody can guess who has not read it.
    pub fn sentence(&mut self) -> String {
        let names = self.several(&NAMES, 2);
        let (one, other) = (names[0], names[1]);
        let (trade, kind, thing) = (self.pick(&TRADES), self.pick(&KINDS), self.pick(&THINGS));
        let places = self.several(&PLACES, 2);
        let (here, there) = (places[0], places[1]);
        let (time, count) = (self.pick(&TIMES), self.number(2..100));
        match self.number(0..8) {
            0 => format!("{time} {one} the {trade} carried a {kind} {thing} from the {here} to the {there}."),
            1 => format!("{one} told {other} that the {kind} {thing} had been left at the {here}."),
            2 => format!("{time} the {trade} sold {count} {thing}s to {one}, who lived near the {here}."),
            3 => format!("Nobody at the {here} knew why {one} had hidden the {kind} {thing} in the {there}."),
            4 => format!("{other} paid {count} coins for the {thing} that {one} had found behind the {here}."),
            5 => format!("The {trade} of the {here} asked {one} for a {kind} {thing}, but {other} had none."),
            6 => format!("{time} {one} and {other} walked to the {here} and waited there for the {trade}."),
            _ => format!("A {kind} {thing} stood in the {here}, and {one} the {trade} wanted it for the {there}."),
        }
    }
}
