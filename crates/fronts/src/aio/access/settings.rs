//! The settings of section `[aio]` about credentials.

use std::time::Duration;

use serde_json::{Value, json};

use super::api_key::ApiKey;
use super::public_key::JwtPublicKey;
use crate::front_settings::{FrontSettingError, FrontSettingKind, SettingValues};

const API_KEY: &str = "api_key";
const JWT_PUBLIC_KEY: &str = "jwt_public_key";
const TICKET_TTL: &str = "ticket_ttl";

/// The names of these settings, and how each is written.
pub(in crate::aio) const SETTING_NAMES: [(&str, FrontSettingKind); 3] = [
    (API_KEY, FrontSettingKind::SecretText),
    (JWT_PUBLIC_KEY, FrontSettingKind::Text),
    (TICKET_TTL, FrontSettingKind::Duration),
];

const DEFAULT_TICKET_TTL: Duration = Duration::from_secs(30);
const MIN_TICKET_TTL: Duration = Duration::from_secs(1);
const MAX_TICKET_TTL: Duration = Duration::from_secs(60 * 60);

/// The credentials that open sandboxes whose address contains no code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::aio) struct AccessSettings {
    pub(super) api_key: Option<ApiKey>,
    pub(super) jwt_public_key: Option<JwtPublicKey>,
    pub(super) ticket_ttl: Duration,
}

impl Default for AccessSettings {
    fn default() -> Self {
        Self { api_key: None, jwt_public_key: None, ticket_ttl: DEFAULT_TICKET_TTL }
    }
}

impl AccessSettings {
    /// Reads values by name; those that are missing keep their defaults. Errors never contain a key.
    pub(in crate::aio) fn from_values(values: &SettingValues) -> Result<Self, FrontSettingError> {
        let mut settings = Self::default();
        let written = |name: &str| values.get(name).filter(|value| !value.is_null());
        if let Some(value) = written(API_KEY) {
            let key = read_text(API_KEY, value)?;
            settings.api_key = Some(ApiKey::parse(key).map_err(|reason| refuse(API_KEY, reason))?);
        }
        if let Some(value) = written(JWT_PUBLIC_KEY) {
            let key = JwtPublicKey::parse(read_text(JWT_PUBLIC_KEY, value)?);
            settings.jwt_public_key = Some(key.map_err(|reason| FrontSettingError {
                hint: Some("`base64 -w0 public.pem` prints it, for the public half of an RSA key"),
                ..refuse(JWT_PUBLIC_KEY, reason)
            })?);
        }
        if let Some(value) = written(TICKET_TTL) {
            let ttl = value.as_u64().map(Duration::from_millis);
            let ttl = ttl.filter(|ttl| (MIN_TICKET_TTL..=MAX_TICKET_TTL).contains(ttl));
            let reason = "not a duration from a second to an hour";
            settings.ticket_ttl = ttl.ok_or_else(|| refuse(TICKET_TTL, reason))?;
        }
        Ok(settings)
    }

    pub(in crate::aio) fn to_values(&self) -> SettingValues {
        let Self { api_key, jwt_public_key, ticket_ttl } = self;
        let millis = u64::try_from(ticket_ttl.as_millis()).unwrap_or(u64::MAX);
        SettingValues::from_iter([
            (API_KEY.to_owned(), json!(api_key.as_ref().map(ApiKey::expose))),
            (JWT_PUBLIC_KEY.to_owned(), json!(jwt_public_key.as_ref().map(|key| &key.setting))),
            (TICKET_TTL.to_owned(), json!(millis)),
        ])
    }
}

fn read_text<'a>(name: &'static str, value: &'a Value) -> Result<&'a str, FrontSettingError> {
    value.as_str().ok_or_else(|| refuse(name, "not text"))
}

fn refuse(setting: &'static str, reason: &str) -> FrontSettingError {
    FrontSettingError { setting, reason: reason.to_owned(), hint: None }
}

#[cfg(test)]
mod tests {
    use base64::Engine;
    use base64::engine::general_purpose::STANDARD;

    use super::*;
    use crate::aio::access::json_web_token::tests::PUBLIC_KEY;

    #[test]
    fn checked_settings_are_read_again_and_hide_the_key() {
        let written =
            json!({"api_key": "s3cret", "jwt_public_key": STANDARD.encode(PUBLIC_KEY), "ticket_ttl": 5000});
        let settings = AccessSettings::from_values(written.as_object().unwrap()).unwrap();
        assert_eq!(settings.ticket_ttl, Duration::from_secs(5));
        assert_eq!(AccessSettings::from_values(&settings.to_values()).unwrap(), settings);
        assert!(!format!("{settings:?}").contains("s3cret"));
        let defaults = AccessSettings::default();
        assert_eq!(AccessSettings::from_values(&defaults.to_values()).unwrap(), defaults);
    }

    #[test]
    fn wrong_values_are_refused_by_name() {
        for (setting, wrong) in [
            ("api_key", json!("")),
            ("api_key", json!("s3cret key")),
            ("api_key", json!(7)),
            ("jwt_public_key", json!("s3cret")),
            ("ticket_ttl", json!(999)),
            ("ticket_ttl", json!(3_600_001)),
        ] {
            let written = SettingValues::from_iter([(setting.to_owned(), wrong)]);
            let error = AccessSettings::from_values(&written).unwrap_err();
            assert_eq!(error.setting, setting);
            assert!(!error.reason.contains("s3cret"), "{error:?}");
        }
    }
}
