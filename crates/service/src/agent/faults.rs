//! Converts an agent's faults into errors, whose meaning depends on the request.

use domain::{Language, ProcessId, SessionId};
use wire::{Fault, FaultKind};

use crate::agent::client::AgentClient;
use crate::error::{FileError, FileFault, LaunchStep, ServiceError};

/// The operation of a fault whose subject says why a kernel did not start.
const START_KERNEL: &str = "start kernel";

/// The named process is missing or not in the right state.
pub(crate) fn process_error(agent: &AgentClient, process: &ProcessId, fault: Fault) -> ServiceError {
    match fault.kind {
        FaultKind::NotFound => ServiceError::NoProcess(process.clone()),
        FaultKind::Busy => ServiceError::Busy(process.clone()),
        FaultKind::Invalid => ServiceError::Invalid(describe_fault(&fault)),
        _ => agent.fault_error(fault),
    }
}

/// A process could not be started: because of a directory, a user or a program, or too many processes.
pub(crate) fn launch_error(agent: &AgentClient, limit: u32, fault: Fault) -> ServiceError {
    match fault.kind {
        FaultKind::Busy => ServiceError::TooManyCommands { id: agent.id().clone(), limit },
        _ => file_error(agent, fault),
    }
}

/// Like [`launch_error`], but the session itself may be missing or busy.
pub(crate) fn session_error(agent: &AgentClient, session: &SessionId, fault: Fault) -> ServiceError {
    match fault.kind {
        FaultKind::NotFound if fault.subject == session.as_str() => ServiceError::NoSession(session.clone()),
        FaultKind::Busy => ServiceError::SessionBusy(session.clone()),
        _ => file_error(agent, fault),
    }
}

/// A kernel could not be started: the program that runs the language is missing or does not work.
pub(crate) fn kernel_error(agent: &AgentClient, language: &Language, fault: Fault) -> ServiceError {
    let reason = match (fault.kind, launch_step(&fault)) {
        (FaultKind::AlreadyExists, _) => return ServiceError::ContextExists(fault.subject),
        (FaultKind::Busy, _) => return ServiceError::Overloaded(agent.id().clone()),
        _ if fault.operation == START_KERNEL => fault.subject,
        (FaultKind::NotFound, Some(LaunchStep::Exec)) => format!("`{}` was not found", fault.subject),
        (_, Some(LaunchStep::Exec)) => format!("`{}` cannot be executed", fault.subject),
        _ => return file_error(agent, fault),
    };
    ServiceError::NoKernel { language: language.clone(), reason }
}

pub(crate) fn file_error(agent: &AgentClient, fault: Fault) -> ServiceError {
    let kind = match fault.kind {
        FaultKind::NotFound => FileFault::NotFound,
        FaultKind::AlreadyExists => FileFault::AlreadyExists,
        FaultKind::NotADirectory => FileFault::NotADirectory,
        FaultKind::IsADirectory => FileFault::IsADirectory,
        FaultKind::Permission => FileFault::Permission,
        FaultKind::NoSpace => FileFault::NoSpace,
        FaultKind::Invalid => FileFault::Invalid,
        // With an errno, the kernel reported it about this file; without one, the agent itself is busy.
        FaultKind::Busy if fault.errno.is_none() => return ServiceError::Overloaded(agent.id().clone()),
        FaultKind::Other | FaultKind::Busy | FaultKind::Refused => FileFault::Other,
        FaultKind::Unsupported => return agent.fault_error(fault),
    };
    ServiceError::File(FileError {
        fault: kind,
        errno: fault.errno,
        launch_step: launch_step(&fault),
        operation: fault.operation,
        path: fault.subject,
    })
}

pub(crate) fn tunnel_error(agent: &AgentClient, port: u16, fault: Fault) -> ServiceError {
    match fault.kind {
        FaultKind::Refused => ServiceError::Refused { id: agent.id().clone(), port },
        _ => agent.fault_error(fault),
    }
}

/// Reads the step from the operation that the agent names. These words are part of the protocol; any other is only
/// shown.
fn launch_step(fault: &Fault) -> Option<LaunchStep> {
    match fault.operation.as_str() {
        "become user" => Some(LaunchStep::BecomeUser),
        "exec" => Some(LaunchStep::Exec),
        _ => None,
    }
}

fn describe_fault(fault: &Fault) -> String {
    format!("could not {} `{}`", fault.operation, fault.subject)
}
