//! The network of one command: its policy, the egress process that carries its connections, and what was denied.

use std::collections::BTreeSet;

use anyhow::{Result, anyhow};
use domain::{NetworkPolicy, SandboxId};
use egress_protocol::{ActionMessage, EgressReplyBody, EgressRequestBody, LogKind, LogRecord};
use launcher::network::{NetworkMode, uplink};

use crate::args::{NetworkChoice, RunArgs};
use crate::config::Config;
use crate::egress_process::CommandLineEgress;
use crate::output::{Printer, WithHint};
use crate::serve::egress::egress_settings;

/// How many records of the log are read at once.
const LOG_PAGE: u32 = 1000;
/// How many denied targets are listed.
const MAX_LISTED_TARGETS: usize = 20;
/// The reason of a denial that no rule and no list caused.
const BY_DEFAULT: &str = "default";

/// Returns the network that the arguments ask for.
pub(super) fn choose_mode(args: &RunArgs) -> Result<NetworkMode> {
    let has_rules = !args.allow.is_empty() || !args.deny.is_empty();
    match (args.network, has_rules) {
        (Some(NetworkChoice::Filtered), _) | (None, true) => Ok(NetworkMode::Filtered),
        (Some(_), true) => Err(anyhow!("`--allow` and `--deny` are for network `filtered`"))
            .with_hint("leave `--network` out, or write `--network filtered`"),
        (None | Some(NetworkChoice::Off), false) => Ok(NetworkMode::Off),
        (Some(NetworkChoice::On), false) => Ok(NetworkMode::On),
        (Some(NetworkChoice::Auto), false) => Ok(NetworkMode::Auto),
    }
}

/// Returns the policy of a filtered sandbox: what is denied is denied even if it is allowed too.
fn build_policy(args: &RunArgs) -> Result<NetworkPolicy> {
    Ok(NetworkPolicy::from_lists(&args.allow, &args.deny)?)
}

/// Starts the egress process if the sandbox needs one, and tells it what the sandbox may reach.
pub(super) fn start_egress(
    args: &RunArgs,
    config: &Config,
    mode: NetworkMode,
    sandbox: &SandboxId,
) -> Result<Option<CommandLineEgress>> {
    let has_link = linux::privileges::is_host_root() && uplink::forwards_packets();
    let needed = match mode {
        NetworkMode::Off => false,
        NetworkMode::On | NetworkMode::Auto => !has_link,
        NetworkMode::Filtered => true,
    };
    if !needed {
        return Ok(None);
    }
    let mut egress = CommandLineEgress::start(config)?;
    egress.request(EgressRequestBody::Configure(egress_settings(config)))?;
    if mode == NetworkMode::Filtered {
        let policy = (&build_policy(args)?).into();
        egress.request(EgressRequestBody::SetPolicy { sandbox: sandbox.to_string(), policy })?;
    }
    Ok(Some(egress))
}

/// Prints which targets were denied, and the options that would allow them.
pub(super) fn print_denied(
    egress: &mut CommandLineEgress,
    sandbox: &SandboxId,
    printer: &Printer,
) -> Result<()> {
    let mut denied = BTreeSet::new();
    let mut after = 0;
    loop {
        let sandbox = sandbox.to_string();
        let request = EgressRequestBody::ReadLog { sandbox, after, limit: LOG_PAGE, wait: false };
        let EgressReplyBody::Log(page) = egress.request(request)? else {
            return Err(anyhow!("egress did not send its log"));
        };
        let Some(last) = page.records.last() else { break };
        after = last.number;
        denied.extend(page.records.iter().filter_map(describe_denied));
    }
    for line in denied.iter().take(MAX_LISTED_TARGETS) {
        printer.remark(format_args!("coracle: {line}"));
    }
    if let Some(more @ 1..) = denied.len().checked_sub(MAX_LISTED_TARGETS) {
        printer.remark(format_args!("coracle: {more} more targets were denied"));
    }
    Ok(())
}

fn describe_denied(record: &LogRecord) -> Option<String> {
    if record.verdict == ActionMessage::Allow {
        return None;
    }
    let target = match (&record.name, record.address, record.kind) {
        (Some(name), None, _) | (Some(name), _, LogKind::Query) => name.clone(),
        (Some(name), Some(address), _) => format!("{name}:{}", address.port()),
        (None, Some(address), _) => address.to_string(),
        (None, None, _) => return None,
    };
    Some(if record.reason == BY_DEFAULT {
        format!("network access to {target} was denied; `--allow {target}` would allow it")
    } else {
        format!("network access to {target} was denied by {}", record.reason)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn denied_targets_are_named_with_the_option_that_allows_them() {
        let record = |name: Option<&str>, address: Option<&str>, kind, reason: &str| LogRecord {
            number: 1,
            unix_ms: 0,
            kind,
            name: name.map(str::to_owned),
            address: address.map(|address| address.parse().expect("an address")),
            verdict: ActionMessage::Deny,
            reason: reason.to_owned(),
            bytes_sent: 0,
            bytes_received: 0,
        };
        let check = |record: LogRecord, expected: &str| {
            assert_eq!(describe_denied(&record).as_deref(), Some(expected));
        };
        check(
            record(Some("a.example"), None, LogKind::Query, BY_DEFAULT),
            "network access to a.example was denied; `--allow a.example` would allow it",
        );
        check(
            record(Some("a.example"), Some("192.0.2.1:443"), LogKind::Connection, BY_DEFAULT),
            "network access to a.example:443 was denied; `--allow a.example:443` would allow it",
        );
        check(
            record(None, Some("[2001:db8::1]:22"), LogKind::Connection, "deny 2001:db8::/32"),
            "network access to [2001:db8::1]:22 was denied by deny 2001:db8::/32",
        );
        let allowed = LogRecord {
            verdict: ActionMessage::Allow,
            ..record(None, Some("192.0.2.1:1"), LogKind::Connection, BY_DEFAULT)
        };
        assert_eq!(describe_denied(&allowed), None);
    }
}
