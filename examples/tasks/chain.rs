//! Arithmetic step by step: worked chains, then one to be worked out.

use anyhow::Result;

use super::words::{NAMES, THINGS, Words};
use super::{CUT, Frame, Rest, Script};

/// Tokens that the model writes. It does not stop by itself.
const TOKENS: usize = 384;

pub fn script(frame: &Frame<'_>, tokens: usize, seed: u64) -> Result<Script> {
    let mut words = Words::new(200, seed);
    let worked = frame.fill(tokens.saturating_sub(160), || {
        let problem = Problem::new(&mut words);
        format!("Problem: {}\nSolution: {}", problem.text(), problem.solution())
    })?;
    let problem = Problem::new(&mut words);
    let message =
        format!("Solve problems step by step.\n\n{}\n\n{CUT}Problem: {}", worked.join("\n\n"), problem.text());
    let (context, question) = frame.dialogue(&[("user", &message)], "Solution: Let us go step by step.")?;
    Ok(Script { context, question, rest: Rest::Write { tokens: TOKENS, temperature: 0.6, answers: Vec::new() } })
}

/// Somebody's things, which become more and fewer.
struct Problem {
    who: &'static str,
    what: &'static str,
    start: u64,
    /// What is added, or taken away.
    steps: Vec<i64>,
}

impl Problem {
    fn new(words: &mut Words) -> Self {
        let (who, what, start) = (words.pick(&NAMES), words.pick(&THINGS), words.number(10..60));
        let mut have = start as i64;
        let steps = (0..words.number(4..9)).map(|_| {
            let amount = words.number(2..30) as i64;
            let change = if amount < have && words.number(0..2) == 0 { -amount } else { amount };
            have += change;
            change
        });
        Problem { who, what, start, steps: steps.collect() }
    }

    fn text(&self) -> String {
        let Problem { who, what, start, steps } = self;
        let steps = steps.iter().map(|&step| match step {
            ..0 => format!("gives away {}", -step),
            _ => format!("buys {step}"),
        });
        let steps = steps.collect::<Vec<_>>().join(", then ");
        format!("{who} has {start} {what}s, {steps}. How many {what}s does {who} have at the end?")
    }

    fn solution(&self) -> String {
        let mut have = self.start as i64;
        let lines = self.steps.iter().map(|&step| {
            let before = have;
            have += step;
            let sign = if step < 0 { '-' } else { '+' };
            format!("{before} {sign} {} = {have}", step.abs())
        });
        let lines = lines.collect::<Vec<_>>().join(", ");
        format!("{lines}. The answer is {have}.")
    }
}
