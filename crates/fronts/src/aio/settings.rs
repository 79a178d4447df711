//! The section `[aio]` of the configuration.

use serde_json::json;

use super::access::{self, AccessSettings};
use crate::front_settings::{FrontSetting, FrontSettingError, FrontSettingKind, SettingValues};

pub(super) static SETTINGS: &[FrontSetting] = &{
    let [api_key, jwt_public_key, ticket_ttl] = access::SETTING_NAMES;
    [
        setting((PORT_HEADER, FrontSettingKind::Switch)),
        setting(api_key),
        setting(jwt_public_key),
        setting(ticket_ttl),
    ]
};

const fn setting((name, kind): (&'static str, FrontSettingKind)) -> FrontSetting {
    FrontSetting { name, former_name: None, kind }
}

const PORT_HEADER: &str = "port_header";

/// The settings of the sandbox API.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct AioSettings {
    pub(super) port_header: PortHeader,
    pub(super) access: AccessSettings,
}

/// Whether the header `x-aio-proxy-port` names a port. A client that may set it reaches any port, so a trusted gateway
/// must stand before the server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum PortHeader {
    #[default]
    Ignored,
    Accepted,
}

impl AioSettings {
    /// Reads values by name; those that are missing keep their defaults.
    pub(super) fn from_values(values: &SettingValues) -> Result<Self, FrontSettingError> {
        let mut settings = Self { access: AccessSettings::from_values(values)?, ..Self::default() };
        if let Some(value) = values.get(PORT_HEADER) {
            settings.port_header = match value.as_bool() {
                Some(true) => PortHeader::Accepted,
                Some(false) => PortHeader::Ignored,
                None => {
                    let reason = format!("`{value}`, neither true nor false");
                    return Err(FrontSettingError { setting: PORT_HEADER, reason, hint: None });
                }
            };
        }
        Ok(settings)
    }

    fn to_values(&self) -> SettingValues {
        let Self { port_header, access } = self;
        let mut values = access.to_values();
        values.insert(PORT_HEADER.to_owned(), json!(*port_header == PortHeader::Accepted));
        values
    }
}

/// Checks the written settings and adds the defaults of the others.
pub(super) fn check_settings(written: SettingValues) -> Result<SettingValues, FrontSettingError> {
    AioSettings::from_values(&written).map(|settings| settings.to_values())
}
