//! The namespace broker: the one process in a sandbox that may create namespaces.
//!
//! ```text
//! agent ── order ──► broker ── clone ──► namespace init ──┐
//!   ◄── pid ────────┘   └───── clone ──► shell, command, worker in the namespaces
//!   all are children of the agent ◄──────────────────────┘
//! ```
//! It is forked before the agent has received a single byte, keeps the privileges that the agent
//! then gives up, and does five things: create the namespaces of a session, start a program in
//! them, perform a file operation in them, signal a program in them, and discard the changes made
//! in them. Every process it clones gives up those privileges before it handles any input, and
//! becomes the agent's child, so that the agent tracks it like any other child. The broker takes
//! orders from the agent alone and answers each at once; the work is done by the processes it
//! clones.

mod holder;
mod order;
mod remove;

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use linux::mounts::{self, Depth};
use linux::namespaces::{self, Namespaces};
use linux::seccomp::Program as Filter;
use linux::spawn::{self, Forked};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::RecvFlags;
use rustix::process::{Pid, Signal};
use wire::Decoder;
use wire::files::FileRequest;
use wire::nest::Nest;
use wire::process::Identity;

use self::holder::Task;
pub(crate) use self::order::{Answer, Begin, Given, Order, Program, ask};
use crate::child::{self, Stdio};
use crate::command::{self, Command, Surroundings};
use crate::identity::Who;
use crate::place::{HIGH, Place};
use crate::shell::Dialect;
use crate::{tree, worker};

/// Where the disk for changes is mounted, in a mount namespace that contains no process.
const DISK: &str = "/dev/shm";

/// Forks the broker. Returns the channel on which it takes orders, and its pid.
pub(crate) fn start(place: &Place, disk: Option<OwnedFd>, filter: &Filter) -> io::Result<(OwnedFd, Pid)> {
    let (ours, theirs) = order::channel()?;
    match place.thread.fork(Namespaces::NONE, None)? {
        Forked::Parent { pid, .. } => Ok((ours, pid)),
        Forked::Child => {
            drop(ours);
            let begun = Nester::new(place, theirs, disk, filter);
            // The agent learns from the closed channel that no session can be isolated.
            let Ok(nester) = begun else { spawn::exit_now(1) };
            nester.run()
        }
    }
}

struct Nester<'a> {
    place: &'a Place,
    channel: OwnedFd,
    /// The pid namespace of the sandbox, to return to.
    home: OwnedFd,
    stores: Stores,
    nests: HashMap<String, Kept>,
    /// How many sessions were isolated so far; numbers their directories on the disk.
    made: u64,
}

/// An isolated session that was created.
struct Kept {
    /// The channel on which its namespace init sends the namespaces before it reports that it is
    /// ready.
    way: OwnedFd,
    spaces: Option<Spaces>,
    share_network: bool,
    /// The number of its directory on the disk.
    store: u64,
}

/// The namespaces of a session.
struct Spaces {
    pid: OwnedFd,
    mount: OwnedFd,
    ipc: OwnedFd,
    net: OwnedFd,
}

impl Kept {
    fn spaces(&mut self) -> io::Result<&Spaces> {
        if self.spaces.is_none() {
            let given = order::take_over(&self.way, RecvFlags::DONTWAIT)?;
            let [pid, mount, ipc, net] = exactly(given.unwrap_or_default())?;
            self.spaces = Some(Spaces { pid, mount, ipc, net });
        }
        self.spaces.as_ref().ok_or_else(|| Errno::SRCH.into())
    }
}

impl Spaces {
    /// Enters all but the pid namespace.
    fn enter(&self, share_network: bool) -> io::Result<()> {
        namespaces::enter(self.ipc.as_fd(), Namespaces::IPC)?;
        if !share_network {
            namespaces::enter(self.net.as_fd(), Namespaces::NET)?;
        }
        namespaces::enter(self.mount.as_fd(), Namespaces::MOUNT)
    }
}

/// The storage for changes that are not kept in memory: a directory on the sandbox's disk, mounted
/// in a separate namespace, so that no command ever sees it.
struct Stores {
    aside: Option<OwnedFd>,
}

impl Stores {
    fn new(disk: Option<OwnedFd>) -> io::Result<Self> {
        let Some(disk) = disk else { return Ok(Self { aside: None }) };
        let home = open_namespace("mnt")?;
        namespaces::unshare(Namespaces::MOUNT)?;
        mounts::attach(disk.as_fd(), Path::new(DISK))?;
        let aside = open_namespace("mnt")?;
        namespaces::enter(home.as_fd(), Namespaces::MOUNT)?;
        Ok(Self { aside: Some(aside) })
    }

    fn has_disk(&self) -> bool {
        self.aside.is_some()
    }

    /// Mounts the disk directory of one session in the current mount namespace.
    fn show_disk(&self, place: &Path, store: u64) -> io::Result<()> {
        let Some(aside) = &self.aside else { return Ok(()) };
        let here = open_namespace("mnt")?;
        namespaces::enter(aside.as_fd(), Namespaces::MOUNT)?;
        let own = Path::new(DISK).join(store.to_string());
        std::fs::create_dir(&own)?;
        let tree = mounts::clone_tree(&own, Depth::Single)?;
        namespaces::enter(here.as_fd(), Namespaces::MOUNT)?;
        std::fs::create_dir(place)?;
        mounts::attach(tree.as_fd(), place)
    }

    /// Removes the stored changes of a session that is gone. Files that cannot be removed stay on
    /// the disk of the sandbox and count against its limit, but conflict with nothing: the number
    /// of a store is never used again.
    fn clear(&self, store: u64) -> io::Result<()> {
        let Some(aside) = &self.aside else { return Ok(()) };
        namespaces::enter(aside.as_fd(), Namespaces::MOUNT)?;
        remove::tree(Path::new(DISK), &store.to_string())
    }
}

fn open_namespace(kind: &str) -> io::Result<OwnedFd> {
    let path = format!("/proc/self/ns/{kind}");
    Ok(rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
}

impl<'a> Nester<'a> {
    fn new(place: &'a Place, channel: OwnedFd, disk: Option<OwnedFd>, filter: &Filter) -> io::Result<Self> {
        let stores = Stores::new(disk)?;
        let home = open_namespace("pid")?;
        // No descriptor through which the agent's data could be read or its connections answered
        // stays open here.
        let kept = place.commands.iter().chain(&place.tasks).chain(place.all_shares());
        let own = [&channel, &home, &place.null].into_iter().chain(stores.aside.as_ref());
        linux::descriptors::keep_only_these(kept.chain(own).map(AsFd::as_fd))?;
        filter.install()?;
        Ok(Self { place, channel, home, stores, nests: HashMap::new(), made: 0 })
    }

    fn run(mut self) -> ! {
        while let Ok(Some(heard)) = order::next(&self.channel) {
            let done = order::read(heard).and_then(|(order, with)| self.obey(order, with));
            let answer = Answer(done.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO)));
            if order::answer(&self.channel, answer).is_err() {
                break;
            }
        }
        spawn::exit_now(0)
    }

    fn obey(&mut self, order: Order, with: Vec<OwnedFd>) -> io::Result<Option<Pid>> {
        match order {
            Order::Make { session, nest, identity, share } => {
                self.make(session, &nest, &identity, share, exactly(with)?).map(Some)
            }
            Order::Start(begin) => self.start(*begin, with).map(Some),
            Order::Work { session, request, rest, config } => {
                let [connection] = exactly(with)?;
                self.work(&session, request, rest, config, connection).map(Some)
            }
            Order::Signal { group, signal } => {
                let group =
                    Some(group).filter(|group| *group > 1).and_then(Pid::from_raw).ok_or(Errno::SRCH)?;
                let signal = Signal::from_named_raw(signal).ok_or(Errno::INVAL)?;
                rustix::process::kill_process_group(group, signal)?;
                Ok(None)
            }
            Order::Forget { session } => self.forget(&session),
        }
    }

    fn make(
        &mut self,
        session: String,
        nest: &Nest,
        identity: &Identity,
        share: usize,
        [report, group]: [OwnedFd; 2],
    ) -> io::Result<Pid> {
        let who = found(Who::find(&self.place.config, identity))?;
        let own = Namespaces::MOUNT.and(Namespaces::PID).and(Namespaces::IPC);
        let own = if nest.share_network { own } else { own.and(Namespaces::NET) };
        let (way, theirs) = order::channel()?;
        self.made += 1;
        let store = self.made;
        let (forked, join) = self.clone_into(own, &group)?;
        match forked {
            Forked::Child => {
                let task = Task { store, nest, who: &who, stores: &self.stores, way: &theirs };
                let join = [join.as_ref(), self.place.command_share(share)];
                holder::run(self.place, &task, join, report)
            }
            Forked::Parent { pid, .. } => {
                let kept = Kept { way, spaces: None, share_network: nest.share_network, store };
                self.nests.insert(session, kept);
                Ok(pid)
            }
        }
    }

    fn start(&mut self, begin: Begin, with: Vec<OwnedFd>) -> io::Result<Pid> {
        let nest = self.nests.get_mut(&begin.session).ok_or(Errno::SRCH)?;
        let share_network = nest.share_network;
        nest.spaces()?;
        let spaces =
            self.nests.get(&begin.session).and_then(|nest| nest.spaces.as_ref()).ok_or(Errno::SRCH)?;
        let mut with = with.into_iter();
        let mut next = || with.next().ok_or(Errno::INVAL);
        let stdio = Stdio { stdin: next()?, stdout: next()?, stderr: next()?, terminal: begin.terminal };
        let (report, group) = (next()?, next()?);
        let private = with.map(|fd| rustix::io::fcntl_dupfd_cloexec(fd, HIGH));
        let command = found(compose(self.place, &begin, private.collect::<Result<_, _>>()?))?;
        namespaces::enter(spaces.pid.as_fd(), Namespaces::PID)?;
        let cloned = self.clone_into(Namespaces::NONE, &group);
        match cloned {
            Ok((Forked::Child, join)) => {
                let entered = spaces.enter(share_network);
                let join = [join.as_ref(), self.place.command_share(begin.share)];
                match entered {
                    Ok(()) => child::run(self.place, &command, &stdio, join, report.as_fd()),
                    Err(error) => child::fail(&error, report.as_fd()),
                }
            }
            cloned => {
                // If this process could not return, it would start everything in that namespace
                // from now on.
                if namespaces::enter(self.home.as_fd(), Namespaces::PID).is_err() {
                    spawn::exit_now(1);
                }
                match cloned?.0 {
                    Forked::Parent { pid, .. } => Ok(pid),
                    Forked::Child => spawn::exit_now(1),
                }
            }
        }
    }

    fn work(
        &mut self,
        session: &str,
        request: FileRequest,
        rest: Vec<u8>,
        given: Given,
        connection: OwnedFd,
    ) -> io::Result<Pid> {
        self.nests.get_mut(session).ok_or(Errno::SRCH)?.spaces()?;
        let spaces = self.nests.get(session).and_then(|nest| nest.spaces.as_ref()).ok_or(Errno::SRCH)?;
        let commands = self.place.commands.as_ref().ok_or(Errno::NOTSUP)?;
        let group = worker::open_group(commands)?;
        let (forked, join) = self.clone_into(Namespaces::NONE, &group)?;
        match forked {
            Forked::Parent { pid, .. } => Ok(pid),
            Forked::Child => {
                let mut decoder = Decoder::new();
                decoder.feed(&rest);
                let config = with_given(self.place, given);
                let enter = || namespaces::enter(spaces.mount.as_fd(), Namespaces::MOUNT);
                worker::run(self.place, &config, connection, decoder, &request, join, Some(&enter))
            }
        }
    }

    /// The stored changes are removed by a separate process, which may take as long as it needs.
    fn forget(&mut self, session: &str) -> io::Result<Option<Pid>> {
        let Some(kept) = self.nests.remove(session).filter(|_| self.stores.has_disk()) else {
            return Ok(None);
        };
        let commands = self.place.commands.as_ref().ok_or(Errno::NOTSUP)?;
        let group = worker::open_group(commands)?;
        match self.clone_into(Namespaces::NONE, &group)?.0 {
            Forked::Parent { .. } => Ok(None),
            Forked::Child => spawn::exit_now(i32::from(self.stores.clear(kept.store).is_err())),
        }
    }

    /// Clones a child for the agent into a group. As in the agent, a full group is no obstacle: the
    /// child gets the descriptor by which it moves there.
    fn clone_into(&self, own: Namespaces, group: &OwnedFd) -> io::Result<(Forked, Option<OwnedFd>)> {
        match self.place.thread.fork_sibling(own, Some(group.as_fd())) {
            Err(error) if error.raw_os_error() == Some(Errno::AGAIN.raw_os_error()) => {
                let join = tree::open_members(group)?;
                Ok((self.place.thread.fork_sibling(own, None)?, Some(join)))
            }
            forked => Ok((forked?, None)),
        }
    }
}

fn exactly<const COUNT: usize>(with: Vec<OwnedFd>) -> io::Result<[OwnedFd; COUNT]> {
    with.try_into().map_err(|_wrong_number: Vec<OwnedFd>| Errno::INVAL.into())
}

/// A missing account is reported as an error number; an answer has no space for more.
fn found<T>(result: Result<T, wire::Fault>) -> io::Result<T> {
    result.map_err(|fault| fault.errno.map_or(Errno::INVAL.into(), io::Error::from_raw_os_error))
}

fn with_given(place: &Place, given: Given) -> wire::AgentConfig {
    let Given { env, env_file } = given;
    wire::AgentConfig { env, env_file, ..place.config.clone() }
}

fn compose(place: &Place, begin: &Begin, private: Vec<OwnedFd>) -> Result<Command, wire::Fault> {
    let config = with_given(place, begin.config.clone());
    let mut around = Surroundings::new(&config, &begin.identity, &begin.env, begin.directory.as_ref())?;
    around.screen(&begin.screen)?;
    match &begin.program {
        Program::Text(text) => Command::from_shell(around, text, false),
        Program::Shell => {
            use std::os::fd::AsRawFd;
            let path = command::shell_path();
            let number = |index: usize| private.get(index).map_or(-1, AsRawFd::as_raw_fd);
            let words = Dialect::of(path).words(path, number(0), number(1));
            Command::from_words(around, &words, private)
        }
    }
}
