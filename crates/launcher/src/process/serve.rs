//! The launcher's event loop: it receives requests, starts and ends sandboxes, and sends responses.
//!
//! The loop never waits for a single sandbox: a create is answered when the agent reports, a destroy
//! when the process has ended and the kernel has released its groups.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;

use domain::{Bytes, SandboxId};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, Mode, Uid};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, socket_with};

use super::Launcher;
use super::attach::PendingAttach;
use super::create::{BeginCreateError, PendingCreate};
use super::disk_task_queue::DiskTaskInProgress;
use super::end::{KeptParts, KillOutcome};
use super::ended_sandboxes::EndedSandboxes;
use super::images::{ImageOp, MAX_IMAGE_CHANGES, PendingImageChange};
use super::puller::RunningPullers;
use crate::cgroups::PendingFreeze;
use crate::client_connection::{ClientConnection, ClientSocket};
use crate::jail::plan::{DiskPlan, JailPlan, LimitName};
use crate::pidfd_queue::UnreadLists;
use crate::protocol::{
    FoundSandbox, LauncherOp, LauncherRequest, LauncherResponse, OpError, OpErrorKind, OpResult,
    PROTOCOL_VERSION, SOCKET_NAME,
};
use crate::settings::LauncherSettings;
use linux::packet;

struct CreateInProgress {
    client: ClientSocket,
    number: u64,
    pending: PendingCreate,
}

/// Mounts that are being added to a running sandbox.
struct AttachInProgress {
    client: ClientSocket,
    number: u64,
    attaching: PendingAttach,
}

/// A sandbox that is being ended, because a client asked for it or because it failed to start.
struct RemovalInProgress {
    client: ClientSocket,
    number: u64,
    id: SandboxId,
    /// The parts that are kept.
    keep: KeptParts,
    /// The response that is sent when everything else is removed.
    answer: Result<OpResult, OpError>,
    pidfd: Option<OwnedFd>,
    state: RemovalStage,
}

/// A pause or resume that the kernel has not finished. A process that is reading from a slow disk
/// cannot be frozen before the read returns.
struct FreezeInProgress {
    client: ClientSocket,
    number: u64,
    freezing: PendingFreeze,
}

/// A change of the images that a separate process makes.
struct ImageChangeInProgress {
    client: ClientSocket,
    number: u64,
    change: PendingImageChange,
}

/// The event that the end of a sandbox waits for.
enum RemovalStage {
    Death,
    /// The kernel has not released its control groups.
    Groups,
}

/// The interval for checking groups that the kernel has not released, in nanoseconds.
const GROUP_RETRY_INTERVAL_NANOS: i64 = 1_000_000;
/// How long the loop must be idle before resources are prepared in advance, in nanoseconds.
const REFILL_IDLE_DELAY_NANOS: i64 = 5_000_000;

type ReadSettings = Box<dyn FnMut(&OwnedFd) -> Option<LauncherSettings>>;

/// The source of new settings.
struct SettingsUpdates {
    /// Readable when new settings are available.
    descriptor: OwnedFd,
    /// Reads the settings; `None` if there will be no more.
    read: ReadSettings,
    /// Reports that the settings are applied.
    applied: Box<dyn FnMut()>,
}

/// The state of the loop.
pub struct LauncherLoop {
    pub(super) launcher: Launcher,
    listener: OwnedFd,
    /// Readable or closed when the loop must end.
    stop: OwnedFd,
    updates: Option<SettingsUpdates>,
    clients: Vec<ClientSocket>,
    creating: Vec<CreateInProgress>,
    freezes: Vec<FreezeInProgress>,
    image_changes: Vec<ImageChangeInProgress>,
    attaches: Vec<AttachInProgress>,
    dying: Vec<RemovalInProgress>,
    ended: EndedSandboxes,
    pub(super) disk_tasks: Vec<DiskTaskInProgress>,
    pullers: RunningPullers,
    unread_lists: UnreadLists,
    fully_prepared: bool,
}

/// The event that became ready.
enum LoopEvent {
    Stop,
    Listener,
    Client(usize),
    Created(usize),
    FreezeChanged(usize),
    ImagesChanged(usize),
    Mounted(usize),
    Died(usize),
    DiskTaskFinished(usize),
    SpareDiskCopied,
    NetworkChanged,
    Update,
    Nothing,
}

impl LauncherLoop {
    /// Listens in the run directory. The socket of a killed launcher is replaced.
    pub fn open(launcher: Launcher, stop: OwnedFd) -> io::Result<Self> {
        let run = launcher.run_directory();
        match rustix::fs::unlinkat(run, SOCKET_NAME, AtFlags::empty()) {
            Ok(()) | Err(rustix::io::Errno::NOENT) => {}
            Err(error) => return Err(error.into()),
        }
        let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        let path = format!("/proc/self/fd/{}/{SOCKET_NAME}", std::os::fd::AsRawFd::as_raw_fd(&run));
        rustix::net::bind(&listener, &SocketAddrUnix::new(path)?)?;
        rustix::fs::chmodat(run, SOCKET_NAME, Mode::from_raw_mode(0o600), AtFlags::empty())?;
        let server = launcher.settings().server_uid.map(Uid::from_raw);
        rustix::fs::chownat(run, SOCKET_NAME, server, None, AtFlags::SYMLINK_NOFOLLOW)?;
        rustix::net::listen(&listener, 16)?;
        let ended = EndedSandboxes::open(&launcher)?;
        Ok(Self {
            launcher,
            listener,
            stop,
            updates: None,
            clients: Vec::new(),
            creating: Vec::new(),
            freezes: Vec::new(),
            image_changes: Vec::new(),
            attaches: Vec::new(),
            dying: Vec::new(),
            ended,
            disk_tasks: Vec::new(),
            pullers: RunningPullers::default(),
            unread_lists: UnreadLists::default(),
            fully_prepared: false,
        })
    }

    /// Makes the loop take new settings from `descriptor`: `read` is called when it is readable, and
    /// `applied` after the returned settings were applied.
    pub fn with_settings_updates(
        self,
        descriptor: OwnedFd,
        read: impl FnMut(&OwnedFd) -> Option<LauncherSettings> + 'static,
        applied: impl FnMut() + 'static,
    ) -> Self {
        let updates = SettingsUpdates { descriptor, read: Box::new(read), applied: Box::new(applied) };
        Self { updates: Some(updates), ..self }
    }

    fn apply_settings_update(&mut self) {
        let Some(mut updates) = self.updates.take() else { return };
        if let Some(settings) = (updates.read)(&updates.descriptor) {
            self.launcher.reload_settings(settings);
            (updates.applied)();
            self.updates = Some(updates);
        }
    }

    /// Serves requests until the stop descriptor is readable.
    pub fn run(&mut self) -> io::Result<()> {
        loop {
            match self.wait_for_event()? {
                LoopEvent::Stop => {
                    self.cancel_disk_tasks();
                    let removed = self.ended.remove_all(&mut self.launcher);
                    return self.launcher.close().and(removed);
                }
                LoopEvent::Listener => {
                    let client = accept_with(&self.listener, SocketFlags::CLOEXEC);
                    self.add_client(client.map_err(Into::into));
                }
                LoopEvent::Client(index) => {
                    // A connection that takes no response is closed; otherwise the loop would try again and again.
                    match self.clients[index].flush() {
                        Ok(()) => self.receive_request(index),
                        Err(error) => {
                            tracing::warn!(%error, "failed to send a response to the server; its connection is closed");
                            self.clients.remove(index).close();
                        }
                    }
                }
                LoopEvent::Created(index) => self.finish_create(index),
                LoopEvent::FreezeChanged(index) => self.check_freeze(index),
                LoopEvent::ImagesChanged(index) => {
                    let ImageChangeInProgress { client, number, change } =
                        self.image_changes.swap_remove(index);
                    send_response(&client, number, change.conclude(), None);
                }
                LoopEvent::Mounted(index) => self.finish_attach(index),
                LoopEvent::Died(index) => self.dying[index].state = RemovalStage::Groups,
                LoopEvent::DiskTaskFinished(index) => self.finish_disk_task(index),
                LoopEvent::SpareDiskCopied => {
                    self.launcher.rights.finish_spare_copy();
                    // Another snapshot may have been restored meanwhile.
                    self.fully_prepared = false;
                }
                LoopEvent::NetworkChanged => {
                    self.fully_prepared &= !self.launcher.rights.handle_network_change()
                }
                LoopEvent::Update => self.apply_settings_update(),
                LoopEvent::Nothing => {}
            }
            self.remove_dead_sandboxes();
            if self.ended.is_removal_due() {
                self.ended.remove_next(&mut self.launcher);
            }
            while let Some((client, request)) = self.ended.take_ready_replacement() {
                self.handle_request(client, request, None);
            }
        }
    }

    /// Waits for the next event, and prepares resources when the loop is idle.
    fn wait_for_event(&mut self) -> io::Result<LoopEvent> {
        let mut watched =
            vec![PollFd::new(&self.stop, PollFlags::IN), PollFd::new(&self.listener, PollFlags::IN)];
        watched.extend(self.clients.iter().map(|client| PollFd::new(&**client, client.poll_flags())));
        watched.extend(
            self.creating.iter().map(|creating| PollFd::new(&creating.pending.status, PollFlags::IN)),
        );
        watched.extend(
            self.freezes.iter().map(|changing| PollFd::new(&changing.freezing.events, PollFlags::PRI)),
        );
        watched
            .extend(self.image_changes.iter().map(|image| PollFd::new(&image.change.pidfd, PollFlags::IN)));
        watched.extend(
            self.attaches.iter().map(|mounting| PollFd::new(&mounting.attaching.status, PollFlags::IN)),
        );
        watched.extend(self.disk_tasks.iter().map(|job| PollFd::new(job.report_pipe(), PollFlags::IN)));
        let spare_disk = self.launcher.rights.spare_disk_report();
        watched.extend(spare_disk.iter().map(|report| PollFd::new(*report, PollFlags::IN)));
        let network = self.launcher.rights.watched_network();
        watched.extend(network.iter().map(|fd| PollFd::new(fd, PollFlags::IN)));
        let updates = self.updates.as_ref().map(|updates| PollFd::new(&updates.descriptor, PollFlags::IN));
        let updating = usize::from(updates.is_some());
        watched.extend(updates);
        let deaths = |dying: &RemovalInProgress| matches!(dying.state, RemovalStage::Death);
        let waiting: Vec<usize> = (0..self.dying.len()).filter(|index| deaths(&self.dying[*index])).collect();
        for index in &waiting {
            if let Some(pidfd) = &self.dying[*index].pidfd {
                watched.push(PollFd::new(pidfd, PollFlags::IN));
            }
        }
        let retrying = self.dying.iter().any(|dying| !deaths(dying)) || self.ended.is_blocked();
        let nanoseconds = match (retrying, self.ended.is_empty()) {
            (true, _) => Some(GROUP_RETRY_INTERVAL_NANOS),
            (false, false) => Some(0),
            (false, true) => self.idle_delay_before_refill(),
        };
        let timeout = nanoseconds.map(|tv_nsec| Timespec { tv_sec: 0, tv_nsec });
        let ready = rustix::io::retry_on_intr(|| poll(&mut watched, timeout.as_ref()))?;
        if ready == 0 {
            drop(watched);
            if self.ended.is_empty() {
                self.refill_when_idle();
            } else {
                self.ended.remove_next(&mut self.launcher);
            }
            return Ok(LoopEvent::Nothing);
        }
        let index = watched.iter().position(|fd| !fd.revents().is_empty()).unwrap_or(0);
        let mut index = index;
        for (kind, count) in [
            ((|_| LoopEvent::Stop) as fn(usize) -> LoopEvent, 1),
            (|_| LoopEvent::Listener, 1),
            (LoopEvent::Client, self.clients.len()),
            (LoopEvent::Created, self.creating.len()),
            (LoopEvent::FreezeChanged, self.freezes.len()),
            (LoopEvent::ImagesChanged, self.image_changes.len()),
            (LoopEvent::Mounted, self.attaches.len()),
            (LoopEvent::DiskTaskFinished, self.disk_tasks.len()),
            (|_| LoopEvent::SpareDiskCopied, usize::from(spare_disk.is_some())),
            (|_| LoopEvent::NetworkChanged, network.len()),
            (|_| LoopEvent::Update, updating),
        ] {
            if index < count {
                return Ok(kind(index));
            }
            index -= count;
        }
        Ok(LoopEvent::Died(waiting[index]))
    }

    /// Returns how many nanoseconds the loop must be idle before resources are prepared; `None` if none
    /// should be prepared now. A new sandbox and its first command should not share the processor and
    /// the kernel's locks with work that can wait, unless few prepared resources are left.
    fn idle_delay_before_refill(&self) -> Option<i64> {
        match (self.fully_prepared, self.creating.is_empty()) {
            (true, _) | (false, false) => None,
            (false, true) => Some(if self.launcher.prepared_are_low() { 0 } else { REFILL_IDLE_DELAY_NANOS }),
        }
    }

    /// Adds a connection. The oldest one is closed if there are too many: a server needs only one.
    fn add_client(&mut self, client: io::Result<OwnedFd>) {
        const MAX_CLIENTS: usize = 8;
        match client {
            Ok(client) => self.clients.push(ClientConnection::new(client)),
            Err(error) => {
                tracing::warn!(%error, "failed to accept a connection; the server must connect again")
            }
        }
        if self.clients.len() > MAX_CLIENTS {
            drop(self.clients.remove(0));
        }
    }

    fn refill_when_idle(&mut self) {
        if self.fully_prepared || !self.creating.is_empty() {
            return;
        }
        match self.launcher.refill_prepared() {
            Ok(more) => self.fully_prepared = !more,
            Err(error) => {
                // The next create tries again and reports the error.
                tracing::warn!(%error, "failed to prepare net namespaces or disks in advance; the next create or restore retries");
                self.fully_prepared = true;
            }
        }
    }

    fn receive_request(&mut self, index: usize) {
        let client = Rc::clone(&self.clients[index]);
        match packet::receive_message::<LauncherRequest>(client.as_fd()) {
            Ok(Some((ask, carried))) if ask.version == PROTOCOL_VERSION => {
                self.handle_request(client, ask, carried)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Ok(Some(_) | None) | Err(_) => drop(self.clients.remove(index)),
        }
    }

    pub(super) fn handle_request(
        &mut self,
        client: ClientSocket,
        request: LauncherRequest,
        carried: Option<OwnedFd>,
    ) {
        let Some((client, request)) = self.ended.queue_if_replacement(client, request) else { return };
        let Some((client, ask)) = self.queue_if_conflicting(client, request) else { return };
        let number = ask.number;
        let answer = match ask.op {
            LauncherOp::Create(plan) if plan.snapshot.is_some() && plan.disk == DiskPlan::New => {
                return self.start_restore(client, number, plan);
            }
            LauncherOp::Snapshot { id, snapshot } => {
                return self.start_snapshot(client, number, &id, &snapshot);
            }
            LauncherOp::ForgetSnapshot { snapshot } => self.forget_snapshot(&snapshot),
            LauncherOp::Create(plan) => return self.start_create(client, number, *plan),
            LauncherOp::Destroy { id } => {
                let cpu_micros = self.launcher.rights.cpu_micros(&id);
                return self.start_removal(
                    client,
                    number,
                    id,
                    KeptParts::Nothing,
                    Ok(OpResult::Ended { cpu_micros }),
                );
            }
            LauncherOp::Stop { id } => {
                let (cpu_micros, files) =
                    (self.launcher.rights.cpu_micros(&id), self.launcher.rights.has_disk(&id));
                return self.start_removal(
                    client,
                    number,
                    id,
                    KeptParts::Disk,
                    Ok(OpResult::Stopped { cpu_micros, files }),
                );
            }
            LauncherOp::Freeze { id, frozen } => match self.launcher.set_frozen(&id, frozen) {
                Ok(freezing) => {
                    self.freezes.push(FreezeInProgress { client, number, freezing });
                    return self.check_freeze(self.freezes.len() - 1);
                }
                Err(refusal) => Err(refusal),
            },
            LauncherOp::Attach { id, mounts } => match self.launcher.begin_attach(&id, &mounts) {
                Ok(attaching) => return self.attaches.push(AttachInProgress { client, number, attaching }),
                Err(refusal) => Err(refusal),
            },
            LauncherOp::MakeVolume(plan) => {
                let most = self.launcher.settings.maxima.disk.map(Bytes);
                self.launcher.rights.make_volume(&plan, most).map(|()| OpResult::Done)
            }
            LauncherOp::RemoveVolume { id } => {
                self.launcher.rights.remove_volume(&id).map(|()| OpResult::Done)
            }
            LauncherOp::Resize(resize) => self.launcher.resize_sandbox(&resize).map(OpResult::Changed),
            LauncherOp::List => match self.list_sandboxes() {
                Ok((found, pidfds)) => {
                    return send_response(&client, number, Ok(OpResult::Found(found)), Some(&pidfds));
                }
                Err(refusal) => Err(refusal),
            },
            LauncherOp::Image(question) => match self.launcher.images.answer_query(&question) {
                Some(answer) => answer,
                None => return self.start_image_change(client, number, question, carried),
            },
            LauncherOp::StartPull => self.pullers.start(&self.launcher, carried),
            LauncherOp::Connect { id, network } => {
                self.launcher.connect_network(&id, network).map(OpResult::Changed)
            }
            question => self.handle_query(question),
        };
        send_response(&client, number, answer, None);
    }

    /// Returns all sandboxes, and a socket that holds the descriptors of the running ones.
    fn list_sandboxes(&mut self) -> Result<(Vec<FoundSandbox>, OwnedFd), OpError> {
        let failed = |error| step_error("list", &error);
        self.unread_lists.check_room()?;
        let (found, queue) = self.launcher.list_with_pidfds().map_err(failed)?;
        Ok((found, self.unread_lists.add(queue).map_err(failed)?))
    }

    /// Starts to make a sandbox.
    pub(super) fn start_create(&mut self, client: ClientSocket, number: u64, plan: JailPlan) {
        self.fully_prepared = false;
        match self.launcher.begin_create(&plan) {
            Ok(pending) => self.creating.push(CreateInProgress { client, number, pending }),
            Err(BeginCreateError::Refused(refusal)) => send_response(&client, number, Err(refusal), None),
            Err(BeginCreateError::Failed(refusal, keep)) => {
                self.start_removal(client, number, plan.id, keep, Err(refusal))
            }
        }
    }

    fn start_image_change(
        &mut self,
        client: ClientSocket,
        number: u64,
        op: ImageOp,
        carried: Option<OwnedFd>,
    ) {
        if self.image_changes.len() >= MAX_IMAGE_CHANGES {
            let message = format!("limit of concurrent image changes reached ({MAX_IMAGE_CHANGES})");
            let refusal = OpError { kind: OpErrorKind::Exhausted, message, hint: None };
            return send_response(&client, number, Err(refusal), None);
        }
        match self.launcher.begin_image_change(op, carried) {
            Ok(change) => self.image_changes.push(ImageChangeInProgress { client, number, change }),
            Err(error) => send_response(&client, number, Err(step_error("change the images", &error)), None),
        }
    }

    /// Answers requests that need no waiting.
    fn handle_query(&self, op: LauncherOp) -> Result<OpResult, OpError> {
        match op {
            LauncherOp::Usage { id } => {
                self.launcher.usage(&id).map(OpResult::Used).ok_or_else(OpError::gone)
            }
            LauncherOp::Volumes => self.launcher.rights.list_volumes().map(OpResult::Volumes),
            LauncherOp::VolumesHold { ids } => {
                Ok(OpResult::VolumesHold(self.launcher.rights.volume_usage(ids)))
            }
            LauncherOp::WasOutOfMemory { id } => {
                Ok(OpResult::Yes(self.launcher.rights.was_out_of_memory(&id)))
            }
            LauncherOp::OpenFiles => self
                .launcher
                .count_open_files()
                .map(OpResult::OpenFiles)
                .map_err(|error| step_error("count open files", &error)),
            LauncherOp::Report => Ok(self.report_capabilities()),
            LauncherOp::Snapshots => self.list_snapshots(),
            LauncherOp::Create(_)
            | LauncherOp::Snapshot { .. }
            | LauncherOp::ForgetSnapshot { .. }
            | LauncherOp::Resize(_)
            | LauncherOp::Destroy { .. }
            | LauncherOp::Stop { .. }
            | LauncherOp::Freeze { .. }
            | LauncherOp::Attach { .. }
            | LauncherOp::MakeVolume(_)
            | LauncherOp::RemoveVolume { .. }
            | LauncherOp::Connect { .. }
            | LauncherOp::List
            | LauncherOp::Resolve { .. }
            | LauncherOp::Watch { .. }
            | LauncherOp::StartPull
            | LauncherOp::Image(_) => Err(OpError::unsupported("this request is not answered here", None)),
        }
    }

    fn report_capabilities(&self) -> OpResult {
        let rights = &self.launcher.rights;
        let (held, missing): (Vec<_>, Vec<_>) =
            LimitName::ALL.into_iter().partition(|limit| rights.enforces(*limit));
        let keeps_score =
            linux::caps::effective_capabilities().is_ok_and(|held| held.has(linux::caps::SYS_RESOURCE));
        let oom_score = (!keeps_score).then(|| crate::jail::host_shares::RESETTABLE_OOM_SCORE.to_owned());
        OpResult::Report {
            limits: held,
            degraded: missing.iter().map(|limit| limit.describe_unenforced()).chain(oom_score).collect(),
            pause: rights.can_freeze(),
            snapshot: rights.can_take_snapshots(),
            attach: true,
            volumes: rights.supports_named_volumes(),
            restart: rights.can_take_snapshots(),
            network: self.launcher.has_network(),
            filtered: self.launcher.check_egress().is_ok(),
            host_versions: self.launcher.host_software().versions(),
        }
    }

    fn finish_create(&mut self, index: usize) {
        let CreateInProgress { client, number, pending } = self.creating.swap_remove(index);
        let (id, keep) = (pending.id.clone(), pending.keep);
        match pending.conclude() {
            Ok(created) => {
                let answer = Ok(OpResult::Created(created.enforced));
                send_response(&client, number, answer, Some(&created.pidfd));
            }
            Err(refusal) => self.start_removal(client, number, id, keep, Err(refusal)),
        }
    }

    fn finish_attach(&mut self, index: usize) {
        let AttachInProgress { client, number, mut attaching } = self.attaches.swap_remove(index);
        let answer = attaching.read_outcome().map(OpResult::Changed);
        send_response(&client, number, answer, None);
        if let Err(error) = attaching.reap() {
            tracing::warn!(%error, "failed to reap the process that attached mounts; it is reaped with the launcher");
        }
    }

    /// Begins to end a sandbox; the response is sent when everything except the kept parts is removed.
    pub(super) fn start_removal(
        &mut self,
        client: ClientSocket,
        number: u64,
        id: SandboxId,
        keep: KeptParts,
        answer: Result<OpResult, OpError>,
    ) {
        let (pidfd, state) = match self.launcher.kill_sandbox(&id) {
            Ok(KillOutcome::Dying(pidfd)) => (Some(pidfd), RemovalStage::Death),
            Ok(KillOutcome::Done) => (None, RemovalStage::Groups),
            Err(error) => {
                tracing::warn!(%id, %error, "failed to kill sandbox; the client gets an error");
                return send_response(&client, number, answer.and(Err(step_error("kill", &error))), None);
            }
        };
        self.dying.push(RemovalInProgress { client, number, id, keep, answer, pidfd, state });
    }

    /// Answers a pause or resume if the kernel has finished it.
    fn check_freeze(&mut self, index: usize) {
        let answer = match self.freezes[index].freezing.is_done() {
            Ok(true) => Ok(OpResult::Done),
            Ok(false) => return,
            Err(error) => Err(step_error("freeze", &error)),
        };
        let FreezeInProgress { client, number, .. } = self.freezes.swap_remove(index);
        send_response(&client, number, answer, None);
    }

    /// Removes sandboxes whose processes have ended, and retries later if the kernel still holds a group.
    /// If nothing of a sandbox is kept, the client need not wait for the removal of its remains.
    fn remove_dead_sandboxes(&mut self) {
        for dying in std::mem::take(&mut self.dying) {
            if matches!(dying.state, RemovalStage::Groups) {
                match self.remove_or_mark_ended(&dying) {
                    Ok(()) => {
                        send_response(&dying.client, dying.number, dying.answer, None);
                        continue;
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(error) => {
                        tracing::warn!(id = %dying.id, %error, "failed to remove sandbox; the client gets an error");
                        let answer = dying.answer.and(Err(step_error("clear", &error)));
                        send_response(&dying.client, dying.number, answer, None);
                        continue;
                    }
                }
            }
            self.dying.push(dying);
        }
    }

    fn remove_or_mark_ended(&mut self, dying: &RemovalInProgress) -> io::Result<()> {
        let was_created = dying.answer.is_ok() && dying.keep == KeptParts::Nothing;
        if was_created && self.launcher.mark_ended(&dying.id, dying.pidfd.as_ref())? {
            self.ended.push(dying.id.clone());
            return Ok(());
        }
        self.launcher.remove_dead_sandbox(&dying.id, dying.pidfd.as_ref(), dying.keep)
    }
}

pub(super) fn step_error(step: &str, error: &io::Error) -> OpError {
    OpError { kind: OpErrorKind::Step(step.to_owned()), message: error.to_string(), hint: None }
}

/// Sends a response. If the server is gone, the response is lost; the next server lists the sandboxes.
pub(super) fn send_response(
    client: &ClientSocket,
    number: u64,
    answer: Result<OpResult, OpError>,
    descriptor: Option<&OwnedFd>,
) {
    let message = LauncherResponse { number, result: answer };
    if let Err(error) = client.send(message, descriptor) {
        tracing::warn!(%error, "failed to send a response to the server");
    }
}
