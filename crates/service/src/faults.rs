//! Converts an agent's faults into errors, whose meaning depends on the request.

use domain::{Language, ProcessId, SessionId};
use wire::{Fault, FaultKind};

use crate::agent_client::Agent;
use crate::error::{FileError, FileFault, ServiceError};

/// The named process is missing or not in the right state.
pub(crate) fn of_process(agent: &Agent, process: &ProcessId, fault: Fault) -> ServiceError {
    match fault.kind {
        FaultKind::NotFound => ServiceError::NoProcess(process.clone()),
        FaultKind::Busy => ServiceError::Busy(process.clone()),
        FaultKind::Invalid => ServiceError::Invalid(sentence(&fault)),
        _ => agent.refused(fault),
    }
}

/// A process could not be started: because of a directory, a user or a program, or too many processes.
pub(crate) fn of_launch(agent: &Agent, limit: u32, fault: Fault) -> ServiceError {
    match fault.kind {
        FaultKind::Busy => ServiceError::TooManyCommands { id: agent.id().clone(), limit },
        _ => of_file(agent, fault),
    }
}

/// Like [`of_launch`], but the session itself may be missing or busy.
pub(crate) fn of_session(agent: &Agent, session: &SessionId, fault: Fault) -> ServiceError {
    match fault.kind {
        FaultKind::NotFound if fault.subject == session.as_str() => ServiceError::NoSession(session.clone()),
        FaultKind::Busy => ServiceError::Busy(session.clone()),
        _ => of_file(agent, fault),
    }
}

/// A kernel could not be started: the program that runs the language is missing or does not work.
pub(crate) fn of_kernel(agent: &Agent, language: &Language, fault: Fault) -> ServiceError {
    let reason = match (fault.kind, fault.operation.as_str()) {
        (FaultKind::AlreadyExists, _) => return ServiceError::Taken(fault.subject),
        (FaultKind::Busy, _) => return ServiceError::Overloaded(agent.id().clone()),
        (_, "start kernel") => fault.subject,
        (FaultKind::NotFound, "exec") => format!("`{}` was not found", fault.subject),
        (_, "exec") => format!("`{}` cannot be executed", fault.subject),
        _ => return of_file(agent, fault),
    };
    ServiceError::NoKernel { language: language.clone(), reason }
}

pub(crate) fn of_file(agent: &Agent, fault: Fault) -> ServiceError {
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
        FaultKind::Unsupported => return agent.refused(fault),
    };
    ServiceError::File(FileError {
        fault: kind,
        errno: fault.errno,
        operation: fault.operation,
        path: fault.subject,
    })
}

pub(crate) fn of_tunnel(agent: &Agent, port: u16, fault: Fault) -> ServiceError {
    match fault.kind {
        FaultKind::Refused => ServiceError::Refused { id: agent.id().clone(), port },
        _ => agent.refused(fault),
    }
}

fn sentence(fault: &Fault) -> String {
    format!("could not {} `{}`", fault.operation, fault.subject)
}
