//! The user as whom commands and file operations run in the sandbox.

use rustix::fs::{Gid, Uid};
use wire::process::UserIdentity;
use wire::{AgentConfig, Fault, FaultKind, FaultOperation};

use crate::accounts::{AccountFiles, UserAccount};
use crate::fault;

/// A user with everything needed to assume its identity.
#[derive(Clone, Debug)]
pub(crate) struct ResolvedUser {
    pub(crate) uid: Uid,
    pub(crate) gid: Gid,
    pub(crate) groups: Vec<Gid>,
    pub(crate) name: String,
    /// The account's home, unless the sandbox's environment sets another one for its default user.
    pub(crate) home: String,
    pub(crate) shell: String,
    /// Whether this is the sandbox's default user.
    pub(crate) is_default: bool,
}

impl ResolvedUser {
    /// Looks the user up in the accounts of the sandbox. A numeric id needs no account.
    pub(crate) fn find(config: &AgentConfig, identity: &UserIdentity) -> Result<Self, Fault> {
        let accounts = AccountFiles::read();
        let (account, gid) = match identity {
            UserIdentity::Default => find_default_user(&accounts, &config.default_user)?,
            UserIdentity::User(name) => (find_user(&accounts, name)?, None),
            UserIdentity::Ids { uid, gid } => {
                (accounts.by_uid(*uid).unwrap_or_else(|| account_without_entry(*uid)), Some(*gid))
            }
        };
        let gid = gid.unwrap_or(account.gid);
        let usual = *identity == UserIdentity::Default
            || find_default_user(&accounts, &config.default_user)
                .is_ok_and(|(usual, _)| usual.uid == account.uid);
        if config.single_user && (account.uid != 0 || gid != 0) {
            return Err(fault::from_kind(FaultKind::Permission, FaultOperation::BecomeUser, &account.name));
        }
        // To the calls that change the identity this number means "unchanged", so the process would
        // stay root.
        if account.uid == u32::MAX || gid == u32::MAX {
            return Err(fault::from_kind(FaultKind::Invalid, FaultOperation::BecomeUser, &account.name));
        }
        let groups = if config.single_user { Vec::new() } else { accounts.groups_of(&account.name) };
        let groups = groups.into_iter().filter(|group| *group != u32::MAX);
        Ok(Self {
            uid: Uid::from_raw(account.uid),
            gid: Gid::from_raw(gid),
            groups: std::iter::once(gid).chain(groups).map(Gid::from_raw).collect(),
            name: account.name,
            home: config.env.get("HOME").filter(|_| usual).cloned().unwrap_or(account.home),
            shell: account.shell,
            is_default: usual,
        })
    }

    pub(crate) fn is_root(&self) -> bool {
        self.uid.is_root()
    }

    /// Assumes the identity permanently. The last of the three calls removes the permission for the
    /// others, hence the order. A sandbox with a single user has no other identity, and the kernel
    /// forbids these calls.
    pub(crate) fn assume_identity(&self, config: &AgentConfig) -> rustix::io::Result<()> {
        if config.single_user {
            return Ok(());
        }
        rustix::thread::set_thread_groups(&self.groups)?;
        rustix::thread::set_thread_res_gid(self.gid, self.gid, self.gid)?;
        rustix::thread::set_thread_res_uid(self.uid, self.uid, self.uid)
    }
}

/// The default user that an image names, optionally with a group: `user`, `uid`, `user:group`,
/// `uid:gid`.
fn find_default_user(accounts: &AccountFiles, text: &str) -> Result<(UserAccount, Option<u32>), Fault> {
    let Some((user, group)) = text.split_once(':') else { return Ok((find_user(accounts, text)?, None)) };
    let gid = accounts.gid_of(group).or_else(|| group.parse().ok());
    let gid = gid.ok_or_else(|| fault::from_kind(FaultKind::NotFound, "find group", group))?;
    Ok((find_user(accounts, user)?, Some(gid)))
}

fn find_user(accounts: &AccountFiles, name: &str) -> Result<UserAccount, Fault> {
    let by_number = || {
        let uid = name.parse().ok()?;
        Some(accounts.by_uid(uid).unwrap_or_else(|| account_without_entry(uid)))
    };
    let known = accounts.by_name(name).or_else(by_number);
    // An image without account files still has its root user.
    let known = known.or_else(|| (name == "root").then(|| account_without_entry(0)));
    known.ok_or_else(|| fault::from_kind(FaultKind::NotFound, "find user", name))
}

/// The account assumed for a uid that has none.
fn account_without_entry(uid: u32) -> UserAccount {
    let (name, home) = if uid == 0 { ("root".to_owned(), "/root") } else { (uid.to_string(), "/") };
    UserAccount { name, uid, gid: uid, home: home.to_owned(), shell: "/bin/sh".to_owned() }
}
