//! Directories of the machine that builds a release, which must not be part of it: they tell about the
//! machine, and the same sources would give another binary elsewhere.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::tools::{command_output, workspace_root};

/// The directories that compilers write into what they make, and the names that replace them.
pub(crate) struct BuildPaths(Vec<(PathBuf, &'static str)>);

impl BuildPaths {
    pub(crate) fn find() -> Result<Self> {
        Self::find_for(&workspace_root())
    }

    /// The directories of a build from a copy of the repository.
    pub(crate) fn find_for(root: &Path) -> Result<Self> {
        let home = std::env::var_os("HOME").map(PathBuf::from);
        let cargo =
            std::env::var_os("CARGO_HOME").map(PathBuf::from).or(home.map(|home| home.join(".cargo")));
        let cargo = cargo.context("there is neither CARGO_HOME nor HOME")?;
        let sysroot = command_output(Command::new("rustc").args(["--print", "sysroot"]))?;
        let library = Path::new(sysroot.trim()).join("lib/rustlib/src/rust");
        let mut paths = vec![(root.to_owned(), "/coracle"), (cargo, "/cargo"), (library, "/rustc/library")];
        // Generated sources lie there, inside or outside the repository; the name is the same.
        let target = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
        paths.extend(target.map(|target| (target, "/coracle/target")));
        Ok(Self(paths))
    }

    /// Has a build of cargo replace the directories, in Rust by a flag that joins those of .cargo/config.toml,
    /// and in C. The programs that `coracle` contains are built by a build script, which inherits both.
    pub(crate) fn hide_in<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        let pairs = || self.0.iter().map(|(path, name)| format!("{}={name}", path.display()));
        let flags: Vec<String> = pairs().map(|pair| format!("--remap-path-prefix={pair}")).collect();
        // A list of strings is written alike in JSON and in TOML.
        let flags = serde_json::Value::from(flags);
        let c_flags: Vec<String> = pairs().map(|pair| format!("-ffile-prefix-map={pair}")).collect();
        command.arg("--config").arg(format!("build.rustflags={flags}")).env("CFLAGS", c_flags.join(" "))
    }

    /// Fails if a file contains one of the directories.
    pub(crate) fn check_absent_from(&self, file: &Path) -> Result<()> {
        let content = fs::read(file).with_context(|| format!("could not read `{}`", file.display()))?;
        match self.find_in(&content) {
            Some(text) => bail!("`{}` contains the build path `{text}`", file.display()),
            None => Ok(()),
        }
    }

    /// Returns the text around the first directory in some bytes.
    fn find_in(&self, content: &[u8]) -> Option<String> {
        let at = self.0.iter().find_map(|(path, _)| {
            // With its separator, so that `/root` does not match `/root-of-something`.
            let pattern = format!("{}/", path.display()).into_bytes();
            content.windows(pattern.len()).position(|window| window == pattern)
        })?;
        let text = content[at..].iter().take(200).take_while(|byte| byte.is_ascii_graphic());
        Some(text.map(|byte| char::from(*byte)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn build_path_is_found_in_a_binary() {
        let paths = BuildPaths(vec![(PathBuf::from("/build/coracle"), "/coracle")]);
        assert_eq!(paths.find_in(b"\0\x01/coracle/crates/x.rs\0/build/coracle-other\0"), None);
        let found = paths.find_in(b"abc\0/build/coracle/crates/x.rs\0rest");
        assert_eq!(found.as_deref(), Some("/build/coracle/crates/x.rs"));
    }

    #[test]
    fn paths_of_this_machine_are_replaced() {
        let mut command = Command::new("true");
        BuildPaths::find().expect("cargo runs this").hide_in(&mut command);
        let arguments: Vec<String> =
            command.get_args().map(|argument| argument.to_string_lossy().into_owned()).collect();
        let replaced = format!("--remap-path-prefix={}=/coracle", workspace_root().display());
        assert!(arguments.iter().any(|argument| argument.contains(&replaced)), "{arguments:?}");
    }
}
