//! The names of images: `[registry[:port]/]path[:tag][@sha256:…]`, and the file in which each is
//! stored.

use domain::split_image_tag;

use super::{Digest, ImageError};

/// The maximum length of a file name that leaves space for a suffix.
const MAX_NAME_LENGTH: usize = 240;

/// Returns the name of the file that describes an image. It is unique for each image name.
pub(super) fn file_name(name: &str) -> Result<String, ImageError> {
    let wrong = || ImageError::BadName(name.chars().take(300).collect());
    let (rest, digest) = name.split_once('@').map_or((name, None), |(rest, digest)| (rest, Some(digest)));
    if digest.is_some_and(|digest| Digest::parse(digest).is_err()) {
        return Err(wrong());
    }
    let (path, tag) = split_image_tag(rest);
    let mut parts = path.split('/').enumerate();
    let several = path.contains('/');
    let path_fits = parts
        .all(|(index, part)| if index == 0 && several { is_valid_host(part) } else { is_valid_part(part) });
    let tag_fits = tag.is_none_or(|tag| {
        let starts = tag.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        starts && tag.len() <= 128 && tag.bytes().all(plain)
    });
    if !(path_fits && tag_fits && name.len() <= MAX_NAME_LENGTH) {
        return Err(wrong());
    }
    // None of the three replacement characters is valid in a name.
    Ok(name.replace('/', "+").replace(':', "=").replace('@', "#"))
}

/// Adds the default tag to a name without one.
pub(super) fn with_default_tag(name: &str) -> Option<String> {
    let bare = !name.contains('@') && split_image_tag(name).1.is_none();
    bare.then(|| format!("{name}:latest"))
}

fn is_valid_part(part: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"._-".contains(&byte);
    let starts = part.bytes().next().is_some_and(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
    starts && part.bytes().all(plain)
}

/// The first of several parts may be a registry with a port.
fn is_valid_host(part: &str) -> bool {
    match part.split_once(':') {
        Some((host, port)) => is_valid_part(host) && port.parse::<u16>().is_ok(),
        None => is_valid_part(part),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_name_has_its_own_file() {
        let digest = Digest::of_content(b"x");
        let pinned = format!("a@{digest}");
        for (name, file) in [
            ("a/b:1.2", "a+b=1.2".to_owned()),
            ("127.0.0.1:5000/a/b:V1", "127.0.0.1=5000+a+b=V1".to_owned()),
            (&pinned, format!("a#sha256={}", digest.hex())),
        ] {
            assert_eq!(file_name(name).ok(), Some(file), "{name}");
        }
        for name in [
            "",
            ".",
            "..",
            "/a",
            "A",
            "a b",
            "a:",
            "a:b:c",
            "a\0",
            "a:b/c",
            "a@b",
            "a+b",
            "../a",
            "-a",
            "a//b",
            "a/",
            "a:99999/b",
            "a/../b",
            "a/b:-x",
            "a=b",
            "a#b",
        ] {
            assert!(file_name(name).is_err(), "{name:?}");
        }
        assert!(file_name(&"a".repeat(MAX_NAME_LENGTH + 1)).is_err());
    }

    #[test]
    fn latest_is_the_default_tag() {
        assert_eq!(with_default_tag("h:5000/a").as_deref(), Some("h:5000/a:latest"));
        assert_eq!(with_default_tag("h:5000/a:1"), None);
        assert_eq!(with_default_tag("a@sha256:0"), None);
    }
}
