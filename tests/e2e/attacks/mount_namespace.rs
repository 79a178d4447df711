//! Puts the attacker into its own mount namespace, so that an attack that succeeds outside changes nothing
//! there.

use std::io;

use crate::call::{call, constant, pointer, text};

pub(crate) fn enter_own_mount_namespace() -> io::Result<()> {
    call(libc::SYS_unshare, &[constant(libc::CLONE_NEWNS)])?;
    let root = text("/");
    call(libc::SYS_mount, &[0, pointer(root.as_c_str()), 0, libc::MS_REC | libc::MS_PRIVATE, 0])?;
    Ok(())
}
