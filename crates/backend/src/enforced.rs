//! What is in force for one sandbox, as types. The words that clients read, and that records and the database
//! keep, are made here and nowhere else, and are read back here.

use domain::{Bytes, MilliCpus, MountAccess, SnapshotId};

/// The measures that are actually in force for one sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Enforced {
    /// The image that was used, after aliases were resolved.
    pub image: String,
    /// As in [`ResolvedImage`](crate::ResolvedImage).
    pub stand_in: Option<String>,
    /// In the order in which they are shown.
    pub measures: EnforcedMeasures,
    /// Default limits that could not be enforced, each as a sentence.
    pub degraded: Vec<String>,
}

/// Measures; of those in force, they replace the ones of the same name, or are added to them.
pub type EnforcedMeasures = Vec<Measure>;

/// One measure that is in force.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Measure {
    Limit(EnforcedAmount),
    /// One process inside may make namespaces for isolated sessions.
    IsolatedSessions,
    Users(UserMapping),
    Kill(KillMeans),
    Network(NetworkState),
    /// Commands run behind a seccomp filter.
    SystemCallFilter,
    /// Landlock confines commands to the mount tree.
    MountTree,
    /// User namespaces cannot be made inside.
    NoUserNamespaces,
    Snapshot(RestoredFiles),
    Mount {
        target: String,
        source: MountKind,
        access: MountAccess,
    },
    /// The pool that the sandbox was warm in.
    Pool(String),
    /// A measure of another backend or another version, in its words.
    Other {
        name: String,
        words: String,
    },
}

/// The resources that have limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitName {
    Memory,
    Cpus,
    Pids,
    Disk,
}

/// A limit, and the mechanism that enforces it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EnforcedAmount {
    pub limit: LimitName,
    /// In bytes, thousandths of a core, or processes.
    pub amount: u64,
    /// Such as `cgroup v2`.
    pub by: String,
}

/// Whether a sandbox can reach other machines, and which.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NetworkState {
    On {
        /// Such as `NAT of IPv4`.
        by: String,
    },
    Off {
        /// The reason, if a network was wanted where possible.
        since: Option<String>,
    },
    /// It reaches what its policy allows.
    Filtered,
}

/// How all processes of a sandbox are ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KillMeans {
    ControlGroup,
    /// A process that adopts the orphans of the sandbox and kills them.
    Subreaper,
}

/// The ids that the users of a sandbox have on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UserMapping {
    OwnRange,
    CallersId,
}

/// What a mount shows. Its path on the host is not part of it: clients must not learn it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MountKind {
    HostDirectory,
    Volume,
}

/// The files of a snapshot that a sandbox was created with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RestoredFiles {
    pub snapshot: SnapshotId,
    pub size: Bytes,
    /// Whether they were copied, instead of shared with the snapshot.
    pub copied: bool,
    /// Whether they count against the disk limit.
    pub counted: bool,
}

impl Enforced {
    /// Applies changed measures.
    pub fn replace_measures(&mut self, changed: EnforcedMeasures) {
        for measure in changed {
            match self.measures.iter_mut().find(|known| known.name() == measure.name()) {
                Some(known) => *known = measure,
                None => self.measures.push(measure),
            }
        }
    }

    /// The network in force, if the backend reported it.
    pub fn network(&self) -> Option<&NetworkState> {
        find_network(&self.measures)
    }
}

/// The network among some measures.
pub fn find_network(measures: &[Measure]) -> Option<&NetworkState> {
    measures.iter().find_map(|measure| match measure {
        Measure::Network(state) => Some(state),
        _ => None,
    })
}

impl Measure {
    /// The name under which it is shown.
    pub fn name(&self) -> String {
        match self {
            Self::Limit(limit) => limit.limit.as_str().to_owned(),
            Self::IsolatedSessions => "nests".to_owned(),
            Self::Users(_) => "users".to_owned(),
            Self::Kill(_) => "kill".to_owned(),
            Self::Network(_) => "network".to_owned(),
            Self::SystemCallFilter => "filter".to_owned(),
            Self::MountTree => "mount tree".to_owned(),
            Self::NoUserNamespaces => "nested user namespaces".to_owned(),
            Self::Snapshot(_) => "snapshot".to_owned(),
            Self::Mount { target, .. } => format!("mount {target}"),
            Self::Pool(_) => "pool".to_owned(),
            Self::Other { name, .. } => name.clone(),
        }
    }

    /// Describes it in words.
    pub fn words(&self) -> String {
        match self {
            Self::Limit(EnforcedAmount { limit, amount, by }) => {
                format!("{} by {by}", limit.format_amount(*amount))
            }
            Self::IsolatedSessions => "by one process with rights over them".to_owned(),
            Self::Users(UserMapping::OwnRange) => "own range of host ids".to_owned(),
            Self::Users(UserMapping::CallersId) => "one id, the caller's".to_owned(),
            Self::Kill(KillMeans::ControlGroup) => "cgroup.kill".to_owned(),
            Self::Kill(KillMeans::Subreaper) => "a subreaping runner".to_owned(),
            Self::Network(state) => state.words(),
            Self::SystemCallFilter => "seccomp".to_owned(),
            Self::MountTree => "Landlock".to_owned(),
            Self::NoUserNamespaces => "off".to_owned(),
            Self::Snapshot(files) => files.words(),
            Self::Mount { source, access, .. } => describe_mount(*source, *access),
            Self::Pool(pool) => pool.clone(),
            Self::Other { words, .. } => words.clone(),
        }
    }

    /// Reads a measure in its words. What would not be written in the same words again stays as it is.
    pub fn from_words(name: &str, words: &str) -> Self {
        let known = Self::parse(name, words).filter(|read| read.name() == name && read.words() == words);
        known.unwrap_or_else(|| Self::Other { name: name.to_owned(), words: words.to_owned() })
    }

    fn parse(name: &str, words: &str) -> Option<Self> {
        if let Some(limit) = LimitName::ALL.into_iter().find(|limit| limit.as_str() == name) {
            let (amount, by) = words.split_once(" by ")?;
            let amount = limit.parse_amount(amount)?;
            return Some(Self::Limit(EnforcedAmount { limit, amount, by: by.to_owned() }));
        }
        if let Some(target) = name.strip_prefix("mount /") {
            return parse_mount(format!("/{target}"), words);
        }
        Some(match name {
            "nests" => Self::IsolatedSessions,
            "users" if words.starts_with("own range") => Self::Users(UserMapping::OwnRange),
            "users" => Self::Users(UserMapping::CallersId),
            "kill" if words == "cgroup.kill" => Self::Kill(KillMeans::ControlGroup),
            "kill" => Self::Kill(KillMeans::Subreaper),
            "network" => Self::Network(NetworkState::parse(words)?),
            "filter" => Self::SystemCallFilter,
            "mount tree" => Self::MountTree,
            "nested user namespaces" => Self::NoUserNamespaces,
            "snapshot" => Self::Snapshot(RestoredFiles::parse(words)?),
            "pool" => Self::Pool(words.to_owned()),
            _ => return None,
        })
    }
}

impl LimitName {
    pub const ALL: [Self; 4] = [Self::Memory, Self::Cpus, Self::Pids, Self::Disk];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Cpus => "cpus",
            Self::Pids => "pids",
            Self::Disk => "disk",
        }
    }

    /// Shows an amount of this limit with its unit.
    pub fn format_amount(self, amount: u64) -> String {
        match self {
            Self::Memory | Self::Disk => Bytes(amount).to_string(),
            Self::Cpus => MilliCpus(u32::try_from(amount).unwrap_or(u32::MAX)).to_string(),
            Self::Pids => amount.to_string(),
        }
    }

    fn parse_amount(self, text: &str) -> Option<u64> {
        match self {
            Self::Memory | Self::Disk => Bytes::parse(text).ok().map(|Bytes(bytes)| bytes),
            Self::Cpus => MilliCpus::parse(text).ok().map(|MilliCpus(thousandths)| thousandths.into()),
            Self::Pids => text.parse().ok(),
        }
    }
}

/// How a filtered network is described.
const FILTERED_WORDS: &str = "filtered by name";

impl NetworkState {
    pub fn is_on(&self) -> bool {
        matches!(self, Self::On { .. })
    }

    pub fn is_filtered(&self) -> bool {
        matches!(self, Self::Filtered)
    }

    /// Describes the state in words.
    pub fn words(&self) -> String {
        match self {
            Self::On { by } => format!("on, by {by}"),
            Self::Off { since: Some(reason) } => format!("off, since {reason}"),
            Self::Off { since: None } => "off".to_owned(),
            Self::Filtered => FILTERED_WORDS.to_owned(),
        }
    }

    fn parse(words: &str) -> Option<Self> {
        if let Some(by) = words.strip_prefix("on, by ") {
            return Some(Self::On { by: by.to_owned() });
        }
        if words == FILTERED_WORDS {
            return Some(Self::Filtered);
        }
        let since = words.strip_prefix("off")?.strip_prefix(", since ").map(str::to_owned);
        Some(Self::Off { since })
    }
}

impl RestoredFiles {
    fn words(&self) -> String {
        let by = if self.copied { "copied" } else { "shared" };
        let counted = if self.counted { "within" } else { "beside" };
        format!("{} of {}, {by}, {counted} the limit on disk", self.size, self.snapshot)
    }

    fn parse(words: &str) -> Option<Self> {
        let (size, rest) = words.split_once(" of ")?;
        let (snapshot, rest) = rest.split_once(", ")?;
        // No amount of bytes that a user writes is 0, but a snapshot may be empty.
        let size = if size == "0" { Bytes(0) } else { Bytes::parse(size).ok()? };
        Some(Self {
            snapshot: SnapshotId::parse(snapshot).ok()?,
            size,
            copied: rest.starts_with("copied"),
            counted: rest.contains("within"),
        })
    }
}

fn describe_mount(source: MountKind, access: MountAccess) -> String {
    let kind = match source {
        MountKind::HostDirectory => "directory of the host",
        MountKind::Volume => "volume",
    };
    let access = match access {
        MountAccess::ReadOnly => "read-only",
        MountAccess::ReadWrite => "read-write",
    };
    format!("{kind}, {access}, nosuid, nodev")
}

fn parse_mount(target: String, words: &str) -> Option<Measure> {
    let source = if words.starts_with("volume") { MountKind::Volume } else { MountKind::HostDirectory };
    let read_only = words.contains("read-only");
    let access = if read_only { MountAccess::ReadOnly } else { MountAccess::ReadWrite };
    Some(Measure::Mount { target, source, access })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks that a measure is written in these words, and that they are read as the measure.
    fn check(measure: &Measure, name: &str, words: &str) {
        assert_eq!((measure.name().as_str(), measure.words().as_str()), (name, words));
        assert_eq!(&Measure::from_words(name, words), measure);
    }

    #[test]
    fn measures_keep_the_words_that_clients_and_records_know() {
        let limit =
            |limit, amount, by: &str| Measure::Limit(EnforcedAmount { limit, amount, by: by.to_owned() });
        check(&limit(LimitName::Memory, 512 << 20, "cgroup v1"), "memory", "512Mi by cgroup v1");
        check(&limit(LimitName::Cpus, 1500, "cgroup v2"), "cpus", "1.5 by cgroup v2");
        check(&limit(LimitName::Pids, 256, "RLIMIT_NPROC"), "pids", "256 by RLIMIT_NPROC");
        check(&limit(LimitName::Disk, 1 << 30, "btrfs quota"), "disk", "1Gi by btrfs quota");
        check(&Measure::IsolatedSessions, "nests", "by one process with rights over them");
        check(&Measure::Users(UserMapping::OwnRange), "users", "own range of host ids");
        check(&Measure::Users(UserMapping::CallersId), "users", "one id, the caller's");
        check(&Measure::Kill(KillMeans::ControlGroup), "kill", "cgroup.kill");
        check(&Measure::Kill(KillMeans::Subreaper), "kill", "a subreaping runner");
        check(&Measure::SystemCallFilter, "filter", "seccomp");
        check(&Measure::MountTree, "mount tree", "Landlock");
        check(&Measure::NoUserNamespaces, "nested user namespaces", "off");
        check(&Measure::Pool("p".to_owned()), "pool", "p");
        let network = Measure::Network;
        check(&network(NetworkState::Off { since: None }), "network", "off");
        let since = Some("the host does not forward IPv4".to_owned());
        check(&network(NetworkState::Off { since }), "network", "off, since the host does not forward IPv4");
        let by = "NAT of IPv4 and IPv6, without a resolver: set `network.resolvers`".to_owned();
        let words = format!("on, by {by}");
        check(&network(NetworkState::On { by }), "network", &words);
        check(&network(NetworkState::Filtered), "network", "filtered by name");
    }

    #[test]
    fn mounts_and_restored_files_keep_their_words() {
        let mount =
            |target: &str, source, access| Measure::Mount { target: target.to_owned(), source, access };
        let (host, volume) = (MountKind::HostDirectory, MountKind::Volume);
        check(
            &mount("/data", host, MountAccess::ReadOnly),
            "mount /data",
            "directory of the host, read-only, nosuid, nodev",
        );
        check(
            &mount("/a b", volume, MountAccess::ReadWrite),
            "mount /a b",
            "volume, read-write, nosuid, nodev",
        );
        let snapshot = SnapshotId::from_entropy([7; 16]);
        for (size, copied, counted, shown) in
            [(3 << 20, true, true, "3Mi"), (1234, false, false, "1234"), (0, true, false, "0")]
        {
            let by = if copied { "copied" } else { "shared" };
            let beside = if counted { "within" } else { "beside" };
            let words = format!("{shown} of {snapshot}, {by}, {beside} the limit on disk");
            let files = RestoredFiles { snapshot: snapshot.clone(), size: Bytes(size), copied, counted };
            check(&Measure::Snapshot(files), "snapshot", &words);
        }
    }

    #[test]
    fn unknown_words_are_kept_as_they_are() {
        for (name, words) in [
            ("memory", "1 GiB"),
            ("memory", "cgroup v1, 512Mi"),
            ("cpus", "0.50 by cgroup v2"),
            ("kill", "by hand"),
            ("network", "offline"),
            ("network", "on"),
            ("mount relative", "volume, read-only, nosuid, nodev"),
            ("a", "b"),
        ] {
            let other = Measure::Other { name: name.to_owned(), words: words.to_owned() };
            assert_eq!(Measure::from_words(name, words), other);
        }
    }
}
