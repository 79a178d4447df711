//! The name servers of this host, and the resolv.conf of sandboxes.

use std::fs;
use std::io::{self, Write};
use std::net::IpAddr;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use super::address::AddressRange;
use super::settings::parse_prefix;
use domain::AddressPrefix;

/// The number of name servers that programs read from a resolv.conf.
pub(super) const MAX_NAME_SERVERS: u32 = 3;
/// The largest part of a resolv.conf that is read.
const MAX_FILE_SIZE: usize = 64 << 10;

const RESOLV_CONF: &str = "/etc/resolv.conf";
/// The file in which systemd-resolved lists the name servers that it uses.
const SYSTEMD_RESOLV_CONF: &str = "/run/systemd/resolve/resolv.conf";

/// Returns the name servers that sandboxes can use: those that the operator chose, or the host's.
pub fn usable_name_servers(chosen: &[IpAddr]) -> Vec<IpAddr> {
    let found = if chosen.is_empty() { host_name_servers() } else { chosen.to_vec() };
    found
        .into_iter()
        .filter(|address| is_reachable(*address))
        .zip(0..MAX_NAME_SERVERS)
        .map(|(address, _)| address)
        .collect()
}

/// Returns when the files with the name servers were last written, to notice a change.
pub fn resolv_conf_stamps() -> Vec<(u64, i64, i64)> {
    let stamp = |path| {
        let found = fs::metadata(path).ok()?;
        Some((found.ino(), found.mtime(), found.mtime_nsec()))
    };
    [RESOLV_CONF, SYSTEMD_RESOLV_CONF].into_iter().filter_map(stamp).collect()
}

fn host_name_servers() -> Vec<IpAddr> {
    let named = read_name_servers(RESOLV_CONF);
    if named.iter().any(|address| is_reachable(*address)) {
        named
    } else {
        read_name_servers(SYSTEMD_RESOLV_CONF)
    }
}

fn read_name_servers(path: &str) -> Vec<IpAddr> {
    let text = fs::read_to_string(path).unwrap_or_default();
    parse_name_servers(text.get(..MAX_FILE_SIZE).unwrap_or(&text))
}

fn parse_name_servers(text: &str) -> Vec<IpAddr> {
    let servers = text.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        (words.next()? == "nameserver").then(|| words.next()?.parse().ok())?
    });
    servers.collect()
}

/// Whether a sandbox can reach the address. It cannot reach the host's loopback, nor link-local
/// addresses, which need the name of a link.
fn is_reachable(address: IpAddr) -> bool {
    let link: AddressPrefix = parse_prefix("fe80::/10");
    !address.is_loopback() && !address.is_unspecified() && !link.contains(address)
}

/// Returns the resolv.conf of a sandbox whose resolvers forward to `upstreams`.
pub fn build_resolv_conf(range: &AddressRange, upstreams: &[IpAddr], v6: bool) -> String {
    let mut text = String::new();
    for (number, upstream) in (0..).zip(upstreams).filter(|(_, upstream)| v6 || upstream.is_ipv4()) {
        text.push_str(&format!("nameserver {}\n", range.resolver_address(upstream.is_ipv6(), number)));
    }
    if text.is_empty() {
        text.push_str("# The host has no name server that a sandbox could reach.\n");
    }
    text
}

/// Writes a resolv.conf into the root of this process; the image may have a link there.
pub fn write_resolv_conf(text: &str) -> io::Result<()> {
    write_resolv_conf_below(Path::new("/"), text)
}

fn write_resolv_conf_below(root: &Path, text: &str) -> io::Result<()> {
    let (directory, path) = (root.join("etc"), root.join("etc/resolv.conf"));
    // Never through a link and never into a pipe: code inside may be putting one there.
    let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
    let mut options = fs::OpenOptions::new();
    options.write(true).custom_flags(flags.bits().cast_signed());
    if fs::symlink_metadata(&path).is_ok_and(|found| found.is_file()) {
        // The file is overwritten: on an overlay that is much cheaper than replacing it.
        return options.truncate(true).open(&path).and_then(|mut file| file.write_all(text.as_bytes()));
    }
    fs::create_dir_all(&directory)?;
    match fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    options.create_new(true).open(&path).and_then(|mut file| file.write_all(text.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_servers_are_parsed_like_other_programs_do() {
        let text = "# nameserver 1.1.1.1\nsearch x\nnameserver 192.0.2.1\n nameserver\t2001:db8::1 # two\nnameserver fe80::1%eth0\n";
        assert_eq!(
            parse_name_servers(text),
            ["192.0.2.1", "2001:db8::1"].map(|text| text.parse::<IpAddr>().expect("an address"))
        );
    }

    #[test]
    fn link_in_an_image_is_replaced_and_not_followed() {
        let root = tempfile::tempdir().expect("a directory can be made");
        let (etc, file) = (root.path().join("etc"), root.path().join("etc/resolv.conf"));
        write_resolv_conf_below(root.path(), "first\n").expect("there was nothing");
        write_resolv_conf_below(root.path(), "2\n").expect("there was a file");
        assert_eq!(fs::read_to_string(&file).expect("the file exists"), "2\n");
        fs::write(etc.join("stub"), "stub\n").expect("the directory is writable");
        fs::remove_file(&file).expect("the file exists");
        for target in ["stub", "../run/systemd/resolve/stub-resolv.conf"] {
            std::os::unix::fs::symlink(target, &file).expect("nothing is there");
            write_resolv_conf_below(root.path(), "second\n").expect("there was a link");
            assert!(fs::symlink_metadata(&file).expect("the file exists").is_file(), "{target}");
            assert_eq!(fs::read_to_string(&file).expect("the file exists"), "second\n");
            fs::remove_file(&file).expect("the file exists");
        }
        assert_eq!(fs::read_to_string(etc.join("stub")).expect("the file exists"), "stub\n");
    }

    #[test]
    fn unreachable_name_servers_are_skipped() {
        let of = |text: &str| usable_name_servers(&[text.parse().expect("an address")]).len();
        assert_eq!(
            (of("127.0.0.53"), of("::1"), of("fe80::1"), of("169.254.169.253"), of("10.0.0.1")),
            (0, 0, 0, 1, 1)
        );
    }

    #[test]
    fn sandbox_without_ipv6_gets_no_ipv6_resolver() {
        let range = AddressRange { v4: parse_prefix("198.19.0.0/16"), v6: parse_prefix("fd00::/64") };
        let upstreams = ["2001:db8::1", "10.0.0.1"].map(|text| text.parse().expect("an address"));
        assert_eq!(
            build_resolv_conf(&range, &upstreams, true),
            "nameserver fd00::1\nnameserver 198.19.0.2\n"
        );
        assert_eq!(build_resolv_conf(&range, &upstreams, false), "nameserver 198.19.0.2\n");
        assert!(build_resolv_conf(&range, &[], true).starts_with('#'));
    }
}
