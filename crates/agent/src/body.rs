//! A running command as the kernel sees it: its pid, its tree, its pipes.
//!
//! A body belongs to a process or to a session's shell, and may outlive its owner's interest in it:
//! processes that a finished command left running continue, and their output is read and discarded,
//! so that they neither block on a full pipe nor die of a closed one.

use std::os::fd::AsFd;

use linux::spawn::{End, Usage};
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::process::Pid;
use wire::StreamTag;

use crate::agent::{Agent, Child};
use crate::child::Failure;
use crate::exec::{Keeper, Launched, Ours, Spot};
use crate::input::Input;
use crate::journal::RECORD;
use crate::poll::{Source, Token};
use crate::runner::Message;
use crate::tree::{self, Tree};

/// How much is read from one pipe when its process has ended. A pipe holds less; survivors that
/// keep writing must not delay the report of the end.
const DRAIN: usize = 1 << 20;

/// How much is read from one pipe in one turn of the event loop.
const TURN: usize = 8 * RECORD;

/// The size of the pipes of a command that fills them. With a small pipe, every few pages cost two
/// context switches.
const WIDE_PIPE: usize = 1 << 20;

#[derive(Debug)]
pub(crate) struct Body {
    pub(crate) owner: Owner,
    /// The command's own pid; with a runner it becomes known a little later.
    pub(crate) pid: Option<Pid>,
    pub(crate) tree: Tree,
    share: usize,
    pub(crate) report: Option<Source>,
    pub(crate) outputs: Vec<(StreamTag, Source)>,
    pub(crate) input: Option<Input>,
    pub(crate) terminal: bool,
    /// Whether its pipes were enlarged because it prints so much.
    widened: bool,
    pub(crate) ended: bool,
}

/// The owner of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    Process(u64),
    Session(u64),
    /// The first process in the namespaces of an isolated session.
    Nest(u64),
    Nobody,
}

impl Body {
    /// Enlarges the pipes, once. This fails for terminals and for users with too many pipes.
    fn widen(&mut self) {
        if !std::mem::replace(&mut self.widened, true) {
            for (_, source) in &self.outputs {
                rustix::pipe::fcntl_setpipe_size(source, WIDE_PIPE).ok();
            }
        }
    }
}

impl Agent {
    /// Registers a launched command with the event loop.
    pub(crate) fn embody(
        &mut self,
        owner: Owner,
        launched: Launched,
        share: usize,
    ) -> rustix::io::Result<u64> {
        let number = self.next_number();
        let readable = EventFlags::IN;
        let watch = |fd, token, interest| {
            self.poll.watch(fd, token, interest).map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))
        };
        let (tree, pid) = match launched.keeper {
            Keeper::Group(group) => (Tree::Group(group), Some(launched.pid)),
            Keeper::Runner(channel) => (Tree::Runner(watch(channel, Token::Runner(number), readable)?), None),
        };
        let mut body = Body {
            owner,
            pid,
            tree,
            share,
            report: Some(watch(launched.report, Token::Report(number), readable)?),
            outputs: Vec::with_capacity(2),
            input: None,
            terminal: false,
            widened: false,
            ended: false,
        };
        match launched.ours {
            Ours::Pipes { stdin, stdout, stderr } => {
                let silent = EventFlags::empty();
                let stdin = stdin.map(|fd| watch(fd, Token::Input(number), silent)).transpose()?;
                body.input = stdin.map(Input::pipe);
                body.outputs.push((StreamTag::Stdout, watch(stdout, Token::Stdout(number), readable)?));
                body.outputs.push((StreamTag::Stderr, watch(stderr, Token::Stderr(number), readable)?));
            }
            Ours::Terminal(master) => {
                let copy = rustix::io::fcntl_dupfd_cloexec(&master, 3)?;
                let input = watch(copy, Token::Input(number), EventFlags::empty())?;
                body.input = Some(Input::terminal(input));
                body.outputs.push((StreamTag::Terminal, watch(master, Token::Terminal(number), readable)?));
                body.terminal = true;
            }
        }
        let child = if body.pid.is_some() { Child::Leader(number) } else { Child::Runner(number) };
        self.children.insert(launched.pid, child);
        self.bodies.insert(number, body);
        Ok(number)
    }

    /// The processor share with the fewest trees. If all commands had one share, a fork bomb would
    /// leave a new command a hundredth of the processor.
    pub(crate) fn quietest_share(&self) -> usize {
        let busy = |share: &usize| {
            let living = self.bodies.values().filter(|body| !matches!(body.tree, Tree::Gone));
            living.filter(|body| body.share == *share).count()
        };
        (0..self.place.command_shares()).min_by_key(busy).unwrap_or(0)
    }

    /// Keeps only what is needed to reap the child and to remove its group, if it has one.
    pub(crate) fn abandon(&mut self, pid: Pid, spot: Spot) {
        self.embody_silent(Owner::Nobody, pid, spot);
    }

    /// Registers the first process of an isolated session.
    pub(crate) fn embody_holder(&mut self, session: u64, pid: Pid, spot: Spot) -> u64 {
        self.embody_silent(Owner::Nest(session), pid, spot)
    }

    /// Registers a body without pipes.
    fn embody_silent(&mut self, owner: Owner, pid: Pid, spot: Spot) -> u64 {
        let number = self.next_number();
        let body = Body {
            owner,
            pid: Some(pid),
            tree: if self.place.commands.is_some() { Tree::Group(spot.group) } else { Tree::Gone },
            share: spot.share,
            report: None,
            outputs: Vec::new(),
            input: None,
            terminal: false,
            widened: false,
            ended: false,
        };
        self.bodies.insert(number, body);
        self.children.insert(pid, Child::Leader(number));
        number
    }

    /// The child has executed the command, or reports why it could not.
    pub(crate) fn on_report(&mut self, number: u64) {
        let Some(body) = self.bodies.get_mut(&number) else { return };
        let Some(report) = &body.report else { return };
        let mut bytes = [0; Failure::LENGTH];
        let outcome = match rustix::io::read(report.as_fd(), &mut bytes) {
            Err(Errno::AGAIN | Errno::INTR) => return,
            Ok(Failure::LENGTH) => Err(Failure::from_bytes(bytes)),
            Ok(_) | Err(_) => Ok(()),
        };
        body.report = None;
        let owner = body.owner;
        if self.bodies.get(&number).is_some_and(|body| body.pid.is_none()) {
            // The runner sends the pid first, so it is readable before the report pipe closes.
            self.read_runner(number);
        }
        if outcome.is_err() {
            self.disown(number);
        }
        match owner {
            Owner::Process(process) => self.process_started(process, outcome),
            Owner::Session(session) => self.shell_started(session, outcome),
            Owner::Nest(_) | Owner::Nobody => {}
        }
    }

    /// Reads from one of a body's outputs, but not so much that others have to wait.
    pub(crate) fn on_output(&mut self, number: u64, stream: StreamTag) {
        self.read_output(number, stream, TURN);
    }

    /// Reads until the pipe is empty or `most` bytes have arrived.
    fn read_output(&mut self, number: u64, stream: StreamTag, most: usize) {
        let mut buffer = std::mem::take(&mut self.scratch);
        let mut total = 0;
        while total < most {
            let Some(body) = self.bodies.get_mut(&number) else { break };
            let Some(index) = body.outputs.iter().position(|(tag, _)| *tag == stream) else { break };
            match rustix::io::read(body.outputs[index].1.as_fd(), &mut buffer) {
                Err(Errno::AGAIN | Errno::INTR) => break,
                // A terminal returns EIO when its last user is gone.
                Ok(0) | Err(_) => {
                    body.outputs.remove(index);
                    self.bury(number);
                    break;
                }
                Ok(count) => {
                    total += count;
                    if count == buffer.len() {
                        body.widen();
                    }
                    let owner = body.owner;
                    self.take_output(owner, stream, &buffer[..count]);
                }
            }
        }
        self.scratch = buffer;
    }

    fn take_output(&mut self, owner: Owner, stream: StreamTag, bytes: &[u8]) {
        let process = match owner {
            Owner::Process(process) => Some(process),
            Owner::Session(session) => self.current_run(session),
            Owner::Nest(_) | Owner::Nobody => None,
        };
        match (process, owner) {
            (Some(process), _) => self.append_output(process, stream, bytes),
            (None, Owner::Session(session)) => self.overhear(session, stream, bytes),
            (None, Owner::Process(_) | Owner::Nest(_) | Owner::Nobody) => {}
        }
    }

    /// Reads everything that is in the pipes now.
    pub(crate) fn drain(&mut self, number: u64) {
        let streams: Vec<StreamTag> = match self.bodies.get(&number) {
            Some(body) => body.outputs.iter().map(|(stream, _)| *stream).collect(),
            None => return,
        };
        for stream in streams {
            self.read_output(number, stream, DRAIN);
        }
    }

    /// A runner has sent messages.
    pub(crate) fn on_runner(&mut self, number: u64) {
        while self.read_runner(number) {}
    }

    /// Reads one message. Returns false if there was none.
    fn read_runner(&mut self, number: u64) -> bool {
        let Some(body) = self.bodies.get_mut(&number) else { return false };
        let Tree::Runner(channel) = &body.tree else { return false };
        let mut bytes = [0; Message::LENGTH];
        match rustix::io::read(channel.as_fd(), &mut bytes) {
            Ok(Message::LENGTH) => {
                if let Some(message) = Message::from_bytes(&bytes) {
                    self.on_message(number, message);
                }
                true
            }
            Err(Errno::AGAIN | Errno::INTR) => false,
            // The runner ended without having read an order. The kernel reports this once, and
            // before the runner's own messages, which can still be read.
            Err(Errno::CONNRESET) => true,
            Ok(_) | Err(_) => {
                body.tree = Tree::Gone;
                self.bury(number);
                false
            }
        }
    }

    fn on_message(&mut self, number: u64, message: Message) {
        let Some(body) = self.bodies.get_mut(&number) else { return };
        match message {
            Message::Started(pid) => {
                body.pid = Some(pid);
                self.children.insert(pid, Child::Leader(number));
            }
            Message::Ended(end, usage) => {
                if let Some(pid) = body.pid {
                    self.children.remove(&pid);
                }
                self.leader_ended(number, end, usage);
            }
        }
    }

    /// The command's main process has ended.
    pub(crate) fn leader_ended(&mut self, number: u64, end: End, usage: Usage) {
        self.on_report(number);
        self.drain(number);
        let Some(body) = self.bodies.get_mut(&number) else { return };
        body.ended = true;
        body.input = None;
        body.pid = None;
        let owner = body.owner;
        self.disown(number);
        match owner {
            Owner::Process(process) => self.process_ended(process, end, usage),
            Owner::Session(session) => self.shell_ended(session, end, usage),
            Owner::Nest(session) => self.nest_ended(session),
            Owner::Nobody => {}
        }
        self.bury(number);
    }

    fn disown(&mut self, number: u64) {
        if let Some(body) = self.bodies.get_mut(&number) {
            body.owner = Owner::Nobody;
        }
    }

    /// Removes a body of which nothing is left. Its group is removed at the end of the turn.
    fn bury(&mut self, number: u64) {
        let Some(body) = self.bodies.get(&number) else { return };
        if !body.ended {
            return;
        }
        match body.tree {
            Tree::Group(_) => {
                self.lingering.insert(number);
            }
            Tree::Gone if body.outputs.is_empty() => {
                self.bodies.remove(&number);
            }
            Tree::Gone | Tree::Runner(_) => {}
        }
    }

    /// Removes the groups that are empty. This is the last step of a turn, so that no reply waits
    /// for it.
    pub(crate) fn sweep_groups(&mut self) {
        let Some(commands) = &self.place.commands else { return };
        let bodies = &mut self.bodies;
        self.lingering.retain(|number| {
            let Some(body) = bodies.get_mut(number) else { return false };
            if let Tree::Group(group) = body.tree {
                if !tree::remove_group(commands, group) {
                    return true;
                }
                body.tree = Tree::Gone;
            }
            if body.outputs.is_empty() {
                bodies.remove(number);
            }
            false
        });
    }
}
