//! Every effective setting, by the name under which it is written. `coracle config show` prints the
//! list, and a reload compares two of them.

use std::time::Duration;

use egress_protocol::{ActionMessage, RuleMessage};
use fronts::{FrontSettingKind, FrontValues, front_sections};
use launcher::plan::LimitName;
use serde::Serialize;
use serde_json::{Value, json};

use super::front_sections::shown_path;
use super::gateway::GatewayMode;
use super::log::LogFormat;
use super::{Config, OnStop};

/// Shown in place of a secret.
const HIDDEN_VALUE: &str = "***";

/// One setting and its value. The value may be a secret: print [`SettingEntry::visible_value`].
pub(crate) struct SettingEntry {
    /// The name in segments, as tables of the file nest.
    pub path: Vec<String>,
    value: Value,
    visibility: SettingVisibility,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum SettingVisibility {
    Plain,
    Secret,
}

impl SettingEntry {
    /// The name as it is written in the file; a segment with unusual characters is quoted.
    pub(crate) fn name(&self) -> String {
        let bare = |segment: &str| {
            segment.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-'))
        };
        let segments = self
            .path
            .iter()
            .map(|segment| if bare(segment) { segment.clone() } else { format!("\"{segment}\"") });
        segments.collect::<Vec<_>>().join(".")
    }

    pub(crate) fn is_secret(&self) -> bool {
        self.visibility == SettingVisibility::Secret && !self.value.is_null() && self.value != json!([])
    }

    /// The value without secrets; `null` if it is not set.
    pub(crate) fn visible_value(&self) -> Value {
        match (self.visibility, &self.value) {
            (SettingVisibility::Plain, value) => value.clone(),
            (SettingVisibility::Secret, Value::Null) => Value::Null,
            (SettingVisibility::Secret, Value::Array(list)) => {
                list.iter().map(|_| json!(HIDDEN_VALUE)).collect()
            }
            (SettingVisibility::Secret, _) => json!(HIDDEN_VALUE),
        }
    }

    /// As [`SettingEntry::visible_value`], in one line for people.
    pub(crate) fn visible_text(&self) -> String {
        match self.visible_value() {
            Value::Null => "-".to_owned(),
            Value::String(text) => text,
            other => other.to_string(),
        }
    }
}

/// A setting whose value differs between two configurations.
pub(crate) struct SettingChange {
    pub name: String,
    pub from: String,
    pub to: String,
}

/// The differences between two configurations. A setting that exists in only one of them has the value
/// `-` in the other.
pub(crate) fn diff_configs(before: &Config, after: &Config) -> Vec<SettingChange> {
    let (before, after) = (before.entries(), after.entries());
    let mut found = Vec::new();
    let text =
        |entry: Option<&SettingEntry>| entry.map_or_else(|| "-".to_owned(), SettingEntry::visible_text);
    for old in &before {
        let new = after.iter().find(|entry| entry.path == old.path);
        if new.is_none_or(|new| new.value != old.value) {
            found.push(SettingChange { name: old.name(), from: old.visible_text(), to: text(new) });
        }
    }
    let added = after.iter().filter(|new| before.iter().all(|old| old.path != new.path));
    found.extend(added.map(|new| SettingChange {
        name: new.name(),
        from: text(None),
        to: new.visible_text(),
    }));
    found
}

/// Collects entries; their names are written with dots.
#[derive(Default)]
struct SettingList(Vec<SettingEntry>);

impl SettingList {
    fn add(&mut self, name: &str, value: impl Serialize) {
        self.add_path(name.split('.').map(str::to_owned).collect(), value, SettingVisibility::Plain);
    }

    fn add_secret(&mut self, name: &str, value: impl Serialize) {
        self.add_path(name.split('.').map(str::to_owned).collect(), value, SettingVisibility::Secret);
    }

    fn add_path(&mut self, path: Vec<String>, value: impl Serialize, visibility: SettingVisibility) {
        let value = serde_json::to_value(value).expect("settings are plain data");
        self.0.push(SettingEntry { path, value, visibility });
    }
}

/// A duration as it can be written in the file.
fn format_seconds(time: Duration) -> String {
    format!("{}s", time.as_secs())
}

/// A rule as it is written in the file.
fn show_rule(rule: &RuleMessage) -> String {
    let word = match rule.action {
        ActionMessage::Allow => "allow",
        ActionMessage::Deny => "deny",
    };
    format!("{word} {}", rule.target)
}

fn to_strings<T: ToString>(list: &[T]) -> Vec<String> {
    list.iter().map(ToString::to_string).collect()
}

/// The settings of each front, under the names that are shown.
fn add_fronts(fronts: &FrontValues, entries: &mut SettingList) {
    for section in front_sections() {
        for setting in section.settings {
            let value = fronts.get(section.front).and_then(|values| values.get(setting.name));
            let value = match (setting.kind, value) {
                (FrontSettingKind::Duration, Some(Value::Number(millis))) => {
                    json!(millis.as_u64().map(|millis| format_seconds(Duration::from_millis(millis))))
                }
                (_, value) => json!(value),
            };
            let visibility = match setting.kind {
                FrontSettingKind::SecretText | FrontSettingKind::SecretList => SettingVisibility::Secret,
                FrontSettingKind::Text
                | FrontSettingKind::Duration
                | FrontSettingKind::Switch
                | FrontSettingKind::Number
                | FrontSettingKind::Amount
                | FrontSettingKind::HostDirectory => SettingVisibility::Plain,
            };
            entries.add_path(shown_path(&section, setting), value, visibility);
        }
    }
}

impl Config {
    /// Every setting with its value. The patterns have no `..`, so the compiler requires that a new
    /// setting is listed.
    pub(crate) fn entries(&self) -> Vec<SettingEntry> {
        let Self {
            listen,
            state_dir,
            api_key,
            public_address,
            trusted_proxies,
            naming,
            on_stop,
            images: _,
            limits: _,
            require_limits,
            uid_base,
            free_space_floor,
            disks,
            longest_timeout,
            owners: _,
            park_after,
            prepared,
            pools,
            volumes,
            network: _,
            most_network: _,
            gateway: _,
            answer_timeout,
            fronts,
            output,
            metrics,
            log,
            // It is no setting of a configuration.
            own_server: _,
        } = self;
        let mut entries = SettingList::default();
        entries.add("listen", listen.to_string());
        entries.add("state_dir", state_dir);
        entries.add_secret("api_key", api_key.as_ref().map(super::OperatorKey::expose));
        entries.add("public_address", public_address);
        entries.add("trusted_proxies", trusted_proxies);
        entries.add("instance", &naming.prefix);
        entries.add("on_stop", if *on_stop == OnStop::Keep { "keep" } else { "remove" });
        entries.add("park_after", format_seconds(*park_after));
        entries.add("answer_timeout", format_seconds(*answer_timeout));
        add_fronts(fronts, &mut entries);
        entries.add("longest_timeout", longest_timeout.map(format_seconds));
        entries.add("log.level", &log.level);
        entries.add("log.format", if log.format == LogFormat::Text { "text" } else { "json" });
        entries.add("output.kept", output.kept.to_string());
        entries.add("output.max_kept", output.max_kept.to_string());
        entries.add("output.stall_timeout", format_seconds(output.stall_timeout));
        entries.add("metrics.per_owner", metrics.per_owner);
        entries.add("metrics.max_owners", metrics.max_owners);
        self.add_limits(&mut entries);
        entries.add("require_limits", require_limits);
        entries.add("free_space_floor", free_space_floor.to_string());
        entries.add("disks", disks.name());
        self.add_owners(&mut entries);
        self.add_images(&mut entries);
        entries.add("uid_base", uid_base);
        let paths: Vec<_> = volumes.host_paths.iter().map(|path| path.written.clone()).collect();
        entries.add("volumes.host_paths", paths);
        entries.add("volumes.default_size", volumes.default_size.to_string());
        self.add_network(&mut entries);
        self.add_gateway(&mut entries);
        entries.add("prepared.volumes", prepared.volumes);
        entries.add("prepared.namespaces", prepared.namespaces);
        for pool in pools {
            entries.add_path(vec!["pool".to_owned(), pool.name().to_owned()], pool, SettingVisibility::Plain);
        }
        entries.0
    }

    fn add_limits(&self, entries: &mut SettingList) {
        let super::LimitSettings {
            memory,
            cpus,
            pids,
            disk,
            maxima: most,
            totals,
            max_sandboxes,
            soft_sandboxes,
            max_commands,
            max_snapshots,
            max_volumes,
            open_files_percent,
            concurrent_requests,
            concurrent_streams,
            connections_per_address,
            json_body,
        } = &self.limits;
        entries.add("limits.memory", memory.to_string());
        entries.add("limits.cpus", cpus.to_string());
        entries.add("limits.pids", pids);
        entries.add("limits.disk", disk.to_string());
        entries.add("limits.max_memory", most.memory.map(|most| most.to_string()));
        entries.add("limits.max_cpus", most.cpus.map(|most| most.to_string()));
        entries.add("limits.max_pids", most.pids);
        entries.add("limits.max_disk", most.disk.map(|most| most.to_string()));
        for limit in [LimitName::Memory, LimitName::Cpus, LimitName::Pids] {
            let total = totals.get(limit).map(|total| total.shown(limit));
            entries.add(&format!("limits.total_{}", limit.as_str()), total);
        }
        entries.add("limits.max_sandboxes", max_sandboxes);
        entries.add("limits.soft_sandboxes", soft_sandboxes);
        entries.add("limits.max_commands", max_commands);
        entries.add("limits.max_snapshots", max_snapshots);
        entries.add("limits.max_volumes", max_volumes);
        entries.add("limits.open_files_percent", open_files_percent);
        entries.add("limits.concurrent_requests", concurrent_requests);
        entries.add("limits.concurrent_streams", concurrent_streams);
        entries.add("limits.connections_per_address", connections_per_address);
        entries.add("limits.json_body", json_body.to_string());
    }

    /// Only the limits that an owner's quota names: all others are unlimited.
    fn add_owners(&self, entries: &mut SettingList) {
        for (owner, super::QuotaSettings { sandboxes, millicpus, memory, disk }) in &self.owners {
            let bytes = |bytes: &Option<u64>| bytes.map(|bytes| json!(domain::Bytes(bytes).to_string()));
            let quotas = [
                ("sandboxes", sandboxes.map(|count| json!(count))),
                ("cpus", millicpus.map(|cpus| json!(domain::MilliCpus(cpus).to_string()))),
                ("memory", bytes(memory)),
                ("disk", bytes(disk)),
            ];
            for (name, value) in quotas {
                if let Some(value) = value {
                    let path = ["owners", owner, name].map(str::to_owned).to_vec();
                    entries.add_path(path, value, SettingVisibility::Plain);
                }
            }
        }
    }

    fn add_images(&self, entries: &mut SettingList) {
        let super::ImageSettings { strict, aliases, max_bytes, allowed, plain } = &self.images;
        entries.add("images.strict", strict);
        entries.add("images.max_bytes", max_bytes.map(|most| most.to_string()));
        entries.add("images.pull", if allowed.is_empty() { "never" } else { "missing" });
        entries.add("images.registries", allowed);
        entries.add("images.plain_http", plain);
        for (alias, image) in aliases {
            let path = ["images", "aliases", alias].map(str::to_owned).to_vec();
            entries.add_path(path, image, SettingVisibility::Plain);
        }
    }

    fn add_network(&self, entries: &mut SettingList) {
        let launcher::network::NetworkSettings {
            default,
            range,
            range6,
            resolvers,
            allow,
            deny,
            filter,
            upstream_proxy,
            // The state directory decides, not a setting.
            auto_needs_link: _,
        } = &self.network;
        entries.add("network.default", default);
        entries.add("network.most", self.most_network);
        entries.add("network.range", range.as_ref().map(ToString::to_string));
        entries.add("network.range6", range6.to_string());
        entries.add("network.resolvers", to_strings(resolvers));
        entries.add("network.allow", to_strings(allow));
        entries.add("network.deny", to_strings(deny));
        entries.add_secret("network.upstream_proxy", upstream_proxy);
        let launcher::network::FilterSettings { always_deny, always_allow, connections, rules } = filter;
        entries.add("network.filter.always_deny", to_strings(always_deny));
        entries.add("network.filter.always_allow", to_strings(always_allow));
        let rules: Vec<String> = rules.iter().map(show_rule).collect();
        entries.add("network.filter.rules", rules);
        entries.add("network.filter.connections", connections);
    }

    fn add_gateway(&self, entries: &mut SettingList) {
        let super::GatewaySettings { mode, public } = &self.gateway;
        let (mode, domain) = match mode {
            GatewayMode::Off => ("off", None),
            GatewayMode::Wildcard(domain) => ("wildcard", Some(domain)),
            GatewayMode::Header => ("header", None),
        };
        entries.add("gateway.mode", mode);
        entries.add("gateway.domain", domain);
        entries.add("gateway.public", public);
    }
}
