//! The configuration that the jail passes to the agent when it starts it.
//!
//! The agent cannot read its own environment or binary, since it is untraceable, so everything
//! comes through descriptor [`CONFIG_FD`]: a sealed memfd with this struct as JSON.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The descriptor of the configuration when the agent starts.
pub const CONFIG_FD: i32 = 3;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AgentConfig {
    pub version: u32,
    /// A bound, not yet listening, unix stream socket.
    pub listen_fd: i32,
    /// The agent writes one byte here once it listens, then closes it.
    pub ready_fd: i32,
    /// A directory for journals, outside the sandbox's root.
    pub journal_fd: i32,
    /// The v2 group `cmd`, in which the agent makes a group for each command; `None` means that
    /// trees are killed by a subreaping runner instead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commands_fd: Option<i32>,
    /// `tasks` files of v1 groups that every command joins by writing `0`.
    #[serde(default)]
    pub tasks_fds: Vec<i32>,
    /// `tasks` files of v1 groups that share the processor equally. Each command joins the group
    /// that has the fewest commands; the last group is for file work.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shares_fds: Vec<i32>,
    /// A file whose `oom_kill N` line counts kills for lack of memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub oom_fd: Option<i32>,
    /// The seccomp filter for commands, each instruction as its eight bytes in native order.
    pub command_filter: Vec<u64>,
    /// Capabilities (bit mask) that a command started as uid 0 keeps.
    pub command_capabilities: u64,
    /// RLIMIT_NPROC of commands, if no group limits their number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process_rlimit: Option<u64>,
    /// Whether root is the only user, as in a map of a single uid.
    pub single_user: bool,
    pub default_user: String,
    pub default_directory: String,
    /// The environment of every process; a request's own variables override it.
    pub env: BTreeMap<String, String>,
    /// A file in the sandbox in which commands keep variables. They override those above, and a
    /// request's own variables override them. Each process reads the file anew when it starts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env_file: Option<String>,
    /// Whether sessions can be isolated. The agent then confines itself after it has forked the one
    /// process that creates their namespaces.
    #[serde(default, rename = "nesting", skip_serializing_if = "Option::is_none")]
    pub namespace_broker: Option<NamespaceBrokerConfig>,
    /// How many processes may run at once.
    pub max_processes: u32,
    /// Files in the sandbox that show its limits instead of the host's values.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_view: Option<LimitViewConfig>,
    /// The value of `OMP_NUM_THREADS` for processes that set none. The agent derives it from the
    /// limit on processor time and keeps it current.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threads: Option<u32>,
    /// The program that runs kernels of ours. Without it the agent's own program does, as in older versions,
    /// whose agents were the whole of `coracle`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernels_fd: Option<i32>,
}

/// The files from which the agent reads the limits of its commands, and those in which it shows
/// them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LimitViewConfig {
    /// A directory in memory whose files cover those of `/proc` and `/sys`, which are read-only.
    pub files_fd: i32,
    /// The host's own `/proc/stat` and `/proc/cpuinfo`, opened before they were covered.
    pub stat_fd: i32,
    pub cpuinfo_fd: i32,
    /// Files of the commands' group; `None` where no group limits memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemoryFiles>,
    /// `cpu.max`, or `cpu.cfs_quota_us` of v1; `None` where no group limits processor time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_fd: Option<i32>,
}

/// The files that contain a group's memory limit, its memory use, and `memory.stat`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MemoryFiles {
    pub limit_fd: i32,
    pub usage_fd: i32,
    pub stat_fd: i32,
}

/// The confinement that the agent applies to itself after it has forked the namespace broker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NamespaceBrokerConfig {
    /// The seccomp filter of the agent itself and of everything that the namespace broker starts.
    pub agent_filter: Vec<u64>,
    /// The seccomp filter of the namespace broker.
    #[serde(rename = "nester_filter")]
    pub broker_filter: Vec<u64>,
    /// Capabilities (bit mask) that the agent keeps.
    pub agent_capabilities: u64,
    /// A mount of a directory on the sandbox's disk, for changes made in isolated sessions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_fd: Option<i32>,
}
