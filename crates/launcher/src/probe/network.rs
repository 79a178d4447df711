//! Checks whether sandboxes can reach other machines, and what could prevent it. Nothing on the
//! host is changed.

use backend::NetworkState;
use linux::netlink::nftables;

use super::HostCheck;
use crate::network::uplink::{self, Uplink};
use crate::network::userspace::PacketForwarder;
use crate::network::{NetworkError, NetworkSettings, resolver};

const CHECK_NAME: &str = "network `on`";
const CONSEQUENCE: &str = "sandboxes can reach only their own loopback: `on` is refused and `auto` is `off`";

pub(super) fn run_checks(settings: &NetworkSettings, rootless: bool) -> Vec<HostCheck> {
    if rootless {
        return vec![check_user_space()];
    }
    match Uplink::new(settings.clone(), "doctor").check_ready() {
        Ok(()) => {
            let detail = format!("by NAT of {}", uplink::describe_families());
            [HostCheck::ok(CHECK_NAME, detail), check_name_servers(settings)]
                .into_iter()
                .chain(check_forward_policies())
                .collect()
        }
        Err(down) => vec![network_unavailable(&down)],
    }
}

fn network_unavailable(down: &NetworkError) -> HostCheck {
    HostCheck::weaker(CHECK_NAME, down.to_string(), CONSEQUENCE).with_fix(down.hint())
}

fn check_user_space() -> HostCheck {
    match PacketForwarder::find() {
        Ok(program) => HostCheck::ok(CHECK_NAME, NetworkState::On { by: program.describe() }.words()),
        Err(down) => network_unavailable(&down),
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
