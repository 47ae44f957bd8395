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
    let facts = format!("My dog is called {pet}. I live in {city}. The code of my locker is {code}.");
    let room = tokens.saturating_sub(220) / MIDDLE.len();
    let mut messages = vec![
        ("user", format!("Please remember three facts about me. {facts}")),
        ("assistant", "I will remember these three facts.".to_owned()),
    ];
    for (request, answer) in MIDDLE {
        let text = frame.fill(room, || words.sentence())?.join(" ");
        messages.push(("user", format!("{request}\n{text}")));
        messages.push(("assistant", answer.to_owned()));
    }
    let asked = "What is my dog called, where do I live, and what is the code of my locker? Answer in three sentences.";
    messages.push(("user", format!("{CUT}{asked}")));
    let messages: Vec<(&str, &str)> = messages.iter().map(|(role, text)| (*role, text.as_str())).collect();
    let (context, question) = frame.dialogue(&messages, "Your dog is called")?;
    let answers = vec![pet.to_owned(), city.to_owned(), code.to_string()];
    Ok(Script { context, question, rest: Rest::Write { tokens: 40, temperature: 0.0, answers } })
}
