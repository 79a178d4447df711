//! Checks whether sandboxes can reach other machines, and what could prevent it. Nothing on the
//! host is changed.

use linux::netlink::nftables;
use linux::spawn::SingleThread;

use super::{CheckStatus, HostCheck};
use crate::network::uplink::{self, Uplink};
use crate::network::{NetworkError, NetworkSettings, resolver};
use crate::process::connect::OPEN_BY;
use crate::process::filtered::probe_diversion;

const FILTERED_CHECK_NAME: &str = "network `filtered`";
const FILTERED_CONSEQUENCE: &str = "network `filtered` is refused, and so is `on` without a link";
const CHECK_NAME: &str = "network `on`";
const CONSEQUENCE: &str = "sandboxes can reach only their own loopback: `on` is refused and `auto` is `off`";

pub(super) fn run_checks(settings: &NetworkSettings, rootless: bool) -> Vec<HostCheck> {
    let filtered = check_diversion(settings);
    let linked = if rootless {
        Err(NetworkError::NotRoot)
    } else {
        Uplink::new(settings.clone(), "doctor").check_ready()
    };
    let carried = filtered.status == CheckStatus::Ok;
    let mut checks = match linked {
        Ok(()) => {
            let detail = format!("by NAT of {}", uplink::describe_families());
            [HostCheck::ok(CHECK_NAME, detail), check_name_servers(settings)]
                .into_iter()
                .chain(check_forward_policies())
                .collect()
        }
        Err(NetworkError::NoForwarding | NetworkError::NotRoot) if carried => {
            vec![HostCheck::ok(CHECK_NAME, format!("by {OPEN_BY}"))]
        }
        Err(down) => vec![network_unavailable(&down)],
    };
    checks.push(filtered);
    checks
}

fn network_unavailable(down: &NetworkError) -> HostCheck {
    HostCheck::weaker(CHECK_NAME, down.to_string(), CONSEQUENCE).with_fix(down.hint())
}

/// Diverts nothing, but sets up a net namespace of its own as that of a sandbox is.
fn check_diversion(settings: &NetworkSettings) -> HostCheck {
    match SingleThread::prove().and_then(|thread| probe_diversion(&thread, settings)) {
        Ok(()) => HostCheck::ok(FILTERED_CHECK_NAME, "nftables diverts connections (nft_tproxy)"),
        Err(error) => {
            let down = NetworkError::NoDiversion(error.to_string());
            HostCheck::weaker(FILTERED_CHECK_NAME, down.to_string(), FILTERED_CONSEQUENCE)
                .with_fix(down.hint())
        }
    }
}

fn check_name_servers(settings: &NetworkSettings) -> HostCheck {
    let name = "name servers";
    let upstreams = resolver::usable_name_servers(&settings.resolvers);
    if upstreams.is_empty() {
        let detail = "the host has none that a sandbox can reach: the host's loopback is not visible inside";
        return HostCheck::weaker(name, detail, "sandboxes with a network cannot resolve names")
            .with_fix("set `network.resolvers` to the upstream servers");
    }
    let list: Vec<String> = upstreams.iter().map(ToString::to_string).collect();
    HostCheck::ok(name, list.join(", "))
}

/// Looks for packet filters of other programs that may drop packets that our rules accept. Whether
/// they do depends on their rules; rules of the old iptables are not visible here at all.
fn check_forward_policies() -> Option<HostCheck> {
    let found = nftables::dropping_forward_chains().ok()?;
    let first = found.first()?;
    let detail = format!("chain `{}` of table `{}` drops what it does not accept", first.chain, first.table);
    let consequence = "packets of sandboxes may be dropped there; rules of coracle cannot prevent it";
    let fix = "accept them there; for Docker `iptables -I DOCKER-USER -i cora+ -j ACCEPT` and `iptables -I \
               DOCKER-USER -o cora+ -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT`, for ufw `ufw route \
               allow in on cora+`";
    Some(HostCheck::weaker("other packet filters", detail, consequence).with_fix(fix))
}
