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
use backend_local::local::{ImageFetcher, LocalBackend, SandboxDefaults};
use futures_util::FutureExt;
use linux::namespaces::{self, SetgroupsPolicy};
use rustix::process::Resource;
use service::{OwnerQuotas, Service};
use tokio::signal::unix::{SignalKind, signal};

use super::child_settings::{self, ChildSettings, ReadyAnnouncement, ReceivedStartup};
use super::update;
use crate::config::{LogFormat, OTHER_OWNERS, OnStop, PoolSettings, QuotaSettings, network_of};
use crate::output::{Printer, WithHint};

/// The exit code with which the server asks the supervisor not to retry.
pub(crate) const EXIT_CANNOT_START: i32 = 78;

/// A name that resolves to loopback if all names below `localhost` do.
const LOCALHOST_PROBE: &str = "coracle-probe.localhost";
/// A resolver that takes longer counts as one that does not resolve the name.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(2);

pub(crate) fn run_server(arguments: &[String], printer: &Printer) -> Result<ExitCode> {
    let parent = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get().unsigned_abs());
    let ReceivedStartup { handover, ready, updates, others } = child_settings::receive_startup(arguments)?;
    let Ok([lock, operators, listener]) = <[OwnedFd; 3]>::try_from(others) else {
        bail!("the listening sockets were not passed");
    };
    linux::descriptors::raise_open_file_limit().context("could not raise the limit on open files")?;
    drop_privileges(&handover)?;
    // The kernel clears the parent death signal when ids change.
    child_settings::end_with_supervisor(parent.context("the supervisor is gone")?)?;
    crate::tracing_output::start_logging(&handover.log);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let outcome = runtime.block_on(serve_requests(
        handover,
        [operators, listener],
        SupervisorPipes { ready, updates },
        printer,
    ));
    drop(lock);
    match outcome {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(error) => {
            printer.print_error(&error);
            Ok(ExitCode::from(u8::try_from(EXIT_CANNOT_START).expect("it is below 256")))
        }
    }
}

/// The files needed to fetch an image: for resolving host names, and the trusted certificates. All users
/// may read these.
const REGISTRY_CLIENT_FILES: &[&str] = &[
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
fn drop_privileges(settings: &ChildSettings) -> Result<()> {
    if let Some(uid) = settings.server_uid {
        namespaces::switch_ids(uid, uid, SetgroupsPolicy::Allow)
            .context("could not take on the server's uid")?;
    }
    linux::set_no_new_privs()?;
    let readable: Vec<&Path> = ["/proc", "/sys/fs/cgroup"]
        .iter()
        .chain(REGISTRY_CLIENT_FILES)
        .map(|path| Path::new(*path))
        .collect();
    let own = super::server_dir(&settings.state_dir);
    let enforced =
        linux::landlock::confine_process(&readable, &[&own]).context("could not confine the server")?;
    if !enforced {
        return Err(anyhow::anyhow!("this kernel has no Landlock, so nothing would confine the server"))
            .with_hint("add `landlock` to the kernel's `lsm=` list");
    }
    Ok(())
}

/// The pipes to and from the supervisor.
struct SupervisorPipes {
    /// Takes a byte when we are ready, and one for each update that was applied.
    ready: OwnedFd,
    updates: OwnedFd,
}

async fn serve_requests(
    mut handover: ChildSettings,
    [operators, listener]: [OwnedFd; 2],
    supervisor: SupervisorPipes,
    printer: &Printer,
) -> Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let listener = TcpListener::from(listener);
    let address = listener.local_addr()?;
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let metrics = fronts::install_metrics().context("could not start collecting metrics")?;
    let (service, backend) = start_service(&handover).await?;
    let settings = fronts::HttpSettings {
        public_address: handover.public_address.clone(),
        default_lines: if handover.strip_line_ends {
            fronts::LineDialect::Stripping
        } else {
            fronts::LineDialect::Preserving
        },
        default_network: network_of(handover.network.default),
        json_body_limit: handover.json_body,
        concurrent_requests: handover.concurrent_requests,
        gateway: handover.gateway.to_front_settings(choose_api_ports(&handover).await),
        answer_timeout: handover.answer_timeout,
        renewal_interval: handover.renewal_interval,
        metrics: Some(metrics),
        ..fronts::HttpSettings::new(address)
    };
    let connections = settings.connections.min(max_connections());
    let operators = tokio::net::UnixListener::from_std(operators.into())?;
    let operators_router = fronts::operators_router(service.clone(), settings.clone());
    let router = fronts::build_router(service.clone(), settings);
    if handover.announce == ReadyAnnouncement::Yes {
        printer.print_line(format!("coracle listening on http://{address}"))?;
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
            fronts::serve_network(listener, connections, router, stop.clone()),
            fronts::serve_operators(operators, operators_router, stop),
        )
    };
    tokio::pin!(serving);
    loop {
        tokio::select! {
            _ = &mut serving => break,
            // Without a supervisor there are no more updates, and the server is about to end.
            Ok(update) = update::read_settings(&mut updates) => {
                apply_update(&update, &service, &backend);
                handover = update;
                ready.write_all(b"u").context("the supervisor is gone")?;
            }
        }
    }
    if handover.on_stop == OnStop::Remove {
        service.remove_all_sandboxes().await;
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
async fn choose_api_ports(settings: &ChildSettings) -> fronts::ApiPorts {
    if !settings.gateway.is_below_localhost() {
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
fn max_connections() -> usize {
    let files = rustix::process::getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from(files / 2).unwrap_or(usize::MAX)
}

/// Applies new settings, as far as they can change while the server runs.
fn apply_update(settings: &ChildSettings, service: &Service, backend: &LocalBackend) {
    crate::tracing_output::set_log_level(&settings.log.level);
    backend.set_defaults(backend_defaults(settings));
    backend.set_registry(Arc::new(build_registries(settings)));
    service.set_config(service_config(settings));
    service.set_operator_key(settings.api_key.as_deref());
}

fn backend_defaults(settings: &ChildSettings) -> SandboxDefaults {
    SandboxDefaults {
        limits: settings.limits,
        require_limits: settings.require_limits,
        max_processes: settings.max_commands,
    }
}

fn build_registries(settings: &ChildSettings) -> registry::RegistrySettings {
    registry::RegistrySettings {
        allowed: settings.allowed_registries.clone(),
        plain: settings.plain_registries.clone(),
    }
}

async fn start_service(settings: &ChildSettings) -> Result<(Service, Arc<LocalBackend>)> {
    let backend = LocalBackend::connect(&settings.state_dir, backend_defaults(settings))
        .context("could not reach the launcher")?;
    let downloads = super::server_dir(&settings.state_dir).join("downloads");
    let fetching = ImageFetcher::open(Arc::new(build_registries(settings)), downloads)
        .context("could not clear downloads")?;
    let backend = Arc::new(backend.with_fetcher(fetching));
    let service = Service::start(service_config(settings), Arc::clone(&backend) as _).await?;
    service.set_operator_key(settings.api_key.as_deref());
    Ok((service, backend))
}

fn service_config(settings: &ChildSettings) -> service::ServiceConfig {
    service::ServiceConfig {
        state_dir: super::server_dir(&settings.state_dir),
        sandboxes: settings.max_sandboxes,
        soft_sandboxes: settings.soft_sandboxes,
        park_after: settings.park_after,
        commands_per_sandbox: settings.max_commands,
        snapshots_per_owner: settings.max_snapshots,
        volumes_per_owner: settings.max_volumes,
        quotas: build_quotas(&settings.owners),
        default_limits: domain::ResourceLimits {
            memory: Some(domain::Bytes(settings.limits.memory)),
            cpus: Some(domain::MilliCpus(settings.limits.cpus)),
            pids: Some(settings.limits.pids),
            disk: Some(domain::Bytes(settings.limits.disk)),
        },
        require_limits: settings.require_limits,
        pools: settings.pools.iter().map(PoolSettings::to_pool).collect(),
        volume_size: domain::Bytes(settings.volume_size),
        max_timeout: settings.longest_timeout,
        output: settings.output.to_service_settings(),
        metric_owners: settings.metric_owners,
    }
}

fn build_quotas(owners: &BTreeMap<String, QuotaSettings>) -> OwnerQuotas {
    let quota = |quota: &QuotaSettings| service::OwnerQuota {
        sandboxes: quota.sandboxes,
        cpus: quota.millicpus.map(domain::MilliCpus),
        memory: quota.memory.map(domain::Bytes),
        disk: quota.disk.map(domain::Bytes),
    };
    let named = owners.iter().filter(|(name, _)| *name != OTHER_OWNERS);
    OwnerQuotas {
        named: named.map(|(name, own)| (domain::Owner::from_valid_name(name.as_str()), quota(own))).collect(),
        others: owners.get(OTHER_OWNERS).map(quota).unwrap_or_default(),
    }
}
