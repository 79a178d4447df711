//! The agent of a sandbox as a program, and what it starts with.

pub(crate) mod program_copies;

use std::path::Path;

use linux::descriptors;
use rustix::process::Rlimit;

use self::program_copies::{ProgramCopies, SandboxPrograms};
use super::LauncherError;
use crate::jail::filters::{FilterSet, SeccompFilters};

pub(super) struct AgentProgram {
    pub(super) copies: ProgramCopies,
    /// The original limit on open files, for programs inside; the launcher raises its own.
    pub(super) open_files: Rlimit,
    filters: SeccompFilters,
}

/// The smallest limit on open files. Below it a sandbox could fail half-way for lack of a descriptor,
/// without an explanation.
pub(super) const MIN_OPEN_FILES: u64 = 128;

impl AgentProgram {
    /// Opens the copies of `programs` in the directory `bin`. `open_files` is the limit on open files that
    /// programs inside start with.
    pub(super) fn open(
        bin: &Path,
        programs: SandboxPrograms,
        open_files: Rlimit,
    ) -> Result<Self, LauncherError> {
        let failed = |source| LauncherError::Io { action: "copy programs to", path: bin.to_owned(), source };
        let owned_inside = !linux::privileges::is_host_root();
        let copies = ProgramCopies::open(bin, programs, owned_inside).map_err(failed)?;
        Ok(Self { copies, open_files, filters: SeccompFilters::compile()? })
    }

    /// Returns the filters of a sandbox. If it can write to directories of the host, set-id bits are
    /// refused: root inside is a real user there, and the host's users could execute its files.
    pub(super) fn filters(&self, refuses_set_id: bool) -> &FilterSet {
        if refuses_set_id { &self.filters.without_set_id } else { &self.filters.standard }
    }
}

/// Raises this process's limit on open files and returns the original one.
pub(super) fn raise_open_file_limit() -> Result<Rlimit, LauncherError> {
    let open_files = descriptors::raise_open_file_limit().map_err(LauncherError::OpenFiles)?;
    match open_files.maximum.filter(|most| *most < MIN_OPEN_FILES) {
        Some(most) => Err(LauncherError::FewFiles(most)),
        None => Ok(open_files),
    }
}
