//! The users of a guest on this host: those that the image has already, and the only one that a sandbox without a range
//! of ids has.

use std::collections::BTreeMap;

use super::super::LauncherRights;
use crate::images::FoundImage;
use crate::jail::plan::{GuestPlan, JailPlan, UserPlan};

/// The user of a sandbox that has no other.
const ONLY_USER: &str = "root";

impl LauncherRights {
    /// Adapts the guest of a plan to the image and to this host.
    pub(in crate::process) fn adapt_guest(&self, plan: &mut JailPlan, image: &FoundImage) {
        if plan.guest.users.is_empty() {
            return;
        }
        match self {
            Self::Root(_) => keep_image_users(&mut plan.guest, |name| image.ids_of(name)),
            Self::User { .. } => use_only_user(&mut plan.guest, &mut plan.env, |name| image.ids_of(name)),
        }
    }

    /// Reports that the users of a guest have no ids of their own.
    pub(super) fn missing_guest_users(&self, plan: &JailPlan) -> Option<String> {
        let names: Vec<&str> = plan.guest.users.iter().map(|user| user.name.as_str()).collect();
        let is_missing = matches!(self, Self::User { .. }) && !names.is_empty();
        is_missing.then(|| {
            format!("user {} has the rights of root: this sandbox has no other user", names.join(", "))
        })
    }
}

/// A user that the image has keeps its ids.
fn keep_image_users(guest: &mut GuestPlan, ids_of: impl Fn(&str) -> Option<(u32, u32)>) {
    for user in &mut guest.users {
        if let Some((uid, gid)) = ids_of(&user.name) {
            *user = UserPlan { uid, gid, in_image: true, ..user.clone() };
        }
    }
}

/// Users become other names of the only user. One whose name has other ids in the image cannot be used at all; commands
/// then run as root in that user's home.
fn use_only_user(
    guest: &mut GuestPlan,
    env: &mut BTreeMap<String, String>,
    ids_of: impl Fn(&str) -> Option<(u32, u32)>,
) {
    for user in &mut guest.users {
        let image_ids = ids_of(&user.name);
        *user = UserPlan { uid: 0, gid: 0, in_image: image_ids.is_some(), ..user.clone() };
        if user.name == guest.default_user && image_ids.is_some_and(|ids| ids != (0, 0)) {
            guest.default_user = ONLY_USER.to_owned();
            env.entry("HOME".to_owned()).or_insert_with(|| user.home.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guest() -> GuestPlan {
        let user = |name: &str| UserPlan {
            name: name.to_owned(),
            uid: 1000,
            gid: 1000,
            home: ["/home", name].join("/"),
            in_image: false,
        };
        GuestPlan {
            users: vec![user("gem"), user("other")],
            default_user: "gem".to_owned(),
            default_directory: "/home/gem".to_owned(),
            directories: Vec::new(),
            by_image: false,
        }
    }

    #[test]
    fn user_of_the_image_keeps_its_ids() {
        let mut guest = guest();
        keep_image_users(&mut guest, |name| (name == "gem").then_some((2000, 3000)));
        let ids: Vec<_> = guest.users.iter().map(|user| (user.uid, user.gid, user.in_image)).collect();
        assert_eq!(ids, [(2000, 3000, true), (1000, 1000, false)]);
    }

    #[test]
    fn only_user_has_the_names_of_all_users() {
        let (mut guest, mut env) = (guest(), BTreeMap::new());
        use_only_user(&mut guest, &mut env, |_| None);
        assert!(guest.users.iter().all(|user| (user.uid, user.gid, user.in_image) == (0, 0, false)));
        assert_eq!((guest.default_user.as_str(), env.get("HOME")), ("gem", None));
        use_only_user(&mut guest, &mut env, |name| (name == "gem").then_some((1000, 1000)));
        assert_eq!(guest.default_user, "root");
        assert_eq!(env.get("HOME").map(String::as_str), Some("/home/gem"));
    }
}
