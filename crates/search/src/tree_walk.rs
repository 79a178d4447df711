//! The files that a search reads, sorted by path, chosen by ripgrep's rules.

use std::path::{Path, PathBuf};

use ignore::overrides::{Override, OverrideBuilder};
use ignore::types::{Types, TypesBuilder};
use ignore::{Walk, WalkBuilder};
use wire::Fault;
use wire::search::GrepRequest;

use crate::file_search::{FileSearchError, open_regular};
use crate::pattern::refuse_pattern;
use crate::{invalid, io_fault};

/// The maximum depth of a walk.
const MAX_DEPTH: usize = 1000;

/// The most globs of each kind, and the longest.
const MAX_GLOBS: usize = 256;
const MAX_GLOB_BYTES: usize = 4096;

/// Yields the paths of regular files. A path that was a file may be something else when it is opened.
pub(crate) enum FileWalk {
    One(Option<PathBuf>),
    Tree(Box<Walk>),
}

impl FileWalk {
    /// A path that cannot be read is a fault only if it is the one that was requested.
    pub(crate) fn start(request: &GrepRequest) -> Result<Self, Fault> {
        let root = Path::new(&request.path);
        let failed = |error| io_fault(&error, "search", &request.path);
        if !root.metadata().map_err(failed)?.is_dir() {
            return match open_regular(root) {
                Ok(_) => Ok(Self::One(Some(root.to_owned()))),
                Err(FileSearchError::Io(error)) if error.raw_os_error().is_some() => Err(failed(error)),
                Err(_) => Err(invalid("search", &format!("{}: not a regular file", request.path))),
            };
        }
        root.read_dir().map_err(failed)?;
        let mut builder = WalkBuilder::new(root);
        builder
            .follow_links(false)
            .max_depth(Some(if request.recursive { MAX_DEPTH } else { 1 }))
            .add_custom_ignore_filename(".rgignore")
            .sort_by_file_name(Ord::cmp)
            .current_dir(root)
            .overrides(build_overrides(root, request)?);
        if let Some(types) = build_types(request)? {
            builder.types(types);
        }
        Ok(Self::Tree(Box::new(builder.build())))
    }

    /// The next files, at most `most`, and none only at the end.
    pub(crate) fn next_files(&mut self, most: usize) -> Vec<PathBuf> {
        match self {
            Self::One(path) => path.take().into_iter().collect(),
            Self::Tree(walk) => {
                // Unreadable directories are left out, and so are invalid lines of ignore files.
                let entries = walk.by_ref().flatten();
                let files = entries.filter(|entry| entry.file_type().is_some_and(|kind| kind.is_file()));
                files.take(most).map(ignore::DirEntry::into_path).collect()
            }
        }
    }
}

fn build_overrides(root: &Path, request: &GrepRequest) -> Result<Override, Fault> {
    if request.include.len().max(request.exclude.len()) > MAX_GLOBS {
        return Err(refuse_pattern("globs", &format!("more than {MAX_GLOBS} are given")));
    }
    let mut builder = OverrideBuilder::new(root);
    let includes = request.include.iter().map(|glob| (glob, glob.clone()));
    let excludes = request.exclude.iter().map(|glob| (glob, format!("!{glob}")));
    for (glob, rule) in includes.chain(excludes) {
        if glob.is_empty() || glob.len() > MAX_GLOB_BYTES {
            return Err(refuse_pattern(glob, &format!("a glob has 1 to {MAX_GLOB_BYTES} bytes")));
        }
        builder.add(&rule).map_err(|error| refuse_pattern(glob, &describe_glob_error(&error)))?;
    }
    builder.build().map_err(|error| refuse_pattern("globs", &describe_glob_error(&error)))
}

fn build_types(request: &GrepRequest) -> Result<Option<Types>, Fault> {
    let Some(name) = &request.file_type else { return Ok(None) };
    let mut builder = TypesBuilder::new();
    builder.add_defaults().select(name);
    let types = builder.build();
    types.map(Some).map_err(|error| refuse_pattern(name, &error.to_string()))
}

/// The reason alone: the caller names the glob.
fn describe_glob_error(error: &ignore::Error) -> String {
    match error {
        ignore::Error::Glob { err, .. } => err.clone(),
        other => other.to_string(),
    }
}
