//! The user and the directories that clients of AIO Sandbox expect.

use domain::{GuestSettings, GuestUser, ImageDefaults};

use super::provisioner::{PROVISIONER_SECTION, ProvisionerSettings};
use crate::front_settings::FrontValues;

/// The user of AIO's image.
pub(super) const USER_NAME: &str = "gem";
pub(super) const DEFAULT_UID: u32 = 1000;
pub(super) const HOME: &str = "/home/gem";
/// Where DeerFlow keeps the files of a conversation.
pub(super) const USER_DATA: &str = "/mnt/user-data";
pub(super) const USER_DATA_DIRECTORIES: [&str; 3] = ["workspace", "uploads", "outputs"];
/// Where DeerFlow expects skills, unless its configuration names another directory.
pub(super) const DEFAULT_SKILLS_ROOT: &str = "/mnt/skills";
pub(super) const SKILL_CATEGORIES: [&str; 4] = ["public", "custom", "legacy", "integrations"];

/// The guest of a server with these settings, which were checked when its configuration was read.
pub(super) fn guest_of_server(values: &FrontValues) -> GuestSettings {
    let settings = values.get(PROVISIONER_SECTION).map(ProvisionerSettings::from_values);
    let settings = settings.and_then(Result::ok).unwrap_or_default();
    guest_with_skills(settings.uid, settings.gid, DEFAULT_SKILLS_ROOT)
}

/// Commands run as `gem` in `/home/gem`. The directories of skills exist even if nothing is mounted there.
pub(super) fn guest_with_skills(uid: u32, gid: u32, skills_root: &str) -> GuestSettings {
    let owned = |path: String| (path, USER_NAME.to_owned());
    let of_root = |path: String| (path, "root".to_owned());
    let mut directories = vec![owned(HOME.to_owned()), owned(USER_DATA.to_owned())];
    directories.extend(USER_DATA_DIRECTORIES.map(|name| owned(format!("{USER_DATA}/{name}"))));
    directories.extend(SKILL_CATEGORIES.map(|name| of_root(format!("{skills_root}/{name}"))));
    let users = vec![GuestUser { name: USER_NAME.to_owned(), uid, gid, home: HOME.to_owned() }];
    GuestSettings {
        users,
        default_user: USER_NAME.to_owned(),
        default_directory: HOME.to_owned(),
        directories,
        image_defaults: ImageDefaults::Ignored,
    }
}
