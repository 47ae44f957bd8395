//! A dialogue that begins with three unlike facts, wanders, and ends with questions about them.

use anyhow::Result;

use super::words::{CITIES, PETS, Words};
use super::{CUT, Frame, Rest, Script};

/// What is talked about in between.
const MIDDLE: [(&str, &str); 3] = [
    ("Now read this text and say when you are done.", "I have read it."),
    ("Here is some more to read.", "I have read that as well."),
    ("And this is the last of it.", "I have read all of it."),
];

pub fn script(frame: &Frame<'_>, tokens: usize, seed: u64) -> Result<Script> {
    let mut words = Words::new(100, seed);
    let (pet, city, code) = (words.pick(&PETS), words.pick(&CITIES), words.code());
    let facts =
        format!("The name of the dog is {pet}. The name of the city is {city}. The code of the locker is {code}.");
    let room = tokens.saturating_sub(220) / MIDDLE.len();
    let mut messages = vec![
        ("user", format!("Remember these three facts. {facts}")),
        ("assistant", "I will remember them.".to_owned()),
    ];
    for (request, answer) in MIDDLE {
        let text = frame.fill(room, || words.sentence())?.join(" ");
        messages.push(("user", format!("{request}\n{text}")));
        messages.push(("assistant", answer.to_owned()));
    }
    let asked = "What three facts did I ask you to remember? Repeat them.";
    messages.push(("user", format!("{CUT}{asked}")));
    let messages: Vec<(&str, &str)> = messages.iter().map(|(role, text)| (*role, text.as_str())).collect();
    let (context, question) = frame.dialogue(&messages, "The name of the dog is")?;
    let answers = vec![pet.to_owned(), city.to_owned(), code.to_string()];
    Ok(Script { context, question, rest: Rest::Write { tokens: 40, temperature: 0.0, answers } })
}
