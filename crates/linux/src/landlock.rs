//! Landlock: restrictions that a process applies to itself and its children. See landlock(7).

use std::io;
use std::path::Path;

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset,
    RulesetAttr, RulesetCreatedAttr, Scope,
};

/// The newest Landlock version that we know.
const NEWEST_ABI: ABI = ABI::V6;

/// Forbids changes of the mount tree, device nodes, and signals or abstract sockets to outside
/// processes, for this process and all its children.
///
/// Any Landlock domain makes mount(2) and related calls fail, regardless of capabilities in a nested
/// user namespace; that is the purpose. Renames across directories must be allowed explicitly, or
/// the domain would forbid them.
pub fn forbid_mounts() -> io::Result<()> {
    forbid_mounts_with_scope(Scope::AbstractUnixSocket | Scope::Signal)
}

/// Like [`forbid_mounts`], for a process in a pid namespace that already isolates its signals:
/// processes inside may signal each other regardless of which process started them.
pub fn forbid_mounts_allow_signals() -> io::Result<()> {
    forbid_mounts_with_scope(Scope::AbstractUnixSocket.into())
}

fn forbid_mounts_with_scope(scope: BitFlags<Scope>) -> io::Result<()> {
    let handled = AccessFs::Refer | AccessFs::MakeBlock;
    let ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(handled)
        .and_then(|ruleset| ruleset.scope(scope))
        .and_then(Ruleset::create)
        .map_err(io::Error::other)?;
    let root = PathFd::new("/").map_err(io::Error::other)?;
    let status = ruleset
        .add_rule(PathBeneath::new(root, BitFlags::from(AccessFs::Refer)))
        .and_then(landlock::RulesetCreated::restrict_self)
        .map_err(io::Error::other)?;
    match status.ruleset {
        landlock::RulesetStatus::NotEnforced => Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP)),
        landlock::RulesetStatus::FullyEnforced | landlock::RulesetStatus::PartiallyEnforced => Ok(()),
    }
}

/// What a confined process may do with TCP sockets. Sockets that it inherits are not affected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TcpAccess {
    Nothing,
    Connect,
}

/// The parts of a confinement that need newer kernels than the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SupportedConfinement {
    /// TCP ports can be refused (Linux 6.7).
    pub tcp: bool,
    /// Abstract sockets and signals to processes outside can be refused (Linux 6.12).
    pub scopes: bool,
}

/// Returns what this kernel supports; `None` if it has no Landlock.
pub fn supported_confinement() -> Option<SupportedConfinement> {
    const ASK_FOR_VERSION: libc::c_ulong = 1;
    const NO_SIZE: libc::size_t = 0;
    // SAFETY: with this flag the call reads nothing: its pointer is null and its size zero.
    let version = unsafe {
        libc::syscall(
            libc::SYS_landlock_create_ruleset,
            std::ptr::null::<libc::c_void>(),
            NO_SIZE,
            ASK_FOR_VERSION,
        )
    };
    (version > 0).then_some(SupportedConfinement { tcp: version >= 4, scopes: version >= 6 })
}

/// Confines this process to reading `readable` and full access below `writable`, to the given use of TCP,
/// and to abstract sockets and signals of its own. Returns whether the kernel enforces it, as far as
/// [`supported_confinement`] says.
pub fn confine_process(readable: &[&Path], writable: &[&Path], tcp: TcpAccess) -> io::Result<bool> {
    let refused_tcp: BitFlags<AccessNet> = match tcp {
        TcpAccess::Nothing => AccessNet::BindTcp | AccessNet::ConnectTcp,
        TcpAccess::Connect => AccessNet::BindTcp.into(),
    };
    let mut ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(NEWEST_ABI))
        .and_then(|ruleset| ruleset.handle_access(refused_tcp))
        .and_then(|ruleset| ruleset.scope(Scope::AbstractUnixSocket | Scope::Signal))
        .and_then(Ruleset::create)
        .map_err(io::Error::other)?;
    let read = AccessFs::ReadFile | AccessFs::ReadDir;
    let rules = readable.iter().map(|path| (path, read));
    let rules = rules.chain(writable.iter().map(|path| (path, AccessFs::from_all(NEWEST_ABI))));
    for (path, access) in rules {
        match PathFd::new(path) {
            Ok(fd) => ruleset = ruleset.add_rule(PathBeneath::new(fd, access)).map_err(io::Error::other)?,
            // A missing path needs no permission.
            Err(landlock::PathFdError::OpenCall { .. }) => {}
            Err(error) => return Err(io::Error::other(error)),
        }
    }
    let status = ruleset.restrict_self().map_err(io::Error::other)?;
    Ok(status.ruleset != landlock::RulesetStatus::NotEnforced)
}
