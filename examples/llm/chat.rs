//! A prompt in the words of the model's own chat template.

use anyhow::{Context, Result};
use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Error, ErrorKind, context};

use super::gguf::Metadata;
use super::tokenizer::Tokenizer;

/// Renders the template that the file carries for one message of the user, up to where the answer begins.
pub fn render(metadata: Metadata<'_>, tokenizer: &Tokenizer, message: &str) -> Result<String> {
    render_dialogue(metadata, tokenizer, &[("user", message)])
}

/// The same for the messages of a dialogue, each with its role, the last of them the user's.
pub fn render_dialogue(metadata: Metadata<'_>, tokenizer: &Tokenizer, dialogue: &[(&str, &str)]) -> Result<String> {
    let template = metadata
        .text("tokenizer.chat_template")
        .context("the model file has no chat template: leave --chat out, or use an instruction-tuned model")?;
    let environment = environment()?;
    let messages: Vec<_> = dialogue.iter().map(|&(role, content)| context! { role, content }).collect();
    let mark = |id: Option<u32>| id.and_then(|id| tokenizer.spelling(id)).unwrap_or_default();
    let eos = metadata.integer("tokenizer.ggml.eos_token_id").and_then(|id| u32::try_from(id).ok());
    environment
        .render_str(
            template,
            context! {
                messages,
                add_generation_prompt => true,
                bos_token => mark(tokenizer.bos()),
                eos_token => mark(eos),
            },
        )
        .context("the model file's chat template cannot be rendered")
}

/// What templates expect beyond Jinja itself: Python's string methods, and the whitespace rules and the two functions
/// that Hugging Face's renderer gives them.
fn environment() -> Result<Environment<'static>> {
    let mut environment = Environment::new();
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_function("raise_exception", |message: String| -> Result<String, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    // A fixed date, so that the same prompt gives the same ids every day.
    environment.add_function("strftime_now", |_format: String| "26 Jul 2024".to_owned());
    Ok(environment)
}
