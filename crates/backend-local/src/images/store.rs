//! The images that were imported: adding, finding, listing, removing.

use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use linux::fs::Root;
use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};

use super::layer::{Layer, write_text};
use super::{During, HOST, ImageError, directory, tarball};

const SUMMARY: &str = "image.json";
const ROOTFS: &str = "rootfs";
/// A half-made or half-removed image; no name of an image looks like this.
const DRAFT: &str = ".draft";

/// What a list of images tells about one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageSummary {
    pub name: String,
    /// The mount points of its trees.
    pub trees: Vec<String>,
    /// What its files hold; the files of the host are not counted.
    pub bytes: u64,
}

/// Takes the directory or archive `source` in as the image `name`. It appears whole or not at all.
pub fn import(
    state: &Path,
    name: &str,
    source: &Path,
    progress: &mut dyn FnMut(&str),
) -> Result<ImageSummary, ImageError> {
    let place = Path::new(&encode(name)?).to_owned();
    if name == HOST {
        return Err(ImageError::Reserved(name.to_owned()));
    }
    let images = open(state)?;
    if images.stat(&place).is_ok() {
        return Err(ImageError::Exists(name.to_owned()));
    }
    let draft = make_draft(&images)?;
    let result = fill(state, &images, &draft, name, source, progress).and_then(|summary| {
        match images.rename_new(&draft, &place) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                Err(ImageError::Exists(name.to_owned()))
            }
            renamed => renamed.during("keep the image", &place).map(|()| summary),
        }
    });
    if result.is_err() {
        images.remove_tree(&draft).during("remove", &draft)?;
    }
    result
}

fn fill(
    state: &Path,
    images: &Root,
    draft: &Path,
    name: &str,
    source: &Path,
    progress: &mut dyn FnMut(&str),
) -> Result<ImageSummary, ImageError> {
    let rootfs = draft.join(ROOTFS);
    images.make_directory(&rootfs, 0o755).during("make", &rootfs)?;
    let mut layer = Layer::new(&directory_of(state).join(&rootfs), progress)?;
    if fs::metadata(source).during("open", source)?.is_dir() {
        directory::copy(source, &mut layer)?;
    } else {
        tarball::unpack(source, &mut layer)?;
    }
    let bytes = layer.finish()?;
    let tree = images.directory(&rootfs).during("open", &rootfs)?;
    complete(&tree, source)?;
    let summary = ImageSummary { name: name.to_owned(), trees: vec!["/".to_owned()], bytes };
    let text = serde_json::to_vec(&summary).map_err(io::Error::other).during("describe", source)?;
    write_text(images, &draft.join(SUMMARY), 0o600, &text).during("describe", source)?;
    Ok(summary)
}

/// Adds the directories that a jail mounts something on.
fn complete(tree: &Root, source: &Path) -> Result<(), ImageError> {
    if tree.stat(Path::new("bin")).is_err() && tree.stat(Path::new("usr")).is_err() {
        return Err(ImageError::NotARoot(source.to_owned()));
    }
    let needed =
        [("proc", 0o555), ("sys", 0o555), ("dev", 0o755), ("run", 0o755), ("tmp", 0o1777), ("root", 0o700)];
    for (name, mode) in needed {
        let path = Path::new(name);
        if tree.stat(path).is_err() {
            tree.make_directory(path, mode).during("make", path)?;
            tree.set_mode(path, mode).during("mark", path)?;
        }
    }
    rustix::fs::fchmod(tree, rustix::fs::Mode::from_raw_mode(0o755))
        .map_err(io::Error::from)
        .during("mark", source)
}

/// The images, `host` first.
pub fn list(state: &Path) -> Result<Vec<ImageSummary>, ImageError> {
    let trees = ["/", "/usr"].map(str::to_owned).to_vec();
    let mut found = vec![ImageSummary { name: HOST.to_owned(), trees, bytes: 0 }];
    let directory = directory_of(state);
    let entries = match fs::read_dir(&directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(found),
        entries => entries.during("list", &directory)?,
    };
    for entry in entries {
        let path = entry.during("list", &directory)?.path();
        if !path.ends_with(DRAFT) {
            let text = fs::read(path.join(SUMMARY)).during("read the summary of", &path)?;
            let summary = serde_json::from_slice(&text).map_err(io::Error::other);
            found.push(summary.during("read the summary of", &path)?);
        }
    }
    found[1..].sort_by(|one, other| one.name.cmp(&other.name));
    Ok(found)
}

/// Removes an image. Sandboxes that use it must be gone.
pub fn remove(state: &Path, name: &str) -> Result<(), ImageError> {
    let place = PathBuf::from(encode(name)?);
    if name == HOST {
        return Err(ImageError::Reserved(name.to_owned()));
    }
    let images = open(state)?;
    let draft = make_draft(&images)?;
    // Moved away first, so that it is gone for everybody before the first file is.
    let moved = images.rename_new(&place, &draft.join(ROOTFS));
    images.remove_tree(&draft).during("remove", &place)?;
    match moved {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(ImageError::Unknown(name.to_owned())),
        moved => moved.during("remove", &place),
    }
}

/// Where the files of the image `name` are, if there is one.
pub(super) fn find(state: &Path, name: &str) -> Result<Option<PathBuf>, ImageError> {
    // A name that no image can have may still be an alias.
    let Ok(place) = encode(name) else { return Ok(None) };
    let rootfs = directory_of(state).join(place).join(ROOTFS);
    match fs::symlink_metadata(&rootfs) {
        Ok(found) if found.is_dir() => Ok(Some(rootfs)),
        Ok(_) => Ok(None),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).during("look for", &rootfs),
    }
}

fn directory_of(state: &Path) -> PathBuf {
    state.join("images")
}

/// Opens the images to change them. One does so at a time, so a draft found then is left over
/// from somebody who was killed.
fn open(state: &Path) -> Result<Root, ImageError> {
    let directory = directory_of(state);
    fs::DirBuilder::new().recursive(true).mode(0o700).create(&directory).during("make", &directory)?;
    let images = Root::open(&directory).during("open", &directory)?;
    rustix::fs::flock(&images, FlockOperation::LockExclusive)
        .map_err(io::Error::from)
        .during("lock", &directory)?;
    images.remove_tree(Path::new(DRAFT)).during("clear", &directory)?;
    Ok(images)
}

fn make_draft(images: &Root) -> Result<PathBuf, ImageError> {
    let draft = PathBuf::from(DRAFT);
    images.make_directory(&draft, 0o700).during("make", &draft)?;
    Ok(draft)
}

/// The directory an image is kept in: its name, checked, with `/` and `:` written otherwise.
fn encode(name: &str) -> Result<String, ImageError> {
    let wrong = || ImageError::BadName(name.to_owned());
    let (path, tag) = name.split_once(':').map_or((name, None), |(path, tag)| (path, Some(tag)));
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"._-".contains(&byte);
    let starts = path.bytes().next().is_some_and(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
    let path_fits = path.len() <= 128 && path.bytes().all(|byte| plain(byte) || byte == b'/');
    let tag_fits = tag.is_none_or(|tag| {
        (1..=64).contains(&tag.len()) && tag.bytes().all(|byte| plain(byte) || byte.is_ascii_uppercase())
    });
    if !(starts && path_fits && tag_fits) {
        return Err(wrong());
    }
    Ok(name.replace('/', "+").replace(':', "@"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_becomes_one_directory_and_no_two_names_the_same() {
        assert_eq!(encode("a/b:1.2").ok().as_deref(), Some("a+b@1.2"));
        for name in
            ["", ".", "..", "/a", "A", "a b", "a:", "a:b:c", "a\0", "a:b/c", "a@b", "a+b", "../a", "-a"]
        {
            assert!(encode(name).is_err(), "{name:?}");
        }
        assert!(encode(&"a".repeat(129)).is_err());
    }
}
