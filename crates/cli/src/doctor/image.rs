//! `doctor --image`: what code can be run in an image, and what it finds there.

use std::ffi::OsString;
use std::process::ExitCode;

use anyhow::Result;
use serde_json::Value;

use crate::args::{LimitArgs, NetworkChoice, RunArgs, StateArgs};
use crate::output::Printer;
use crate::run;

/// The maximum length of a text from an image in a table.
const MAX_TEXT_CHARS: usize = 120;

pub(super) fn describe_image(image: &str, state: &StateArgs, printer: &Printer) -> Result<ExitCode> {
    let args = RunArgs {
        limits: LimitArgs::default(),
        timeout: None,
        mounts: Vec::new(),
        env: Vec::new(),
        workdir: None,
        image: image.to_owned(),
        network: Some(NetworkChoice::Off),
        allow: Vec::new(),
        deny: Vec::new(),
        user: None,
        keep: false,
        require_limits: false,
        quiet: false,
        state: StateArgs { state_dir: state.state_dir.clone(), config: state.config.clone() },
        command: Vec::<OsString>::new(),
    };
    let offer = run::query_image_offer(&args, printer)?;
    if printer.is_json() {
        printer.print_json(&offer)?;
    } else {
        print_offer(&offer, printer)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn print_offer(offer: &Value, printer: &Printer) -> Result<()> {
    let rows = |list: &str, fields: &[&str]| -> Vec<Vec<String>> {
        let entries = offer[list].as_array().into_iter().flatten();
        entries.map(|entry| fields.iter().map(|field| clean_value(&entry[*field])).collect()).collect()
    };
    printer.print_table(
        &["language", "interpreter", "version"],
        rows("languages", &["language", "interpreter", "version"]),
    )?;
    let kernels = rows("jupyter", &["name", "language", "display_name", "directory"]);
    if !kernels.is_empty() {
        printer.print_line("")?;
        printer.print_table(&["Jupyter kernel", "language", "title", "directory"], kernels)?;
    }
    let tools = offer["tools"].as_object().into_iter().flatten();
    printer.print_line("")?;
    printer.print_table(
        &["tool", "path"],
        tools.map(|(name, path)| vec![clean_text(name), clean_value(path)]).collect(),
    )
}

fn clean_value(value: &Value) -> String {
    value.as_str().map(clean_text).unwrap_or_default()
}

/// Cleans a text from inside: removes control characters that a terminal would obey, and cuts it to a
/// line.
fn clean_text(text: &str) -> String {
    text.chars().filter(|character| !character.is_control()).take(MAX_TEXT_CHARS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn control_characters_from_an_image_are_removed() {
        assert_eq!(clean_value(&json!("a\u{1b}[2Jb\n")), "a[2Jb");
        assert_eq!(clean_value(&json!("x".repeat(1000))).len(), MAX_TEXT_CHARS);
        assert_eq!(clean_value(&json!({"not": "a text"})), "");
    }
}
