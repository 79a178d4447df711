//! Sessions without a shell: each run is a process of its own, with its own pipes, group and environment.
//!
//! ```text
//! open ─► idle ─ run ─► forked ─► running, its input is open ─► idle; the next run that waits begins
//!                          └─► could not be started: the run is refused, and the session is as before
//! ```
//! Nothing that a run does to its shell reaches the next one. The session itself keeps the directory where runs
//! start. Processes that a run has left continue until the session is closed.

use linux::spawn::{ProcessExit, ProcessUsage};
use rustix::io::Errno;
use rustix::process::Signal;
use wire::process::{MissingDirectory, OpenSession, RunInSession, WorkingDirectory};
use wire::shared_session::{MAX_SESSION_SCRIPT_BYTES, OpenCommands};
use wire::{AgentConfig, Fault, FaultKind};

use super::shared::refused_open;
use super::{MAX_DIRECTORY_BYTES, QueuedCaller, Session, SessionKind, SessionRun, change_dir, shell};
use crate::event_loop::agent::Agent;
use crate::event_loop::handles::{ConnectionId, SessionHandle};
use crate::process::child::ExecFailure;
use crate::process::command::{ExecEnvironment, PreparedCommand, ResolvedDirectory};
use crate::process::exec::StdioMode;
use crate::process::running_process::ProcessOwner;
use crate::process::{FaultSubjects, ManagedProcess};
use crate::{fault, path};

/// The settings that all runs of a session without a shell share.
#[derive(Clone, Debug)]
pub(crate) struct CommandSettings {
    /// An absolute path once the session is open.
    script: Option<String>,
    start: StartDirectory,
}

/// The directory where runs start that name none.
#[derive(Clone, Debug)]
pub(super) struct StartDirectory {
    /// `None` is the sandbox's default directory.
    directory: Option<WorkingDirectory>,
    /// The directory that a relative path starts from.
    base: String,
    /// The path, unless it depends on variables that only the command itself can look up.
    path: Option<String>,
}

impl CommandSettings {
    fn new(config: &AgentConfig, open: &OpenSession, script: Option<String>) -> Self {
        let start = StartDirectory {
            directory: open.directory.clone(),
            base: config.default_directory.clone(),
            path: None,
        };
        Self { script, start }
    }
}

impl StartDirectory {
    /// The directory as a command has resolved it, so that later variables and directories do not change it.
    fn with_resolved_path(self, resolved: &ResolvedDirectory) -> Result<Self, Fault> {
        let Some(path) = resolved.known_path() else { return Ok(self) };
        if path.len() > MAX_DIRECTORY_BYTES {
            return Err(fault::from_errno(Errno::NAMETOOLONG, "change directory", path));
        }
        let path = plain_path(path);
        let directory = self.directory.map(|directory| WorkingDirectory {
            path: path.clone(),
            missing: directory.missing,
            expand: false,
        });
        Ok(Self { directory, base: path.clone(), path: Some(path) })
    }
}

impl Agent {
    /// Opens a session without a shell, or finds the one that is open under its name.
    pub(crate) fn open_commands(
        &mut self,
        connection: ConnectionId,
        request: OpenCommands,
    ) -> Result<(), Fault> {
        let OpenCommands { open, script } = request;
        let refused = |why| Err(refused_open(&open, why));
        let Some(sharing) = open.sharing.clone() else {
            return refused("a session without a shell must be shared");
        };
        if open.terminal.is_some() || open.text_terminal {
            return refused("a session without a shell has no terminal");
        }
        let valid =
            |path: &String| (1..=MAX_SESSION_SCRIPT_BYTES).contains(&path.len()) && !path.contains('\0');
        if !script.as_ref().is_none_or(valid) {
            return refused("the path of its script must have 1 to 4096 bytes");
        }
        let settings = CommandSettings::new(&self.context.config, &open, script);
        self.open_shared_session(connection, open, &sharing, SessionKind::Commands(settings))
    }

    /// Checks the user and the directory of a new session and answers its opener.
    pub(super) fn begin_command_session(&mut self, number: SessionHandle) -> Result<(), Fault> {
        let config = &self.context.config;
        let session = self.sessions.get_mut(number).expect("it was just added");
        let SessionKind::Commands(settings) = &mut session.kind else { return Ok(()) };
        let open = &session.open;
        let environment = ExecEnvironment::new(config, &open.identity, &open.env, open.directory.as_ref())?;
        if let Some(script) = &mut settings.script {
            let literal =
                WorkingDirectory { path: script.clone(), missing: MissingDirectory::Fail, expand: false };
            *script = path::expand_path(&config.default_directory, &environment.env, &literal);
        }
        settings.start = settings.start.clone().with_resolved_path(&environment.workdir)?;
        session.directory = settings.start.path.clone();
        let must_exist =
            open.directory.as_ref().is_some_and(|directory| directory.missing == MissingDirectory::Fail);
        if let Some(path) = settings.start.path.as_ref().filter(|_| must_exist) {
            change_dir::check_directory_exists(path)?;
        }
        for opener in std::mem::take(&mut session.openers) {
            self.report_session(number, opener);
        }
        self.sessions.restart_idle_timer(number, &mut self.events.alarms);
        Ok(())
    }

    /// Starts the process of a run; the reply comes when it is known whether the exec succeeded.
    pub(super) fn begin_command_run(
        &mut self,
        number: SessionHandle,
        caller: QueuedCaller,
        request: RunInSession,
    ) -> Result<(), Fault> {
        self.context.refresh_limit_view(&mut self.events);
        let session = self.sessions.get(number).expect("the caller has found it");
        let (command, new_directory) = session.prepare_command(&self.context.config, &request)?;
        let process = self.add_begun_run(caller, &request, FaultSubjects::of_command(&command));
        let wiring = StdioMode { terminal: None, plain: false, stdin: true };
        let launched = self.launch_process(ProcessOwner::CommandRun(number), &command, wiring);
        let running = launched.inspect_err(|_| self.drop_unstarted_run(process))?;
        let deadline = self.set_deadline(process, request.deadline_ms);
        if let Some(begun) = self.processes.get_mut(process) {
            begun.running = Some(running);
            begun.deadline = deadline;
            begun.mark_started();
        }
        let session = self.sessions.get_mut(number).expect("the session exists");
        // There is no shell that could report about a run, so it needs no key.
        session.current = Some(SessionRun { process, key: String::new(), request, new_directory });
        self.sessions.restart_idle_timer(number, &mut self.events.alarms);
        Ok(())
    }

    /// The exec of the present run has succeeded or failed.
    pub(crate) fn command_run_started(&mut self, number: SessionHandle, outcome: Result<(), ExecFailure>) {
        let Some(session) = self.sessions.get_mut(number) else { return };
        let Some(run) = &mut session.current else { return };
        let (handle, new_directory) = (run.process, run.new_directory.take());
        let Some(process) = self.processes.get_mut(handle) else { return };
        match outcome {
            Ok(()) => {
                process.pid = process.running.and_then(|running| self.children.pid_of(running));
                let caller = process.caller.take();
                session.record_run(handle);
                if let (Some(directory), SessionKind::Commands(settings)) = (new_directory, &mut session.kind)
                {
                    session.directory = directory.path.clone();
                    settings.start = directory;
                }
                self.report_started(handle, caller);
            }
            Err(failure) => {
                let fault = process.start_fault(failure);
                self.refuse_current_run(number, &fault);
                self.begin_next_run(number);
                self.sessions.drop_if_closed(number);
            }
        }
    }

    /// The main process of the present run has ended.
    pub(crate) fn command_run_ended(&mut self, number: SessionHandle, end: ProcessExit, usage: ProcessUsage) {
        let run = self.sessions.current_run(number).and_then(|process| self.processes.get(process));
        let running = run.and_then(|process| process.running);
        if let Some(session) = self.sessions.get_mut(number) {
            session.earlier_runs.retain(|left| self.children.has_tree(*left));
            session.earlier_runs.extend(running);
            if session.closing {
                // It was asked to end; what it has started was not.
                session.kill_earlier_runs(&self.children, &self.context);
            }
        }
        self.finish_run(number, end, usage);
        self.begin_next_run(number);
        self.sessions.drop_if_closed(number);
    }

    /// Kills the present run of a session without a shell, and everything that it has started.
    pub(crate) fn kill_command_run(&self, number: SessionHandle) {
        if let Some(running) = self.command_run(number).and_then(|process| process.running) {
            self.children.kill_tree(running, &self.context);
        }
    }

    /// Asks the present run of a session without a shell to end. Returns `false` if there is none, or if it cannot be
    /// asked.
    pub(super) fn terminate_command_run(&mut self, number: SessionHandle) -> bool {
        let Some((process, running)) =
            self.command_run(number).and_then(|process| Some((process.number, process.running?)))
        else {
            return false;
        };
        let sent = self.children.get(running).is_some_and(|running| {
            running.tree.signal(self.context.commands.as_ref(), running.pid, Signal::TERM).is_ok()
        });
        if let Some(process) = self.processes.get_mut(process).filter(|_| sent) {
            process.signalled = Some(Signal::TERM.as_raw());
        }
        sent
    }

    /// The present run of a session, if it is a process of its own.
    fn command_run(&self, number: SessionHandle) -> Option<&ManagedProcess> {
        self.sessions.get(number).filter(|session| session.runs_commands())?;
        self.processes.get(self.sessions.current_run(number)?)
    }
}

impl Session {
    /// Whether each run is a process of its own.
    pub(crate) fn runs_commands(&self) -> bool {
        matches!(self.kind, SessionKind::Commands(_))
    }

    /// The command of a run and, if the request names a directory, the one where later runs start.
    fn prepare_command(
        &self,
        config: &AgentConfig,
        request: &RunInSession,
    ) -> Result<(PreparedCommand, Option<StartDirectory>), Fault> {
        let SessionKind::Commands(settings) = &self.kind else {
            return Err(fault::from_kind(FaultKind::Invalid, "run", "a session with a shell"));
        };
        let start = match &request.directory {
            Some(directory) => StartDirectory {
                directory: Some(directory.clone()),
                base: settings.start.base.clone(),
                path: None,
            },
            None => settings.start.clone(),
        };
        let mut env = self.open.env.clone();
        env.extend(request.env.clone());
        let directory = start.directory.as_ref();
        let environment =
            ExecEnvironment::with_base(config, &self.open.identity, &env, directory, &start.base)?;
        let new_directory = match &request.directory {
            Some(_) => Some(start.with_resolved_path(&environment.workdir)?),
            None => None,
        };
        let text = command_text(settings.script.as_deref(), &request.text);
        Ok((PreparedCommand::from_shell(environment, &text, false)?, new_directory))
    }
}

/// The text of a command that reads a script first. Both are quoted as one word each, so the shell interprets no part of
/// the path, and the text is parsed only after the script was read, so that aliases of the script apply to it. A
/// script that is no regular file is not read: it might block, and a plain `sh` exits if it cannot be read.
fn command_text(script: Option<&str>, text: &str) -> String {
    let Some(script) = script else { return text.to_owned() };
    let script = shell::quote_word(script);
    format!("[ -f {script} ] && [ -r {script} ] && . {script}; eval {}", shell::quote_word(text))
}

/// The path without empty and `.` components. A `..` stays: what it means depends on symbolic links.
fn plain_path(path: &str) -> String {
    let components = path.split('/').filter(|component| !matches!(*component, "" | "."));
    let path = components.fold(String::new(), |path, component| path + "/" + component);
    if path.is_empty() { "/".to_owned() } else { path }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_is_absolute_and_has_no_empty_components() {
        for (path, expected) in
            [("/", "/"), ("//a/./b/", "/a/b"), ("/a/../b", "/a/../b"), ("/./", "/"), ("/a/b", "/a/b")]
        {
            assert_eq!(plain_path(path), expected);
        }
    }

    /// This runs real shells, because the result depends on their parsing.
    #[test]
    fn script_is_read_first_and_no_part_of_its_path_is_interpreted() {
        let directory = tempfile::tempdir().expect("a directory can be created");
        let script = directory.path().join("a'; echo injected; '$(echo x)\\\n b");
        let missing = directory.path().join("missing");
        std::fs::write(&script, "x='from script'; alias greet='echo hello'\n").expect("it can be written");
        for (path, text, expected) in [
            (&script, "echo \"$x\"", "from script\n"),
            (&missing, "echo \"[$x]\" it\\'s", "[] it's\n"),
            (&directory.path().to_owned(), "echo on", "on\n"),
        ] {
            let text = command_text(path.to_str(), text);
            for shell in ["/bin/sh", "/bin/bash"].into_iter().filter(|shell| std::fs::exists(shell).is_ok()) {
                let output = std::process::Command::new(shell).args(["-c", &text]).output();
                let output = output.expect("the shell exists");
                assert_eq!(String::from_utf8_lossy(&output.stdout), expected, "{shell}: {text}");
                assert!(output.status.success());
            }
        }
    }
}
