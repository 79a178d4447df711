//! The section `[deerflow]` of the configuration.

use std::time::Duration;

use domain::{Bytes, MilliCpus, NetworkAccess, Owner, ResourceLimits};
use serde_json::{Value, json};
use service::{LimitName, Service};

use super::request_checks::normalize_path;
use crate::aio::guest;
use crate::aio::notes::DEFAULT_SHELL_SESSIONS;
use crate::front_settings::{FrontSetting, FrontSettingError, FrontSettingKind, SettingValues};
use crate::settings::HttpSettings;

pub(super) static SETTINGS: &[FrontSetting] = &[
    setting(AUTO_RESTART, FrontSettingKind::Switch),
    setting(MAX_SHELL_SESSIONS, FrontSettingKind::Number),
    setting(UID, FrontSettingKind::Number),
    setting(GID, FrontSettingKind::Number),
    setting(USER_DATA, FrontSettingKind::Text),
    setting(STATE_ROOT, FrontSettingKind::HostDirectory),
    setting(OWNER, FrontSettingKind::Text),
    setting(KEEP_USER_DATA, FrontSettingKind::Duration),
    setting(IDLE_TIMEOUT, FrontSettingKind::Duration),
    setting(IMAGE, FrontSettingKind::Text),
    setting(NETWORK, FrontSettingKind::Text),
    setting(MEMORY, FrontSettingKind::Amount),
    setting(CPUS, FrontSettingKind::Amount),
    setting(PIDS, FrontSettingKind::Number),
    setting(DISK, FrontSettingKind::Amount),
];

const AUTO_RESTART: &str = "auto_restart";
const MAX_SHELL_SESSIONS: &str = "max_shell_sessions";
const UID: &str = "uid";
const GID: &str = "gid";
const USER_DATA: &str = "user_data";
const STATE_ROOT: &str = "state_root";
const OWNER: &str = "owner";
const KEEP_USER_DATA: &str = "keep_user_data";
const IDLE_TIMEOUT: &str = "idle_timeout";
const IMAGE: &str = "image";
const NETWORK: &str = "network";
const MEMORY: &str = "memory";
const CPUS: &str = "cpus";
const PIDS: &str = "pids";
const DISK: &str = "disk";

/// The largest number of shell sessions that may be configured.
const MAX_CONFIGURED_SESSIONS: u64 = 10_000;
/// The ids that a sandbox has, without that of nobody.
pub(in crate::aio) const MAX_ID: u64 = 65_533;
const DEFAULT_KEEP_USER_DATA: Duration = Duration::from_secs(7 * 24 * 60 * 60);
/// DeerFlow removes sandboxes that it does not need, by default after ten minutes. This is for those whose gateway
/// disappeared.
const DEFAULT_IDLE_TIMEOUT: Duration = Duration::from_secs(60 * 60);

/// The limits of DeerFlow's own pods, for limits that the operator does not set. A limit that this host cannot enforce
/// is left out, if the server does not require limits.
const POD_MEMORY: Bytes = Bytes(1 << 30);
const POD_CPUS: MilliCpus = MilliCpus(1000);
const POD_DISK: Bytes = Bytes(500 << 20);

/// The settings of the provisioner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::aio) struct ProvisionerSettings {
    /// Whether a client that still uses the address of a crashed sandbox is served by a successor.
    pub(in crate::aio) auto_restart: bool,
    /// The configured maximum; `effective_max_shell_sessions` also applies the limit on commands.
    pub(super) max_shell_sessions: u32,
    /// The ids of the user in sandboxes.
    pub(in crate::aio) uid: u32,
    pub(in crate::aio) gid: u32,
    pub(in crate::aio) user_data: UserDataMode,
    /// The directory of the host that holds DeerFlow's state.
    pub(in crate::aio) state_root: Option<String>,
    /// The only owner whose sandboxes may mount directories below `state_root`.
    pub(in crate::aio) owner: Owner,
    /// How long a volume with user data is kept after its last use; `None` for ever.
    pub(in crate::aio) keep_user_data: Option<Duration>,
    /// Zero means never.
    pub(in crate::aio) idle_timeout: Duration,
    pub(in crate::aio) image: String,
    /// `None` for the default of the server.
    pub(in crate::aio) network: Option<NetworkAccess>,
    /// The limits that the operator set.
    pub(in crate::aio) limits: ResourceLimits,
}

/// Where the files of a conversation are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::aio) enum UserDataMode {
    /// On the disk of the sandbox.
    None,
    /// In directories of the host, which DeerFlow's gateway uses as well.
    Host,
    /// In a volume for each conversation.
    Volume,
}

impl UserDataMode {
    const ALL: [Self; 3] = [Self::None, Self::Host, Self::Volume];

    fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Host => "host",
            Self::Volume => "volume",
        }
    }
}

impl Default for ProvisionerSettings {
    fn default() -> Self {
        Self {
            auto_restart: true,
            max_shell_sessions: 200,
            uid: guest::DEFAULT_UID,
            gid: guest::DEFAULT_UID,
            user_data: UserDataMode::None,
            state_root: None,
            owner: Owner::operator(),
            keep_user_data: Some(DEFAULT_KEEP_USER_DATA),
            idle_timeout: DEFAULT_IDLE_TIMEOUT,
            image: "host".to_owned(),
            network: None,
            limits: ResourceLimits::default(),
        }
    }
}

const fn setting(name: &'static str, kind: FrontSettingKind) -> FrontSetting {
    FrontSetting { name, former_name: None, kind }
}

impl ProvisionerSettings {
    /// The settings of a server, which were checked when its configuration was read.
    pub(in crate::aio) fn of_server(settings: &HttpSettings) -> Self {
        let values = settings.fronts.get(super::PROVISIONER_SECTION).map(Self::from_values);
        values.transpose().expect("settings are checked when the configuration is read").unwrap_or_default()
    }

    /// How many shell sessions the creator of a sandbox may ask for. All of them may be busy at once, so there are not
    /// more than a sandbox may run commands.
    pub(in crate::aio) fn effective_max_shell_sessions(&self, service: &Service) -> u32 {
        self.max_shell_sessions.min(service.commands_per_sandbox())
    }

    /// How many shell sessions a sandbox has whose creator names no number.
    pub(in crate::aio) fn default_shell_sessions(&self, service: &Service) -> u32 {
        DEFAULT_SHELL_SESSIONS.min(self.effective_max_shell_sessions(service))
    }

    /// The limits of a sandbox: those that are configured, and of the others those that this server can enforce.
    pub(super) fn effective_limits(&self, may_lack: impl Fn(LimitName) -> bool) -> ResourceLimits {
        let ResourceLimits { memory, cpus, pids, disk } = self.limits;
        ResourceLimits {
            memory: memory.or(Some(POD_MEMORY).filter(|_| !may_lack(LimitName::Memory))),
            cpus: cpus.or(Some(POD_CPUS).filter(|_| !may_lack(LimitName::Cpus))),
            pids,
            disk: disk.or(Some(POD_DISK).filter(|_| !may_lack(LimitName::Disk))),
        }
    }

    /// Reads values by name; those that are missing keep their defaults.
    pub(in crate::aio) fn from_values(values: &SettingValues) -> Result<Self, FrontSettingError> {
        let mut settings = Self::default();
        let written = WrittenValues(values);
        if let Some(switch) = written.switch(AUTO_RESTART)? {
            settings.auto_restart = switch;
        }
        if let Some(count) = written.number(MAX_SHELL_SESSIONS, 1, MAX_CONFIGURED_SESSIONS)? {
            settings.max_shell_sessions = count;
        }
        if let Some(uid) = written.number(UID, 1, MAX_ID)? {
            settings.uid = uid;
        }
        if let Some(gid) = written.number(GID, 1, MAX_ID)? {
            settings.gid = gid;
        }
        if let Some(text) = written.text(USER_DATA)? {
            let mode = UserDataMode::ALL.into_iter().find(|mode| mode.name() == text);
            settings.user_data = mode.ok_or_else(|| {
                refusal(USER_DATA, format!("`{text}`, none of `none`, `host` and `volume`"))
            })?;
        }
        if let Some(text) = written.text(STATE_ROOT)? {
            if normalize_path(text).as_deref() != Some(text) || text == "/" {
                return Err(refusal(STATE_ROOT, format!("`{text}`, not a plain absolute path")));
            }
            settings.state_root = Some(text.to_owned());
        }
        if settings.user_data == UserDataMode::Host && settings.state_root.is_none() {
            let hint = Some("set `deerflow.state_root` to DeerFlow's directory on this host");
            let reason = "`host`, which needs a `state_root`".to_owned();
            return Err(FrontSettingError { setting: USER_DATA, reason, hint });
        }
        if let Some(text) = written.text(OWNER)? {
            settings.owner =
                Owner::parse(text).map_err(|error| refusal(OWNER, format!("`{text}`: {error}")))?;
        }
        if let Some(time) = written.duration(KEEP_USER_DATA)? {
            settings.keep_user_data = Some(time).filter(|time| !time.is_zero());
        }
        if let Some(time) = written.duration(IDLE_TIMEOUT)? {
            settings.idle_timeout = time;
        }
        if let Some(text) = written.text(IMAGE)? {
            if text.trim().is_empty() || text.len() > 512 {
                return Err(refusal(IMAGE, "empty or longer than 512 bytes".to_owned()));
            }
            settings.image = text.to_owned();
        }
        if let Some(text) = written.text(NETWORK)? {
            settings.network = Some(match text {
                "auto" => NetworkAccess::Auto,
                "on" => NetworkAccess::On,
                "off" => NetworkAccess::Off,
                "filtered" => NetworkAccess::Filtered,
                _ => {
                    let why = format!("`{text}`, none of `auto`, `on`, `filtered` and `off`");
                    return Err(refusal(NETWORK, why));
                }
            });
        }
        settings.limits = ResourceLimits {
            memory: written
                .amount(MEMORY, |text| Bytes::parse_binary(text).map_err(|error| error.to_string()))?,
            cpus: written.amount(CPUS, |text| MilliCpus::parse(text).map_err(|error| error.to_string()))?,
            pids: written.number(PIDS, 1, u64::from(u32::MAX))?,
            disk: written
                .amount(DISK, |text| Bytes::parse_binary(text).map_err(|error| error.to_string()))?,
        };
        Ok(settings)
    }

    fn to_values(&self) -> SettingValues {
        let Self {
            auto_restart,
            max_shell_sessions,
            uid,
            gid,
            user_data,
            state_root,
            owner,
            keep_user_data,
            idle_timeout,
            image,
            network,
            limits,
        } = self;
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let network = network.map(NetworkAccess::name);
        SettingValues::from_iter([
            (AUTO_RESTART.to_owned(), json!(auto_restart)),
            (MAX_SHELL_SESSIONS.to_owned(), json!(max_shell_sessions)),
            (UID.to_owned(), json!(uid)),
            (GID.to_owned(), json!(gid)),
            (USER_DATA.to_owned(), json!(user_data.name())),
            (STATE_ROOT.to_owned(), json!(state_root)),
            (OWNER.to_owned(), json!(owner.as_str())),
            (KEEP_USER_DATA.to_owned(), json!(keep_user_data.map_or(0, millis))),
            (IDLE_TIMEOUT.to_owned(), json!(millis(*idle_timeout))),
            (IMAGE.to_owned(), json!(image)),
            (NETWORK.to_owned(), json!(network)),
            (MEMORY.to_owned(), json!(limits.memory.map(|bytes| bytes.0.to_string()))),
            (CPUS.to_owned(), json!(limits.cpus.map(|cpus| format!("{}m", cpus.0)))),
            (PIDS.to_owned(), json!(limits.pids)),
            (DISK.to_owned(), json!(limits.disk.map(|bytes| bytes.0.to_string()))),
        ])
    }
}

/// The values of the section as they were written. A `null` stands for a setting that was not written.
struct WrittenValues<'a>(&'a SettingValues);

impl WrittenValues<'_> {
    fn find(&self, name: &str) -> Option<&Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    fn switch(&self, name: &'static str) -> Result<Option<bool>, FrontSettingError> {
        let read = |value: &Value| {
            value.as_bool().ok_or_else(|| refusal(name, format!("`{value}`, neither true nor false")))
        };
        self.find(name).map(read).transpose()
    }

    fn number(&self, name: &'static str, least: u64, most: u64) -> Result<Option<u32>, FrontSettingError> {
        let read = |value: &Value| {
            let number = value.as_u64().filter(|number| (least..=most).contains(number));
            let number = number.and_then(|number| u32::try_from(number).ok());
            number.ok_or_else(|| refusal(name, format!("`{value}`, not a number from {least} to {most}")))
        };
        self.find(name).map(read).transpose()
    }

    fn duration(&self, name: &'static str) -> Result<Option<Duration>, FrontSettingError> {
        let read = |value: &Value| {
            let millis = value.as_u64().map(Duration::from_millis);
            millis.ok_or_else(|| refusal(name, format!("`{value}`, not a duration")))
        };
        self.find(name).map(read).transpose()
    }

    fn text(&self, name: &'static str) -> Result<Option<&str>, FrontSettingError> {
        let read = |value| Value::as_str(value).ok_or_else(|| refusal(name, format!("`{value}`, not text")));
        self.find(name).map(read).transpose()
    }

    fn amount<T>(
        &self,
        name: &'static str,
        parse: impl Fn(&str) -> Result<T, String>,
    ) -> Result<Option<T>, FrontSettingError> {
        let read = |text| parse(text).map_err(|error| refusal(name, format!("`{text}`: {error}")));
        self.text(name)?.map(read).transpose()
    }
}

fn refusal(setting: &'static str, reason: String) -> FrontSettingError {
    FrontSettingError { setting, reason, hint: None }
}

/// Checks the written settings and adds the defaults of the others.
pub(super) fn check_settings(written: SettingValues) -> Result<SettingValues, FrontSettingError> {
    ProvisionerSettings::from_values(&written).map(|settings| settings.to_values())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(json: Value) -> SettingValues {
        json.as_object().unwrap().clone()
    }

    #[test]
    fn checked_settings_are_read_again() {
        let written = json!({
            "auto_restart": false, "max_shell_sessions": 7, "uid": 1001, "gid": 1002, "user_data": "host",
            "state_root": "/srv/deerflow", "owner": "team", "keep_user_data": 0, "idle_timeout": 5000,
            "image": "python", "network": "off", "memory": "2g", "cpus": "1.5", "pids": 100, "disk": "1Gi",
        });
        let settings = ProvisionerSettings::from_values(&values(written.clone())).unwrap();
        let checked = check_settings(values(written)).unwrap();
        assert_eq!(ProvisionerSettings::from_values(&checked).unwrap(), settings);
        assert_eq!(settings.keep_user_data, None);
        assert_eq!(settings.limits.memory, Some(Bytes(2 << 30)));
        let defaults = check_settings(SettingValues::new()).unwrap();
        assert_eq!(ProvisionerSettings::from_values(&defaults).unwrap(), ProvisionerSettings::default());
    }

    #[test]
    fn wrong_values_are_refused_by_name() {
        for (setting, wrong) in [
            ("max_shell_sessions", json!(0)),
            ("uid", json!(0)),
            ("gid", json!(65534)),
            ("user_data", json!("disk")),
            ("user_data", json!("host")),
            ("state_root", json!("srv")),
            ("state_root", json!("/")),
            ("state_root", json!("/srv/../etc")),
            ("owner", json!("A B")),
            ("image", json!(" ")),
            ("network", json!("open")),
            ("memory", json!("lots")),
            ("cpus", json!("x")),
            ("pids", json!(0)),
        ] {
            let written = SettingValues::from_iter([(setting.to_owned(), wrong.clone())]);
            let error = check_settings(written).unwrap_err();
            assert_eq!(error.setting, setting, "{wrong}");
        }
    }

    #[test]
    fn default_limits_are_left_out_where_they_cannot_be_enforced() {
        let defaults = ProvisionerSettings::default();
        let enforced = defaults.effective_limits(|_| false);
        assert_eq!((enforced.memory, enforced.disk), (Some(POD_MEMORY), Some(POD_DISK)));
        assert_eq!(defaults.effective_limits(|_| true), ResourceLimits::default());
        let limits = ResourceLimits { memory: Some(Bytes(1 << 20)), ..ResourceLimits::default() };
        let configured = ProvisionerSettings { limits: limits.clone(), ..defaults };
        assert_eq!(configured.effective_limits(|_| true), limits);
    }
}
