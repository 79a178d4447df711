//! The sections of the fronts. Which settings they have, and what values those accept, is defined by the
//! fronts; this file only finds them in the configuration.
//!
//! A setting that is older than the sections has a former name outside of them. Within a layer it is
//! moved to that name, so that layers override each other whichever name was written.

use std::path::PathBuf;

use anyhow::{Result, anyhow, bail};
use fronts::{FrontSection, FrontSetting, FrontSettingKind, FrontValues, SettingValues, front_sections};
use serde::Deserialize;
use toml::de::{DeTable, DeValue};
use toml::{Table, Value};

use super::env_settings::insert_setting;
use super::parse_amount;
use super::raw::RawAmount;
use crate::output::WithHint;
use crate::values;

/// The name under which a setting is shown, in segments.
pub(super) fn shown_path(section: &FrontSection, setting: &FrontSetting) -> Vec<String> {
    match setting.former_name {
        Some(name) => name.split('.').map(str::to_owned).collect(),
        None => vec![section.front.to_owned(), setting.name.to_owned()],
    }
}

/// Every name under which a setting of a front can be written, and how its value is written.
pub(super) fn setting_names() -> impl Iterator<Item = (String, FrontSettingKind)> {
    front_sections().flat_map(|section| {
        section.settings.iter().flat_map(move |setting| {
            let sectioned = format!("{}.{}", section.front, setting.name);
            let names = setting.former_name.map(str::to_owned).into_iter().chain([sectioned]);
            names.map(|name| (name, setting.kind))
        })
    })
}

/// Removes what belongs to fronts from a file as it was written.
pub(super) fn remove_front_settings(table: &mut DeTable<'_>) {
    for section in front_sections() {
        table.remove(section.front);
        for former in section.settings.iter().filter_map(|setting| setting.former_name) {
            match former.split_once('.') {
                None => drop(table.remove(former)),
                Some((outer, key)) => {
                    if let Some(DeValue::Table(outer)) = table.get_mut(outer).map(|value| value.get_mut()) {
                        outer.remove(key);
                    }
                }
            }
        }
    }
}

/// Moves settings that have a former name from their section to that name.
pub(super) fn use_former_names(table: &mut Table) -> Result<()> {
    for section in front_sections() {
        for setting in section.settings {
            let Some(former) = setting.former_name else { continue };
            let Some(Value::Table(written)) = table.get_mut(section.front) else { continue };
            let Some(value) = written.remove(setting.name) else { continue };
            if take_setting(table, former).is_some() {
                bail!("`{former}` and `{}.{}` are the same setting", section.front, setting.name);
            }
            insert_setting(table, former, value);
        }
    }
    Ok(())
}

/// Takes a setting, whose name may be `section.key`, out of a table.
fn take_setting(table: &mut Table, name: &str) -> Option<Value> {
    match name.split_once('.') {
        None => table.remove(name),
        Some((section, key)) => table.get_mut(section)?.as_table_mut()?.remove(key),
    }
}

/// Takes the settings of all fronts out of a table and checks them.
pub(super) fn take_front_values(table: &mut Table) -> Result<FrontValues> {
    front_sections().map(|section| Ok((section.front.to_owned(), take_section(&section, table)?))).collect()
}

fn take_section(section: &FrontSection, table: &mut Table) -> Result<SettingValues> {
    let mut own = match table.remove(section.front) {
        None => Table::new(),
        Some(Value::Table(own)) => own,
        Some(_) => bail!("`{}` is not a section", section.front),
    };
    let mut written = SettingValues::new();
    for setting in section.settings {
        let value = match setting.former_name {
            Some(former) => take_setting(table, former),
            None => own.remove(setting.name),
        };
        if let Some(value) = value {
            let name = shown_path(section, setting).join(".");
            written.insert(setting.name.to_owned(), read_value(&name, setting.kind, value)?);
        }
    }
    if let Some(unknown) = own.keys().next() {
        let known: Vec<_> = section.settings.iter().map(|setting| format!("`{}`", setting.name)).collect();
        bail!("`{}.{unknown}` is no setting; the section has {}", section.front, known.join(", "));
    }
    section.check_values(written).or_else(|error| {
        let setting = section.settings.iter().find(|setting| setting.name == error.setting);
        let name = setting.map_or(error.setting.to_owned(), |setting| shown_path(section, setting).join("."));
        let refused = Err(anyhow!("`{name}` is {}", error.reason));
        match error.hint {
            Some(hint) => refused.with_hint(hint),
            None => refused,
        }
    })
}

/// The directories of the host that settings reserve for sandboxes of their front: the setting's name, the front, and the
/// path.
pub(super) fn reserved_directories(values: &FrontValues) -> Vec<(String, &'static str, PathBuf)> {
    let mut reserved = Vec::new();
    for section in front_sections() {
        let directories =
            section.settings.iter().filter(|setting| setting.kind == FrontSettingKind::HostDirectory);
        for setting in directories {
            let value = values.get(section.front).and_then(|values| values.get(setting.name));
            if let Some(path) = value.and_then(serde_json::Value::as_str) {
                let name = shown_path(&section, setting).join(".");
                reserved.push((name, section.front, PathBuf::from(path)));
            }
        }
    }
    reserved
}

fn read_value(name: &str, kind: FrontSettingKind, value: Value) -> Result<serde_json::Value> {
    Ok(match (kind, value) {
        (
            FrontSettingKind::Text | FrontSettingKind::SecretText | FrontSettingKind::HostDirectory,
            Value::String(text),
        ) => text.into(),
        (FrontSettingKind::Text | FrontSettingKind::SecretText | FrontSettingKind::HostDirectory, other) => {
            bail!("`{name}` is {}, not text", other.type_str())
        }
        (FrontSettingKind::Number, value) => {
            let Ok(number) = u64::deserialize(value) else { bail!("`{name}` is not a whole number") };
            number.into()
        }
        (FrontSettingKind::Amount, value) => {
            let Ok(amount) = RawAmount::deserialize(value) else { bail!("`{name}` is not an amount") };
            amount.text().into()
        }
        (FrontSettingKind::Switch, Value::Boolean(switch)) => switch.into(),
        (FrontSettingKind::Switch, other) => bail!("`{name}` is {}, not true or false", other.type_str()),
        (FrontSettingKind::SecretList, value) => {
            let Ok(texts) = Vec::<String>::deserialize(value) else {
                bail!("`{name}` is not a list of texts")
            };
            texts.into()
        }
        (FrontSettingKind::Duration, value) => {
            let Ok(amount) = RawAmount::deserialize(value) else { bail!("`{name}` is not a duration") };
            let duration = parse_amount(name, &amount, values::parse_duration)?;
            u64::try_from(duration.as_millis()).unwrap_or(u64::MAX).into()
        }
    })
}
