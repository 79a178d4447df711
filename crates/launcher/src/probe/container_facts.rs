//! The container in which the probe runs, if any: what it withholds, and the lines of its specification that
//! would change that.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;

use linux::caps;
use linux::seccomp::blocked_calls::{self, BlockedCall};
use serde::{Deserialize, Serialize};

use super::HostCheck;
use crate::container;

/// Something that a container has to be given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ContainerNeed {
    /// System calls that its seccomp filter refuses.
    SystemCalls,
    /// Mounts, which its AppArmor profile refuses.
    AppArmor,
    /// The whole of /proc.
    WholeProc,
    /// CAP_SETFCAP, without which root cannot be mapped into a user namespace.
    FileCapabilities,
    /// All capabilities, devices and writable control groups.
    Privileges,
    /// A volume for the state directory.
    StateVolume,
}

/// The lines of a container's specification that give it what sandboxes need.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerSpec {
    pub needs: Vec<ContainerNeed>,
    /// Flags of `docker run` and `podman run`.
    pub docker_run: String,
    /// Lines of a service in a compose file.
    pub compose: String,
    /// Lines of a Kubernetes pod.
    pub pod: String,
}

/// What is known about the container without trying anything.
pub(super) struct ContainerFacts {
    pub(super) in_container: bool,
    blocked: Vec<BlockedCall>,
    /// The AppArmor profile that confines us.
    profile: Option<String>,
    hides_proc_parts: bool,
    /// Whether root of a new user namespace can be mapped to our uid.
    pub(super) can_map_own_id: bool,
}

impl ContainerFacts {
    pub(super) fn collect() -> Self {
        Self {
            in_container: container::is_in_container(),
            // Without /proc nothing works, and other checks report that.
            blocked: blocked_calls::find_blocked_calls().unwrap_or_default(),
            profile: apparmor_profile(),
            hides_proc_parts: hides_proc_parts(),
            can_map_own_id: !rustix::process::geteuid().is_root()
                || caps::effective_capabilities().is_ok_and(|held| held.has(caps::SETFCAP)),
        }
    }

    /// Reports the system calls that a filter refuses. All other failures would follow from that.
    pub(super) fn check_blocked_calls(&self) -> Option<HostCheck> {
        if self.blocked.is_empty() {
            return None;
        }
        let by_error = |errno: i32| {
            let names = self.blocked.iter().filter(|call| call.errno == errno).map(|call| call.name);
            format!("{} with {}", names.collect::<Vec<_>>().join(", "), errno_name(errno))
        };
        let errors: BTreeSet<i32> = self.blocked.iter().map(|call| call.errno).collect();
        let answers: Vec<String> = errors.into_iter().map(by_error).collect();
        let detail = format!("a seccomp filter answers {}", answers.join(" and "));
        let mut needs = vec![ContainerNeed::SystemCalls];
        needs.extend(self.hidden_needs());
        let fix = "the filter was loaded by what started coracle: in a container, start it with \
                   `--security-opt seccomp=unconfined`; in a systemd unit, remove `RestrictNamespaces=` and \
                   `SystemCallFilter=`";
        Some(HostCheck::missing("system calls", detail).with_fix(fix).with_needs(&needs))
    }

    /// Returns what would be missed next, once namespaces can be made.
    pub(super) fn hidden_needs(&self) -> Vec<ContainerNeed> {
        let all = [
            (self.profile.is_some(), ContainerNeed::AppArmor),
            (self.hides_proc_parts, ContainerNeed::WholeProc),
            (!self.can_map_own_id, ContainerNeed::FileCapabilities),
        ];
        all.into_iter().filter_map(|(missing, need)| missing.then_some(need)).collect()
    }
}

impl ContainerSpec {
    /// Returns the lines for these needs, or none if there are no needs.
    pub(super) fn for_needs(mut needs: BTreeSet<ContainerNeed>) -> Option<Self> {
        if needs.contains(&ContainerNeed::Privileges) {
            // A privileged container has everything but a volume.
            needs.retain(|need| matches!(need, ContainerNeed::Privileges | ContainerNeed::StateVolume));
        }
        if needs.is_empty() {
            return None;
        }
        let needs: Vec<ContainerNeed> = needs.into_iter().collect();
        let flags: Vec<&str> = needs.iter().map(|need| need.docker_flag()).collect();
        Some(Self {
            docker_run: flags.join(" "),
            compose: compose_lines(&needs),
            pod: pod_lines(&needs),
            needs,
        })
    }
}

impl ContainerNeed {
    fn docker_flag(self) -> &'static str {
        match self {
            Self::SystemCalls => "--security-opt seccomp=unconfined",
            Self::AppArmor => "--security-opt apparmor=unconfined",
            Self::WholeProc => "--security-opt systempaths=unconfined",
            Self::FileCapabilities => "--cap-add SETFCAP",
            Self::Privileges => "--privileged",
            Self::StateVolume => "--volume coracle:/var/lib/coracle",
        }
    }

    /// The line of the container's `securityContext` in a pod.
    fn pod_line(self) -> Option<&'static str> {
        match self {
            Self::SystemCalls => Some("seccompProfile: { type: Unconfined }"),
            Self::AppArmor => Some("appArmorProfile: { type: Unconfined }"),
            Self::WholeProc => Some("procMount: Unmasked"),
            Self::FileCapabilities => Some("capabilities: { add: [SETFCAP] }"),
            Self::Privileges => Some("privileged: true"),
            Self::StateVolume => None,
        }
    }
}

fn compose_lines(needs: &[ContainerNeed]) -> String {
    let mut lines = String::new();
    let options: Vec<&str> =
        needs.iter().filter_map(|need| need.docker_flag().strip_prefix("--security-opt ")).collect();
    if !options.is_empty() {
        lines.push_str("security_opt:\n");
        options.iter().for_each(|option| push_line(&mut lines, format_args!("  - {option}")));
    }
    for need in needs {
        match need {
            ContainerNeed::FileCapabilities => lines.push_str("cap_add: [SETFCAP]\n"),
            ContainerNeed::Privileges => lines.push_str("privileged: true\n"),
            ContainerNeed::StateVolume => lines.push_str("volumes:\n  - coracle:/var/lib/coracle\n"),
            ContainerNeed::SystemCalls | ContainerNeed::AppArmor | ContainerNeed::WholeProc => {}
        }
    }
    lines
}

fn pod_lines(needs: &[ContainerNeed]) -> String {
    let mut lines = "spec:\n".to_owned();
    if needs.contains(&ContainerNeed::WholeProc) {
        // Kubernetes shows the whole of /proc only to pods with a user namespace.
        lines.push_str("  hostUsers: false\n");
    }
    lines.push_str("  containers:\n    - name: coracle\n");
    let context: Vec<&str> = needs.iter().filter_map(|need| need.pod_line()).collect();
    if !context.is_empty() {
        lines.push_str("      securityContext:\n");
        context.iter().for_each(|line| push_line(&mut lines, format_args!("        {line}")));
    }
    if needs.contains(&ContainerNeed::StateVolume) {
        lines.push_str("      volumeMounts:\n        - { name: coracle, mountPath: /var/lib/coracle }\n");
        lines.push_str("  volumes:\n    - { name: coracle, emptyDir: {} }\n");
    }
    lines
}

fn push_line(lines: &mut String, line: std::fmt::Arguments<'_>) {
    // Writing to a string does not fail.
    writeln!(lines, "{line}").unwrap_or_default();
}

/// Returns the AppArmor profile that confines this process, such as `docker-default (enforce)`. Other security
/// modules use the second file too; their labels name no mode.
fn apparmor_profile() -> Option<String> {
    let current = ["/proc/self/attr/apparmor/current", "/proc/self/attr/current"];
    let text = current.iter().find_map(|path| fs::read_to_string(path).ok())?;
    let text = text.trim_matches(['\0', '\n']).to_owned();
    text.ends_with("(enforce)").then_some(text)
}

/// Whether something is mounted over a part of /proc. The kernel then refuses a new mount of it in a user
/// namespace, since that would show the part.
fn hides_proc_parts() -> bool {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let covers = |line: &str| line.split(' ').nth(4).is_some_and(|path| path.starts_with("/proc/"));
    table.lines().any(covers)
}

fn errno_name(errno: i32) -> String {
    const NAMES: [(i32, &str); 3] = [(1, "EPERM"), (13, "EACCES"), (38, "ENOSYS")];
    let name = NAMES.iter().find(|(number, _)| *number == errno);
    name.map_or_else(|| format!("error {errno}"), |(_, name)| (*name).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn specification_has_a_line_for_each_need() {
        let needs = BTreeSet::from([ContainerNeed::WholeProc, ContainerNeed::SystemCalls]);
        let spec = ContainerSpec::for_needs(needs).expect("there are needs");
        let flags = "--security-opt seccomp=unconfined --security-opt systempaths=unconfined";
        assert_eq!(spec.docker_run, flags);
        assert_eq!(spec.compose, "security_opt:\n  - seccomp=unconfined\n  - systempaths=unconfined\n");
        assert_eq!(
            spec.pod,
            "spec:\n  hostUsers: false\n  containers:\n    - name: coracle\n      securityContext:\n        \
             seccompProfile: { type: Unconfined }\n        procMount: Unmasked\n"
        );
    }

    #[test]
    fn privileged_container_needs_nothing_else_but_a_volume() {
        let all = BTreeSet::from([
            ContainerNeed::SystemCalls,
            ContainerNeed::Privileges,
            ContainerNeed::StateVolume,
            ContainerNeed::FileCapabilities,
        ]);
        let spec = ContainerSpec::for_needs(all).expect("there are needs");
        assert_eq!(spec.docker_run, "--privileged --volume coracle:/var/lib/coracle");
        assert!(spec.compose.starts_with("privileged: true\nvolumes:\n"), "{}", spec.compose);
        assert!(spec.pod.contains("mountPath: /var/lib/coracle"), "{}", spec.pod);
        assert_eq!(ContainerSpec::for_needs(BTreeSet::new()), None);
    }
}
