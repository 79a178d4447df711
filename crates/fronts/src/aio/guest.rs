//! The user and the directories that clients of AIO Sandbox expect.

use domain::{GuestSettings, GuestUser, ImageDefaults};

/// The user of AIO's image.
pub(super) const USER_NAME: &str = "gem";
pub(super) const DEFAULT_UID: u32 = 1000;
pub(super) const HOME: &str = "/home/gem";
/// Where DeerFlow keeps the files of a conversation.
pub(super) const USER_DATA: &str = "/mnt/user-data";

/// Commands run as `gem` in `/home/gem`.
pub(super) fn guest_settings() -> GuestSettings {
    let owned = |path: &str| (path.to_owned(), USER_NAME.to_owned());
    let user_data = ["workspace", "uploads", "outputs"].map(|name| owned(&format!("{USER_DATA}/{name}")));
    let mut directories = vec![owned(HOME), owned(USER_DATA)];
    directories.extend(user_data);
    GuestSettings {
        users: vec![GuestUser {
            name: USER_NAME.to_owned(),
            uid: DEFAULT_UID,
            gid: DEFAULT_UID,
            home: HOME.to_owned(),
        }],
        default_user: USER_NAME.to_owned(),
        default_directory: HOME.to_owned(),
        directories,
        image_defaults: ImageDefaults::Ignored,
    }
}
