//! The settings by name, so that the environment can set each of them.
//!
//! The setting `limits.memory` is the variable `CORACLE_LIMITS_MEMORY`. A `CORACLE_` variable that names
//! no setting is an error, as an unknown key in the file is: a typing mistake in a limit must not pass
//! unnoticed.

use anyhow::{Result, bail};
use fronts::FrontSettingKind;
use toml::{Table, Value};

use super::front_sections;
use crate::output::WithHint;

#[derive(Clone, Copy, Debug)]
enum SettingKind {
    Text,
    Count,
    Switch,
    /// A list of texts, separated by commas in a variable.
    List,
}

/// Every setting that a variable can hold, except for those of the fronts. Tables with free names (`images.aliases`, `owners`) and pools
/// can be set in the file only.
const VARIABLE_SETTINGS: &[(&str, SettingKind)] = &[
    ("listen", SettingKind::Text),
    ("state_dir", SettingKind::Text),
    ("api_key", SettingKind::Text),
    ("public_address", SettingKind::Text),
    ("trusted_proxies", SettingKind::List),
    ("instance", SettingKind::Text),
    ("on_stop", SettingKind::Text),
    ("require_limits", SettingKind::Switch),
    ("uid_base", SettingKind::Count),
    ("free_space_floor", SettingKind::Text),
    ("disks", SettingKind::Text),
    ("longest_timeout", SettingKind::Text),
    ("park_after", SettingKind::Text),
    ("answer_timeout", SettingKind::Text),
    ("log.level", SettingKind::Text),
    ("log.format", SettingKind::Text),
    ("images.strict", SettingKind::Switch),
    ("images.max_bytes", SettingKind::Text),
    ("images.pull", SettingKind::Text),
    ("images.registries", SettingKind::List),
    ("images.plain_http", SettingKind::List),
    ("limits.memory", SettingKind::Text),
    ("limits.cpus", SettingKind::Text),
    ("limits.pids", SettingKind::Count),
    ("limits.disk", SettingKind::Text),
    ("limits.max_memory", SettingKind::Text),
    ("limits.max_cpus", SettingKind::Text),
    ("limits.max_pids", SettingKind::Count),
    ("limits.max_disk", SettingKind::Text),
    ("limits.total_memory", SettingKind::Text),
    ("limits.total_cpus", SettingKind::Text),
    ("limits.total_pids", SettingKind::Count),
    ("limits.max_sandboxes", SettingKind::Count),
    ("limits.soft_sandboxes", SettingKind::Count),
    ("limits.max_commands", SettingKind::Count),
    ("limits.max_snapshots", SettingKind::Count),
    ("limits.max_volumes", SettingKind::Count),
    ("limits.open_files_percent", SettingKind::Count),
    ("limits.concurrent_requests", SettingKind::Count),
    ("limits.concurrent_streams", SettingKind::Count),
    ("limits.connections_per_address", SettingKind::Count),
    ("limits.json_body", SettingKind::Text),
    ("prepared.volumes", SettingKind::Count),
    ("prepared.namespaces", SettingKind::Count),
    ("volumes.host_paths", SettingKind::Text),
    ("volumes.default_size", SettingKind::Text),
    ("gateway.mode", SettingKind::Text),
    ("gateway.domain", SettingKind::Text),
    ("gateway.public", SettingKind::Switch),
    ("output.kept", SettingKind::Text),
    ("output.max_kept", SettingKind::Text),
    ("output.stall_timeout", SettingKind::Text),
    ("metrics.per_owner", SettingKind::Switch),
    ("metrics.max_owners", SettingKind::Count),
    ("network.default", SettingKind::Text),
    ("network.most", SettingKind::Text),
    ("network.range", SettingKind::Text),
    ("network.range6", SettingKind::Text),
    ("network.resolvers", SettingKind::List),
    ("network.allow", SettingKind::List),
    ("network.deny", SettingKind::List),
    ("network.upstream_proxy", SettingKind::Text),
    ("network.filter.always_deny", SettingKind::List),
    ("network.filter.always_allow", SettingKind::List),
    ("network.filter.rules", SettingKind::List),
    ("network.filter.connections", SettingKind::Count),
];

/// Variables with our prefix that are not settings of the server: the address for clients, the path of
/// the file, and the program under test.
const NON_SETTING_VARIABLES: &[&str] = &["CORACLE_URL", "CORACLE_CONFIG", "CORACLE_BIN"];

/// The short name of `CORACLE_LOG_LEVEL`.
const LOG_LEVEL_VARIABLE: &str = "CORACLE_LOG";

const VARIABLE_PREFIX: &str = "CORACLE_";

fn variable_name(setting: &str) -> String {
    format!("{VARIABLE_PREFIX}{}", setting.replace('.', "_").to_ascii_uppercase())
}

/// Turns the variables of the environment into the table that a file would have given.
pub(super) fn table_from_variables(variables: impl Iterator<Item = (String, String)>) -> Result<Table> {
    let mut table = Table::new();
    for (name, text) in variables.filter(|(name, _)| name.starts_with(VARIABLE_PREFIX)) {
        let is_named = |setting: &str| {
            variable_name(setting) == name || (setting == "log.level" && name == LOG_LEVEL_VARIABLE)
        };
        match known_settings().find(|(setting, _)| is_named(setting)) {
            Some((setting, kind)) => {
                insert_setting(&mut table, &setting, parse_variable(&name, &text, kind)?)
            }
            None if is_ignored_variable(&name) => {}
            None => return unknown_variable_error(&name),
        }
    }
    front_sections::use_former_names(&mut table)?;
    Ok(table)
}

/// Every setting that a variable can hold, with those of the fronts.
fn known_settings() -> impl Iterator<Item = (String, SettingKind)> {
    let shared = VARIABLE_SETTINGS.iter().map(|(setting, kind)| ((*setting).to_owned(), *kind));
    let kind = |kind: FrontSettingKind| match kind {
        FrontSettingKind::Text
        | FrontSettingKind::SecretText
        | FrontSettingKind::Duration
        | FrontSettingKind::Amount
        | FrontSettingKind::HostDirectory => SettingKind::Text,
        FrontSettingKind::Number => SettingKind::Count,
        FrontSettingKind::Switch => SettingKind::Switch,
        FrontSettingKind::SecretList => SettingKind::List,
    };
    shared.chain(front_sections::setting_names().map(move |(setting, written)| (setting, kind(written))))
}

/// Whether the server ignores a variable. Cluster managers put the addresses of a service called
/// `coracle` into the environment of every container.
fn is_ignored_variable(name: &str) -> bool {
    let rest = &name[VARIABLE_PREFIX.len()..];
    let injected = rest.starts_with("SERVICE_") || rest == "PORT" || rest.starts_with("PORT_");
    NON_SETTING_VARIABLES.contains(&name) || injected || rest.starts_with("TEST_")
}

fn unknown_variable_error<T>(name: &str) -> Result<T> {
    let known: Vec<String> = known_settings().map(|(setting, _)| variable_name(&setting)).collect();
    Err(anyhow::anyhow!("the variable `{name}` is no setting"))
        .with_hint(format!("the settings are {}", known.join(", ")))
}

fn parse_variable(name: &str, text: &str, kind: SettingKind) -> Result<Value> {
    Ok(match kind {
        SettingKind::Text => Value::String(text.to_owned()),
        SettingKind::Count => match text.parse() {
            Ok(number) => Value::Integer(number),
            Err(_) => bail!("the variable `{name}` is `{text}`, which is not a number"),
        },
        SettingKind::List => {
            let texts = text.split(',').map(str::trim).filter(|text| !text.is_empty());
            Value::Array(texts.map(|text| Value::String(text.to_owned())).collect())
        }
        SettingKind::Switch => match text {
            "true" | "1" => Value::Boolean(true),
            "false" | "0" => Value::Boolean(false),
            _ => bail!("the variable `{name}` is `{text}`, neither `true` nor `false`"),
        },
    })
}

/// Inserts a value under a dotted name.
pub(super) fn insert_setting(table: &mut Table, setting: &str, value: Value) {
    match setting.split_once('.') {
        None => {
            table.insert(setting.to_owned(), value);
        }
        Some((section, key)) => {
            let section = table.entry(section).or_insert_with(|| Value::Table(Table::new()));
            if let Value::Table(section) = section {
                insert_setting(section, key, value);
            }
        }
    }
}

/// Merges `over` into `base`: where both have a value, that of `over` is taken.
pub(super) fn merge_tables(base: &mut Table, over: Table) {
    for (key, value) in over {
        match (base.get_mut(&key), value) {
            (Some(Value::Table(below)), Value::Table(above)) => merge_tables(below, above),
            (_, value) => {
                base.insert(key, value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_all(pairs: &[(&str, &str)]) -> Result<Table> {
        table_from_variables(pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())))
    }

    #[test]
    fn variables_become_the_tables_of_a_file() {
        let found = read_all(&[
            ("CORACLE_LIMITS_PIDS", "64"),
            ("CORACLE_IMAGES_STRICT", "true"),
            ("CORACLE_API_KEY", "12345"),
            ("CORACLE_URL", "http://elsewhere"),
            ("CORACLE_SERVICE_HOST", "10.0.0.1"),
            ("PATH", "/bin"),
        ]);
        let expected =
            toml::from_str("api_key = \"12345\"\nlimits.pids = 64\nimages.strict = true").expect("toml");
        assert_eq!(found.expect("it reads"), expected);
    }

    #[test]
    fn both_names_of_a_front_setting_are_variables() {
        let expected: Table = toml::from_str("lines = \"S\"").expect("toml");
        for name in ["CORACLE_LINES", "CORACLE_OPENSANDBOX_LINES"] {
            let mut found = read_all(&[(name, "S")]).expect("it reads");
            found.retain(|_, value| !value.as_table().is_some_and(Table::is_empty));
            assert_eq!(found, expected, "{name}");
        }
    }

    #[test]
    fn a_variable_that_is_no_setting_is_an_error() {
        let error = read_all(&[("CORACLE_LISTN", "x")]).expect_err("it is unknown");
        assert_eq!(error.to_string(), "the variable `CORACLE_LISTN` is no setting");
    }

    #[test]
    fn every_setting_is_known_to_the_file_and_described() {
        let described = include_str!("../../../../docs/configuration.md");
        for (setting, kind) in VARIABLE_SETTINGS {
            let sample = match (kind, *setting) {
                (SettingKind::Count, _) => Value::Integer(1),
                (SettingKind::List, _) => Value::Array(vec![Value::String("1".to_owned())]),
                (SettingKind::Switch, _) => Value::Boolean(true),
                (SettingKind::Text, _) => Value::String("1".to_owned()),
            };
            let mut table = Table::new();
            insert_setting(&mut table, setting, sample);
            let raw = table.try_into::<super::super::raw::RawConfig>();
            assert!(raw.is_ok(), "{setting}: {raw:?}");
            assert!(described.contains(&format!("`{setting}`")), "docs/configuration.md lacks `{setting}`");
        }
    }

    /// So `coracle config show` omits nothing.
    #[test]
    fn every_setting_is_listed_under_its_name() {
        let described = include_str!("../../../../docs/configuration.md");
        let config = super::super::tests::parse_settings("").expect("defaults hold");
        let listed: Vec<String> = config.entries().iter().map(|entry| entry.name()).collect();
        for (setting, _) in VARIABLE_SETTINGS {
            assert!(listed.iter().any(|name| name == setting), "{setting} is not listed");
        }
        for section in fronts::front_sections() {
            for setting in section.settings {
                let shown = front_sections::shown_path(&section, setting).join(".");
                assert!(listed.contains(&shown), "{shown} is not listed");
                assert!(described.contains(&format!("`{shown}`")), "docs/configuration.md lacks `{shown}`");
            }
        }
    }

    #[test]
    fn the_short_variable_of_the_log_level_is_known() {
        let found = read_all(&[("CORACLE_LOG", "debug"), ("CORACLE_LOG_FORMAT", "json")]);
        let expected = toml::from_str("log = { level = \"debug\", format = \"json\" }").expect("toml");
        assert_eq!(found.expect("it reads"), expected);
    }

    #[test]
    fn the_upper_layer_wins_key_by_key() {
        let mut base: Table =
            toml::from_str("listen = \"a\"\nlimits.pids = 1\nlimits.memory = \"1g\"").expect("toml");
        merge_tables(&mut base, toml::from_str("limits.pids = 2").expect("toml"));
        let expected: Table =
            toml::from_str("listen = \"a\"\nlimits.pids = 2\nlimits.memory = \"1g\"").expect("toml");
        assert_eq!(base, expected);
    }
}
