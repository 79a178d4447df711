//! Starts a session's shell or kernel and handles its end.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use linux::spawn::{ProcessExit, ProcessUsage};
use rustix::event::epoll::EventFlags;
use rustix::pipe::{PipeFlags, pipe_with};
use wire::process::{KernelProgram, MissingDirectory, WorkingDirectory};
use wire::{AgentReply, Fault, FaultKind};

use super::{ReceivedVerdicts, SessionProtocol, SessionShell};
use crate::context::MIN_PRIVATE_FD;
use crate::event_loop::agent::Agent;
use crate::event_loop::handles::SessionHandle;
use crate::event_loop::poll::EventToken;
use crate::fault;
use crate::isolation::isolated_session::IsolatedLaunch;
use crate::isolation::namespace_broker;
use crate::process::FaultSubjects;
use crate::process::child::ExecFailure;
use crate::process::command::{self, ExecEnvironment, PreparedCommand};
use crate::process::exec::StdioMode;
use crate::process::input::InputWriter;
use crate::process::running_process::ProcessOwner;
use crate::session::kernel::KernelReportParser;
use crate::session::shell::{ReportedState, ShellDialect};

/// Keep programs that see a terminal from waiting for a key and from moving a cursor.
const TEXT_TERMINAL_VARIABLES: [(&str, &str); 5] =
    [("TERM", "dumb"), ("PAGER", "cat"), ("GIT_PAGER", "cat"), ("MANPAGER", "cat"), ("SYSTEMD_PAGER", "cat")];

impl Agent {
    pub(crate) fn start_shell(&mut self, number: SessionHandle) -> Result<(), Fault> {
        self.context.refresh_limit_view(&mut self.events);
        let session = self.sessions.get(number).expect("the caller has found the session");
        let forgetful = session.directory.is_some() || !session.state.is_empty();
        // A shell that replaces another one starts in the directory of its predecessor.
        let last = session.directory.clone().map(|path| WorkingDirectory {
            path,
            missing: MissingDirectory::Ignore,
            expand: false,
        });
        let directory = last.as_ref().or(session.open.directory.as_ref());
        let open = &session.open;
        let mut environment =
            ExecEnvironment::new(&self.context.config, &open.identity, &open.env, directory)?;
        if open.text_terminal {
            for (name, value) in TEXT_TERMINAL_VARIABLES {
                environment.set_default_variable(name, value);
            }
        }
        let wiring = StdioMode { terminal: open.terminal, plain: open.text_terminal, stdin: false };
        let failed = |errno| fault::from_errno(errno, "open session", &open.session);
        let (their_commands, commands) = create_private_pipe(&environment).map_err(failed)?;
        let (verdicts, their_verdicts) = create_private_pipe(&environment).map_err(failed)?;
        for ours in [&commands, &verdicts] {
            rustix::io::ioctl_fionbio(ours, true).map_err(failed)?;
        }
        let theirs = [their_commands, their_verdicts];
        let started = match (&open.isolation, session.kernel().map(|kernel| &kernel.program)) {
            (Some(spec), None) => {
                let path = command::shell_path();
                let (name, open, spec) = (session.name.clone(), open.clone(), spec.clone());
                let directory = directory.cloned();
                let inside = IsolatedLaunch {
                    identity: &open.identity,
                    directory: directory.as_ref(),
                    env: &open.env,
                    spec: &spec,
                    program: namespace_broker::SessionProgram::Shell,
                    private: &[theirs[0].as_fd(), theirs[1].as_fd()],
                };
                let subjects =
                    FaultSubjects { program: path.to_owned(), ..FaultSubjects::of_environment(&environment) };
                let running = self.launch_isolated(ProcessOwner::Session(number), &name, inside, wiring)?;
                (running, subjects, SessionProtocol::Shell(ShellDialect::from_path(path)))
            }
            (Some(_), Some(_)) => {
                return Err(fault::from_kind(
                    FaultKind::Invalid,
                    "open session",
                    "a kernel in an isolated session",
                ));
            }
            (None, program) => {
                let (command, protocol) = match program {
                    None | Some(KernelProgram::Shell) => shell_command(environment, theirs)?,
                    Some(program) => (
                        PreparedCommand::from_kernel(environment, program, theirs)?,
                        SessionProtocol::Kernel(KernelReportParser::default()),
                    ),
                };
                let running = self.launch_process(ProcessOwner::Session(number), &command, wiring)?;
                (running, FaultSubjects::of_command(&command), protocol)
            }
        };
        let (running, subjects, protocol) = started;
        let watch = |fd, token, interest| {
            let watched = self.events.poll.register_fd(fd, token, interest);
            watched.map_err(|error| fault::from_io(&error, "open session", &subjects.program))
        };
        let shell = SessionShell {
            running,
            protocol,
            commands: InputWriter::for_pipe(watch(
                commands,
                EventToken::Commands(number),
                EventFlags::empty(),
            )?),
            verdicts: watch(verdicts, EventToken::Verdict(number), EventFlags::IN)?,
            received: ReceivedVerdicts::default(),
            started: false,
            ending: false,
            is_replacement: forgetful,
            was_used: false,
            subjects,
        };
        self.sessions.get_mut(number).expect("the session exists").shell = Some(shell);
        Ok(())
    }

    /// The shell has started, or the reason why not is known.
    pub(crate) fn shell_started(&mut self, number: SessionHandle, outcome: Result<(), ExecFailure>) {
        let Some(session) = self.sessions.get_mut(number) else { return };
        let Some(shell) = &mut session.shell else { return };
        match outcome {
            Ok(()) => {
                shell.started = true;
                session.had_shell = true;
                let openers = match session.opens_with_its_shell() {
                    true => std::mem::take(&mut session.openers),
                    false => Vec::new(),
                };
                let shared = session.open.sharing.is_some();
                for opener in openers {
                    match shared {
                        true => self.report_session(number, opener),
                        false => self.connections.send_final_reply(opener, &AgentReply::Ok),
                    }
                }
                self.sessions.restart_idle_timer(number, &mut self.events.alarms);
                self.drop_run_without_caller(number);
                self.send_current_run(number);
            }
            Err(failure) => {
                let fault = shell.subjects.to_fault(failure);
                session.shell = None;
                self.shell_failed(number, &fault);
            }
        }
    }

    fn shell_failed(&mut self, number: SessionHandle, fault: &Fault) {
        let Some(session) = self.sessions.get_mut(number) else { return };
        if !session.openers.is_empty() && session.namespaces.is_some() {
            self.isolation_failed(number, fault);
            return;
        }
        let (openers, had_shell) = (std::mem::take(&mut session.openers), session.had_shell);
        self.refuse_current_run(number, fault);
        if openers.is_empty() && had_shell {
            self.begin_next_run(number);
            return;
        }
        for opener in openers {
            self.connections.refuse_request(opener, fault.clone());
        }
        self.drop_failed_session(number);
    }

    /// The shell has ended. Its run ends with it, and the session waits for the next run.
    pub(crate) fn shell_ended(&mut self, number: SessionHandle, end: ProcessExit, usage: ProcessUsage) {
        self.on_shell_report(number);
        let Some(session) = self.sessions.get_mut(number) else { return };
        let shell = session.shell.take();
        session.run_variables.clear();
        // A run that began after an idle shell was killed has not reached it.
        let ended_idle = !session.closing && shell.as_ref().is_some_and(|shell| shell.ending);
        let openers = std::mem::take(&mut session.openers);
        let restarters = std::mem::take(&mut session.restarters);
        if !restarters.is_empty() {
            // The last report of the old shell must not affect its successor.
            session.directory = None;
            session.state = String::new();
        }
        let kernel = matches!(&shell, Some(SessionShell { protocol: SessionProtocol::Kernel(_), .. }));
        // A kernel that ends during a run has failed it, even with exit code 0.
        let end = if kernel && end == ProcessExit::Code(0) { ProcessExit::Code(1) } else { end };
        if !ended_idle {
            self.finish_run(number, end, usage);
        }
        for connection in restarters {
            self.connections.send_final_reply(connection, &AgentReply::Ok);
        }
        if ended_idle {
            self.restart_shell_for_run(number);
            return;
        }
        if let (Some(SessionShell { protocol: SessionProtocol::Kernel(parser), subjects, .. }), false) =
            (shell, openers.is_empty())
        {
            for opener in openers {
                self.connections.refuse_request(opener, parser.startup_fault(&subjects.program, end));
            }
            self.drop_failed_session(number);
            return;
        }
        self.begin_next_run(number);
        self.sessions.drop_if_closed(number);
    }

    /// Starts a shell for the run that waits for one.
    fn restart_shell_for_run(&mut self, number: SessionHandle) {
        let waits = self.sessions.get(number).is_some_and(|session| session.current.is_some());
        if waits && let Err(fault) = self.start_shell(number) {
            self.shell_failed(number, &fault);
        }
    }

    /// Removes a session that could not be opened, and refuses the runs that already wait for it.
    fn drop_failed_session(&mut self, number: SessionHandle) {
        let Some(session) = self.sessions.get_mut(number) else { return };
        let (name, queue) = (session.name.clone(), std::mem::take(&mut session.queue));
        self.sessions.remove(number);
        self.refuse_queued_runs(queue, &name);
    }
}

/// The command for the preferred shell, with the script that makes it run what it reads from a pipe.
fn shell_command(
    environment: ExecEnvironment,
    [commands, verdicts]: [OwnedFd; 2],
) -> Result<(PreparedCommand, SessionProtocol), Fault> {
    let path = command::shell_path();
    let dialect = ShellDialect::from_path(path);
    let pipes = [commands.as_raw_fd(), verdicts.as_raw_fd()];
    let words = dialect.start_arguments(path, pipes, ReportedState::Everything);
    Ok((
        PreparedCommand::from_words(environment, &words, vec![commands, verdicts])?,
        SessionProtocol::Shell(dialect),
    ))
}

/// A pipe between the agent and a shell. The ends have high numbers, since the shell keeps one of
/// them open under its present number. It belongs to the user, so that the shell may open it by
/// name.
fn create_private_pipe(environment: &ExecEnvironment) -> rustix::io::Result<(OwnedFd, OwnedFd)> {
    let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
    let read = rustix::io::fcntl_dupfd_cloexec(&read, MIN_PRIVATE_FD)?;
    let write = rustix::io::fcntl_dupfd_cloexec(&write, MIN_PRIVATE_FD)?;
    if !environment.user.is_root() {
        rustix::fs::fchown(&read, Some(environment.user.uid), Some(environment.user.gid))?;
    }
    Ok((read, write))
}
