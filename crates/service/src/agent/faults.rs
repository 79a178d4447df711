//! Converts an agent's faults into errors, whose meaning depends on the request.

use domain::{Language, ProcessId, SessionId};
use wire::{Fault, FaultKind, FaultOperation};

use crate::agent::client::AgentClient;
use crate::error::{FileError, FileFault, LaunchStep, ServiceError};

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
        FaultKind::NotFound if names_session(&fault, session) => ServiceError::NoSession(session.clone()),
        FaultKind::Busy => ServiceError::SessionBusy(session.clone()),
        _ => file_error(agent, fault),
    }
}

/// A session that several callers may open could not be opened: there are too many, it was closed since, or it is
/// another session.
pub(crate) fn open_session_error(agent: &AgentClient, session: &SessionId, fault: Fault) -> ServiceError {
    match fault.kind {
        FaultKind::NotFound if names_session(&fault, session) => ServiceError::NoSession(session.clone()),
        FaultKind::Busy => ServiceError::TooManySessions(agent.id().clone()),
        FaultKind::AlreadyExists => {
            let reason =
                fault.subject.strip_prefix(session.as_str()).and_then(|rest| rest.strip_prefix(": "));
            let reason = reason.unwrap_or("it is used otherwise").to_owned();
            ServiceError::SessionExists { session: session.clone(), reason }
        }
        _ => file_error(agent, fault),
    }
}

/// A session could not be opened for a run, or the run could not be started in it.
pub(crate) fn open_and_run_error(
    agent: &AgentClient,
    limit: u32,
    session: &SessionId,
    fault: Fault,
) -> ServiceError {
    match (fault.kind, &fault.operation) {
        (FaultKind::Busy | FaultKind::AlreadyExists, FaultOperation::OpenSession)
        | (FaultKind::NotFound, FaultOperation::FindSession) => open_session_error(agent, session, fault),
        _ => launch_error(agent, limit, fault),
    }
}

/// A kernel could not be started: the program that runs the language is missing or does not work.
pub(crate) fn kernel_error(agent: &AgentClient, language: &Language, fault: Fault) -> ServiceError {
    let reason = match (fault.kind, launch_step(&fault)) {
        (FaultKind::AlreadyExists, _) => return ServiceError::ContextExists(fault.subject),
        (FaultKind::Busy, _) => return ServiceError::Overloaded(agent.id().clone()),
        // The subject says why the kernel did not start.
        _ if fault.operation == FaultOperation::StartKernel => fault.subject,
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
        FaultKind::NotText => FileFault::NotText,
        // With an errno, the kernel reported it about this file; without one, the agent itself is busy.
        FaultKind::Busy if fault.errno.is_none() => return ServiceError::Overloaded(agent.id().clone()),
        FaultKind::Other | FaultKind::Busy | FaultKind::Refused => FileFault::Other,
        FaultKind::Unsupported => return agent.fault_error(fault),
    };
    ServiceError::File(FileError {
        fault: kind,
        errno: fault.errno,
        launch_step: launch_step(&fault),
        operation: fault.operation.into(),
        path: fault.subject,
    })
}

pub(crate) fn tunnel_error(agent: &AgentClient, port: u16, fault: Fault) -> ServiceError {
    match fault.kind {
        FaultKind::Refused => ServiceError::Refused { id: agent.id().clone(), port },
        _ => agent.fault_error(fault),
    }
}

fn launch_step(fault: &Fault) -> Option<LaunchStep> {
    match fault.operation {
        FaultOperation::BecomeUser => Some(LaunchStep::BecomeUser),
        FaultOperation::Exec => Some(LaunchStep::Exec),
        FaultOperation::FindSession
        | FaultOperation::FindIsolatedSession
        | FaultOperation::OpenSession
        | FaultOperation::StartKernel
        | FaultOperation::Other(_) => None,
    }
}

/// Whether the session itself was looked for, and not a file or program that its run needs. An agent of an earlier
/// version may name another operation; then the subject is the session.
fn names_session(fault: &Fault, session: &SessionId) -> bool {
    matches!(fault.operation, FaultOperation::FindSession | FaultOperation::FindIsolatedSession)
        || fault.subject == session.as_str()
}

fn describe_fault(fault: &Fault) -> String {
    format!("could not {} `{}`", fault.operation, fault.subject)
}
