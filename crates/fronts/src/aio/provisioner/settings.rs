//! The section `[deerflow]` of the configuration.

use serde_json::json;

use crate::front_settings::{FrontSetting, FrontSettingError, FrontSettingKind, SettingValues};
use crate::settings::HttpSettings;

pub(super) static SETTINGS: &[FrontSetting] =
    &[FrontSetting { name: AUTO_RESTART, former_name: None, kind: FrontSettingKind::Switch }];

const AUTO_RESTART: &str = "auto_restart";

/// The settings of the provisioner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::aio) struct ProvisionerSettings {
    /// Whether a client that still uses the address of a crashed sandbox is served by a successor.
    pub(in crate::aio) auto_restart: bool,
}

impl Default for ProvisionerSettings {
    fn default() -> Self {
        Self { auto_restart: true }
    }
}

impl ProvisionerSettings {
    /// The settings of a server, which were checked when its configuration was read.
    pub(in crate::aio) fn of_server(settings: &HttpSettings) -> Self {
        let values = settings.fronts.get(super::FRONT.name).map(Self::from_values);
        values.transpose().expect("settings are checked when the configuration is read").unwrap_or_default()
    }

    /// Reads values by name; those that are missing keep their defaults.
    fn from_values(values: &SettingValues) -> Result<Self, FrontSettingError> {
        let mut settings = Self::default();
        if let Some(value) = values.get(AUTO_RESTART) {
            settings.auto_restart = value.as_bool().ok_or_else(|| FrontSettingError {
                setting: AUTO_RESTART,
                reason: format!("`{value}`, neither true nor false"),
                hint: None,
            })?;
        }
        Ok(settings)
    }

    fn to_values(&self) -> SettingValues {
        let Self { auto_restart } = self;
        SettingValues::from_iter([(AUTO_RESTART.to_owned(), json!(auto_restart))])
    }
}

/// Checks the written settings and adds the defaults of the others.
pub(super) fn check_settings(written: SettingValues) -> Result<SettingValues, FrontSettingError> {
    ProvisionerSettings::from_values(&written).map(|settings| settings.to_values())
}
