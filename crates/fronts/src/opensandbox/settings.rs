//! The section `[opensandbox]` of the configuration.

use std::time::Duration;

use serde_json::{Value, json};

use super::route_keys::{RouteKey, ShortSignatures};
use crate::front_settings::{FrontSetting, FrontSettingError, FrontSettingKind, SettingValues};
use crate::kit::lines::LineDialect;

pub(super) static SETTINGS: &[FrontSetting] = &[
    FrontSetting { name: LINES, former_name: Some("lines"), kind: FrontSettingKind::Text },
    FrontSetting {
        name: RENEWAL_INTERVAL,
        former_name: Some("renewal_interval"),
        kind: FrontSettingKind::Duration,
    },
    FrontSetting { name: ROUTE_KEYS, former_name: Some("gateway.keys"), kind: FrontSettingKind::SecretList },
    FrontSetting {
        name: SHORT_SIGNATURES,
        former_name: Some("gateway.short_signatures"),
        kind: FrontSettingKind::Switch,
    },
];

const LINES: &str = "lines";
const RENEWAL_INTERVAL: &str = "renewal_interval";
const ROUTE_KEYS: &str = "route_keys";
const SHORT_SIGNATURES: &str = "short_signatures";

/// The settings of this front.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct OpenSandboxSettings {
    /// How output is split into events, unless a sandbox sets its own dialect.
    pub(super) lines: LineDialect,
    /// Accesses within this interval renew a sandbox only once.
    pub(super) renewal_interval: Duration,
    /// Keys of signed routes. The first one signs, all are accepted; without any, the server uses its own.
    pub(super) route_keys: Vec<RouteKey>,
    pub(super) short_signatures: ShortSignatures,
}

impl Default for OpenSandboxSettings {
    fn default() -> Self {
        Self {
            lines: LineDialect::default(),
            renewal_interval: Duration::from_secs(60),
            route_keys: Vec::new(),
            short_signatures: ShortSignatures::default(),
        }
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
        if let Some(value) = values.get(ROUTE_KEYS) {
            settings.route_keys = parse_route_keys(value)?;
        }
        if values.get(SHORT_SIGNATURES).and_then(Value::as_bool) == Some(true) {
            if settings.route_keys.is_empty() {
                return Err(FrontSettingError {
                    setting: SHORT_SIGNATURES,
                    reason: "true, but there are no keys of signed routes".to_owned(),
                    hint: Some("name the keys that the other programs that check these signatures have too"),
                });
            }
            settings.short_signatures = ShortSignatures::Accepted;
        }
        Ok(settings)
    }

    fn to_values(&self) -> SettingValues {
        let Self { lines, renewal_interval, route_keys, short_signatures } = self;
        let millis = u64::try_from(renewal_interval.as_millis()).unwrap_or(u64::MAX);
        SettingValues::from_iter([
            (LINES.to_owned(), json!(lines.letter())),
            (RENEWAL_INTERVAL.to_owned(), json!(millis)),
            (ROUTE_KEYS.to_owned(), route_keys.iter().map(RouteKey::to_text).collect()),
            (SHORT_SIGNATURES.to_owned(), json!(*short_signatures == ShortSignatures::Accepted)),
        ])
    }
}

/// Checks the written settings and adds the defaults of the others.
pub(super) fn check_settings(written: SettingValues) -> Result<SettingValues, FrontSettingError> {
    OpenSandboxSettings::from_values(&written).map(|settings| settings.to_values())
}

fn parse_route_keys(value: &Value) -> Result<Vec<RouteKey>, FrontSettingError> {
    let texts = value.as_array().into_iter().flatten().map(|text| text.as_str().unwrap_or_default());
    RouteKey::parse_list(texts).map_err(|error| FrontSettingError {
        setting: ROUTE_KEYS,
        reason: error.to_string(),
        hint: error.hint(),
    })
}

fn invalid(setting: &'static str, value: &Value, why: &str) -> FrontSettingError {
    let shown = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    FrontSettingError { setting, reason: format!("`{shown}`, {why}"), hint: None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_survive_a_round_trip() {
        let settings = OpenSandboxSettings {
            lines: LineDialect::Stripping,
            renewal_interval: Duration::from_millis(1500),
            route_keys: vec![RouteKey { name: 'a', secret: b"0123456789abcdef".to_vec() }],
            short_signatures: ShortSignatures::Accepted,
        };
        assert_eq!(OpenSandboxSettings::from_values(&settings.to_values()), Ok(settings));
    }

    #[test]
    fn short_signatures_need_keys() {
        let written = SettingValues::from_iter([(SHORT_SIGNATURES.to_owned(), json!(true))]);
        assert_eq!(check_settings(written).unwrap_err().setting, SHORT_SIGNATURES);
    }

    #[test]
    fn unknown_dialects_are_refused_by_name() {
        let written = SettingValues::from_iter([(LINES.to_owned(), json!("Q"))]);
        let error = check_settings(written).unwrap_err();
        assert_eq!((error.setting, error.reason.as_str()), ("lines", "`Q`, neither `P` nor `S`"));
    }
}
