//! The launcher's event loop: it receives requests, starts and ends sandboxes, and sends responses.
//!
//! The loop never waits for a single sandbox: a create is answered when the agent reports, a destroy
//! when the process has ended and the kernel has released its groups.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;

use domain::{SandboxId, SnapshotId};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, Mode, Uid};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, socket_with};

use super::attach::Attaching;
use super::create::{NotBegun, Pending};
use super::end::{Ending, Keep};
use super::images::{Change, ImageQuestion, MOST_CHANGES};
use super::jobs::Job;
use super::protocol::{Answer, Ask, Question, Refusal, RefusalKind, SOCKET, Tell, VERSION};
use super::{Launcher, packet};
use crate::cgroups::Freezing;
use crate::jail::plan::{DiskPlan, JailPlan, LimitName};
use crate::settings::Settings;

/// A connection; responses may still be due to it after it was replaced.
pub(super) type Client = Rc<OwnedFd>;

struct Creating {
    client: Client,
    number: u64,
    pending: Pending,
}

/// Mounts that are being added to a running sandbox.
struct Mounting {
    client: Client,
    number: u64,
    attaching: Attaching,
}

/// A sandbox that is being ended, because a client asked for it or because it failed to start.
struct Dying {
    client: Client,
    number: u64,
    id: String,
    /// The parts that are kept.
    keep: Keep,
    /// The response that is sent when everything else is removed.
    answer: Result<Answer, Refusal>,
    pidfd: Option<OwnedFd>,
    state: Waiting,
}

/// A pause or resume that the kernel has not finished. A process that is reading from a slow disk
/// cannot be frozen before the read returns.
struct Changing {
    client: Client,
    number: u64,
    freezing: Freezing,
}

/// A change of the images that a separate process makes.
struct ChangingImages {
    client: Client,
    number: u64,
    change: Change,
}

/// The event that the end of a sandbox waits for.
enum Waiting {
    Death,
    /// The kernel has not released its control groups.
    Groups,
}

/// The interval for checking groups that the kernel has not released, in nanoseconds.
const RETRY: i64 = 1_000_000;
/// How long the loop must be idle before resources are prepared in advance, in nanoseconds.
const QUIET: i64 = 5_000_000;

type ReadSettings = Box<dyn FnMut(&OwnedFd) -> Option<Settings>>;

/// The source of new settings.
struct Updates {
    /// Readable when new settings are available.
    descriptor: OwnedFd,
    /// Reads the settings; `None` if there will be no more.
    read: ReadSettings,
    /// Reports that the settings are applied.
    applied: Box<dyn FnMut()>,
}

/// The state of the loop.
pub struct Loop {
    pub(super) launcher: Launcher,
    listener: OwnedFd,
    /// Readable or closed when the loop must end.
    stop: OwnedFd,
    updates: Option<Updates>,
    clients: Vec<Client>,
    creating: Vec<Creating>,
    changing: Vec<Changing>,
    images: Vec<ChangingImages>,
    mounting: Vec<Mounting>,
    dying: Vec<Dying>,
    pub(super) jobs: Vec<Job>,
    stocked: bool,
}

/// The event that became ready.
enum Ready {
    Stop,
    Listener,
    Client(usize),
    Created(usize),
    Changed(usize),
    ImagesChanged(usize),
    Mounted(usize),
    Died(usize),
    Over(usize),
    NetworkChanged,
    Update,
    Nothing,
}

impl Loop {
    /// Listens in the run directory. The socket of a killed launcher is replaced.
    pub fn open(launcher: Launcher, stop: OwnedFd) -> io::Result<Self> {
        let run = launcher.run_directory();
        match rustix::fs::unlinkat(run, SOCKET, AtFlags::empty()) {
            Ok(()) | Err(rustix::io::Errno::NOENT) => {}
            Err(error) => return Err(error.into()),
        }
        let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        let path = format!("/proc/self/fd/{}/{SOCKET}", std::os::fd::AsRawFd::as_raw_fd(&run));
        rustix::net::bind(&listener, &SocketAddrUnix::new(path)?)?;
        rustix::fs::chmodat(run, SOCKET, Mode::from_raw_mode(0o600), AtFlags::empty())?;
        let server = launcher.settings().server_uid.map(Uid::from_raw);
        rustix::fs::chownat(run, SOCKET, server, None, AtFlags::SYMLINK_NOFOLLOW)?;
        rustix::net::listen(&listener, 16)?;
        Ok(Self {
            launcher,
            listener,
            stop,
            updates: None,
            clients: Vec::new(),
            creating: Vec::new(),
            changing: Vec::new(),
            images: Vec::new(),
            mounting: Vec::new(),
            dying: Vec::new(),
            jobs: Vec::new(),
            stocked: false,
        })
    }

    /// Makes the loop take new settings from `descriptor`: `read` is called when it is readable, and
    /// `applied` after the returned settings were applied.
    pub fn with_updates(
        self,
        descriptor: OwnedFd,
        read: impl FnMut(&OwnedFd) -> Option<Settings> + 'static,
        applied: impl FnMut() + 'static,
    ) -> Self {
        let updates = Updates { descriptor, read: Box::new(read), applied: Box::new(applied) };
        Self { updates: Some(updates), ..self }
    }

    fn take_update(&mut self) {
        let Some(mut updates) = self.updates.take() else { return };
        if let Some(settings) = (updates.read)(&updates.descriptor) {
            self.launcher.reload(settings);
            (updates.applied)();
            self.updates = Some(updates);
        }
    }

    /// Serves requests until the stop descriptor is readable.
    pub fn run(&mut self) -> io::Result<()> {
        loop {
            match self.wait()? {
                Ready::Stop => {
                    self.abandon_jobs();
                    return self.launcher.close();
                }
                Ready::Listener => {
                    let client = accept_with(&self.listener, SocketFlags::CLOEXEC);
                    self.welcome(client.map_err(Into::into));
                }
                Ready::Client(index) => self.hear(index),
                Ready::Created(index) => self.conclude(index),
                Ready::Changed(index) => self.look_at_change(index),
                Ready::ImagesChanged(index) => {
                    let ChangingImages { client, number, change } = self.images.swap_remove(index);
                    tell(&client, number, change.conclude(), None);
                }
                Ready::Mounted(index) => self.conclude_mounting(index),
                Ready::Died(index) => self.dying[index].state = Waiting::Groups,
                Ready::Over(index) => self.finish(index),
                Ready::NetworkChanged => self.stocked &= !self.launcher.hear_network(),
                Ready::Update => self.take_update(),
                Ready::Nothing => {}
            }
            self.clear_dying();
        }
    }

    /// Waits for the next event, and prepares resources when the loop is idle.
    fn wait(&mut self) -> io::Result<Ready> {
        let mut watched =
            vec![PollFd::new(&self.stop, PollFlags::IN), PollFd::new(&self.listener, PollFlags::IN)];
        watched.extend(self.clients.iter().map(|client| PollFd::new(&**client, PollFlags::IN)));
        watched.extend(
            self.creating.iter().map(|creating| PollFd::new(&creating.pending.status, PollFlags::IN)),
        );
        watched.extend(
            self.changing.iter().map(|changing| PollFd::new(&changing.freezing.events, PollFlags::PRI)),
        );
        watched.extend(self.images.iter().map(|image| PollFd::new(&image.change.pidfd, PollFlags::IN)));
        watched.extend(
            self.mounting.iter().map(|mounting| PollFd::new(&mounting.attaching.status, PollFlags::IN)),
        );
        watched.extend(self.jobs.iter().map(|job| PollFd::new(job.report(), PollFlags::IN)));
        let network = self.launcher.watched_network();
        watched.extend(network.iter().map(|fd| PollFd::new(fd, PollFlags::IN)));
        let updates = self.updates.as_ref().map(|updates| PollFd::new(&updates.descriptor, PollFlags::IN));
        let updating = usize::from(updates.is_some());
        watched.extend(updates);
        let deaths = |dying: &Dying| matches!(dying.state, Waiting::Death);
        let waiting: Vec<usize> = (0..self.dying.len()).filter(|index| deaths(&self.dying[*index])).collect();
        for index in &waiting {
            if let Some(pidfd) = &self.dying[*index].pidfd {
                watched.push(PollFd::new(pidfd, PollFlags::IN));
            }
        }
        let retrying = self.dying.iter().any(|dying| !deaths(dying));
        let nanoseconds = if retrying { Some(RETRY) } else { self.quiet_before_restocking() };
        let timeout = nanoseconds.map(|tv_nsec| Timespec { tv_sec: 0, tv_nsec });
        let ready = rustix::io::retry_on_intr(|| poll(&mut watched, timeout.as_ref()))?;
        if ready == 0 {
            drop(watched);
            self.restock();
            return Ok(Ready::Nothing);
        }
        let index = watched.iter().position(|fd| !fd.revents().is_empty()).unwrap_or(0);
        let mut index = index;
        for (kind, count) in [
            ((|_| Ready::Stop) as fn(usize) -> Ready, 1),
            (|_| Ready::Listener, 1),
            (Ready::Client, self.clients.len()),
            (Ready::Created, self.creating.len()),
            (Ready::Changed, self.changing.len()),
            (Ready::ImagesChanged, self.images.len()),
            (Ready::Mounted, self.mounting.len()),
            (Ready::Over, self.jobs.len()),
            (|_| Ready::NetworkChanged, network.len()),
            (|_| Ready::Update, updating),
        ] {
            if index < count {
                return Ok(kind(index));
            }
            index -= count;
        }
        Ok(Ready::Died(waiting[index]))
    }

    /// Returns how many nanoseconds the loop must be idle before resources are prepared; `None` if none
    /// should be prepared now. A new sandbox and its first command should not share the processor and
    /// the kernel's locks with work that can wait, unless few prepared resources are left.
    fn quiet_before_restocking(&self) -> Option<i64> {
        match (self.stocked, self.creating.is_empty()) {
            (true, _) | (false, false) => None,
            (false, true) => Some(if self.launcher.stock_is_low() { 0 } else { QUIET }),
        }
    }

    /// Adds a connection. The oldest one is closed if there are too many: a server needs only one.
    fn welcome(&mut self, client: io::Result<OwnedFd>) {
        const MOST_CLIENTS: usize = 8;
        match client {
            Ok(client) => self.clients.push(Rc::new(client)),
            Err(error) => {
                tracing::warn!(%error, "failed to accept a connection; the server must connect again")
            }
        }
        if self.clients.len() > MOST_CLIENTS {
            drop(self.clients.remove(0));
        }
    }

    fn restock(&mut self) {
        if self.stocked || !self.creating.is_empty() {
            return;
        }
        match self.launcher.restock() {
            Ok(more) => self.stocked = !more,
            Err(error) => {
                // The next create tries again and reports the error.
                tracing::warn!(%error, "failed to prepare net namespaces or disks in advance; the next create retries");
                self.stocked = true;
            }
        }
    }

    fn hear(&mut self, index: usize) {
        let client = Rc::clone(&self.clients[index]);
        match packet::receive::<Ask>(client.as_fd()) {
            Ok(Some((ask, carried))) if ask.version == VERSION && names_a_sandbox(&ask.question) => {
                self.answer(client, ask, carried)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Ok(Some(_) | None) | Err(_) => drop(self.clients.remove(index)),
        }
    }

    pub(super) fn answer(&mut self, client: Client, ask: Ask, carried: Option<OwnedFd>) {
        let Some((client, ask)) = self.put_off(client, ask) else { return };
        let number = ask.number;
        let answer = match ask.question {
            Question::Create(plan) if plan.snapshot.is_some() && plan.disk == DiskPlan::New => {
                return self.restore(client, number, plan);
            }
            Question::Snapshot { id, snapshot } => return self.snapshot(client, number, &id, &snapshot),
            Question::ForgetSnapshot { snapshot } => self.forget(&snapshot),
            Question::Create(plan) => return self.create(client, number, *plan),
            Question::Destroy { id } => {
                let cpu_micros = self.launcher.cpu_micros(&id);
                return self.end(client, number, id, Keep::Nothing, Ok(Answer::Ended { cpu_micros }));
            }
            Question::Stop { id } => {
                let (cpu_micros, files) = (self.launcher.cpu_micros(&id), self.launcher.has_disk(&id));
                return self.end(client, number, id, Keep::Disk, Ok(Answer::Stopped { cpu_micros, files }));
            }
            Question::Freeze { id, frozen } => match self.launcher.freeze(&id, frozen) {
                Ok(freezing) => {
                    self.changing.push(Changing { client, number, freezing });
                    return self.look_at_change(self.changing.len() - 1);
                }
                Err(refusal) => Err(refusal),
            },
            Question::Attach { id, mounts } => match self.launcher.begin_attach(&id, &mounts) {
                Ok(attaching) => return self.mounting.push(Mounting { client, number, attaching }),
                Err(refusal) => Err(refusal),
            },
            Question::MakeVolume(plan) => self.launcher.make_volume(&plan).map(|()| Answer::Done),
            Question::RemoveVolume { id } => self.launcher.remove_volume(&id).map(|()| Answer::Done),
            Question::Resize(resize) => self.launcher.resize(&resize).map(Answer::Changed),
            Question::Watch { id } => {
                let pidfd = self.launcher.pidfd(&id);
                let answer = if pidfd.is_some() { Ok(Answer::Done) } else { Err(Refusal::gone()) };
                return tell(&client, number, answer, pidfd.as_ref());
            }
            Question::Image(question) => match self.launcher.look_at_images(&question) {
                Some(answer) => answer,
                None => return self.change_images(client, number, question, carried),
            },
            Question::Connect { id, network } => self.launcher.connect(&id, network).map(Answer::Changed),
            question => self.look(question),
        };
        tell(&client, number, answer, None);
    }

    /// Starts to make a sandbox.
    pub(super) fn create(&mut self, client: Client, number: u64, plan: JailPlan) {
        self.stocked = false;
        match self.launcher.begin(&plan) {
            Ok(pending) => self.creating.push(Creating { client, number, pending }),
            Err(NotBegun::Refused(refusal)) => tell(&client, number, Err(refusal), None),
            Err(NotBegun::Failed(refusal, keep)) => self.end(client, number, plan.id, keep, Err(refusal)),
        }
    }

    fn change_images(
        &mut self,
        client: Client,
        number: u64,
        question: ImageQuestion,
        carried: Option<OwnedFd>,
    ) {
        if self.images.len() >= MOST_CHANGES {
            let message = format!("limit of concurrent image changes reached ({MOST_CHANGES})");
            let refusal = Refusal { kind: RefusalKind::Exhausted, message, hint: None };
            return tell(&client, number, Err(refusal), None);
        }
        match self.launcher.change_images(question, carried) {
            Ok(change) => self.images.push(ChangingImages { client, number, change }),
            Err(error) => tell(&client, number, Err(failed("change the images", &error)), None),
        }
    }

    /// Answers requests that need no waiting.
    fn look(&self, question: Question) -> Result<Answer, Refusal> {
        match question {
            Question::List => {
                self.launcher.found().map(Answer::Found).map_err(|error| failed("list", &error))
            }
            Question::Usage { id } => self.launcher.usage(&id).map(Answer::Used).ok_or_else(Refusal::gone),
            Question::Volumes => self.launcher.volumes().map(Answer::Volumes),
            Question::VolumesHold { ids } => Ok(Answer::VolumesHold(self.launcher.volumes_hold(ids))),
            Question::WasOutOfMemory { id } => Ok(Answer::Yes(self.launcher.was_out_of_memory(&id))),
            Question::Report => Ok(self.report()),
            Question::Resolve { image } => self.launcher.resolve_name(&image),
            Question::Snapshots => self.found_snapshots(),
            Question::Create(_)
            | Question::Snapshot { .. }
            | Question::ForgetSnapshot { .. }
            | Question::Resize(_)
            | Question::Destroy { .. }
            | Question::Stop { .. }
            | Question::Freeze { .. }
            | Question::Attach { .. }
            | Question::MakeVolume(_)
            | Question::RemoveVolume { .. }
            | Question::Connect { .. }
            | Question::Watch { .. }
            | Question::Image(_) => Err(Refusal::unsupported("this request is not answered here", None)),
        }
    }

    fn report(&self) -> Answer {
        let (held, missing): (Vec<_>, Vec<_>) =
            LimitName::ALL.into_iter().partition(|limit| self.launcher.enforces(*limit));
        Answer::Report {
            limits: held.iter().map(|limit| limit.word().to_owned()).collect(),
            weaker: missing.iter().map(|limit| limit.without_groups()).collect(),
            pause: self.launcher.can_freeze(),
            snapshot: self.launcher.can_keep(),
            attach: true,
            volumes: self.launcher.keeps_volumes(),
            restart: self.launcher.can_keep(),
            network: self.launcher.has_network(),
            host_versions: crate::images::HostPrograms::of_this_host().versions(),
        }
    }

    fn conclude(&mut self, index: usize) {
        let Creating { client, number, pending } = self.creating.swap_remove(index);
        let (id, keep) = (pending.id.clone(), pending.keep);
        match self.launcher.conclude(pending) {
            Ok(created) => {
                let answer = Ok(Answer::Created(created.holds));
                tell(&client, number, answer, Some(&created.pidfd));
            }
            Err(refusal) => self.end(client, number, id, keep, Err(refusal)),
        }
    }

    fn conclude_mounting(&mut self, index: usize) {
        let Mounting { client, number, attaching } = self.mounting.swap_remove(index);
        let answer = self.launcher.conclude_attach(attaching).map(Answer::Changed);
        tell(&client, number, answer, None);
    }

    /// Begins to end a sandbox; the response is sent when everything except the kept parts is removed.
    pub(super) fn end(
        &mut self,
        client: Client,
        number: u64,
        id: String,
        keep: Keep,
        answer: Result<Answer, Refusal>,
    ) {
        let (pidfd, state) = match self.launcher.kill(&id) {
            Ok(Ending::Dying(pidfd)) => (Some(pidfd), Waiting::Death),
            Ok(Ending::Done) => (None, Waiting::Groups),
            Err(error) => {
                tracing::warn!(id, %error, "failed to kill sandbox; the client gets an error");
                return tell(&client, number, answer.and(Err(failed("kill", &error))), None);
            }
        };
        self.dying.push(Dying { client, number, id, keep, answer, pidfd, state });
    }

    /// Answers a pause or resume if the kernel has finished it.
    fn look_at_change(&mut self, index: usize) {
        let answer = match self.changing[index].freezing.is_done() {
            Ok(true) => Ok(Answer::Done),
            Ok(false) => return,
            Err(error) => Err(failed("freeze", &error)),
        };
        let Changing { client, number, .. } = self.changing.swap_remove(index);
        tell(&client, number, answer, None);
    }

    /// Removes sandboxes whose processes have ended, and retries later if the kernel still holds a group.
    fn clear_dying(&mut self) {
        for mut dying in std::mem::take(&mut self.dying) {
            if matches!(dying.state, Waiting::Groups) {
                match self.launcher.clear(&dying.id, dying.pidfd.as_ref(), dying.keep) {
                    Ok(()) => {
                        tell(&dying.client, dying.number, dying.answer, None);
                        continue;
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => dying.state = Waiting::Groups,
                    Err(error) => {
                        tracing::warn!(id = dying.id, %error, "failed to remove sandbox; the client gets an error");
                        let answer = dying.answer.and(Err(failed("clear", &error)));
                        tell(&dying.client, dying.number, answer, None);
                        continue;
                    }
                }
            }
            self.dying.push(dying);
        }
    }
}

/// Whether the ids in a request are valid. Ids become parts of paths here, and the server, which faces
/// the network, is not trusted.
fn names_a_sandbox(question: &Question) -> bool {
    let id = match question {
        Question::Create(plan) => {
            let snapshot = plan.snapshot.as_deref();
            if snapshot.is_some_and(|snapshot| SnapshotId::parse(snapshot).is_err()) {
                return false;
            }
            &plan.id
        }
        Question::Resize(resize) => &resize.id,
        Question::Destroy { id }
        | Question::Stop { id }
        | Question::Freeze { id, .. }
        | Question::Attach { id, .. }
        | Question::Usage { id }
        | Question::Watch { id }
        | Question::Connect { id, .. }
        | Question::WasOutOfMemory { id } => id,
        // A volume's id has the same form as a sandbox's.
        Question::MakeVolume(plan) => &plan.id,
        Question::RemoveVolume { id } => id,
        Question::Snapshot { id, snapshot } => {
            return SandboxId::parse(id).is_ok() && SnapshotId::parse(snapshot).is_ok();
        }
        Question::ForgetSnapshot { snapshot } => return SnapshotId::parse(snapshot).is_ok(),
        Question::VolumesHold { ids } => return ids.iter().all(|id| SandboxId::parse(id).is_ok()),
        Question::List
        | Question::Snapshots
        | Question::Volumes
        | Question::Resolve { .. }
        | Question::Report => return true,
        Question::Image(question) => return names_a_snapshot(question),
    };
    SandboxId::parse(id).is_ok()
}

/// Whether the id of a snapshot in a question about images is one. Names of images are checked where
/// they become the names of files.
fn names_a_snapshot(question: &ImageQuestion) -> bool {
    match question {
        ImageQuestion::Commit { snapshot, .. } => SnapshotId::parse(snapshot).is_ok(),
        ImageQuestion::List
        | ImageQuestion::Find { .. }
        | ImageQuestion::Layers { .. }
        | ImageQuestion::Import { .. }
        | ImageQuestion::ImportArchive { .. }
        | ImageQuestion::Remove { .. }
        | ImageQuestion::Collect => true,
    }
}

pub(super) fn failed(step: &str, error: &io::Error) -> Refusal {
    Refusal { kind: RefusalKind::Step(step.to_owned()), message: error.to_string(), hint: None }
}

/// Sends a response. If the server is gone, the response is lost; the next server lists the sandboxes.
pub(super) fn tell(
    client: &Client,
    number: u64,
    answer: Result<Answer, Refusal>,
    descriptor: Option<&OwnedFd>,
) {
    let message = Tell { number, answer };
    if let Err(error) = packet::send(client.as_fd(), &message, descriptor.map(AsFd::as_fd)) {
        tracing::warn!(%error, "could not send response: server disconnected");
    }
}
