//! Least standing: uses and near misses of the selection, fading.

use super::fading::{Fading, by_fading};
use super::{Replacement, Scores};

/// The page goes that has of late been chosen least, and been least close to being chosen; of equal ones the lower page.
///
/// A page that is read counts 1, and one that the selection has scored and left out counts 1/(1 + x + x²), where x is how far its score
/// lies below the least score that was chosen. Scores are logits, so a page that would have had a third of the weight of the last one
/// chosen counts about a third. All of it counts half after 6 steps. Reading a prompt counts nothing.
///
/// The selection computes the scores anyway, of the pages that are not resident as well: they say who is about to come back, which
/// use alone cannot. Without scores it is [`Frequency`](super::Frequency) with a shorter memory. The rule is ours, chosen on
/// recorded runs of one model.
#[derive(Clone, Debug)]
pub struct Standing(Fading);

/// Steps until a use or a near miss counts half.
const HALF_LIFE: f32 = 6.0;

impl Standing {
    /// What a page counts, in a unit that all heads share which have taken as many steps.
    pub(crate) fn of(&self, page: u32) -> f32 {
        self.0.of(page)
    }
}

impl Replacement for Standing {
    fn new() -> Self {
        Standing(Fading::new(HALF_LIFE))
    }

    by_fading!();

    fn rate(&mut self, scores: Scores<'_>, pages: &[u32]) {
        self.0.add(scores.first, near_misses(scores, pages));
    }
}

/// What each scored page counts for having been close: nothing if it is among the demanded `pages`.
fn near_misses<'a>(Scores { first, scores }: Scores<'a>, pages: &'a [u32]) -> impl Iterator<Item = f32> + 'a {
    let score = move |page: u32| scores.get(page.checked_sub(first)? as usize).copied();
    let mut chosen = pages.iter().copied().filter(move |&page| score(page).is_some());
    let cut = chosen.clone().filter_map(score).fold(f32::INFINITY, f32::min);
    let mut next = chosen.next();
    (first..).zip(scores).map(move |(page, &score)| {
        if next == Some(page) {
            next = chosen.next();
            return 0.0;
        }
        let below = cut - score;
        let share = 1.0 / (1.0 + below + below * below);
        if share.is_nan() { 0.0 } else { share }
    })
}
