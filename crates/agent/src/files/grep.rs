//! Searches for text in files. A worker executes a program of its own for it and leaves the connection to it, because
//! the engines for regular expressions would make the agent of every sandbox larger.
//!
//! The program is the one that also runs kernels, and it is confined as a command is.

use std::convert::Infallible;
use std::fs::File;
use std::io::{self, Seek, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use linux::caps::{self, CapSet};
use linux::spawn::{self, ExecFile, ExecStrings};
use linux::{descriptors, signals};
use rustix::fs::MemfdFlags;
use rustix::process::Signal;
use wire::Fault;
use wire::search::{GrepRequest, REQUEST_FD, SEARCH_SUBCOMMAND};

use super::FileWorker;
use crate::context::{AgentContext, MIN_PRIVATE_FD};
use crate::fault;
use crate::process::child::{self, ExecFailure};
use crate::process::command::c_string;

/// The capability of a search for root, so that root may read any file.
const ROOT_CAPABILITIES: CapSet = CapSet::of(&[caps::DAC_OVERRIDE]);

/// The program's arguments, its environment, and the descriptors that it inherits.
struct PreparedSearch {
    /// The request and the connection, in the order of their numbers.
    descriptors: [OwnedFd; 2],
    arguments: ExecStrings,
    environment: ExecStrings,
}

impl FileWorker<'_> {
    /// Becomes the program. The caller still has the agent's privileges, and so may be confined as a command is.
    pub(super) fn exec_search(
        &self,
        context: &AgentContext,
        request: &GrepRequest,
    ) -> Result<Infallible, Fault> {
        let failed = |error: io::Error| fault::from_io(&error, "start", "the search");
        let prepared = self.prepare_search(&self.resolve_path(&request.path)?, request)?;
        let keep = if self.user.is_root() { ROOT_CAPABILITIES } else { CapSet::NONE };
        child::set_limits(context).map_err(|errno| failed(errno.into()))?;
        child::confine_process(context, self.user, CapSet(keep.0 & context.capabilities.0))
            .map_err(|ExecFailure { step, errno }| fault::from_errno(errno, step.name(), "the search"))?;
        // A change of identity resets this setting. The search must not outlive the agent.
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
            .map_err(|errno| failed(errno.into()))?;
        Err(failed(prepared.exec(context.kernels_executable.as_fd())))
    }

    fn prepare_search(&self, path: &Path, request: &GrepRequest) -> Result<PreparedSearch, Fault> {
        let failed = |error: io::Error| fault::from_io(&error, "prepare", "the search");
        let request = GrepRequest { path: path.to_string_lossy().into_owned(), ..request.clone() };
        let request = store_request(&request).map_err(failed)?;
        let private = |fd: BorrowedFd<'_>| {
            rustix::io::fcntl_dupfd_cloexec(fd, MIN_PRIVATE_FD).map_err(|errno| failed(errno.into()))
        };
        Ok(PreparedSearch {
            descriptors: [private(request.as_fd())?, private(self.connection.as_fd())?],
            arguments: ExecStrings::new(vec![c_string("coracle")?, c_string(SEARCH_SUBCOMMAND)?]),
            // Names the ignore rules that the user has for all repositories.
            environment: ExecStrings::new(vec![c_string(&format!("HOME={}", self.user.home))?]),
        })
    }
}

impl PreparedSearch {
    /// Returns only on failure, with the reason.
    fn exec(self, program: BorrowedFd<'_>) -> io::Error {
        let ready = descriptors::close_on_exec_from(3)
            .and_then(|()| descriptors::duplicate_from(REQUEST_FD, &self.descriptors))
            .and_then(|()| signals::unblock_all());
        match ready {
            Ok(()) => spawn::exec_program(ExecFile::File(program), &self.arguments, &self.environment),
            Err(error) => error,
        }
    }
}

fn store_request(request: &GrepRequest) -> io::Result<File> {
    let mut file = File::from(rustix::fs::memfd_create("search", MemfdFlags::CLOEXEC)?);
    file.write_all(&serde_json::to_vec(request)?)?;
    file.rewind()?;
    Ok(file)
}
