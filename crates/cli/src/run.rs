//! `coracle run`: one command in a sandbox of its own, without a server.
//!
//! This process is its own launcher: it makes the sandbox, speaks to the agent over the same protocol as
//! a server would, passes input and output through, and removes everything. The sandbox dies with it;
//! leftovers of a killed run are removed by the next.

mod agent_connection;
mod image_offer;
mod input;
mod network;
mod stdio_relay;
mod terminal;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::IsTerminal;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use backend::enforced::find_network;
use backend::{BackendError, LimitPlan};
use domain::{Bytes, MountSource, ResourceLimits, SandboxId, UserIdentity};
use launcher::identity::{ExaminedIdentity, InstanceNaming, ServerIdentity};
use launcher::network::{NetworkMode, NetworkSettings};
use launcher::plan::{DiskPlan, GuestPlan, JailPlan};
use launcher::protocol::{EnforcedPlan, OpError};
use launcher::settings::{LauncherSettings, LifetimePolicy, MaxLimits, MountRule, TotalLimits};
use launcher::{BeginCreateError, Launcher, SandboxPrograms, VolumeKind};
use linux::namespaces::{self, NamespaceSet};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::FlockOperation;
use service::{ResolvedImage, StandIn};
use wire::process::{
    CommandLine, ExitReason, MissingDirectory, OutputRetention, StartProcess, TerminalSize, WorkingDirectory,
};

use crate::args::{LimitArgs, RunArgs};
use crate::config::Config;
use crate::egress_process::CommandLineEgress;
use crate::embedded_programs;
use crate::output::{Printer, WithHint};
use crate::serve::state::with_identity_hint;
use crate::serve::{child_settings, lock_file, make_state_dir, state_dir_hint};

/// As timeout(1) uses it.
const EXIT_TIMED_OUT: u8 = 124;
/// As a shell reports a command that the kernel killed.
const EXIT_KILLED: u8 = 137;

pub(crate) fn run_oneshot(args: &RunArgs, printer: &Printer) -> Result<ExitCode> {
    let printer = &if args.quiet { printer.quiet() } else { *printer };
    let config = Config::for_host(&args.state)?;
    let plan = build_plan(args, &config)?;
    let start = build_start_request(args, &plan)?;
    let programs = embedded_programs::COMMAND_PROGRAMS;
    let exit = with_sandbox(args, &config, &plan, programs, printer, |socket| {
        stdio_relay::relay_command(socket, start)
    })?;
    explain_exit(exit, args, &plan, printer);
    Ok(exit_code(exit))
}

/// Asks an image from inside what it offers, and returns the reply.
pub(crate) fn query_image_offer(args: &RunArgs, printer: &Printer) -> Result<serde_json::Value> {
    let config = Config::for_host(&args.state)?;
    let plan = build_plan(args, &config)?;
    with_sandbox(args, &config, &plan, embedded_programs::ALL_PROGRAMS, printer, image_offer::query_offer)
}

/// Runs `work` with the agent of a sandbox that ends afterwards.
fn with_sandbox<T>(
    args: &RunArgs,
    config: &Config,
    plan: &JailPlan,
    programs: SandboxPrograms,
    printer: &Printer,
    work: impl FnOnce(&Path) -> Result<T>,
) -> Result<T> {
    let state = config.state_dir.join("oneshot");
    if linux::privileges::is_host_root() {
        namespaces::unshare_namespaces(NamespaceSet::MOUNT).context("could not make a mount namespace")?;
        linux::mounts::make_private().context("could not make mounts private")?;
    }
    let mut egress = network::start_egress(args, config, plan.network, &plan.id)?;
    let mut sandbox = OneshotSandbox::create(config, &state, plan, programs, egress.as_ref(), printer)?;
    let outcome = work(&sandbox.launcher.agent_socket_path(&plan.id));
    if let Some(egress) = &mut egress
        && let Err(error) = network::print_denied(egress, &plan.id, printer)
    {
        printer.warn(format_args!("failed to read what the network filter denied: {error:#}"));
    }
    // The sandbox is removed in any case; an error of the command matters more than an error of the
    // removal.
    let removed = sandbox.tear_down(args.keep, printer);
    let outcome = outcome?;
    removed?;
    Ok(outcome)
}

/// A sandbox that ends with this process.
struct OneshotSandbox {
    launcher: Launcher,
    id: SandboxId,
    /// Locked while we live, so that other runs do not remove this sandbox.
    _alive: File,
    alive_path: PathBuf,
    /// Locked by the run that opens or closes what all runs share.
    shared_lock_path: PathBuf,
}

impl OneshotSandbox {
    fn create(
        config: &Config,
        state: &Path,
        plan: &JailPlan,
        programs: SandboxPrograms,
        egress: Option<&CommandLineEgress>,
        printer: &Printer,
    ) -> Result<Self> {
        if let Err(error) = make_oneshot_dir(&config.state_dir, state) {
            let hint = state_dir_hint(&error);
            return Err(error)
                .with_context(|| format!("could not make `{}`", state.display()))
                .with_hint(hint);
        }
        // Only one run at a time opens and sweeps.
        let turn_path = state.join("lock");
        let turn = lock_file(&turn_path, FlockOperation::LockExclusive)?;
        let identity = determine_identity(config, state)?;
        let mut launcher = Launcher::open(launcher_settings(config, state, identity), programs)?;
        remove_stale_sandboxes(&mut launcher, state, printer)?;
        if let Some(egress) = egress {
            launcher.connect_keeper(egress.connection()?).context("could not talk to egress")?;
        }
        let alive_path = state.join("alive").join(plan.id.as_str());
        let alive = lock_file(&alive_path, FlockOperation::LockExclusive)?;
        let mut sandbox =
            Self { launcher, id: plan.id.clone(), _alive: alive, alive_path, shared_lock_path: turn_path };
        match sandbox.start(config, plan, turn) {
            Ok((holds, stand_in)) => {
                if let Some(stand_in) = &stand_in {
                    printer.warn(stand_in);
                }
                if let Some(warning) = degraded_warning(&holds, plan) {
                    printer.warn(warning);
                }
                Ok(sandbox)
            }
            Err(error) => {
                let ended = sandbox.tear_down(false, printer);
                let discarded = || sandbox.launcher.discard_kept_files(&plan.id).map_err(Into::into);
                if let Err(error) = ended.and_then(|()| discarded()) {
                    printer.warn(format_args!("failed to remove the remains of the sandbox: {error:#}"));
                }
                Err(error)
            }
        }
    }

    /// Makes the sandbox; the shared lock is released once its first process exists.
    fn start(
        &mut self,
        config: &Config,
        plan: &JailPlan,
        turn: File,
    ) -> Result<(EnforcedPlan, Option<StandIn>)> {
        let ResolvedImage { name: image, stand_in } = resolve_image(&self.launcher, config, &plan.image)
            .map_err(|error| anyhow::Error::from(error).context("could not create the sandbox"))?;
        let begun = self.launcher.begin_create(&JailPlan { image, ..plan.clone() });
        drop(turn);
        let pending = begun.map_err(|why| match why {
            BeginCreateError::Refused(refusal) | BeginCreateError::Failed(refusal, _) => {
                create_error(refusal)
            }
        })?;
        let mut watched = [PollFd::new(&pending.status, PollFlags::IN)];
        rustix::io::retry_on_intr(|| poll(&mut watched, None))?;
        Ok((pending.conclude().map_err(create_error)?.enforced, stand_in))
    }

    fn tear_down(&mut self, keep: bool, printer: &Printer) -> Result<()> {
        self.launcher.destroy_and_wait(&self.id).context("could not remove the sandbox")?;
        // Closing removes what another `run` may just have opened, so it needs the lock.
        let turn = lock_file(&self.shared_lock_path, FlockOperation::LockExclusive)?;
        self.launcher.close()?;
        drop(turn);
        std::fs::remove_file(&self.alive_path)?;
        if keep {
            printer.remark(format!(
                "kept what was written in {}",
                self.launcher.kept_files_path(&self.id).display()
            ));
        }
        Ok(())
    }
}

/// Decides which image a name stands for, by the same rules as a server.
fn resolve_image(launcher: &Launcher, config: &Config, name: &str) -> Result<ResolvedImage, BackendError> {
    if let Some(found) = launcher.find_image_name(name)? {
        return Ok(ResolvedImage { name: found, stand_in: None });
    }
    let aliases = child_settings::image_aliases(config);
    let stand_in = aliases.find_stand_in(name, &launcher.host_software())?;
    let found = launcher.find_image_name(&stand_in.used)?;
    Ok(stand_in.resolve_found(found)?)
}

/// One line about the protections that are weaker than they should be.
fn degraded_warning(enforced: &EnforcedPlan, plan: &JailPlan) -> Option<String> {
    let mut parts = enforced.degraded.clone();
    if let (NetworkMode::Auto, Some(state)) = (plan.network, find_network(&enforced.measures))
        && !state.is_on()
    {
        parts.push(format!("the network is {}", state.words()));
    }
    let limits = !enforced.degraded.is_empty();
    let advice = if limits { "; `coracle doctor` says how to get what is missing" } else { "" };
    (!parts.is_empty()).then(|| format!("{}{advice}", parts.join("; ")))
}

/// Makes the directory of one-shot sandboxes, closed to other users: files written by sandboxes may lie
/// there with the owners and set-id bits they had inside.
fn make_oneshot_dir(state_dir: &Path, state: &Path) -> std::io::Result<()> {
    make_state_dir(state_dir)?;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(state)?;
    std::fs::set_permissions(state, std::fs::Permissions::from_mode(0o700))?;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(state.join("alive"))
}

/// Removes sandboxes whose `run` was killed, which means that their lock is not held. A lock is created
/// before its sandbox and removed after it, so some locks have no sandbox.
fn remove_stale_sandboxes(launcher: &mut Launcher, state: &Path, printer: &Printer) -> Result<()> {
    let alive = state.join("alive");
    let mut ids: BTreeSet<SandboxId> = launcher.list_sandboxes()?.into_iter().map(|found| found.id).collect();
    for entry in std::fs::read_dir(&alive)? {
        ids.extend(entry?.file_name().to_str().and_then(|name| SandboxId::parse(name).ok()));
    }
    for id in ids {
        let path = alive.join(id.as_str());
        if lock_file(&path, FlockOperation::NonBlockingLockExclusive).is_ok() {
            if let Err(error) = launcher.destroy_and_wait(&id) {
                // This must not keep the command from running; the next sweep tries again.
                printer.warn(format!("what is left of sandbox {id} could not be removed: {error}"));
                continue;
            }
            std::fs::remove_file(&path)?;
            printer.note_on_terminal(format!("swept what was left of sandbox {id}"));
        }
    }
    Ok(())
}

/// The identity of the directory of one-shot sandboxes, which the caller has locked.
fn determine_identity(config: &Config, state: &Path) -> Result<ServerIdentity> {
    let run = |name: &String| format!("{name}-run");
    let naming =
        InstanceNaming { former: run(&config.naming.former), prefix: config.naming.prefix.as_ref().map(run) };
    launcher::identity::examine_identity(state, &naming)
        .and_then(ExaminedIdentity::assign_identity)
        .map_err(with_identity_hint)
}

fn launcher_settings(config: &Config, state: &Path, identity: ServerIdentity) -> LauncherSettings {
    LauncherSettings {
        state_dir: state.to_owned(),
        image_state: config.state_dir.clone(),
        instance: identity.instance,
        owns_unsigned_records: identity.owns_unsigned_records,
        uid_base: config.uid_base,
        server_uid: None,
        image_bytes: None,
        pool_bytes: None,
        disks: Some(VolumeKind::Oneshot),
        free_space_floor: config.free_space_floor.0,
        prepared: 0,
        mounts: MountRule::Allow,
        lifetime: LifetimePolicy::Ours,
        // They bound the requests of a server's clients; here the caller is the operator.
        maxima: MaxLimits::default(),
        totals: TotalLimits::default(),
        // There is only one sandbox, so nothing is prepared ahead.
        network: NetworkSettings {
            default: NetworkMode::Off,
            auto_needs_link: false,
            ..config.network.clone()
        },
        open_files: None,
        egress_uid: None,
    }
}

fn build_plan(args: &RunArgs, config: &Config) -> Result<JailPlan> {
    let network = network::choose_mode(args)?;
    for mount in &args.mounts {
        let MountSource::Host(source) = &mount.source else { continue };
        std::fs::metadata(source)
            .with_context(|| format!("`{}` cannot be mounted", source.display()))
            .with_hint("the form is `--mount SOURCE:TARGET[:ro]`, with a SOURCE that exists on this host")?;
    }
    let LimitArgs { memory, cpus, pids, disk, .. } = args.limits;
    let named = ResourceLimits { memory, cpus, pids, disk };
    let limits = LimitPlan::new(&named, child_settings::default_limits(config), args.require_limits);
    let mut entropy = [0; 20];
    rustix::rand::getrandom(&mut entropy, rustix::rand::GetRandomFlags::empty())?;
    Ok(JailPlan {
        id: SandboxId::from_entropy(entropy),
        image: args.image.clone(),
        snapshot: None,
        disk: DiskPlan::New,
        limits: limits.limits.into(),
        named: limits.named.into_iter().map(Into::into).collect(),
        require_limits: limits.require_all,
        mounts: backend_local::mount_plans(&args.mounts)?,
        network,
        env: BTreeMap::new(),
        env_file: None,
        isolated_sessions: false,
        guest: GuestPlan {
            users: Vec::new(),
            default_user: "root".to_owned(),
            default_directory: "/root".to_owned(),
            directories: Vec::new(),
            by_image: true,
        },
        max_processes: 8,
        user: match args.user {
            Some(UserIdentity::Ids { uid, gid }) => Some((uid, gid)),
            Some(UserIdentity::Default | UserIdentity::User(_)) | None => None,
        },
        keep: args.keep,
    })
}

fn build_start_request(args: &RunArgs, plan: &JailPlan) -> Result<StartProcess> {
    let words = args.command.iter().map(|word| word.to_str().map(str::to_owned));
    let words: Vec<String> = words.collect::<Option<_>>().context("a word of the command is not UTF-8")?;
    let interactive = std::io::stdin().is_terminal() && std::io::stdout().is_terminal();
    let size = interactive.then(terminal::terminal_size).transpose()?;
    let directory = |path: &String| WorkingDirectory {
        path: path.clone(),
        missing: MissingDirectory::Fail,
        expand: false,
    };
    Ok(StartProcess {
        process: plan
            .id
            .as_str()
            .bytes()
            .map(|byte| format!("{:x}", byte & 15))
            .chain(["000000000000".to_owned()])
            .collect(),
        command: CommandLine::Argv(words),
        identity: to_wire_identity(args.user.as_ref()),
        directory: args.workdir.as_ref().map(directory),
        env: args.env.iter().cloned().collect(),
        terminal: size.map(|(columns, rows)| TerminalSize { columns, rows }),
        stdin: true,
        tag: None,
        deadline_ms: args.timeout.map(|timeout| u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX)),
        retention: OutputRetention { first: 0, last: 4 << 20, lossless: true, stall_ms: None },
        follow: true,
    })
}

fn to_wire_identity(user: Option<&UserIdentity>) -> wire::process::UserIdentity {
    match user {
        None | Some(UserIdentity::Default) => wire::process::UserIdentity::Default,
        Some(UserIdentity::User(name)) => wire::process::UserIdentity::User(name.clone()),
        Some(UserIdentity::Ids { uid, gid }) => wire::process::UserIdentity::Ids { uid: *uid, gid: *gid },
    }
}

fn create_error(refusal: OpError) -> anyhow::Error {
    anyhow::Error::from(BackendError::from(refusal)).context("could not create the sandbox")
}

/// Says which limit ended the command: the exit code alone could be the command's own.
fn explain_exit(exit: ExitReason, args: &RunArgs, plan: &JailPlan, printer: &Printer) {
    let limit = Bytes(plan.limits.memory);
    match (exit, args.timeout) {
        (ExitReason::Oom, _) => printer.remark(format_args!(
            "coracle: the memory limit of {limit} was reached and the kernel killed the command"
        )),
        (ExitReason::Deadline, Some(timeout)) => printer.remark(format_args!(
            "coracle: the timeout of {timeout:?} was reached and the command was killed"
        )),
        _ => {}
    }
}

fn exit_code(exit: ExitReason) -> ExitCode {
    match exit {
        ExitReason::Code(code) => ExitCode::from(u8::try_from(code & 0xff).unwrap_or(u8::MAX)),
        ExitReason::Signal(signal) => ExitCode::from(u8::try_from((128 + signal) & 0xff).unwrap_or(u8::MAX)),
        ExitReason::Oom | ExitReason::Lost => ExitCode::from(EXIT_KILLED),
        ExitReason::Deadline => ExitCode::from(EXIT_TIMED_OUT),
    }
}
