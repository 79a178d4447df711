//! The users, homes and default directory that a client expects inside a sandbox.

/// The users and directories of a sandbox. Each front defines its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestSettings {
    /// Accounts that must exist in addition to those of the image.
    pub users: Vec<GuestUser>,
    /// The user that runs commands when the caller names no user.
    pub default_user: String,
    /// The directory where commands start when the caller names none; it must exist.
    pub default_directory: String,
    /// Directories that must exist, each with its owner.
    pub directories: Vec<(String, String)>,
    pub image_defaults: ImageDefaults,
}

/// Whether the user and the directory that an image names replace the defaults of the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageDefaults {
    Preferred,
    Ignored,
}

/// An account inside the sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestUser {
    pub name: String,
    pub uid: u32,
    pub gid: u32,
    pub home: String,
}

impl GuestSettings {
    /// Everything as root in `/root`, unless the image names another user or directory.
    pub fn root_only() -> Self {
        Self {
            users: Vec::new(),
            default_user: "root".to_owned(),
            default_directory: "/root".to_owned(),
            directories: Vec::new(),
            image_defaults: ImageDefaults::Preferred,
        }
    }
}
