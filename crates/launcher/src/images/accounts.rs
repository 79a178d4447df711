//! Resolves the user that an image names to numeric ids.
//!
//! The agent resolves it again for each command, in the current files inside. Here it is resolved
//! before the sandbox exists, for the owners of mounts: in the topmost layer that has the file. The
//! author of the image wrote that file. A wrong number in it can only give a mounted host directory a
//! different owner inside than intended; it grants no right that root inside does not have.

use std::io::{self, Read};
use std::path::Path;

use linux::fs::RootDirectory;
use rustix::fs::OFlags;

use super::FoundImage;

/// The maximum size read from a file. Longer files are truncated.
const MAX_FILE_SIZE: u64 = 1 << 20;
/// Larger ids do not exist inside.
const MAX_ID: u32 = 65_535;

impl FoundImage {
    /// Returns uid and gid of `user`, which is `user`, `uid`, `user:group` or `uid:gid`. Returns
    /// `None` if the files of the image do not define it.
    pub fn ids_of(&self, user: &str) -> Option<(u32, u32)> {
        let (user, group) = match user.split_once(':') {
            Some((user, group)) => (user, Some(group)),
            None => (user, None),
        };
        let passwd = self.read_file(Path::new("etc/passwd"));
        let (uid, own) = find_account(&passwd, user)?;
        let gid = match group {
            None => own,
            Some(group) => {
                find_group(&self.read_file(Path::new("etc/group")), group).or_else(|| group.parse().ok())?
            }
        };
        (uid <= MAX_ID && gid <= MAX_ID).then_some((uid, gid))
    }

    /// Returns the content of a file, or an empty string if it cannot be read without following a
    /// link.
    fn read_file(&self, path: &Path) -> String {
        let root = self.trees.iter().find(|tree| tree.mount_point == "/");
        for lower in root.into_iter().flat_map(|tree| &tree.lowers) {
            match read_in_layer(lower, path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                read => return read.unwrap_or_default(),
            }
        }
        String::new()
    }
}

fn read_in_layer(lower: &Path, path: &Path) -> io::Result<String> {
    let file = RootDirectory::open(lower)?.open_with(path, OFlags::RDONLY | OFlags::NONBLOCK, 0)?;
    if !file.metadata()?.is_file() {
        return Ok(String::new());
    }
    let mut bytes = Vec::new();
    file.take(MAX_FILE_SIZE).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Returns uid and gid of a user. A numeric user needs no account.
fn find_account(passwd: &str, user: &str) -> Option<(u32, u32)> {
    let accounts = || passwd.lines().filter_map(parse_account);
    let by_name = accounts().find(|(name, _, _)| *name == user);
    let by_number = || {
        let uid = user.parse().ok()?;
        Some(accounts().find(|(_, own, _)| *own == uid).unwrap_or((user, uid, uid)))
    };
    by_name.or_else(by_number).map(|(_, uid, gid)| (uid, gid))
}

fn parse_account(line: &str) -> Option<(&str, u32, u32)> {
    let mut fields = line.split(':');
    let (name, uid) = (fields.next()?, fields.nth(1)?.parse().ok()?);
    Some((name, uid, fields.next()?.parse().ok()?))
}

/// Returns the id of a group.
fn find_group(groups: &str, group: &str) -> Option<u32> {
    groups.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next()? == group).then(|| fields.nth(1)?.parse().ok()).flatten()
    })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::super::ImageTree;
    use super::*;

    const PASSWD: &str = "root:x:0:0::/root:/bin/sh\nbroken\napp:x:1234:50::/:/bin/sh\nfar:x:70000:1::/:\n";

    /// Creates an image whose layers, topmost first, have these files.
    fn image(place: &Path, layers: &[&[(&str, &str)]]) -> FoundImage {
        let mut lowers = Vec::new();
        for (number, files) in layers.iter().enumerate() {
            let lower = place.join(number.to_string());
            fs::create_dir_all(lower.join("etc")).expect("our own directory");
            for (name, content) in *files {
                fs::write(lower.join(name), content).expect("our own directory");
            }
            lowers.push(lower);
        }
        let trees = vec![ImageTree { mount_point: "/".to_owned(), lowers }];
        FoundImage { name: "test".to_owned(), trees, env: Vec::new(), record: None }
    }

    #[test]
    fn user_is_a_name_or_number_with_optional_group() {
        let place = tempfile::tempdir().expect("a directory");
        let lower: &[(&str, &str)] =
            &[("etc/passwd", "app:x:1:1::/:\n"), ("etc/group", "staff:x:77:app\nfar:x:70000:\n")];
        let image = image(place.path(), &[&[], &[("etc/passwd", PASSWD)], lower]);
        for (user, expected) in [
            ("app", Some((1234, 50))),
            ("1234", Some((1234, 50))),
            ("4242", Some((4242, 4242))),
            ("app:staff", Some((1234, 77))),
            ("4242:9", Some((4242, 9))),
            ("nobody", None),
            ("app:none", None),
            ("far", None),
            ("70000", None),
            ("1:70000", None),
            ("app:far", None),
            ("", None),
        ] {
            assert_eq!(image.ids_of(user), expected, "{user}");
        }
    }

    #[test]
    fn links_in_an_image_are_not_followed() {
        let place = tempfile::tempdir().expect("a directory");
        fs::write(place.path().join("outside"), PASSWD).expect("our own directory");
        let image = image(place.path(), &[&[], &[("etc/passwd", PASSWD)]]);
        symlink(place.path().join("outside"), place.path().join("0/etc/passwd")).expect("our own directory");
        assert_eq!(image.ids_of("app"), None);
        assert_eq!(image.ids_of("7"), Some((7, 7)));
    }
}
