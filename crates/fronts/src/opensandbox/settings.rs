//! The section `[opensandbox]` of the configuration.

use std::time::Duration;

use serde_json::{Value, json};

use crate::front_settings::{FrontSetting, FrontSettingError, FrontSettingKind, SettingValues};
use crate::kit::lines::LineDialect;

pub(super) static SETTINGS: &[FrontSetting] = &[
    FrontSetting { name: LINES, former_name: Some("lines"), kind: FrontSettingKind::Text },
    FrontSetting {
        name: RENEWAL_INTERVAL,
        former_name: Some("renewal_interval"),
        kind: FrontSettingKind::Duration,
    },
];

const LINES: &str = "lines";
const RENEWAL_INTERVAL: &str = "renewal_interval";

/// The settings of this front.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct OpenSandboxSettings {
    /// How output is split into events, unless a sandbox sets its own dialect.
    pub(super) lines: LineDialect,
    /// Accesses within this interval renew a sandbox only once.
    pub(super) renewal_interval: Duration,
}

impl Default for OpenSandboxSettings {
    fn default() -> Self {
        Self { lines: LineDialect::default(), renewal_interval: Duration::from_secs(60) }
    }
}

impl OpenSandboxSettings {
    /// Reads values by name; those that are missing keep their defaults.
    pub(super) fn from_values(values: &SettingValues) -> Result<Self, FrontSettingError> {
        let mut settings = Self::default();
        if let Some(value) = values.get(LINES) {
            settings.lines = match value.as_str() {
                Some("P") => LineDialect::Preserving,
                Some("S") => LineDialect::Stripping,
                _ => return Err(invalid(LINES, value, "neither `P` nor `S`")),
            };
        }
        if let Some(value) = values.get(RENEWAL_INTERVAL) {
            let millis = value.as_u64().ok_or_else(|| invalid(RENEWAL_INTERVAL, value, "not a duration"))?;
            settings.renewal_interval = Duration::from_millis(millis);
        }
        Ok(settings)
    }

    fn to_values(&self) -> SettingValues {
        let Self { lines, renewal_interval } = self;
        let millis = u64::try_from(renewal_interval.as_millis()).unwrap_or(u64::MAX);
        SettingValues::from_iter([
            (LINES.to_owned(), json!(lines.letter())),
            (RENEWAL_INTERVAL.to_owned(), json!(millis)),
        ])
    }
}

/// Checks the written settings and adds the defaults of the others.
pub(super) fn check_settings(written: SettingValues) -> Result<SettingValues, FrontSettingError> {
    OpenSandboxSettings::from_values(&written).map(|settings| settings.to_values())
}

fn invalid(setting: &'static str, value: &Value, why: &str) -> FrontSettingError {
    let shown = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    FrontSettingError { setting, reason: format!("`{shown}`, {why}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_survive_a_round_trip() {
        let settings = OpenSandboxSettings {
            lines: LineDialect::Stripping,
            renewal_interval: Duration::from_millis(1500),
        };
        assert_eq!(OpenSandboxSettings::from_values(&settings.to_values()), Ok(settings));
    }

    #[test]
    fn unknown_dialects_are_refused_by_name() {
        let written = SettingValues::from_iter([(LINES.to_owned(), json!("Q"))]);
        let error = check_settings(written).unwrap_err();
        assert_eq!((error.setting, error.reason.as_str()), ("lines", "`Q`, neither `P` nor `S`"));
    }
}
