//! The resource usage of sandboxes: samples of each living one, and sums per owner and hour.
//!
//! A sample is taken every few seconds; usage after the last sample is added when the sandbox ends. The sums are kept
//! over restarts, except for the usage since the last sample if server and sandboxes are killed at once. Samples are
//! kept in memory only: they are for looking at running sandboxes.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use backend::{NetworkTotals, SandboxUsage};
use domain::{Owner, Phase, SandboxId};
use futures_util::StreamExt;

use crate::clock::ClockReading;
use crate::core::Core;
use crate::error::error_chain;
use crate::telemetry::memory_stall::StallWatch;
use crate::telemetry::network_usage::{self, totals_since};
use crate::telemetry::owner_metrics::{OwnerLabel, OwnerMetrics, OwnerTotals};

/// How often samples are taken.
pub const SAMPLE_INTERVAL: Duration = Duration::from_secs(10);
/// How many samples of a sandbox are kept: one hour's.
const MAX_SAMPLES: usize = 360;
/// How many sandboxes are measured at once.
pub(crate) const MAX_CONCURRENT_CALLS: usize = 8;
const HOUR: Duration = Duration::from_secs(3600);
/// How many hours are kept: those of 31 days.
pub(crate) const MAX_HOURS: u64 = 31 * 24;

/// The usage of a sandbox at one moment.
#[derive(Clone, Copy, Debug)]
pub struct UsageSample {
    pub time: SystemTime,
    pub usage: SandboxUsage,
}

/// The usage of an owner's sandboxes in one hour.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HourlyUsage {
    pub owner: Owner,
    /// Hours since 1970.
    pub number: u64,
    pub used: UsageTotals,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UsageTotals {
    /// How many sandboxes were created.
    pub created: u64,
    /// The sum of the times that sandboxes lived.
    pub alive_millis: u64,
    pub cpu_micros: u64,
    /// Memory multiplied by the time it was used.
    pub memory_byte_seconds: u64,
    /// Bytes that passed the filter of networks; those over a link are not counted.
    pub network_sent: u64,
    pub network_received: u64,
}

impl UsageTotals {
    pub(crate) fn add(&mut self, more: Self) {
        self.created = self.created.saturating_add(more.created);
        self.alive_millis = self.alive_millis.saturating_add(more.alive_millis);
        self.cpu_micros = self.cpu_micros.saturating_add(more.cpu_micros);
        self.memory_byte_seconds = self.memory_byte_seconds.saturating_add(more.memory_byte_seconds);
        self.network_sent = self.network_sent.saturating_add(more.network_sent);
        self.network_received = self.network_received.saturating_add(more.network_received);
    }
}

impl HourlyUsage {
    pub fn start(&self) -> SystemTime {
        UNIX_EPOCH + HOUR * u32::try_from(self.number).unwrap_or(u32::MAX)
    }
}

#[derive(Default)]
pub(crate) struct UsageHistory(Mutex<HistoryState>);

#[derive(Default)]
struct HistoryState {
    meters: HashMap<SandboxId, SandboxMeter>,
    hours: BTreeMap<(u64, Owner), UsageTotals>,
    /// The hours that differ from the stored ones.
    changed: Vec<(u64, Owner)>,
    /// Sums since the server started, if metrics per owner are on.
    totals: Option<OwnerTotals>,
}

/// The usage of one sandbox so far.
struct SandboxMeter {
    owner: Owner,
    counted: ClockReading,
    /// The processor time counted so far; unknown if a former server counted it.
    cpu_micros: Option<u64>,
    /// The network totals counted so far; unknown if a former server counted them.
    network: Option<NetworkTotals>,
    samples: VecDeque<UsageSample>,
}

impl UsageHistory {
    /// Metrics are kept for at most `metric_owners` owners; `None` turns metrics per owner off.
    pub(crate) fn new(hours: Vec<HourlyUsage>, metric_owners: Option<usize>) -> Self {
        let totals = metric_owners.map(OwnerTotals::new);
        let hours = hours.into_iter().map(|hour| ((hour.number, hour.owner), hour.used)).collect();
        Self(Mutex::new(HistoryState { hours, totals, ..HistoryState::default() }))
    }

    /// Starts counting a sandbox: a new one if `fresh`, else one that a former server made.
    pub(crate) fn begin_metering(&self, id: &SandboxId, owner: &Owner, now: ClockReading, fresh: bool) {
        let mut books = self.lock();
        let meter = SandboxMeter {
            owner: owner.clone(),
            counted: now,
            cpu_micros: fresh.then_some(0),
            network: fresh.then(NetworkTotals::default),
            samples: VecDeque::new(),
        };
        books.meters.insert(id.clone(), meter);
        if fresh {
            books.add_usage(owner, now, UsageTotals { created: 1, ..UsageTotals::default() });
        }
    }

    /// Starts counting a sandbox that was restarted.
    pub(crate) fn restart_metering(&self, id: &SandboxId, owner: &Owner, now: ClockReading) {
        let meter = SandboxMeter {
            owner: owner.clone(),
            counted: now,
            cpu_micros: Some(0),
            network: Some(NetworkTotals::default()),
            samples: VecDeque::new(),
        };
        self.lock().meters.insert(id.clone(), meter);
    }

    /// Adds the usage of a sandbox since it was last counted.
    fn add_sample(&self, id: &SandboxId, now: ClockReading, usage: SandboxUsage) {
        let mut books = self.lock();
        let Some(meter) = books.meters.get_mut(id) else { return };
        let used = meter.advance(now, usage);
        let owner = meter.owner.clone();
        if meter.samples.len() >= MAX_SAMPLES {
            meter.samples.pop_front();
        }
        meter.samples.push_back(UsageSample { time: now.wall, usage });
        books.add_usage(&owner, now, used);
    }

    /// Adds what a sandbox exchanged since it was last counted, and returns it. Totals below those counted before are
    /// those of a filter that was restarted.
    pub(super) fn add_network_totals(
        &self,
        id: &SandboxId,
        now: ClockReading,
        totals: NetworkTotals,
    ) -> NetworkTotals {
        let mut books = self.lock();
        let Some(meter) = books.meters.get_mut(id) else { return NetworkTotals::default() };
        let since = match meter.network.replace(totals) {
            Some(counted) => totals_since(totals, counted),
            None => NetworkTotals::default(),
        };
        let owner = meter.owner.clone();
        if since.bytes_sent > 0 || since.bytes_received > 0 {
            let (network_sent, network_received) = (since.bytes_sent, since.bytes_received);
            books.add_usage(
                &owner,
                now,
                UsageTotals { network_sent, network_received, ..UsageTotals::default() },
            );
        }
        since
    }

    /// Adds the remaining usage of a sandbox, and stops counting it.
    pub(crate) fn end_metering(&self, id: &SandboxId, now: ClockReading, last: SandboxUsage) {
        let mut books = self.lock();
        let Some(mut meter) = books.meters.remove(id) else { return };
        let used = meter.advance(now, last);
        books.add_usage(&meter.owner, now, used);
    }

    /// The samples of one sandbox, oldest first.
    pub(crate) fn samples(&self, id: &SandboxId) -> Vec<UsageSample> {
        let books = self.lock();
        books.meters.get(id).map(|meter| meter.samples.iter().copied().collect()).unwrap_or_default()
    }

    /// The last `count` hours, newest first, of one owner or of all.
    pub(crate) fn hours(&self, owner: Option<&Owner>, now: SystemTime, count: u64) -> Vec<HourlyUsage> {
        let first = hour_number(now).saturating_sub(count.saturating_sub(1));
        let books = self.lock();
        let all = books.hours.range((first, Owner::from_valid_name(""))..).rev();
        let wanted = all.filter(|((_, whose), _)| owner.is_none_or(|owner| owner == whose));
        wanted.map(|((number, owner), used)| hourly_usage(*number, owner, *used)).collect()
    }

    /// Metrics per owner, if they are turned on. `phases` has the owner and the phase of each sandbox.
    pub(crate) fn owner_metrics(
        &self,
        phases: &[(Owner, Phase)],
    ) -> Option<BTreeMap<OwnerLabel, OwnerMetrics>> {
        let mut books = self.lock();
        let HistoryState { meters, totals, .. } = &mut *books;
        let totals = totals.as_mut()?;
        let mut rows = totals.rows();
        for (owner, phase) in phases {
            let row = rows.entry(totals.label_for(owner)).or_default();
            *row.phases.entry(phase.name()).or_default() += 1;
        }
        for meter in meters.values() {
            let Some(usage) = meter.samples.back().map(|sample| sample.usage) else { continue };
            let row = rows.entry(totals.label_for(&meter.owner)).or_default();
            row.memory = row.memory.saturating_add(usage.memory.map_or(0, |memory| memory.0));
            row.disk = row.disk.saturating_add(usage.disk.map_or(0, |disk| disk.0));
        }
        Some(rows)
    }

    fn metered_sandboxes(&self) -> Vec<SandboxId> {
        self.lock().meters.keys().cloned().collect()
    }

    /// Returns the hours that changed since the last call, and drops hours that are too old.
    fn take_changed(&self, now: SystemTime) -> Vec<HourlyUsage> {
        let mut books = self.lock();
        let oldest = hour_number(now).saturating_sub(MAX_HOURS);
        books.hours.retain(|(number, _), _| *number >= oldest);
        let changed = std::mem::take(&mut books.changed);
        let kept = changed.iter().filter_map(|key| Some((key, books.hours.get(key)?)));
        kept.map(|((number, owner), used)| hourly_usage(*number, owner, *used)).collect()
    }

    fn lock(&self) -> MutexGuard<'_, HistoryState> {
        self.0.lock().expect("no thread panics while adding up")
    }
}

impl HistoryState {
    fn add_usage(&mut self, owner: &Owner, now: ClockReading, used: UsageTotals) {
        let key = (hour_number(now.wall), owner.clone());
        self.hours.entry(key.clone()).or_default().add(used);
        if let Some(totals) = &mut self.totals {
            totals.add(owner, used);
        }
        if !self.changed.contains(&key) {
            self.changed.push(key);
        }
    }
}

impl SandboxMeter {
    fn advance(&mut self, now: ClockReading, usage: SandboxUsage) -> UsageTotals {
        let passed = now.boot.saturating_sub(self.counted.boot);
        self.counted = now;
        let cpu_micros = usage.cpu_micros.zip(self.cpu_micros).map(|(now, then)| now.saturating_sub(then));
        self.cpu_micros = usage.cpu_micros.or(self.cpu_micros);
        let memory = usage.memory.map_or(0, |memory| u128::from(memory.0)) * passed.as_millis() / 1000;
        UsageTotals {
            created: 0,
            alive_millis: u64::try_from(passed.as_millis()).unwrap_or(u64::MAX),
            cpu_micros: cpu_micros.unwrap_or_default(),
            memory_byte_seconds: u64::try_from(memory).unwrap_or(u64::MAX),
            ..UsageTotals::default()
        }
    }
}

fn hourly_usage(number: u64, owner: &Owner, used: UsageTotals) -> HourlyUsage {
    HourlyUsage { owner: owner.clone(), number, used }
}

fn hour_number(wall: SystemTime) -> u64 {
    wall.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() / HOUR.as_secs())
}

/// Takes samples until the service stops, and then stores the hours that are not stored yet.
pub(crate) async fn record_usage(core: Arc<Core>) {
    let mut ticks = tokio::time::interval(SAMPLE_INTERVAL);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut stalls = StallWatch::default();
    loop {
        let stopping = tokio::select! {
            _ = ticks.tick() => false,
            () = core.tasks.cancelled() => true,
        };
        if !stopping {
            for id in sample_all(&core, &mut stalls).await {
                kill_largest_process(&core, &id).await;
            }
            network_usage::count_network_usage(&core).await;
        }
        let changed = core.telemetry.history.take_changed(core.clock.now().wall);
        if !changed.is_empty() {
            core.store.queue_hours(changed).await;
        }
        if stopping {
            return;
        }
    }
}

/// Counts the current usage of every sandbox, and returns those that make no progress at their memory limit. A sandbox that
/// cannot be measured is counted the next time.
async fn sample_all(core: &Core, stalls: &mut StallWatch) -> Vec<SandboxId> {
    let mut stuck = Vec::new();
    let samples = futures_util::stream::iter(core.telemetry.history.metered_sandboxes());
    let samples = samples
        .map(|id| async move { (core.host.usage_of(&id).await, id) })
        .buffer_unordered(MAX_CONCURRENT_CALLS);
    let mut samples = std::pin::pin!(samples.take_until(core.tasks.cancelled()));
    while let Some((usage, id)) = samples.next().await {
        if let Ok(usage) = usage {
            let now = core.clock.now();
            core.telemetry.history.add_sample(&id, now, usage);
            if stalls.add_sample(&id, now.boot, &usage) {
                stuck.push(id);
            }
        }
    }
    stalls.retain(|id| core.lifecycle.registry.find(id).is_some());
    stuck
}

/// Has the largest process of a sandbox killed that makes no progress at its memory limit.
async fn kill_largest_process(core: &Core, id: &SandboxId) {
    let Some(handle) = core.lifecycle.registry.find(id) else { return };
    tracing::warn!(sandbox = %id, "sandbox makes no progress at its memory limit; killing its largest process");
    let killed = handle.agent.request::<()>(wire::AgentRequest::KillLargest).await;
    if let Err(error) = killed.and_then(|killed| killed.map_err(|fault| handle.agent.fault_error(fault))) {
        tracing::warn!(sandbox = %id, error = %error_chain(&error), "failed to kill the largest process of a sandbox at its memory limit");
    }
}

#[cfg(test)]
mod tests {
    use domain::Bytes;

    use super::*;

    fn at(seconds: u64) -> ClockReading {
        let span = Duration::from_secs(seconds);
        ClockReading { wall: UNIX_EPOCH + HOUR * 100 + span, boot: span }
    }

    fn using(cpu_micros: u64, memory: u64) -> SandboxUsage {
        SandboxUsage { cpu_micros: Some(cpu_micros), memory: Some(Bytes(memory)), ..SandboxUsage::default() }
    }

    #[test]
    fn usage_is_counted_once_and_to_the_end() {
        let (history, id) = (UsageHistory::default(), SandboxId::from_entropy([1; 20]));
        let owner = Owner::from_valid_name("a");
        history.begin_metering(&id, &owner, at(0), true);
        history.add_sample(&id, at(10), using(500, 1000));
        history.add_sample(&id, at(20), using(700, 2000));
        history.end_metering(&id, at(25), SandboxUsage { cpu_micros: Some(1000), ..SandboxUsage::default() });
        history.end_metering(&id, at(99), using(9999, 0));
        let used = UsageTotals {
            created: 1,
            alive_millis: 25_000,
            cpu_micros: 1000,
            memory_byte_seconds: 30_000,
            ..UsageTotals::default()
        };
        assert_eq!(history.hours(None, at(30).wall, 1), [hourly_usage(100, &owner, used)]);
        assert_eq!(history.take_changed(at(30).wall), [hourly_usage(100, &owner, used)]);
        assert!(history.take_changed(at(30).wall).is_empty());
    }

    #[test]
    fn owner_metrics_join_totals_with_phases_and_last_samples() {
        let history = UsageHistory::new(Vec::new(), Some(1));
        let (one, other) = (Owner::from_valid_name("a"), Owner::from_valid_name("b"));
        let ids = [SandboxId::from_entropy([1; 20]), SandboxId::from_entropy([2; 20])];
        history.begin_metering(&ids[0], &one, at(0), true);
        history.begin_metering(&ids[1], &other, at(0), true);
        let usage = |cpu: u64| SandboxUsage { disk: Some(Bytes(3)), ..using(cpu, 1000) };
        history.add_sample(&ids[0], at(10), usage(500));
        history.add_sample(&ids[0], at(20), usage(700));
        history.add_sample(&ids[1], at(20), usage(90));
        history.end_metering(&ids[1], at(25), using(100, 0));
        let phases = [(one.clone(), Phase::Running), (one.clone(), Phase::Paused)];
        let rows = history.owner_metrics(&phases).expect("metrics per owner are on");
        let phases = BTreeMap::from([("running", 1), ("paused", 1)]);
        let first = OwnerMetrics { phases, created: 1, cpu_micros: 700, memory: 1000, disk: 3 };
        let rest = OwnerMetrics { created: 1, cpu_micros: 100, ..OwnerMetrics::default() };
        assert_eq!(rows, BTreeMap::from([(OwnerLabel::Named(one), first), (OwnerLabel::Other, rest)]));
        assert_eq!(UsageHistory::default().owner_metrics(&[]), None, "metrics per owner are off by default");
    }

    #[test]
    fn network_totals_are_counted_once_also_when_the_filter_restarts() {
        let history = UsageHistory::default();
        let ids = [SandboxId::from_entropy([1; 20]), SandboxId::from_entropy([2; 20])];
        history.begin_metering(&ids[0], &Owner::operator(), at(0), true);
        // A former server has counted what the second exchanged until now.
        history.begin_metering(&ids[1], &Owner::operator(), at(0), false);
        let totals = |bytes_sent| NetworkTotals { bytes_sent, bytes_received: 1, ..NetworkTotals::default() };
        let sent = |id: &SandboxId, bytes| history.add_network_totals(id, at(10), totals(bytes)).bytes_sent;
        assert_eq!([sent(&ids[0], 100), sent(&ids[0], 100), sent(&ids[0], 130)], [100, 0, 30]);
        assert_eq!(sent(&ids[0], 7), 7, "the filter was restarted");
        assert_eq!([sent(&ids[1], 1000), sent(&ids[1], 1001)], [0, 1]);
        let used = history.hours(None, at(10).wall, 1)[0].used;
        assert_eq!((used.network_sent, used.network_received), (138, 2));
    }

    #[test]
    fn usage_counted_by_a_former_server_is_not_counted_again() {
        let (history, id) = (UsageHistory::default(), SandboxId::from_entropy([1; 20]));
        history.begin_metering(&id, &Owner::operator(), at(0), false);
        history.add_sample(&id, at(10), using(1_000_000, 0));
        history.add_sample(&id, at(20), using(1_000_007, 0));
        let hours = history.hours(None, at(20).wall, 1);
        assert_eq!((hours[0].used.created, hours[0].used.cpu_micros), (0, 7));
    }

    #[test]
    fn hours_are_separate_by_owner_and_time_and_old_ones_are_dropped() {
        let history = UsageHistory::default();
        let (one, other) = (Owner::from_valid_name("a"), Owner::from_valid_name("b"));
        history.begin_metering(&SandboxId::from_entropy([1; 20]), &one, at(0), true);
        history.begin_metering(&SandboxId::from_entropy([2; 20]), &other, at(3600), true);
        assert_eq!(history.hours(None, at(3600).wall, 2).len(), 2);
        assert_eq!(history.hours(None, at(3600).wall, 1)[0].owner, other);
        assert!(history.hours(Some(&one), at(3600).wall, 1).is_empty());
        assert_eq!(history.hours(Some(&one), at(3600).wall, 2)[0].start(), at(0).wall);
        history.take_changed(at(3600 * (MAX_HOURS + 1)).wall);
        assert_eq!(history.hours(None, at(3600 * (MAX_HOURS + 1)).wall, MAX_HOURS + 5).len(), 1);
    }
}
