//! Stories of random sentences: to go on with, to copy, to foresee.

use anyhow::Result;

use super::words::Words;
use super::{CUT, Frame, Rest, Script};

/// Tokens that are written of a story, copied of a text, and foreseen of one.
const STORY: usize = 384;
const COPIED: usize = 64;
const FORESEEN: usize = 64;

/// The beginning of a story, which the model continues without end.
pub fn story(frame: &Frame<'_>, tokens: usize, seed: u64) -> Result<Script> {
    let mut words = Words::new(300, seed);
    let text = frame.fill(tokens.saturating_sub(64), || words.sentence())?.join(" ");
    let message = format!("Here is the beginning of a story.\n\n{text}\n\n{CUT}Continue the story at length.");
    let (context, question) = frame.dialogue(&[("user", &message)], "")?;
    Ok(Script { context, question, rest: Rest::Write { tokens: STORY, temperature: 0.8, answers: Vec::new() } })
}

/// A text and a request to repeat it. Which part is copied depends on the seed: the answer begins inside the text, with a whole sentence
/// given as part of the question.
pub fn copy(frame: &Frame<'_>, tokens: usize, seed: u64) -> Result<Script> {
    let mut words = Words::new(400, seed);
    let sentences = frame.fill(tokens.saturating_sub(64), || words.sentence())?;
    let message = format!(
        "Repeat the following text word for word.\n\n{}\n\n{CUT}Repeat it from the sentence on that I begin.",
        sentences.join(" ")
    );
    // Over ten seeds the parts lie at every tenth of the text, but for its end.
    let from = sentences.len() * (seed % 10) as usize / 12;
    let (given, copied) = (&sentences[from], &sentences[from + 1..]);
    let (context, question) = frame.dialogue(&[("user", &message)], given)?;
    let mut ids = frame.further(&format!(" {}", copied.join(" ")))?;
    ids.truncate(COPIED);
    Ok(Script { context, question, rest: Rest::Follow(ids) })
}

/// A plain text, whose last tokens are to be foreseen.
pub fn foresee(frame: &Frame<'_>, tokens: usize, seed: u64) -> Result<Script> {
    let mut words = Words::new(500, seed);
    let text = frame.fill(tokens + FORESEEN, || words.sentence())?.join(" ");
    let mut ids = frame.tokenizer.encode(&text)?;
    ids.truncate(tokens + FORESEEN);
    let follow = ids.split_off(ids.len() - FORESEEN);
    Ok(Script { context: ids, question: Vec::new(), rest: Rest::Follow(follow) })
}
