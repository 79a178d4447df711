//! The settings by name, so that the environment can set each of them.
//!
//! The setting `limits.memory` is the variable `CORACLE_LIMITS_MEMORY`. A `CORACLE_` variable that names
//! no setting is an error, as an unknown key in the file is: a typing mistake in a limit must not pass
//! unnoticed.

use anyhow::{Result, bail};
use toml::{Table, Value};

use crate::output::WithHint;

#[derive(Clone, Copy, Debug)]
enum Kind {
    Text,
    Count,
    Switch,
    /// A list of texts, separated by commas in a variable.
    List,
}

/// Every setting that a variable can hold. Tables with free names (`images.aliases`, `owners`) and pools
/// can be set in the file only.
const SETTINGS: &[(&str, Kind)] = &[
    ("listen", Kind::Text),
    ("state_dir", Kind::Text),
    ("api_key", Kind::Text),
    ("public_address", Kind::Text),
    ("instance", Kind::Text),
    ("lines", Kind::Text),
    ("on_stop", Kind::Text),
    ("require_limits", Kind::Switch),
    ("uid_base", Kind::Count),
    ("free_space_floor", Kind::Text),
    ("longest_timeout", Kind::Text),
    ("park_after", Kind::Text),
    ("renewal_interval", Kind::Text),
    ("answer_timeout", Kind::Text),
    ("log.level", Kind::Text),
    ("log.format", Kind::Text),
    ("images.strict", Kind::Switch),
    ("images.max_bytes", Kind::Text),
    ("images.pull", Kind::Text),
    ("images.registries", Kind::List),
    ("images.plain_http", Kind::List),
    ("limits.memory", Kind::Text),
    ("limits.cpus", Kind::Text),
    ("limits.pids", Kind::Count),
    ("limits.disk", Kind::Text),
    ("limits.max_memory", Kind::Text),
    ("limits.max_cpus", Kind::Text),
    ("limits.max_pids", Kind::Count),
    ("limits.max_disk", Kind::Text),
    ("limits.max_sandboxes", Kind::Count),
    ("limits.soft_sandboxes", Kind::Count),
    ("limits.max_commands", Kind::Count),
    ("limits.max_snapshots", Kind::Count),
    ("limits.max_volumes", Kind::Count),
    ("limits.concurrent_requests", Kind::Count),
    ("limits.json_body", Kind::Text),
    ("prepared.volumes", Kind::Count),
    ("prepared.namespaces", Kind::Count),
    ("volumes.host_paths", Kind::Text),
    ("volumes.default_size", Kind::Text),
    ("gateway.mode", Kind::Text),
    ("gateway.domain", Kind::Text),
    ("gateway.public", Kind::Switch),
    ("gateway.keys", Kind::List),
    ("gateway.short_signatures", Kind::Switch),
    ("output.kept", Kind::Text),
    ("output.max_kept", Kind::Text),
    ("output.stall_timeout", Kind::Text),
    ("metrics.per_owner", Kind::Switch),
    ("metrics.max_owners", Kind::Count),
    ("network.default", Kind::Text),
    ("network.range", Kind::Text),
    ("network.range6", Kind::Text),
    ("network.resolvers", Kind::List),
    ("network.allow", Kind::List),
    ("network.deny", Kind::List),
];

/// Variables with our prefix that are not settings of the server: the address for clients, the path of
/// the file, and the program under test.
const OTHERS: &[&str] = &["CORACLE_URL", "CORACLE_CONFIG", "CORACLE_BIN"];

/// The short name of `CORACLE_LOG_LEVEL`.
const LOG_LEVEL: &str = "CORACLE_LOG";

const PREFIX: &str = "CORACLE_";

fn variable(setting: &str) -> String {
    format!("{PREFIX}{}", setting.replace('.', "_").to_ascii_uppercase())
}

/// Turns the variables of the environment into the table that a file would have given.
pub(super) fn table(variables: impl Iterator<Item = (String, String)>) -> Result<Table> {
    let mut table = Table::new();
    for (name, text) in variables.filter(|(name, _)| name.starts_with(PREFIX)) {
        let is_named =
            |setting: &str| variable(setting) == name || (setting == "log.level" && name == LOG_LEVEL);
        match SETTINGS.iter().find(|(setting, _)| is_named(setting)) {
            Some((setting, kind)) => insert(&mut table, setting, read(&name, &text, *kind)?),
            None if foreign(&name) => {}
            None => return unknown(&name),
        }
    }
    Ok(table)
}

/// Whether the server ignores a variable. Cluster managers put the addresses of a service called
/// `coracle` into the environment of every container.
fn foreign(name: &str) -> bool {
    let rest = &name[PREFIX.len()..];
    let injected = rest.starts_with("SERVICE_") || rest == "PORT" || rest.starts_with("PORT_");
    OTHERS.contains(&name) || injected || rest.starts_with("TEST_")
}

fn unknown<T>(name: &str) -> Result<T> {
    let known: Vec<String> = SETTINGS.iter().map(|(setting, _)| variable(setting)).collect();
    Err(anyhow::anyhow!("the variable `{name}` is no setting"))
        .hint(format!("the settings are {}", known.join(", ")))
}

fn read(name: &str, text: &str, kind: Kind) -> Result<Value> {
    Ok(match kind {
        Kind::Text => Value::String(text.to_owned()),
        Kind::Count => match text.parse() {
            Ok(number) => Value::Integer(number),
            Err(_) => bail!("the variable `{name}` is `{text}`, which is not a number"),
        },
        Kind::List => {
            let texts = text.split(',').map(str::trim).filter(|text| !text.is_empty());
            Value::Array(texts.map(|text| Value::String(text.to_owned())).collect())
        }
        Kind::Switch => match text {
            "true" | "1" => Value::Boolean(true),
            "false" | "0" => Value::Boolean(false),
            _ => bail!("the variable `{name}` is `{text}`, neither `true` nor `false`"),
        },
    })
}

/// Inserts a value under a dotted name. A setting is at most one table deep.
pub(super) fn insert(table: &mut Table, setting: &str, value: Value) {
    match setting.split_once('.') {
        None => {
            table.insert(setting.to_owned(), value);
        }
        Some((section, key)) => {
            let section = table.entry(section).or_insert_with(|| Value::Table(Table::new()));
            if let Value::Table(section) = section {
                section.insert(key.to_owned(), value);
            }
        }
    }
}

/// Merges `over` into `base`: where both have a value, that of `over` is taken.
pub(super) fn lay(base: &mut Table, over: Table) {
    for (key, value) in over {
        match (base.get_mut(&key), value) {
            (Some(Value::Table(below)), Value::Table(above)) => lay(below, above),
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
        table(pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())))
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
    fn a_variable_that_is_no_setting_is_an_error() {
        let error = read_all(&[("CORACLE_LISTN", "x")]).expect_err("it is unknown");
        assert_eq!(error.to_string(), "the variable `CORACLE_LISTN` is no setting");
    }

    #[test]
    fn every_setting_is_known_to_the_file_and_described() {
        let described = include_str!("../../../../docs/configuration.md");
        for (setting, kind) in SETTINGS {
            let sample = match (kind, *setting) {
                (Kind::Count, _) => Value::Integer(1),
                (Kind::List, _) => Value::Array(vec![Value::String("1".to_owned())]),
                (Kind::Switch, _) => Value::Boolean(true),
                (Kind::Text, _) => Value::String("1".to_owned()),
            };
            let mut table = Table::new();
            insert(&mut table, setting, sample);
            let raw = table.try_into::<super::super::raw::RawConfig>();
            assert!(raw.is_ok(), "{setting}: {raw:?}");
            assert!(described.contains(&format!("`{setting}`")), "docs/configuration.md lacks `{setting}`");
        }
    }

    /// So `coracle config show` omits nothing.
    #[test]
    fn every_setting_is_listed_under_its_name() {
        let config = super::super::tests::written("").expect("defaults hold");
        let listed: Vec<String> = config.entries().iter().map(|entry| entry.name()).collect();
        for (setting, _) in SETTINGS {
            assert!(listed.iter().any(|name| name == setting), "{setting} is not listed");
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
        lay(&mut base, toml::from_str("limits.pids = 2").expect("toml"));
        let expected: Table =
            toml::from_str("listen = \"a\"\nlimits.pids = 2\nlimits.memory = \"1g\"").expect("toml");
        assert_eq!(base, expected);
    }
}
