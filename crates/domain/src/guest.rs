//! What a client expects to find inside: users, homes, the directory where commands start.

/// The inhabitants of a sandbox. Each front has its own idea of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Guest {
    /// Accounts that must exist besides those of the image.
    pub users: Vec<User>,
    /// As whom commands run when the caller names nobody.
    pub default_user: String,
    /// Where commands start when the caller names no directory; it must exist.
    pub default_directory: String,
    /// Directories that must exist, each with the user it belongs to.
    pub directories: Vec<(String, String)>,
}

/// An account inside the sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    pub name: String,
    pub uid: u32,
    pub gid: u32,
    pub home: String,
}

impl Guest {
    /// Everything as root in `/root`, as the reference API has it.
    pub fn root() -> Self {
        Self {
            users: Vec::new(),
            default_user: "root".to_owned(),
            default_directory: "/root".to_owned(),
            directories: Vec::new(),
        }
    }
}
