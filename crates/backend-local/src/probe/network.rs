//! Checks whether sandboxes can reach other machines, and what could prevent it. Nothing on the
//! host is changed.

use linux::netlink::filter;

use super::Check;
use crate::network::uplink::{self, Uplink};
use crate::network::userspace::Program;
use crate::network::{Down, NetworkSettings, resolver};

const NAME: &str = "network `on`";
const CONSEQUENCE: &str = "sandboxes can reach only their own loopback: `on` is refused and `auto` is `off`";

pub(super) fn checks(settings: &NetworkSettings, rootless: bool) -> Vec<Check> {
    if rootless {
        return vec![in_user_space()];
    }
    match Uplink::new(settings.clone(), "doctor").look() {
        Ok(()) => {
            let detail = format!("by NAT of {}", uplink::families());
            [Check::ok(NAME, detail), names(settings)].into_iter().chain(policies()).collect()
        }
        Err(down) => vec![lacking(&down)],
    }
}

fn lacking(down: &Down) -> Check {
    Check::weaker(NAME, down.to_string(), CONSEQUENCE).fix(down.hint())
}

fn in_user_space() -> Check {
    match Program::find() {
        Ok(program) => Check::ok(NAME, program.describe()),
        Err(down) => lacking(&down),
    }
}

fn names(settings: &NetworkSettings) -> Check {
    let name = "name servers";
    let upstreams = resolver::upstreams(&settings.resolvers);
    if upstreams.is_empty() {
        let detail = "the host has none that a sandbox can reach: the host's loopback is not visible inside";
        return Check::weaker(name, detail, "sandboxes with a network cannot resolve names")
            .fix("set `network.resolvers` to the upstream servers");
    }
    let list: Vec<String> = upstreams.iter().map(ToString::to_string).collect();
    Check::ok(name, list.join(", "))
}

/// Looks for packet filters of other programs that may drop packets that our rules accept. Whether
/// they do depends on their rules; rules of the old iptables are not visible here at all.
fn policies() -> Option<Check> {
    let found = filter::dropping_forward_chains().ok()?;
    let first = found.first()?;
    let detail = format!("chain `{}` of table `{}` drops what it does not accept", first.chain, first.table);
    let consequence = "packets of sandboxes may be dropped there; rules of coracle cannot prevent it";
    let fix = "accept them there; for Docker `iptables -I DOCKER-USER -i cora+ -j ACCEPT` and `iptables -I \
               DOCKER-USER -o cora+ -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT`, for ufw `ufw route \
               allow in on cora+`";
    Some(Check::weaker("other packet filters", detail, consequence).fix(fix))
}
