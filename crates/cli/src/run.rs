//! `coracle run`: one command in a sandbox of its own, without a server.
//!
//! This process is its own launcher: it makes the sandbox, speaks to the agent over the same protocol as
//! a server would, passes input and output through, and removes everything. The sandbox dies with it;
//! leftovers of a killed run are removed by the next.

mod input;
mod link;
mod offer;
mod pump;
mod terminal;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::IsTerminal;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow};
use backend_local::identity::{Examined, Naming, ServerIdentity};
use backend_local::jail::plan::{DiskPlan, GuestPlan, JailPlan, LimitName, Limits};
use backend_local::launcher::Launcher;
use backend_local::launcher::create::NotBegun;
use backend_local::launcher::protocol::{Holds, Refusal};
use backend_local::network::{NetworkSettings, Wish};
use backend_local::settings::{Lifetime, Maxima, MountRule, Settings};
use domain::{Bytes, Identity, Network, Source};
use linux::namespaces::{self, Namespaces};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::FlockOperation;
use wire::process::{Command, Directory, Exit, Missing, Retention, Start, TerminalSize};

use crate::args::RunArgs;
use crate::config::Config;
use crate::output::{Printer, WithHint};
use crate::serve::state::with_hint;
use crate::serve::{handover, lock, make_state_dir, state_dir_hint};

/// As timeout(1) uses it.
const TIMED_OUT: u8 = 124;
/// As a shell reports a command that the kernel killed.
const KILLED: u8 = 137;

pub(crate) fn run(args: &RunArgs, printer: &Printer) -> Result<ExitCode> {
    let printer = &if args.quiet { printer.quiet() } else { *printer };
    let config = Config::for_host(&args.state)?;
    let plan = plan(args, &config)?;
    let start = start(args, &plan)?;
    let exit = inside(args, &config, &plan, printer, |socket| pump::run(socket, start))?;
    explain(exit, args, &plan, printer);
    Ok(exit_code(exit))
}

/// Asks an image from inside what it offers, and returns the reply.
pub(crate) fn offer(args: &RunArgs, printer: &Printer) -> Result<serde_json::Value> {
    let config = Config::for_host(&args.state)?;
    let plan = plan(args, &config)?;
    inside(args, &config, &plan, printer, offer::ask)
}

/// Runs `work` with the agent of a sandbox that ends afterwards.
fn inside<T>(
    args: &RunArgs,
    config: &Config,
    plan: &JailPlan,
    printer: &Printer,
    work: impl FnOnce(&Path) -> Result<T>,
) -> Result<T> {
    let state = config.state_dir.join("oneshot");
    if rustix::process::geteuid().is_root() {
        namespaces::unshare(Namespaces::MOUNT).context("could not make a mount namespace")?;
        linux::mounts::make_private().context("could not make mounts private")?;
    }
    let mut sandbox = Sandbox::make(config, &state, plan, printer)?;
    let outcome = work(&sandbox.launcher.socket(&plan.id));
    // The sandbox is removed in any case; an error of the command matters more than an error of the
    // removal.
    let removed = sandbox.end(args.keep, printer);
    let outcome = outcome?;
    removed?;
    Ok(outcome)
}

/// A sandbox that ends with this process.
struct Sandbox {
    launcher: Launcher,
    id: String,
    /// Locked while we live, so that other runs do not remove this sandbox.
    _alive: File,
    alive_path: PathBuf,
    /// Locked by the run that opens or closes what all runs share.
    turn_path: PathBuf,
}

impl Sandbox {
    fn make(config: &Config, state: &Path, plan: &JailPlan, printer: &Printer) -> Result<Self> {
        if let Err(error) = prepare(&config.state_dir, state) {
            let hint = state_dir_hint(&error);
            return Err(error).with_context(|| format!("could not make `{}`", state.display())).hint(hint);
        }
        // Only one run at a time opens and sweeps.
        let turn_path = state.join("lock");
        let turn = lock(&turn_path, FlockOperation::LockExclusive)?;
        let identity = settle_identity(config, state)?;
        let mut launcher = Launcher::open(settings(config, state, identity))?;
        sweep(&mut launcher, state, printer)?;
        let alive_path = state.join("alive").join(&plan.id);
        let alive = lock(&alive_path, FlockOperation::LockExclusive)?;
        let mut sandbox = Self { launcher, id: plan.id.clone(), _alive: alive, alive_path, turn_path };
        match sandbox.come_up(plan, turn) {
            Ok(holds) => {
                if let Some(stand_in) = &holds.stand_in {
                    printer.warn(stand_in);
                }
                if let Some(warning) = weaker_than_asked(&holds, plan) {
                    printer.warn(warning);
                }
                Ok(sandbox)
            }
            Err(error) => {
                let ended = sandbox.end(false, printer);
                let discarded = || sandbox.launcher.discard_kept(&plan.id).map_err(Into::into);
                if let Err(error) = ended.and_then(|()| discarded()) {
                    printer.warn(format_args!("what was made of the sandbox is not removed: {error:#}"));
                }
                Err(error)
            }
        }
    }

    /// Makes the sandbox; the shared lock is released once its first process exists.
    fn come_up(&mut self, plan: &JailPlan, turn: File) -> Result<Holds> {
        let begun = self.launcher.begin(plan);
        drop(turn);
        let pending = begun.map_err(|why| match why {
            NotBegun::Refused(refusal) | NotBegun::Failed(refusal, _) => refused(refusal),
        })?;
        let mut watched = [PollFd::new(&pending.status, PollFlags::IN)];
        rustix::io::retry_on_intr(|| poll(&mut watched, None))?;
        Ok(self.launcher.conclude(pending).map_err(refused)?.holds)
    }

    fn end(&mut self, keep: bool, printer: &Printer) -> Result<()> {
        self.launcher.destroy_and_wait(&self.id).context("could not remove the sandbox")?;
        // Closing removes what another `run` may just have opened, so it needs the lock.
        let turn = lock(&self.turn_path, FlockOperation::LockExclusive)?;
        self.launcher.close()?;
        drop(turn);
        std::fs::remove_file(&self.alive_path)?;
        if keep {
            printer.remark(format!("kept what was written in {}", self.launcher.kept(&self.id).display()));
        }
        Ok(())
    }
}

/// One line about the protections that are weaker than they should be.
fn weaker_than_asked(holds: &Holds, plan: &JailPlan) -> Option<String> {
    let mut parts = holds.weaker.clone();
    let network = holds.measures.iter().find(|(name, _)| name == "network");
    if let (Wish::Auto, Some((_, held))) = (plan.network, network)
        && held.starts_with("off")
    {
        parts.push(format!("the network is {held}"));
    }
    let limits = !holds.weaker.is_empty();
    let advice = if limits { "; `coracle doctor` says how to get what is missing" } else { "" };
    (!parts.is_empty()).then(|| format!("{}{advice}", parts.join("; ")))
}

/// Makes the directory of one-shot sandboxes, closed to other users: files written by sandboxes may lie
/// there with the owners and set-id bits they had inside.
fn prepare(state_dir: &Path, state: &Path) -> std::io::Result<()> {
    make_state_dir(state_dir)?;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(state)?;
    std::fs::set_permissions(state, std::fs::Permissions::from_mode(0o700))?;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(state.join("alive"))
}

/// Removes sandboxes whose `run` was killed, which means that their lock is not held. A lock is created
/// before its sandbox and removed after it, so some locks have no sandbox.
fn sweep(launcher: &mut Launcher, state: &Path, printer: &Printer) -> Result<()> {
    let alive = state.join("alive");
    let mut ids: BTreeSet<String> = launcher.found()?.into_iter().map(|found| found.id).collect();
    for entry in std::fs::read_dir(&alive)? {
        ids.extend(entry?.file_name().into_string().ok());
    }
    for id in ids {
        let path = alive.join(&id);
        if lock(&path, FlockOperation::NonBlockingLockExclusive).is_ok() {
            if let Err(error) = launcher.destroy_and_wait(&id) {
                // This must not keep the command from running; the next sweep tries again.
                printer.warn(format!("what is left of sandbox {id} could not be removed: {error}"));
                continue;
            }
            std::fs::remove_file(&path)?;
            printer.note(format!("swept what was left of sandbox {id}"));
        }
    }
    Ok(())
}

/// The identity of the directory of one-shot sandboxes, which the caller has locked.
fn settle_identity(config: &Config, state: &Path) -> Result<ServerIdentity> {
    let run = |name: &String| format!("{name}-run");
    let naming =
        Naming { former: run(&config.naming.former), prefix: config.naming.prefix.as_ref().map(run) };
    backend_local::identity::examine(state, &naming).and_then(Examined::settle).map_err(with_hint)
}

fn settings(config: &Config, state: &Path, identity: ServerIdentity) -> Settings {
    Settings {
        state_dir: state.to_owned(),
        image_state: config.state_dir.clone(),
        instance: identity.instance,
        owns_unsigned_records: identity.owns_unsigned_records,
        uid_base: config.uid_base,
        server_uid: None,
        aliases: config.images.aliases.clone(),
        strict_images: config.images.strict,
        image_bytes: None,
        pool_bytes: None,
        disks: None,
        free_space_floor: config.free_space_floor.0,
        prepared: 0,
        mounts: MountRule::Allow,
        lifetime: Lifetime::Ours,
        // They bound the requests of a server's clients; here the caller is the operator.
        maxima: Maxima::default(),
        // There is only one sandbox, so nothing is prepared ahead.
        network: NetworkSettings { default: Wish::Off, ..config.network.clone() },
    }
}

fn plan(args: &RunArgs, config: &Config) -> Result<JailPlan> {
    let network = match Network::from(args.network) {
        Network::Off => Wish::Off,
        Network::On => Wish::On,
        Network::Auto => Wish::Auto,
        Network::Filtered => {
            let message = "network `filtered` comes with the egress filter";
            return Err(anyhow!(message)).hint("use `--network on` or `--network off`");
        }
    };
    for mount in &args.mounts {
        let Source::Host(source) = &mount.source else { continue };
        std::fs::metadata(source)
            .with_context(|| format!("`{}` cannot be mounted", source.display()))
            .hint("the form is `--mount SOURCE:TARGET[:ro]`, with a SOURCE that exists on this host")?;
    }
    let defaults = handover::limits(config);
    let asked = [
        (args.limits.memory.is_some(), LimitName::Memory),
        (args.limits.cpus.is_some(), LimitName::Cpus),
        (args.limits.pids.is_some(), LimitName::Pids),
        (args.limits.disk.is_some(), LimitName::Disk),
    ];
    let mut entropy = [0; 20];
    rustix::rand::getrandom(&mut entropy, rustix::rand::GetRandomFlags::empty())?;
    Ok(JailPlan {
        id: domain::SandboxId::from_entropy(entropy).to_string(),
        image: args.image.clone(),
        snapshot: None,
        disk: DiskPlan::New,
        limits: Limits {
            memory: args.limits.memory.map_or(defaults.memory, |memory| memory.0),
            cpus: args.limits.cpus.map_or(defaults.cpus, |cpus| cpus.0),
            pids: args.limits.pids.unwrap_or(defaults.pids),
            disk: args.limits.disk.map_or(defaults.disk, |disk| disk.0),
        },
        named: asked.into_iter().filter_map(|(named, limit)| named.then_some(limit)).collect(),
        require_limits: args.require_limits,
        mounts: backend_local::native::mount_plans(&args.mounts)?,
        network,
        env: BTreeMap::new(),
        env_file: None,
        nesting: false,
        guest: GuestPlan {
            users: Vec::new(),
            default_user: "root".to_owned(),
            default_directory: "/root".to_owned(),
            directories: Vec::new(),
            by_image: true,
        },
        max_processes: 8,
        user: match args.user {
            Some(Identity::Ids { uid, gid }) => Some((uid, gid)),
            Some(Identity::Default | Identity::User(_)) | None => None,
        },
        keep: args.keep,
    })
}

fn start(args: &RunArgs, plan: &JailPlan) -> Result<Start> {
    let words = args.command.iter().map(|word| word.to_str().map(str::to_owned));
    let words: Vec<String> = words.collect::<Option<_>>().context("a word of the command is not UTF-8")?;
    let interactive = std::io::stdin().is_terminal() && std::io::stdout().is_terminal();
    let size = interactive.then(terminal::size).transpose()?;
    let directory = |path: &String| Directory { path: path.clone(), missing: Missing::Fail, expand: false };
    Ok(Start {
        process: plan
            .id
            .bytes()
            .map(|byte| format!("{:x}", byte & 15))
            .chain(["000000000000".to_owned()])
            .collect(),
        command: Command::Argv(words),
        identity: identity(args.user.as_ref()),
        directory: args.workdir.as_ref().map(directory),
        env: args.env.iter().cloned().collect(),
        terminal: size.map(|(columns, rows)| TerminalSize { columns, rows }),
        stdin: true,
        tag: None,
        deadline_ms: args.timeout.map(|timeout| u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX)),
        retention: Retention { first: 0, last: 4 << 20, hold: true, stall_ms: None },
        follow: true,
    })
}

fn identity(user: Option<&Identity>) -> wire::process::Identity {
    match user {
        None | Some(Identity::Default) => wire::process::Identity::Default,
        Some(Identity::User(name)) => wire::process::Identity::User(name.clone()),
        Some(Identity::Ids { uid, gid }) => wire::process::Identity::Ids { uid: *uid, gid: *gid },
    }
}

fn refused(refusal: Refusal) -> anyhow::Error {
    anyhow::Error::from(backend::BackendError::from(refusal)).context("could not create the sandbox")
}

/// Says which limit ended the command: the exit code alone could be the command's own.
fn explain(exit: Exit, args: &RunArgs, plan: &JailPlan, printer: &Printer) {
    let limit = Bytes(plan.limits.memory);
    match (exit, args.timeout) {
        (Exit::Oom, _) => printer.remark(format_args!(
            "coracle: the memory limit of {limit} was reached and the kernel killed the command"
        )),
        (Exit::Deadline, Some(timeout)) => printer.remark(format_args!(
            "coracle: the timeout of {timeout:?} was reached and the command was killed"
        )),
        _ => {}
    }
}

fn exit_code(exit: Exit) -> ExitCode {
    match exit {
        Exit::Code(code) => ExitCode::from(u8::try_from(code & 0xff).unwrap_or(u8::MAX)),
        Exit::Signal(signal) => ExitCode::from(u8::try_from((128 + signal) & 0xff).unwrap_or(u8::MAX)),
        Exit::Oom | Exit::Lost => ExitCode::from(KILLED),
        Exit::Deadline => ExitCode::from(TIMED_OUT),
    }
}
