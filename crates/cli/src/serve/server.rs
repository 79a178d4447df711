//! `coracle __server`: the network-facing process. It gives up every privilege before it reads
//! its first request.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use backend_local::native::{Defaults, Fetching, Native};
use futures_util::FutureExt;
use linux::namespaces::{self, Setgroups};
use rustix::process::Resource;
use service::{Quotas, Service};
use tokio::signal::unix::{SignalKind, signal};

use super::handover::{self, Announce, Handover, Received};
use super::update;
use crate::config::{EVERYBODY_ELSE, LogFormat, OnStop, PoolSettings, Quota, network_of};
use crate::output::{Printer, WithHint};

/// The exit code with which the server asks the supervisor not to retry.
pub(crate) const CANNOT_START: i32 = 78;

/// A name that resolves to loopback if all names below `localhost` do.
const LOCALHOST_PROBE: &str = "coracle-probe.localhost";
/// A resolver that takes longer counts as one that does not resolve the name.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(2);

pub(crate) fn server(arguments: &[String], printer: &Printer) -> Result<ExitCode> {
    let parent = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get().unsigned_abs());
    let Received { handover, ready, updates, others } = handover::receive(arguments)?;
    let Ok([lock, operators, listener]) = <[OwnedFd; 3]>::try_from(others) else {
        bail!("the listening sockets were not passed");
    };
    linux::descriptors::raise_limit().context("could not raise the limit on open files")?;
    drop_privileges(&handover)?;
    // The kernel clears the parent death signal when ids change.
    handover::end_with(parent.context("the supervisor is gone")?)?;
    crate::tracing_output::start(&handover.log);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let outcome =
        runtime.block_on(run(handover, [operators, listener], Supervisor { ready, updates }, printer));
    drop(lock);
    match outcome {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(error) => {
            printer.error(&error);
            Ok(ExitCode::from(u8::try_from(CANNOT_START).expect("it is below 256")))
        }
    }
}

/// The files needed to fetch an image: for resolving host names, and the trusted certificates. All users
/// may read these.
const OF_REGISTRIES: &[&str] = &[
    "/etc/hosts",
    "/etc/resolv.conf",
    "/run/systemd/resolve",
    "/etc/ssl/certs",
    "/etc/pki",
    "/etc/ca-certificates",
    "/usr/share/ca-certificates",
    "/usr/local/share/ca-certificates",
    // A static program cannot look up `getrandom` at run time. The library that tries this, while
    // resolving names, then reads these files instead, and panics if it may not.
    "/dev/random",
    "/dev/urandom",
];

/// Switches to the server's own uid and restricts itself to its own directory.
fn drop_privileges(handover: &Handover) -> Result<()> {
    if let Some(uid) = handover.server_uid {
        namespaces::become_ids(uid, uid, Setgroups::Allow).context("could not take on the server's uid")?;
    }
    linux::set_no_new_privs()?;
    let readable: Vec<&Path> =
        ["/proc", "/sys/fs/cgroup"].iter().chain(OF_REGISTRIES).map(|path| Path::new(*path)).collect();
    let own = super::server_dir(&handover.state_dir);
    let enforced = linux::landlock::confine(&readable, &[&own]).context("could not confine the server")?;
    if !enforced {
        return Err(anyhow::anyhow!("this kernel has no Landlock, so nothing would confine the server"))
            .hint("add `landlock` to the kernel's `lsm=` list");
    }
    Ok(())
}

/// The pipes to and from the supervisor.
struct Supervisor {
    /// Takes a byte when we are ready, and one for each update that was applied.
    ready: OwnedFd,
    updates: OwnedFd,
}

async fn run(
    mut handover: Handover,
    [operators, listener]: [OwnedFd; 2],
    supervisor: Supervisor,
    printer: &Printer,
) -> Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let listener = TcpListener::from(listener);
    let address = listener.local_addr()?;
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let metrics = fronts::install_metrics().context("could not start collecting metrics")?;
    let (service, backend) = start_service(&handover).await?;
    let settings = fronts::Settings {
        public_address: handover.public_address.clone(),
        default_lines: if handover.strip_line_ends {
            fronts::Lines::Stripping
        } else {
            fronts::Lines::Preserving
        },
        default_network: network_of(handover.network.default),
        json_body_limit: handover.json_body,
        concurrent_requests: handover.concurrent_requests,
        gateway: handover.gateway.settings(api_ports(&handover).await),
        answer_timeout: handover.answer_timeout,
        renewal_interval: handover.renewal_interval,
        metrics: Some(metrics),
        ..fronts::Settings::new(address)
    };
    let connections = settings.connections.min(connections());
    let operators = tokio::net::UnixListener::from_std(operators.into())?;
    let operators_router = fronts::operators_router(service.clone(), settings.clone());
    let router = fronts::router(service.clone(), settings);
    if handover.announce == Announce::Yes {
        printer.line(format!("coracle listening on http://{address}"))?;
    }
    let mut ready = File::from(supervisor.ready);
    ready.write_all(b"r").context("the supervisor is gone")?;
    let mut updates = tokio::net::unix::pipe::Receiver::from_owned_fd(supervisor.updates)?;
    let stop = async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };
    let stop = stop.shared();
    let serving = async {
        tokio::join!(
            fronts::serve(listener, connections, router, stop.clone()),
            fronts::serve_operators(operators, operators_router, stop),
        )
    };
    tokio::pin!(serving);
    loop {
        tokio::select! {
            _ = &mut serving => break,
            // Without a supervisor there are no more updates, and the server is about to end.
            Ok(update) = update::read(&mut updates) => {
                apply_update(&update, &service, &backend);
                handover = update;
                ready.write_all(b"u").context("the supervisor is gone")?;
            }
        }
    }
    if handover.on_stop == OnStop::Remove {
        service.remove_all().await;
    }
    service.drain_pools().await;
    let staying = service.stop().await;
    if staying > 0 {
        let some =
            if staying == 1 { "1 sandbox stays".to_owned() } else { format!("{staying} sandboxes stay") };
        let text = format!("{some}; start the server again and `coracle rm --all` removes them");
        match handover.log.format {
            LogFormat::Text => printer.remark(text),
            LogFormat::Json => tracing::info!(sandboxes = staying, "{text}"),
        }
    }
    Ok(())
}

/// Decides once, at the start, which addresses SDKs get for the APIs of sandboxes. They connect to the
/// address in the response, so names below `localhost` are given only if this host resolves them.
async fn api_ports(handover: &Handover) -> fronts::ApiPorts {
    if !handover.gateway.is_below_localhost() {
        return fronts::ApiPorts::ByMode;
    }
    let lookup = tokio::net::lookup_host((LOCALHOST_PROBE, 80));
    let found = tokio::time::timeout(LOOKUP_TIMEOUT, lookup).await;
    let resolves = found
        .is_ok_and(|found| found.is_ok_and(|mut addresses| addresses.all(|each| each.ip().is_loopback())));
    if resolves {
        return fronts::ApiPorts::ByMode;
    }
    tracing::info!(
        "names below `localhost` do not resolve on this host; endpoints of the execution and egress APIs are given by path"
    );
    fronts::ApiPorts::ByPath
}

/// Half of the files that this process may open; the other half is for its sandboxes.
fn connections() -> usize {
    let files = rustix::process::getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from(files / 2).unwrap_or(usize::MAX)
}

/// Applies new settings, as far as they can change while the server runs.
fn apply_update(handover: &Handover, service: &Service, backend: &Native) {
    crate::tracing_output::set_level(&handover.log.level);
    backend.set_defaults(defaults(handover));
    backend.set_registry(Arc::new(registries(handover)));
    service.set_config(service_config(handover));
    service.set_single_key(handover.api_key.as_deref());
}

fn defaults(handover: &Handover) -> Defaults {
    Defaults {
        limits: handover.limits,
        require_limits: handover.require_limits,
        max_processes: handover.max_commands,
    }
}

fn registries(handover: &Handover) -> registry::Registries {
    registry::Registries {
        allowed: handover.allowed_registries.clone(),
        plain: handover.plain_registries.clone(),
    }
}

async fn start_service(handover: &Handover) -> Result<(Service, Arc<Native>)> {
    let backend =
        Native::connect(&handover.state_dir, defaults(handover)).context("could not reach the launcher")?;
    let downloads = super::server_dir(&handover.state_dir).join("downloads");
    let fetching =
        Fetching::open(Arc::new(registries(handover)), downloads).context("could not clear downloads")?;
    let backend = Arc::new(backend.fetching(fetching));
    let service = Service::start(service_config(handover), Arc::clone(&backend) as _).await?;
    service.set_single_key(handover.api_key.as_deref());
    Ok((service, backend))
}

fn service_config(handover: &Handover) -> service::Config {
    service::Config {
        state_dir: super::server_dir(&handover.state_dir),
        sandboxes: handover.max_sandboxes,
        soft_sandboxes: handover.soft_sandboxes,
        park_after: handover.park_after,
        commands_per_sandbox: handover.max_commands,
        snapshots_per_owner: handover.max_snapshots,
        volumes_per_owner: handover.max_volumes,
        quotas: quotas(&handover.owners),
        usual: domain::Resources {
            memory: Some(domain::Bytes(handover.limits.memory)),
            cpus: Some(domain::Cpus(handover.limits.cpus)),
            pids: Some(handover.limits.pids),
            disk: Some(domain::Bytes(handover.limits.disk)),
        },
        require_limits: handover.require_limits,
        pools: handover.pools.iter().map(PoolSettings::pool).collect(),
        volume_size: domain::Bytes(handover.volume_size),
        longest_timeout: handover.longest_timeout,
        output: handover.output.settings(),
        metric_owners: handover.metric_owners,
    }
}

fn quotas(owners: &BTreeMap<String, Quota>) -> Quotas {
    let quota = |quota: &Quota| service::Quota {
        sandboxes: quota.sandboxes,
        cpus: quota.millicpus.map(domain::Cpus),
        memory: quota.memory.map(domain::Bytes),
        disk: quota.disk.map(domain::Bytes),
    };
    let named = owners.iter().filter(|(name, _)| *name != EVERYBODY_ELSE);
    Quotas {
        named: named.map(|(name, own)| (domain::Owner::named(name.as_str()), quota(own))).collect(),
        others: owners.get(EVERYBODY_ELSE).map(quota).unwrap_or_default(),
    }
}
