//! The flags of the commands about what a sandbox may reach.

use clap::{Args, Subcommand, ValueEnum};
use domain::PolicyTarget;

use super::SandboxArgs;
use crate::client::SandboxRef;
use crate::values;

#[derive(Debug, Subcommand)]
pub(crate) enum PolicyCommand {
    /// Print the network policy of a sandbox
    Get(SandboxArgs),
    /// Replace the network policy of a sandbox; a sandbox that was not filtered is filtered from then on
    Set(SetPolicyArgs),
    /// Allow targets, before all other rules
    Allow(PolicyRulesArgs),
    /// Deny targets, before all other rules
    Deny(PolicyRulesArgs),
    /// Remove the rules for targets
    Rm(PolicyRulesArgs),
}

#[derive(Debug, Args)]
#[command(after_help = SET_HELP)]
pub(crate) struct SetPolicyArgs {
    /// The sandbox: its id, its name, or the beginning of its id
    #[arg(value_name = "SANDBOX")]
    pub id: SandboxRef,

    /// Allow connections to this name, to all names below it (`*.example.org`), or to an address or range; can be
    /// repeated
    #[arg(long, value_name = "TARGET[:PORT]", value_parser = values::parse_policy_target)]
    pub allow: Vec<PolicyTarget>,

    /// Deny connections to this target, even if `--allow` names it; can be repeated
    #[arg(long, value_name = "TARGET[:PORT]", value_parser = values::parse_policy_target)]
    pub deny: Vec<PolicyTarget>,

    /// What applies to all other targets [default: deny, or allow if only `--deny` is given]
    #[arg(long, value_enum, value_name = "ACTION")]
    pub default: Option<PolicyActionChoice>,
}

const SET_HELP: &str = "\
Without any option the sandbox reaches nothing. The change applies at once, also to open connections.";

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum PolicyActionChoice {
    Allow,
    Deny,
}

impl From<PolicyActionChoice> for domain::PolicyAction {
    fn from(choice: PolicyActionChoice) -> Self {
        match choice {
            PolicyActionChoice::Allow => Self::Allow,
            PolicyActionChoice::Deny => Self::Deny,
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct PolicyRulesArgs {
    /// The sandbox: its id, its name, or the beginning of its id
    #[arg(value_name = "SANDBOX")]
    pub id: SandboxRef,

    /// Names, `*.NAME` for all names below one, addresses or ranges, each with or without a port
    #[arg(value_name = "TARGET[:PORT]", required = true, value_parser = values::parse_policy_target)]
    pub targets: Vec<PolicyTarget>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum NetCommand {
    /// Show what a sandbox tried to reach, and what was denied
    Log(NetLogArgs),
}

#[derive(Debug, Args)]
pub(crate) struct NetLogArgs {
    /// The sandbox: its id, its name, or the beginning of its id
    #[arg(value_name = "SANDBOX")]
    pub id: SandboxRef,

    /// Start after the record with this number [default: the oldest stored record]
    #[arg(long, value_name = "NUMBER", default_value_t = 0, hide_default_value = true)]
    pub after: u64,

    /// Keep printing new records until the sandbox ends
    #[arg(long, short = 'f')]
    pub follow: bool,

    /// Show only what was denied
    #[arg(long)]
    pub denied: bool,
}
