//! Starts a session's shell or kernel and handles its end.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use linux::spawn::{End, Usage};
use rustix::event::epoll::EventFlags;
use rustix::pipe::{PipeFlags, pipe_with};
use wire::process::{Directory, Missing, Program};
use wire::{Fault, FaultKind, Reply};

use super::{Shell, Tongue};
use crate::agent::Agent;
use crate::body::Owner;
use crate::child::Failure;
use crate::command::{self, Command, Surroundings};
use crate::exec::Wiring;
use crate::input::Input;
use crate::kernel::Hearing;
use crate::nest::Inside;
use crate::place::HIGH;
use crate::poll::Token;
use crate::process::Subjects;
use crate::shell::Dialect;
use crate::{fault, nester};

impl Agent {
    pub(crate) fn start_shell(&mut self, number: u64) -> Result<(), Fault> {
        self.refresh_limit_view();
        let session = self.sessions.get(&number).expect("the caller has found the session");
        let forgetful = session.directory.is_some() || !session.exports.is_empty();
        // A shell that replaces another one starts in the directory of its predecessor.
        let last =
            session.directory.clone().map(|path| Directory { path, missing: Missing::Ignore, expand: false });
        let directory = last.as_ref().or(session.open.directory.as_ref());
        let open = &session.open;
        let around = Surroundings::new(&self.place.config, &open.identity, &open.env, directory)?;
        let wiring = Wiring { terminal: open.terminal, stdin: false };
        let failed = |errno| fault::from_errno(errno, "open session", &open.session);
        let (their_orders, orders) = private_pipe(&around).map_err(failed)?;
        let (verdicts, their_verdicts) = private_pipe(&around).map_err(failed)?;
        for ours in [&orders, &verdicts] {
            rustix::io::ioctl_fionbio(ours, true).map_err(failed)?;
        }
        let theirs = [their_orders, their_verdicts];
        let started = match (&open.nest, session.kernel.as_ref().map(|kernel| &kernel.program)) {
            (Some(nest), None) => {
                let path = command::shell_path();
                let (name, open, nest) = (session.name.clone(), open.clone(), nest.clone());
                let directory = directory.cloned();
                let inside = Inside {
                    identity: &open.identity,
                    directory: directory.as_ref(),
                    env: &open.env,
                    nest: &nest,
                    program: nester::Program::Shell,
                    private: &[theirs[0].as_fd(), theirs[1].as_fd()],
                };
                let subjects = Subjects { program: path.to_owned(), ..Subjects::of_place(&around) };
                let body = self.launch_inside(Owner::Session(number), &name, inside, wiring)?;
                (body, subjects, Tongue::Shell(Dialect::of(path)))
            }
            (Some(_), Some(_)) => {
                return Err(fault::plain(
                    FaultKind::Invalid,
                    "open session",
                    "a kernel in an isolated session",
                ));
            }
            (None, program) => {
                let (command, tongue) = match program {
                    None | Some(Program::Shell) => as_shell(around, theirs)?,
                    Some(program) => {
                        (Command::kernel(around, program, theirs)?, Tongue::Kernel(Hearing::default()))
                    }
                };
                let body = self.launch(Owner::Session(number), &command, wiring)?;
                (body, Subjects::of(&command), tongue)
            }
        };
        let (body, subjects, tongue) = started;
        let watch = |fd, token, interest| {
            let watched = self.poll.watch(fd, token, interest);
            watched.map_err(|error| fault::from_io(&error, "open session", &subjects.program))
        };
        let shell = Shell {
            body,
            tongue,
            orders: Input::pipe(watch(orders, Token::Orders(number), EventFlags::empty())?),
            verdicts: watch(verdicts, Token::Verdict(number), EventFlags::IN)?,
            heard: Vec::new(),
            started: false,
            forgetful,
            subjects,
        };
        self.sessions.get_mut(&number).expect("the session exists").shell = Some(shell);
        Ok(())
    }

    /// The shell has started, or the reason why not is known.
    pub(crate) fn shell_started(&mut self, number: u64, outcome: Result<(), Failure>) {
        let Some(session) = self.sessions.get_mut(&number) else { return };
        let Some(shell) = &mut session.shell else { return };
        match outcome {
            Ok(()) => {
                shell.started = true;
                let opened = session.opens_with_its_shell();
                if let Some(opener) = session.opener.take_if(|_| opened) {
                    self.answer(opener, &Reply::Ok);
                }
                self.use_nest(number);
                self.give_order(number);
            }
            Err(failure) => {
                let fault = shell.subjects.fault(failure);
                session.shell = None;
                self.shell_failed(number, &fault);
            }
        }
    }

    fn shell_failed(&mut self, number: u64, fault: &Fault) {
        let Some(session) = self.sessions.get_mut(&number) else { return };
        if session.opener.is_some() && session.nest.is_some() {
            self.nest_failed(number, fault);
            return;
        }
        if let Some(opener) = session.opener.take() {
            self.drop_session(number);
            self.refuse(opener, fault.clone());
            return;
        }
        if let Some(run) = session.current.take() {
            let caller = self.processes.get_mut(&run.process).and_then(|process| process.caller.take());
            self.drop_process(run.process);
            if let Some(caller) = caller {
                self.refuse(caller.connection, fault.clone());
            }
        }
        self.begin_next(number);
    }

    pub(crate) fn kill_shell(&self, number: u64) {
        let shell = self.sessions.get(&number).and_then(|session| session.shell.as_ref());
        if let Some(body) = shell.and_then(|shell| self.bodies.get(&shell.body)) {
            // A tree that cannot be killed has ended already.
            body.tree.kill(self.place.commands.as_ref(), body.pid).ok();
        }
    }

    /// The shell has ended. Its run ends with it, and the session waits for the next run.
    pub(crate) fn shell_ended(&mut self, number: u64, end: End, usage: Usage) {
        self.on_verdict(number);
        let Some(session) = self.sessions.get_mut(&number) else { return };
        let shell = session.shell.take();
        session.passing.clear();
        let opener = session.opener.take();
        let restarters = std::mem::take(&mut session.restarters);
        if !restarters.is_empty() {
            // The last report of the old shell must not affect its successor.
            session.directory = None;
            session.exports = String::new();
        }
        let kernel = matches!(&shell, Some(Shell { tongue: Tongue::Kernel(_), .. }));
        // A kernel that ends during a run has failed it, even with exit code 0.
        let end = if kernel && end == End::Code(0) { End::Code(1) } else { end };
        self.finish_run(number, end, usage);
        for connection in restarters {
            self.answer(connection, &Reply::Ok);
        }
        if let (Some(Shell { tongue: Tongue::Kernel(hearing), subjects, .. }), Some(opener)) = (shell, opener)
        {
            self.refuse(opener, hearing.obituary(&subjects.program, end));
            self.forsake(number);
            return;
        }
        self.begin_next(number);
        self.drop_if_closed(number);
    }

    /// Removes a session that could not be opened, and refuses the runs that already wait for it.
    fn forsake(&mut self, number: u64) {
        let Some(session) = self.sessions.get_mut(&number) else { return };
        let (name, queue) = (session.name.clone(), std::mem::take(&mut session.queue));
        self.drop_session(number);
        for (connection, _) in queue {
            self.refuse(connection, fault::plain(FaultKind::NotFound, "find session", &name));
        }
    }
}

/// The command for the preferred shell, with the script that makes it obey orders.
fn as_shell(around: Surroundings, [orders, verdicts]: [OwnedFd; 2]) -> Result<(Command, Tongue), Fault> {
    let path = command::shell_path();
    let dialect = Dialect::of(path);
    let words = dialect.words(path, orders.as_raw_fd(), verdicts.as_raw_fd());
    Ok((Command::from_words(around, &words, vec![orders, verdicts])?, Tongue::Shell(dialect)))
}

/// A pipe between the agent and a shell. The ends have high numbers, since the shell keeps one of
/// them open under its present number. It belongs to the user, so that the shell may open it by
/// name.
fn private_pipe(around: &Surroundings) -> rustix::io::Result<(OwnedFd, OwnedFd)> {
    let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
    let read = rustix::io::fcntl_dupfd_cloexec(&read, HIGH)?;
    let write = rustix::io::fcntl_dupfd_cloexec(&write, HIGH)?;
    if !around.who.is_root() {
        rustix::fs::fchown(&read, Some(around.who.uid), Some(around.who.gid))?;
    }
    Ok((read, write))
}
