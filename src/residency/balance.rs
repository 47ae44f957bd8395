//! Ways that move between heads: those that have cooled give, those that miss get. The sum stays what it was.

/// When and how many ways move.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BalanceSettings {
    /// Steps from one rebalancing to the next, at least 1.
    pub every: u32,
    /// A head has cooled when the share of its ways that were used since the last rebalancing is below this.
    pub cooling_threshold: f32,
    /// Steps until a miss counts half.
    pub half_life: f32,
    /// Ways that no head goes below. Whatever is said here, none goes below what its pins take.
    pub floor: usize,
}

impl Default for BalanceSettings {
    /// Every 8 steps; cooled below 90 % of use; misses count half after 16 steps; no head below 4 ways.
    fn default() -> Self {
        BalanceSettings { every: 8, cooling_threshold: 0.9, half_life: 16.0, floor: 4 }
    }
}

/// What a head owns and uses when ways are about to move.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Ways that it owns.
    pub ways: usize,
    /// Ways whose pages were used since the last rebalancing.
    pub used: usize,
    /// Ways that it could use at all: its pages.
    pub pages: usize,
}

/// One way moves from a head to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// The head that gives.
    pub from: usize,
    /// The head that gets.
    pub to: usize,
}

/// Watches the misses of the heads of a sequence and says which ways have to move.
///
/// Cooling and waking are WakeKV's idea (arXiv 2610.02713 moves pages between heads by hand-set classes); the rule is ours. A cooled
/// head can spare the ways it did not use. Heads get ways in the order of their recent misses, at most as many as they have missed per
/// step, and nobody gets and gives at once.
#[derive(Clone, Debug)]
pub struct Balancer {
    settings: BalanceSettings,
    /// Misses per head, fading.
    misses: Vec<f32>,
    steps: u32,
    order: Vec<usize>,
    spare: Vec<usize>,
    moves: Vec<Move>,
}

impl Balancer {
    /// A balancer for so many heads.
    pub fn new(heads: usize, settings: BalanceSettings) -> Self {
        Balancer {
            settings,
            misses: vec![0.0; heads],
            steps: 0,
            order: Vec::with_capacity(heads),
            spare: vec![0; heads],
            moves: Vec::new(),
        }
    }

    /// A head has missed so many pages in this step. To be called once per head and step.
    pub fn observe(&mut self, head: usize, misses: u32) {
        let keep = f32::exp2(-1.0 / self.settings.half_life.max(f32::MIN_POSITIVE));
        if let Some(mean) = self.misses.get_mut(head) {
            *mean = *mean * keep + misses as f32 * (1.0 - keep);
        }
    }

    /// Ends a step. Whether it is time to [`rebalance`](Self::rebalance).
    pub fn end_step(&mut self) -> bool {
        self.steps += 1;
        let due = self.steps >= self.settings.every.max(1);
        if due {
            self.steps = 0;
        }
        due
    }

    /// Which ways have to move, given the load of every head. `pinned` is what no head may go below.
    pub fn rebalance(&mut self, loads: &[Load], pinned: usize) -> &[Move] {
        let floor = self.settings.floor.max(pinned);
        self.moves.clear();
        self.order.clear();
        for (head, (spare, load)) in self.spare.iter_mut().zip(loads).enumerate() {
            let cooled = (load.used as f32) < self.settings.cooling_threshold * load.ways as f32;
            let need = load.used.max(floor);
            *spare = if cooled { load.ways.saturating_sub(need) } else { 0 };
            if self.misses[head] > 0.0 && load.ways < load.pages {
                self.order.push(head);
            }
        }
        let misses = &self.misses;
        self.order.sort_by(|&a, &b| misses[b].total_cmp(&misses[a]).then(a.cmp(&b)));
        // A head with many misses takes before its own spare ways, if it has any, go to others.
        let mut giver = 0;
        for &to in &self.order {
            let wanted = misses[to].ceil() as usize;
            let wanted = wanted.min(loads[to].pages - loads[to].ways);
            if self.spare[to] > 0 {
                continue;
            }
            for _ in 0..wanted {
                while self.spare.get(giver).is_some_and(|&spare| spare == 0) {
                    giver += 1;
                }
                let Some(spare) = self.spare.get_mut(giver) else { return &self.moves };
                *spare -= 1;
                self.moves.push(Move { from: giver, to });
            }
        }
        &self.moves
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(ways: usize, used: usize) -> Load {
        Load { ways, used, pages: 100 }
    }

    #[test]
    fn cooled_heads_give_to_those_that_miss_most() {
        let mut balancer = Balancer::new(4, BalanceSettings { every: 2, ..BalanceSettings::default() });
        for step in 0..60 {
            [0, 3, 1, 0].into_iter().enumerate().for_each(|(head, misses)| balancer.observe(head, misses));
            assert_eq!(balancer.end_step(), step % 2 == 1);
        }
        // Head 0 can spare 3 ways above the floor; head 3 uses all of its own.
        let moves = balancer.rebalance(&[load(7, 1), load(8, 8), load(8, 8), load(8, 8)], 2).to_vec();
        assert_eq!(moves, [Move { from: 0, to: 1 }; 3]);
        // With more to spare, head 2 gets the one way that it misses per step.
        let moves = balancer.rebalance(&[load(40, 10), load(8, 8), load(8, 8), load(8, 8)], 2).to_vec();
        assert_eq!(moves.iter().filter(|moved| moved.to == 1).count(), 3);
        assert_eq!(moves.iter().filter(|moved| moved.to == 2).count(), 1);
        assert_eq!(moves.len(), 4);
    }

    #[test]
    fn nobody_gives_below_the_floor_or_while_in_use() {
        let mut balancer = Balancer::new(2, BalanceSettings::default());
        balancer.observe(1, 50);
        assert!(balancer.rebalance(&[load(4, 0), load(4, 4)], 2).is_empty());
        assert!(balancer.rebalance(&[load(10, 9), load(4, 4)], 2).is_empty(), "90 % of use is not cool");
        assert_eq!(balancer.rebalance(&[load(10, 8), load(4, 4)], 9).len(), 1, "pins count as a floor");
        assert!(balancer.rebalance(&[load(10, 8), Load { ways: 4, used: 4, pages: 4 }], 2).is_empty());
    }
}
