//! The programs that sandboxes of this process execute.

use launcher::{ProgramSource, SandboxPrograms};

/// For sandboxes that only run commands.
pub(crate) const COMMAND_PROGRAMS: SandboxPrograms =
    SandboxPrograms { agent: ProgramSource::Embedded(embedded::AGENT_PROGRAM), kernels: None };

/// For sandboxes that may also start kernels, which are a role of the whole program.
pub(crate) const ALL_PROGRAMS: SandboxPrograms =
    SandboxPrograms { kernels: Some(ProgramSource::ThisProgram), ..COMMAND_PROGRAMS };
