//! The settings of fronts: each front has its own section in the configuration, and defines what may be
//! written there. The rest of the configuration does not know their names.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use crate::registry::FRONTS;

/// The settings of one front by name. Durations are numbers of milliseconds.
pub type SettingValues = Map<String, Value>;

/// The settings of all fronts, by their names.
pub type FrontValues = BTreeMap<String, SettingValues>;

/// One setting in the section of a front.
#[derive(Clone, Copy, Debug)]
pub struct FrontSetting {
    pub name: &'static str,
    /// The name outside of the front's section under which older configurations have this setting: a key at
    /// the top, or `section.key`. It stays valid, and lists show the setting under it.
    pub former_name: Option<&'static str>,
    pub kind: FrontSettingKind,
}

/// How the value of a setting is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrontSettingKind {
    Text,
    /// Text with a unit, or a number of seconds. Fronts get milliseconds.
    Duration,
    Switch,
    /// A whole number.
    Number,
    /// Text with a unit, or a number. Fronts get text.
    Amount,
    /// The path of a directory of the host, which sandboxes may mount if this front made them. A sandbox of another front
    /// cannot.
    HostDirectory,
    /// A text that is never shown.
    SecretText,
    /// A list of texts that are never shown.
    SecretList,
}

/// The section of a front.
#[derive(Clone, Copy, Debug)]
pub struct FrontSection {
    pub front: &'static str,
    pub settings: &'static [FrontSetting],
    check: fn(SettingValues) -> Result<SettingValues, FrontSettingError>,
}

/// A value that a front does not accept.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct FrontSettingError {
    /// The name within the section.
    pub setting: &'static str,
    pub reason: String,
    /// How to resolve it.
    pub hint: Option<&'static str>,
}

impl FrontSection {
    /// Checks the written settings and adds the defaults of the others.
    pub fn check_values(&self, written: SettingValues) -> Result<SettingValues, FrontSettingError> {
        (self.check)(written)
    }
}

/// The sections of all fronts that have settings.
pub fn front_sections() -> impl Iterator<Item = FrontSection> {
    let with_settings = FRONTS.iter().filter(|front| !front.settings.is_empty());
    with_settings.map(|front| FrontSection {
        front: front.name,
        settings: front.settings,
        check: front.check_settings,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_has_a_default() {
        for section in front_sections() {
            let values = section.check_values(SettingValues::new()).unwrap();
            let names: Vec<_> = section.settings.iter().map(|setting| setting.name).collect();
            assert_eq!(values.len(), names.len(), "{}", section.front);
            assert!(names.iter().all(|name| values.contains_key(*name)), "{}: {names:?}", section.front);
        }
    }
}
