//! The log on standard error: lines for people, or JSON, depending on the setting `log.format`.

use std::io::{self, IsTerminal};
use std::sync::OnceLock;

use tracing_subscriber::EnvFilter;

use crate::config::{LogFormat, LogSettings};

/// Changes the log level, once the log has started.
static LEVEL_SETTER: OnceLock<Box<dyn Fn(EnvFilter) + Send + Sync>> = OnceLock::new();

pub(crate) fn start_logging(settings: &LogSettings) {
    let logs = tracing_subscriber::fmt()
        .with_env_filter(parse_level_filter(&settings.level))
        .with_writer(io::stderr)
        // Colour codes would end up in files and journals.
        .with_ansi(io::stderr().is_terminal());
    match settings.format {
        LogFormat::Text => {
            let logs = logs.with_filter_reloading();
            let handle = logs.reload_handle();
            store_level_setter(logs.try_init().is_ok(), move |filter| {
                handle.reload(filter).unwrap_or_default()
            });
        }
        LogFormat::Json => {
            let logs = logs.json().flatten_event(true).with_filter_reloading();
            let handle = logs.reload_handle();
            store_level_setter(logs.try_init().is_ok(), move |filter| {
                handle.reload(filter).unwrap_or_default()
            });
        }
    }
}

/// Stores the function that changes the level, unless a log was started before, which then stays as it
/// is.
fn store_level_setter(started: bool, set_level: impl Fn(EnvFilter) + Send + Sync + 'static) {
    if started {
        LEVEL_SETTER.set(Box::new(set_level)).unwrap_or_default();
    }
}

/// Changes the log level from now on.
pub(crate) fn set_log_level(level: &str) {
    if let Some(set) = LEVEL_SETTER.get() {
        set(parse_level_filter(level));
    }
}

/// The configuration was checked, so the text is a valid filter.
fn parse_level_filter(level: &str) -> EnvFilter {
    let filter = EnvFilter::try_new(level).unwrap_or_else(|_| EnvFilter::new("info"));
    // The MCP library logs whole messages, with the commands and files of clients, and a line for each at `info`.
    let quiet = "rmcp=error".parse().expect("the directive is valid");
    filter.add_directive(quiet)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_clients_are_not_logged_at_any_level() {
        for level in ["info", "trace", "rmcp=trace,debug"] {
            assert!(parse_level_filter(level).to_string().contains("rmcp=error"), "{level}");
            assert!(!parse_level_filter(level).to_string().contains("rmcp=trace"), "{level}");
        }
    }
}
