//! Numbers hidden in filler, in the words of RULER (arXiv 2404.06654).

use anyhow::Result;

use super::words::{THINGS, Words};
use super::{CUT, Frame, Rest, Script};

const FILLER: [&str; 5] =
    ["The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again."];
const OPENING: &str = "Some special magic numbers are hidden within the following text. Make sure to memorize it. I will quiz \
                       you about the numbers afterwards.\n";

/// `needles` numbers, evenly spread; one of them is asked for. Over ten seeds it lies at every tenth of the text.
pub fn script(frame: &Frame<'_>, tokens: usize, seed: u64, needles: usize) -> Result<Script> {
    let mut words = Words::new(needles as u64, seed);
    let keys = words.several(&THINGS, needles);
    let facts: Vec<(&str, u64)> = keys.into_iter().map(|key| (key, words.code())).collect();
    let sentence = |&(key, code): &(&str, u64)| format!("One of the special magic numbers for {key} is: {code}.");

    let mut filler = FILLER.iter().cycle().map(|sentence| (*sentence).to_owned());
    // Opening, needles and the template take room as well.
    let room = tokens.saturating_sub(64 + 20 * needles);
    let mut text = frame.fill(room, || filler.next().unwrap_or_default())?;
    let asked = words.number(0..needles as u64) as usize;
    let depth = |index: usize| {
        let shift = (index + needles - asked) % needles;
        let tenth = (seed % 10) as f64 / 10.0 + 0.05;
        (tenth + shift as f64 / needles as f64).fract()
    };
    let mut places: Vec<(usize, String)> = facts
        .iter()
        .enumerate()
        .map(|(index, fact)| ((depth(index) * text.len() as f64) as usize, sentence(fact)))
        .collect();
    // From the back, so that the places before stay what they are.
    places.sort();
    for (place, needle) in places.into_iter().rev() {
        text.insert(place, needle);
    }

    let (key, code) = facts[asked];
    let question = format!("What is the special magic number for {key} mentioned in the provided text?");
    let message = format!("{OPENING}{}\n{CUT}{question}", text.join(" "));
    let begun = format!("The special magic number for {key} mentioned in the provided text is");
    let (context, question) = frame.dialogue(&[("user", &message)], &begun)?;
    let rest = Rest::Write { tokens: 8, temperature: 0.0, answers: vec![code.to_string()] };
    Ok(Script { context, question, rest })
}
