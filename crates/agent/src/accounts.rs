//! Users and groups from the account files of the sandbox.
//!
//! The sandbox controls these files, so they are read with care: anything but a regular file of
//! moderate size counts as empty, and a malformed line is skipped. The C library's functions are
//! not used, because they load modules named in yet another file.

use std::os::fd::OwnedFd;

use rustix::fs::{FileType, Mode, OFlags};

/// The largest part of a file that is read; the rest is ignored.
const MAX_FILE_BYTES: usize = 1 << 20;

/// The maximum number of supplementary groups of one user; the kernel allows more.
const MAX_GROUPS: usize = 1024;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct UserAccount {
    pub(crate) name: String,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) home: String,
    pub(crate) shell: String,
}

/// The contents of the two files at one moment.
#[derive(Debug, Default)]
pub(crate) struct AccountFiles {
    passwd: String,
    group: String,
}

impl AccountFiles {
    pub(crate) fn read() -> Self {
        Self { passwd: read_account_file("/etc/passwd"), group: read_account_file("/etc/group") }
    }

    pub(crate) fn by_name(&self, name: &str) -> Option<UserAccount> {
        self.accounts().find(|account| account.name == name)
    }

    pub(crate) fn by_uid(&self, uid: u32) -> Option<UserAccount> {
        self.accounts().find(|account| account.uid == uid)
    }

    /// The groups that list the user as a member.
    pub(crate) fn groups_of(&self, name: &str) -> Vec<u32> {
        let listed = self.groups().filter(|(_, _, members)| members.split(',').any(|member| member == name));
        listed.map(|(_, gid, _)| gid).take(MAX_GROUPS).collect()
    }

    pub(crate) fn group_name(&self, gid: u32) -> Option<&str> {
        self.groups().find(|(_, id, _)| *id == gid).map(|(name, _, _)| name)
    }

    pub(crate) fn gid_of(&self, group: &str) -> Option<u32> {
        self.groups().find(|(name, _, _)| *name == group).map(|(_, gid, _)| gid)
    }

    fn accounts(&self) -> impl Iterator<Item = UserAccount> {
        self.passwd.lines().filter_map(parse_account)
    }

    fn groups(&self) -> impl Iterator<Item = (&str, u32, &str)> {
        self.group.lines().filter_map(|line| {
            let mut fields = line.split(':');
            let name = fields.next()?;
            let gid = fields.nth(1)?.parse().ok()?;
            Some((name, gid, fields.next().unwrap_or_default()))
        })
    }
}

fn parse_account(line: &str) -> Option<UserAccount> {
    let mut fields = line.split(':');
    let name = fields.next()?.to_owned();
    let uid = fields.nth(1)?.parse().ok()?;
    let gid = fields.next()?.parse().ok()?;
    let home = fields.nth(1)?.to_owned();
    let shell = fields.next().unwrap_or_default().to_owned();
    Some(UserAccount { name, uid, gid, home, shell })
}

fn read_account_file(path: &str) -> String {
    // A pipe instead of the file must not block the agent.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
    let Ok(file) = rustix::fs::open(path, flags, Mode::empty()) else { return String::new() };
    let regular = rustix::fs::fstat(&file).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode).is_file());
    if regular { String::from_utf8_lossy(&read_start(&file)).into_owned() } else { String::new() }
}

fn read_start(file: &OwnedFd) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut piece = [0; 4096];
    while bytes.len() < MAX_FILE_BYTES {
        match rustix::io::read(file, &mut piece) {
            Ok(0) | Err(_) => break,
            Ok(count) => bytes.extend_from_slice(&piece[..count]),
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> AccountFiles {
        AccountFiles {
            passwd: "root:x:0:0:root:/root:/bin/bash\nbroken\nalice:x:1000:1000::/home/alice:/bin/sh\n\
                     half:x:7:8:gecos:/nonexistent\nbad:x:minus:1::/:\n"
                .to_owned(),
            group: "root:x:0:\nwheel:x:10:root,alice\nvideo:x:44:alice\nalice:x:1000:\n:::\n".to_owned(),
        }
    }

    #[test]
    fn accounts_are_found_by_name_and_by_number() {
        let accounts = sample();
        let alice = accounts.by_name("alice").expect("alice is listed");
        assert_eq!((alice.uid, alice.gid, alice.home.as_str()), (1000, 1000, "/home/alice"));
        assert_eq!(accounts.by_uid(1000), Some(alice));
        assert_eq!(accounts.by_uid(7).map(|account| account.shell), Some(String::new()));
        assert_eq!(accounts.by_name("bad"), None);
        assert_eq!(accounts.by_name("broken"), None);
    }

    #[test]
    fn groups_are_those_that_list_the_user() {
        assert_eq!(sample().groups_of("alice"), [10, 44]);
        assert_eq!(sample().groups_of("nobody"), [0; 0]);
        assert_eq!(sample().group_name(44), Some("video"));
        assert_eq!(sample().gid_of("wheel"), Some(10));
    }
}
