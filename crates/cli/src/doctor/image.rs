//! `doctor --image`: what code can be run in an image, and what it finds there.

use std::ffi::OsString;
use std::process::ExitCode;

use anyhow::Result;
use serde_json::Value;

use crate::args::{LimitArgs, NetworkChoice, RunArgs, StateArgs};
use crate::output::Printer;
use crate::run;

/// The maximum length of a text from an image in a table.
const LONGEST: usize = 120;

pub(super) fn describe(image: &str, state: &StateArgs, printer: &Printer) -> Result<ExitCode> {
    let args = RunArgs {
        limits: LimitArgs::default(),
        timeout: None,
        mounts: Vec::new(),
        env: Vec::new(),
        workdir: None,
        image: image.to_owned(),
        network: NetworkChoice::Off,
        user: None,
        keep: false,
        require_limits: false,
        quiet: false,
        state: StateArgs { state_dir: state.state_dir.clone(), config: state.config.clone() },
        command: Vec::<OsString>::new(),
    };
    let offer = run::offer(&args, printer)?;
    if printer.json() {
        printer.value(&offer)?;
    } else {
        tell(&offer, printer)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn tell(offer: &Value, printer: &Printer) -> Result<()> {
    let rows = |list: &str, fields: &[&str]| -> Vec<Vec<String>> {
        let entries = offer[list].as_array().into_iter().flatten();
        entries.map(|entry| fields.iter().map(|field| shown(&entry[*field])).collect()).collect()
    };
    printer.table(
        &["language", "interpreter", "version"],
        rows("languages", &["language", "interpreter", "version"]),
    )?;
    let kernels = rows("jupyter", &["name", "language", "display_name", "directory"]);
    if !kernels.is_empty() {
        printer.line("")?;
        printer.table(&["Jupyter kernel", "language", "title", "directory"], kernels)?;
    }
    let tools = offer["tools"].as_object().into_iter().flatten();
    printer.line("")?;
    printer.table(&["tool", "path"], tools.map(|(name, path)| vec![clean(name), shown(path)]).collect())
}

fn shown(value: &Value) -> String {
    value.as_str().map(clean).unwrap_or_default()
}

/// Cleans a text from inside: removes control characters that a terminal would obey, and cuts it to a
/// line.
fn clean(text: &str) -> String {
    text.chars().filter(|character| !character.is_control()).take(LONGEST).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_image_cannot_command_the_terminal() {
        assert_eq!(shown(&json!("a\u{1b}[2Jb\n")), "a[2Jb");
        assert_eq!(shown(&json!("x".repeat(1000))).len(), LONGEST);
        assert_eq!(shown(&json!({"not": "a text"})), "");
    }
}
