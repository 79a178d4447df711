//! `coracle __server`: the network-facing process. It gives up every privilege before it reads
//! its first request.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use backend_local::{ImageFetcher, LocalBackend};
use egress_protocol::ActionMessage;
use futures_util::FutureExt;
use launcher::role_filters::{self, FilterRole};
use linux::caps::CapSet;
use linux::landlock::TcpAccess;
use linux::namespaces::{self, SetgroupsPolicy};
use rustix::process::Resource;
use service::{OwnerQuotas, Service};
use tokio::signal::unix::{SignalKind, signal};

use super::child_settings::{self, ChildSettings, ReadyAnnouncement, ReceivedStartup};
use super::{own_sandbox, update};
use crate::config::{
    Config, LogFormat, OTHER_OWNERS, OnStop, OperatorKey, OwnListener, OwnServerConfig, QuotaSettings,
    network_of,
};
use crate::output::{Printer, WithHint};

/// The exit code with which the server asks the supervisor not to retry.
pub(crate) const EXIT_CANNOT_START: i32 = 78;

/// A name that resolves to loopback if all names below `localhost` do.
const LOCALHOST_PROBE: &str = "coracle-probe.localhost";
/// A resolver that takes longer counts as one that does not resolve the name.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(2);

pub(crate) fn run_server(arguments: &[String], printer: &Printer) -> Result<ExitCode> {
    let parent = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get().unsigned_abs());
    let ReceivedStartup { settings, ready, updates, others } =
        child_settings::receive_startup::<ChildSettings>(arguments)?;
    let Ok([lock, operators, listener]) = <[OwnedFd; 3]>::try_from(others) else {
        bail!("the listening sockets were not passed");
    };
    linux::descriptors::raise_open_file_limit().context("could not raise the limit on open files")?;
    drop_privileges(&settings)?;
    // The kernel clears the parent death signal when ids change.
    child_settings::end_with_supervisor(parent.context("the supervisor is gone")?)?;
    crate::tracing_output::start_logging(&settings.config.log);
    // The filter allows no socket with which a name could be resolved.
    let api_ports = choose_api_ports(&settings.config);
    FilterRole::Server.load_filter()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let outcome = runtime.block_on(serve_requests(
        settings,
        [operators, listener],
        SupervisorPipes { ready, updates },
        api_ports,
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

/// The files that the server reads: the usage of sandboxes, and what resolving the name of this host needs.
const READABLE_FILES: &[&str] =
    &["/proc", "/sys/fs/cgroup", "/etc/hosts", "/etc/resolv.conf", "/run/systemd/resolve"];

/// Switches to the server's own uid and restricts itself to its own directory.
fn drop_privileges(settings: &ChildSettings) -> Result<()> {
    if let Some(uid) = settings.server_uid {
        role_filters::empty_bounding_set()?;
        namespaces::switch_ids(uid, uid, SetgroupsPolicy::Allow)
            .context("could not take on the server's uid")?;
    }
    // Without a uid of its own the server may still have capabilities: those of root in a container.
    linux::caps::set_capabilities(CapSet::NONE).context("could not drop capabilities")?;
    linux::set_no_new_privs()?;
    let readable: Vec<&Path> = READABLE_FILES.iter().map(Path::new).collect();
    let own = super::server_dir(&settings.config.state_dir);
    let enforced = linux::landlock::confine_process(&readable, &[&own], TcpAccess::Nothing)
        .context("could not confine the server")?;
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
    ChildSettings { mut config, announce, .. }: ChildSettings,
    [operators, listener]: [OwnedFd; 2],
    supervisor: SupervisorPipes,
    api_ports: fronts::ApiPorts,
    printer: &Printer,
) -> Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let listener = ClientListener::open(listener, &config)?;
    let address = listener.address();
    let metrics = fronts::install_metrics().context("could not start collecting metrics")?;
    let (service, backend) = start_service(&config).await?;
    export_total_limits(&config);
    let settings = fronts::HttpSettings {
        public_address: config.public_address.clone(),
        default_network: network_of(config.network.default),
        json_body_limit: usize::try_from(config.limits.json_body.0).unwrap_or(usize::MAX),
        concurrent_requests: config.limits.concurrent_requests,
        concurrent_streams: config.limits.concurrent_streams,
        connections_per_address: config.limits.connections_per_address,
        trusted_proxies: parse_proxies(&config)?,
        connections: fronts::HttpSettings::new(address).connections.min(max_connections()),
        gateway: config.gateway.to_front_settings(api_ports),
        answer_timeout: config.answer_timeout,
        fronts: config.fronts.clone(),
        root: config.own_server.as_ref().map(|own| own.root.clone()),
        metrics: Some(metrics),
        ..fronts::HttpSettings::new(address)
    };
    if let Some(own) = &config.own_server {
        // Asked to end while the sandbox is made, the server ends without it.
        let opened = tokio::select! {
            opened = own_sandbox::open_sandbox(&service, &settings, own, printer) => opened?,
            _ = terminate.recv() => return stop_early(&service).await,
            _ = interrupt.recv() => return stop_early(&service).await,
        };
        if announce == ReadyAnnouncement::Yes {
            own_sandbox::announce_sandbox(&opened, &listener.url(), own.announcement, printer)?;
        }
    } else if announce == ReadyAnnouncement::Yes {
        printer.print_line(format!("coracle listening on {}", listener.url()))?;
    }
    let connections = settings.connection_settings();
    let operators = tokio::net::UnixListener::from_std(operators.into())?;
    let operators_router = fronts::operators_router(service.clone(), settings.clone());
    let router = fronts::build_router(service.clone(), settings);
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
    let stopped = stop.clone();
    let clients = async move {
        match listener {
            ClientListener::Network(listener, _) => {
                fronts::serve_network(listener, connections, router, stopped).await
            }
            ClientListener::Private(listener, _) => {
                fronts::serve_private_socket(listener, connections, router, stopped).await
            }
        }
    };
    let serving =
        async { tokio::join!(clients, fronts::serve_operators(operators, operators_router, stop),) };
    tokio::pin!(serving);
    loop {
        tokio::select! {
            _ = &mut serving => break,
            // Without a supervisor there are no more updates, and the server is about to end.
            Ok(update) = update::read_settings(&mut updates) => {
                config = update.config;
                apply_update(&config, &service, &backend);
                ready.write_all(b"u").context("the supervisor is gone")?;
            }
        }
    }
    if config.on_stop == OnStop::Remove {
        service.remove_all_sandboxes().await;
    }
    service.drain_pools().await;
    let staying = service.stop().await;
    if staying > 0 {
        let some =
            if staying == 1 { "1 sandbox stays".to_owned() } else { format!("{staying} sandboxes stay") };
        let text = format!("{some}; start the server again and `coracle rm --all` removes them");
        match config.log.format {
            LogFormat::Text => printer.remark(text),
            LogFormat::Json => tracing::info!(sandboxes = staying, "{text}"),
        }
    }
    Ok(())
}

async fn stop_early(service: &Service) -> Result<()> {
    service.remove_all_sandboxes().await;
    service.stop().await;
    Ok(())
}

/// The socket on which clients connect.
enum ClientListener {
    Network(tokio::net::TcpListener, SocketAddr),
    Private(tokio::net::UnixListener, PathBuf),
}

impl ClientListener {
    fn open(socket: OwnedFd, config: &Config) -> Result<Self> {
        if let Some(OwnServerConfig { listener: OwnListener::Socket(path), .. }) = &config.own_server {
            let listener = tokio::net::UnixListener::from_std(socket.into())?;
            return Ok(Self::Private(listener, path.clone()));
        }
        let listener = TcpListener::from(socket);
        let address = listener.local_addr()?;
        Ok(Self::Network(tokio::net::TcpListener::from_std(listener)?, address))
    }

    /// The address; that of a file counts as one of this machine.
    fn address(&self) -> SocketAddr {
        match self {
            Self::Network(_, address) => *address,
            Self::Private(..) => (Ipv4Addr::LOCALHOST, 0).into(),
        }
    }

    fn url(&self) -> String {
        match self {
            Self::Network(_, address) => format!("http://{address}"),
            Self::Private(_, path) => format!("unix:{}", path.display()),
        }
    }
}

/// Shows the limits of all sandboxes together in the metrics.
#[expect(clippy::cast_precision_loss, reason = "metrics are floating-point numbers")]
fn export_total_limits(config: &Config) {
    let totals = &config.limits.totals;
    let amounts = [
        ("memory", totals.memory.map(|total| total.amount as f64)),
        ("cpus", totals.cpus.map(|total| total.amount as f64 / 1000.0)),
        ("pids", totals.pids.map(|total| total.amount as f64)),
    ];
    for (resource, amount) in amounts {
        if let Some(amount) = amount {
            service::set_total_limit(resource, amount);
        }
    }
}

/// Decides once, at the start, which addresses SDKs get for the APIs of sandboxes. They connect to the
/// address in the response, so names below `localhost` are given only if this host resolves them.
fn choose_api_ports(config: &Config) -> fronts::ApiPorts {
    if !config.gateway.is_below_localhost() {
        return fronts::ApiPorts::ByMode;
    }
    let (sender, found) = mpsc::channel();
    // A resolver that takes too long is left behind with its thread, which then gets the filter as well.
    std::thread::spawn(move || sender.send((LOCALHOST_PROBE, 80).to_socket_addrs()).unwrap_or_default());
    let found = found.recv_timeout(LOOKUP_TIMEOUT);
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

fn parse_proxies(config: &Config) -> Result<Vec<fronts::TrustedNetwork>> {
    let parsed = config.trusted_proxies.iter().map(|text| text.parse().context("`trusted_proxies`"));
    parsed.collect()
}

/// Half of the files that this process may open; the other half is for its sandboxes.
fn max_connections() -> usize {
    let files = rustix::process::getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from(files / 2).unwrap_or(usize::MAX)
}

/// Applies new settings, as far as they can change while the server runs.
fn apply_update(config: &Config, service: &Service, backend: &LocalBackend) {
    crate::tracing_output::set_log_level(&config.log.level);
    backend.set_registry(Arc::new(build_registries(config)));
    service.set_config(service_config(config));
    service.set_operator_key(config.api_key.as_ref().map(OperatorKey::expose));
}

fn build_registries(config: &Config) -> registry::RegistrySettings {
    registry::RegistrySettings { allowed: config.images.allowed.clone(), plain: config.images.plain.clone() }
}

async fn start_service(config: &Config) -> Result<(Service, Arc<LocalBackend>)> {
    let backend = LocalBackend::connect(&config.state_dir).context("could not reach the launcher")?;
    let downloads = super::server_dir(&config.state_dir).join("downloads");
    let fetching = ImageFetcher::open(Arc::new(build_registries(config)), downloads)
        .context("could not clear downloads")?;
    let backend = Arc::new(backend.with_fetcher(fetching));
    let service = Service::start(service_config(config), Arc::clone(&backend) as _).await?;
    service.set_operator_key(config.api_key.as_ref().map(OperatorKey::expose));
    Ok((service, backend))
}

fn service_config(config: &Config) -> service::ServiceConfig {
    service::ServiceConfig {
        state_dir: super::server_dir(&config.state_dir),
        sandboxes: config.limits.max_sandboxes,
        soft_sandboxes: config.limits.soft_sandboxes,
        park_after: config.park_after,
        commands_per_sandbox: config.limits.max_commands,
        snapshots_per_owner: config.limits.max_snapshots,
        volumes_per_owner: config.limits.max_volumes,
        quotas: build_quotas(&config.owners),
        default_limits: child_settings::default_limits(config),
        aliases: child_settings::image_aliases(config),
        require_limits: config.require_limits,
        pools: config.pools.iter().map(|pool| pool.to_pool(&config.fronts)).collect(),
        volume_size: config.volumes.default_size,
        max_timeout: config.longest_timeout,
        output: config.output.to_service_settings(),
        most_network: network_of(config.most_network),
        default_policy: default_policy(config).map(Arc::new),
        metric_owners: config.metrics.max_owner_series(),
        open_files_percent: config.limits.open_files_percent,
    }
}

/// The operator's policy for filtered sandboxes whose client names none; `None` without one.
fn default_policy(config: &Config) -> Option<domain::NetworkPolicy> {
    let rules = &config.network.filter.rules;
    let policy = egress_protocol::PolicyMessage { rules: rules.clone(), default: ActionMessage::Deny };
    let policy = (&policy).try_into().expect("rules are checked when the configuration is read");
    (!rules.is_empty()).then_some(policy)
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
