//! `[log]`: the level and the format of the server's log.

use anyhow::{Result, anyhow, bail};
use serde::{Deserialize, Serialize};
use tracing_subscriber::EnvFilter;

use super::raw::RawLog;
use crate::output::WithHint;

pub(super) const DEFAULT_LEVEL: &str = "info";

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LogSettings {
    /// A filter in the syntax of `tracing`: `info`, or `service=debug,info`.
    pub level: String,
    pub format: LogFormat,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum LogFormat {
    /// Lines for people, with colours only on a terminal.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

pub(super) fn check_log(raw: RawLog) -> Result<LogSettings> {
    let level = raw.level.unwrap_or_else(|| DEFAULT_LEVEL.to_owned());
    if let Err(error) = EnvFilter::try_new(&level) {
        return Err(anyhow!("`log.level` is `{level}`: {error}"))
            .with_hint("write error, warn, info, debug or trace, or a filter such as `service=debug,info`");
    }
    let format = match raw.format.as_deref() {
        None | Some("text") => LogFormat::Text,
        Some("json") => LogFormat::Json,
        Some(other) => bail!("`log.format` is `{other}`, neither `text` nor `json`"),
    };
    Ok(LogSettings { level, format })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<LogSettings> {
        check_log(toml::from_str(text).expect("the types are right"))
    }

    #[test]
    fn text_at_info_is_the_default() {
        let log = read("").expect("it is right");
        assert_eq!((log.level.as_str(), log.format), ("info", LogFormat::Text));
        let log = read("level = \"service=debug,info\"\nformat = \"json\"").expect("it is right");
        assert_eq!((log.level.as_str(), log.format), ("service=debug,info", LogFormat::Json));
    }

    #[test]
    fn wrong_levels_and_formats_are_refused_by_name() {
        for (text, expected) in
            [("format = \"xml\"", "`log.format` is `xml`"), ("level = \"a=b=c\"", "`log.level` is `a=b=c`")]
        {
            let error = read(text).expect_err(text).to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
