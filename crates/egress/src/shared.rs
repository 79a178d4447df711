//! What all sandboxes share: settings, the resolver, routes, pipes and the total of connections.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use egress_protocol::EgressCounters;
use linux::netlink::route::{RouteType, RoutingSocket};

use crate::address_check::{AddressRefusal, judge_address};
use crate::dns::upstream::UpstreamResolver;
use crate::limits::OpenCount;
use crate::pipe_pool::PipePool;
use crate::policy::PolicyView;
use crate::sandbox::{ClosingConnections, Sandbox};
use crate::settings::OperatorSettings;
use crate::vault::VaultStore;

/// A server may set policies before sockets arrive; this bounds how many.
const MAX_SANDBOXES: usize = 65_536;

pub(crate) struct EgressState {
    sandboxes: Mutex<BTreeMap<String, Arc<Sandbox>>>,
    settings: RwLock<Option<Arc<OperatorSettings>>>,
    pub(crate) resolver: UpstreamResolver,
    routes: Mutex<RoutingSocket>,
    pub(crate) open: OpenCount,
    pub(crate) pipes: PipePool,
    pub(crate) vaults: Arc<VaultStore>,
    spare: SpareDescriptor,
}

impl EgressState {
    pub(crate) fn open(vaults: VaultStore) -> io::Result<Self> {
        Ok(Self {
            sandboxes: Mutex::default(),
            settings: RwLock::default(),
            resolver: UpstreamResolver::default(),
            routes: Mutex::new(RoutingSocket::open()?),
            open: OpenCount::default(),
            pipes: PipePool::default(),
            vaults: Arc::new(vaults),
            spare: SpareDescriptor::default(),
        })
    }

    /// Returns a sandbox that is known.
    pub(crate) fn find(&self, id: &str) -> Option<Arc<Sandbox>> {
        self.lock().get(id).cloned()
    }

    /// Returns a sandbox, which becomes known; `None` if there are too many.
    pub(crate) fn find_or_add(&self, id: &str) -> Option<Arc<Sandbox>> {
        let mut sandboxes = self.lock();
        if let Some(found) = sandboxes.get(id) {
            return Some(Arc::clone(found));
        }
        if sandboxes.len() >= MAX_SANDBOXES {
            return None;
        }
        let added = Arc::new(Sandbox::new(id, self.settings()));
        sandboxes.insert(id.to_owned(), Arc::clone(&added));
        Some(added)
    }

    /// Forgets a sandbox: its tasks, connections, policy and log.
    pub(crate) fn forget(&self, id: &str) {
        self.vaults.remove(id);
        let removed = self.lock().remove(id);
        if let Some(sandbox) = removed {
            sandbox.gone.cancel();
        }
    }

    /// Forgets all sandboxes that are not served and not among these.
    pub(crate) fn keep(&self, ids: &[String]) {
        self.vaults.keep_only(ids);
        let kept: std::collections::HashSet<&str> = ids.iter().map(String::as_str).collect();
        self.lock().retain(|id, sandbox| {
            let keep = sandbox.is_served() || kept.contains(id.as_str());
            if !keep {
                sandbox.gone.cancel();
            }
            keep
        });
    }

    /// Returns the ids of the sandboxes whose sockets are here.
    pub(crate) fn served(&self) -> Vec<String> {
        let sandboxes = self.lock();
        let served = sandboxes.values().filter(|sandbox| sandbox.is_served());
        served.map(|sandbox| sandbox.id.clone()).collect()
    }

    /// Replaces the settings; connections that the new ones deny are cancelled.
    pub(crate) fn configure(&self, settings: OperatorSettings) -> Vec<(Arc<Sandbox>, ClosingConnections)> {
        self.resolver.configure(&settings);
        let settings = Arc::new(settings);
        let sandboxes: Vec<Arc<Sandbox>> = {
            // New sandboxes take the settings under the same lock, so each has either these or is changed below.
            let sandboxes = self.lock();
            *self.settings.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&settings));
            sandboxes.values().cloned().collect()
        };
        let change = |sandbox: Arc<Sandbox>| {
            let closing = sandbox.set_settings(&settings);
            (sandbox, closing)
        };
        sandboxes.into_iter().map(change).collect()
    }

    pub(crate) fn settings(&self) -> Option<Arc<OperatorSettings>> {
        self.settings.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn read_counters(&self) -> EgressCounters {
        let sandboxes = self.lock();
        let served = sandboxes.values().filter(|sandbox| sandbox.is_served());
        EgressCounters {
            open_connections: self.open.open().into(),
            sandboxes: served.map(|sandbox| sandbox.read_counters()).collect(),
        }
    }

    /// Judges the exact address of a connection, or of an answer if there is no port.
    pub(crate) fn judge_address(
        &self,
        view: &PolicyView,
        address: IpAddr,
        port: Option<u16>,
    ) -> Result<(), AddressRefusal> {
        judge_address(&view.settings, &view.own, address, port, |address| {
            let found = self.routes.lock().unwrap_or_else(PoisonError::into_inner).route_type(address)?;
            // Behind a proxy the host itself needs no route.
            let is_proxied = view.settings.proxy.is_some();
            Ok(found.or_else(|| is_proxied.then_some(RouteType::Unicast)))
        })
    }

    /// Gives up the descriptor that is kept so that a connection can be accepted, to be refused, when there are no others.
    pub(crate) fn take_spare_descriptor(&self) -> Option<OwnedFd> {
        self.spare.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Keeps a descriptor for that, if one is free.
    pub(crate) fn keep_spare_descriptor(&self) {
        let mut spare = self.spare.0.lock().unwrap_or_else(PoisonError::into_inner);
        if spare.is_none() {
            *spare = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).ok();
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Sandbox>>> {
        self.sandboxes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug, Default)]
struct SpareDescriptor(Mutex<Option<OwnedFd>>);
