//! The files in which a sandbox sees its own limits instead of the host's values: `/proc/meminfo`,
//! `/proc/cpuinfo`, `/proc/stat` and `/sys/devices/system/cpu`.
//!
//! ```text
//! the commands' group ── limits, use ──►┐
//! the host's /proc/stat, cpuinfo ──────►├─ refresh ─► files in memory ─► read-only mounts inside
//! a command starts, or a file is read ─►┘
//! ```
//! Limits are read from the group whenever a command starts, so a sandbox shows its present limits
//! even after they were changed. Usage is refreshed at the same time, and whenever one of the files
//! is read: a program that reads repeatedly sees the values of the time of its previous read.
//! Nothing is refreshed while there are no readers, and never more than ten times a second.

use std::cell::OnceCell;
use std::fmt::Write;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;
use rustix::fs::inotify::{self, CreateFlags, Reader, WatchFlags};
use rustix::fs::{AtFlags, Mode, OFlags};
use wire::config;

use crate::context::AgentContext;
use crate::event_loop::alarms::Alarm;
use crate::event_loop::event_sources::EventSources;
use crate::event_loop::poll::{EventToken, RegisteredFd};

/// The shortest time between two refreshes.
const MIN_REFRESH_INTERVAL: Duration = Duration::from_millis(100);

/// The maximum that is read from a file of the kernel.
const MAX_SOURCE: usize = 4 << 20;

/// The longest text of a quota: two numbers of 64 bits.
const MAX_QUOTA_TEXT: usize = 48;

/// The period of v1's quotas, which is never changed.
const V1_QUOTA_PERIOD_US: u64 = 100_000;

const CPU_DIRECTORY: &str = "sys/devices/system/cpu";

/// The variable that limits the number of threads in programs that use OpenMP, and in nproc(1).
pub(crate) const THREADS_VARIABLE: &str = "OMP_NUM_THREADS";

/// The files that the jail passed to the agent.
#[derive(Debug)]
pub(crate) struct LimitView {
    files: OwnedFd,
    /// The files that are watched for reads. They stay open, because opening one to refresh it counts as a read and
    /// would cause the next refresh.
    meminfo: OnceCell<OwnedFd>,
    stat: OnceCell<OwnedFd>,
    host_stat: OwnedFd,
    host_cpuinfo: OwnedFd,
    memory: Option<MemorySources>,
    cpu: Option<OwnedFd>,
    shown: ShownLimits,
    /// Reports that one of the files was opened or read.
    reads: Option<RegisteredFd>,
    /// Whether reads are watched, or will be soon.
    is_watch_planned: bool,
}

#[derive(Debug)]
struct MemorySources {
    limit: OwnedFd,
    usage: OwnedFd,
    stat: OwnedFd,
}

/// The values that the files show now.
#[derive(Debug, Default)]
struct ShownLimits {
    memory_limit: Option<u64>,
    processors: Option<u32>,
    refreshed: Option<Instant>,
}

/// The memory statistics of a group, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct MemoryStats {
    total: u64,
    used: u64,
    cached: u64,
    active_anon: u64,
    inactive_anon: u64,
    active_file: u64,
    inactive_file: u64,
    shmem: u64,
    slab_reclaimable: u64,
    slab_unreclaimable: u64,
}

impl LimitView {
    pub(crate) fn from_config<E>(
        config: &config::LimitViewConfig,
        mut take: impl FnMut(i32) -> Result<OwnedFd, E>,
    ) -> Result<Self, E> {
        let memory = config.memory.as_ref().map(|memory| {
            let (limit, usage) = (take(memory.limit_fd)?, take(memory.usage_fd)?);
            Ok(MemorySources { limit, usage, stat: take(memory.stat_fd)? })
        });
        Ok(Self {
            memory: memory.transpose()?,
            files: take(config.files_fd)?,
            meminfo: OnceCell::new(),
            stat: OnceCell::new(),
            host_stat: take(config.stat_fd)?,
            host_cpuinfo: take(config.cpuinfo_fd)?,
            cpu: config.cpu_fd.map(&mut take).transpose()?,
            shown: ShownLimits::default(),
            reads: None,
            is_watch_planned: false,
        })
    }

    /// Updates the files before a command starts. Returns the number of threads a program should
    /// use, if that is less than the host's number of processors.
    fn refresh_for_command(&mut self, now: Instant) -> Option<u32> {
        let recent = self
            .shown
            .refreshed
            .is_some_and(|last| now.saturating_duration_since(last) < MIN_REFRESH_INTERVAL);
        let limit = self.memory.as_ref().and_then(|memory| read_number(&memory.limit));
        if !recent || limit != self.shown.memory_limit {
            self.refresh_memory();
            self.shown.refreshed = Some(now);
        }
        let host = self.refresh_processors();
        self.shown.processors.filter(|shown| *shown < host)
    }

    fn refresh_memory(&mut self) {
        let Some(memory) = &self.memory else { return };
        let (limit, used) = (read_number(&memory.limit), read_number(&memory.usage));
        let Some(limit) = limit else { return };
        let host = rustix::system::sysinfo();
        let host_total = u64::from(host.mem_unit).saturating_mul(host.totalram);
        let stat = read_kernel_file(&memory.stat);
        let found = MemoryStats::new(limit.min(host_total), used.unwrap_or(0), &stat);
        self.write_watched_file(&self.meminfo, "meminfo", &found.render_meminfo());
        self.shown.memory_limit = Some(limit);
    }

    /// Rewrites the files that depend on the number of processors, if it has changed. Returns the
    /// number of the host's processors.
    fn refresh_processors(&mut self) -> u32 {
        let Some(cpu) = &self.cpu else { return 0 };
        let host = rustix::thread::sched_getaffinity(None).map_or(1, |set| set.count()).max(1);
        let mut text = [0; MAX_QUOTA_TEXT];
        let shown = processors_for_quota(read_short_text(cpu, &mut text).unwrap_or_default(), host);
        if self.shown.processors != Some(shown) {
            self.write_file("cpuinfo", &first_processors(&read_kernel_file(&self.host_cpuinfo), shown));
            let list = if shown == 1 { "0\n".to_owned() } else { format!("0-{}\n", shown - 1) };
            for name in ["online", "possible", "present"] {
                self.write_file(&format!("{CPU_DIRECTORY}/{name}"), &list);
            }
            self.update_cpu_directories(shown, self.shown.processors.unwrap_or(0));
            self.shown.processors = Some(shown);
            self.refresh_stat();
        }
        host
    }

    /// One directory for each processor, because older C libraries count them.
    fn update_cpu_directories(&self, wanted: u32, former: u32) {
        for number in wanted.min(former)..wanted.max(former) {
            let path = format!("{CPU_DIRECTORY}/cpu{number}");
            let changed = match number < wanted {
                true => rustix::fs::mkdirat(&self.files, &path, Mode::from_raw_mode(0o755)),
                false => rustix::fs::unlinkat(&self.files, &path, AtFlags::REMOVEDIR),
            };
            // These files only inform programs and enforce nothing, so no command fails because of
            // them.
            changed.ok();
        }
    }

    fn refresh_stat(&self) {
        let Some(shown) = self.shown.processors else { return };
        self.write_watched_file(&self.stat, "stat", &render_stat(&read_kernel_file(&self.host_stat), shown));
    }

    fn write_watched_file(&self, file: &OnceCell<OwnedFd>, name: &str, text: &str) {
        if file.get().is_none()
            && let Ok(opened) = self.open_file(name)
        {
            file.set(opened).ok();
        }
        if let Some(file) = file.get() {
            replace_content(file, text).ok();
        }
    }

    fn write_file(&self, name: &str, text: &str) {
        // As above, no command fails because of these files.
        self.open_file(name).and_then(|file| replace_content(&file, text)).ok();
    }

    fn open_file(&self, name: &str) -> rustix::io::Result<OwnedFd> {
        let flags = OFlags::WRONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        rustix::fs::openat(&self.files, name, flags, Mode::empty())
    }

    /// Discards the reads that were reported. Returns whether there were any.
    fn drain_reads(&self) -> bool {
        let Some(reads) = &self.reads else { return false };
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut reader = Reader::new(reads, &mut buffer);
        let mut any = false;
        while reader.next().is_ok() {
            any = true;
        }
        any
    }
}

/// Replaces the content in place: the file is mounted, so it cannot be replaced by another.
fn replace_content(file: &OwnedFd, text: &str) -> rustix::io::Result<()> {
    let length = rustix::io::pwrite(file, text.as_bytes(), 0)?;
    rustix::fs::ftruncate(file, length as u64)
}

impl AgentContext {
    /// Called before anything starts that may read its limits. What is written now is shown for a while in any case,
    /// so reads are watched only afterwards: the end of a process that watches files takes the kernel some
    /// milliseconds, which a sandbox for one short command need not wait for.
    pub(crate) fn refresh_limit_view(&mut self, events: &mut EventSources) {
        let Some(view) = &mut self.limit_view else { return };
        self.config.threads = view.refresh_for_command(Instant::now());
        if !view.is_watch_planned {
            view.is_watch_planned = true;
            events.alarms.set(MIN_REFRESH_INTERVAL, Alarm::LimitView);
        }
    }

    /// A file was read: refreshes the values, and then ignores reads for a while.
    pub(crate) fn on_limit_view_read(&mut self, events: &mut EventSources) {
        let Some(view) = &mut self.limit_view else { return };
        view.drain_reads();
        view.refresh_memory();
        view.refresh_stat();
        view.shown.refreshed = Some(Instant::now());
        if let Some(reads) = &mut view.reads {
            reads.set_interest(EventFlags::empty());
        }
        events.alarms.set(MIN_REFRESH_INTERVAL, Alarm::LimitView);
    }

    /// The pause after a refresh is over.
    pub(crate) fn watch_limit_view_again(&mut self, events: &mut EventSources) {
        let Some(view) = &mut self.limit_view else { return };
        if view.reads.is_none() {
            // Reads before this moment were not seen.
            view.reads = watch_reads(&events.poll).ok();
            if view.reads.is_some() {
                self.on_limit_view_read(events);
            } else {
                // The next command tries again: the user may have no inotify instance left now.
                view.is_watch_planned = false;
            }
            return;
        }
        if view.drain_reads() {
            return self.on_limit_view_read(events);
        }
        if let Some(reads) = &mut view.reads {
            reads.set_interest(EventFlags::IN);
        }
    }
}

fn watch_reads(poll: &crate::event_loop::poll::Epoll) -> std::io::Result<RegisteredFd> {
    let events = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
    for path in ["/proc/meminfo", "/proc/stat"] {
        inotify::add_watch(&events, path, WatchFlags::OPEN | WatchFlags::ACCESS)?;
    }
    poll.register_fd(events, EventToken::LimitView, EventFlags::IN)
}

impl MemoryStats {
    fn new(total: u64, used: u64, stat: &str) -> Self {
        // v1 has each field for the group itself and, as `total_`, including the groups below it.
        let field = |name: &str| {
            let find = |wanted: &str| {
                let mut fields = stat.lines().filter_map(|line| line.split_once(' '));
                fields.find(|(name, _)| *name == wanted).and_then(|(_, value)| value.trim().parse().ok())
            };
            find(&format!("total_{name}")).or_else(|| find(name)).unwrap_or(0_u64)
        };
        let used = used.min(total);
        Self {
            total,
            used,
            cached: field("cache").max(field("file")).min(used),
            active_anon: field("active_anon"),
            inactive_anon: field("inactive_anon"),
            active_file: field("active_file"),
            inactive_file: field("inactive_file"),
            shmem: field("shmem"),
            slab_reclaimable: field("slab_reclaimable"),
            slab_unreclaimable: field("slab_unreclaimable"),
        }
    }

    /// The memory available without killing anything: free memory and what the kernel can reclaim.
    fn available_bytes(&self) -> u64 {
        let droppable = self.active_file.saturating_add(self.inactive_file);
        let droppable = droppable.saturating_add(self.slab_reclaimable).min(self.used);
        self.total - self.used + droppable
    }

    /// The lines of proc_meminfo(5) that are meaningful for a group. A sandbox never has swap.
    fn render_meminfo(&self) -> String {
        let lines = [
            ("MemTotal", self.total),
            ("MemFree", self.total - self.used),
            ("MemAvailable", self.available_bytes()),
            ("Buffers", 0),
            ("Cached", self.cached),
            ("SwapCached", 0),
            ("Active", self.active_anon.saturating_add(self.active_file)),
            ("Inactive", self.inactive_anon.saturating_add(self.inactive_file)),
            ("Active(anon)", self.active_anon),
            ("Inactive(anon)", self.inactive_anon),
            ("Active(file)", self.active_file),
            ("Inactive(file)", self.inactive_file),
            ("Unevictable", 0),
            ("Mlocked", 0),
            ("SwapTotal", 0),
            ("SwapFree", 0),
            ("Dirty", 0),
            ("Writeback", 0),
            ("AnonPages", self.active_anon.saturating_add(self.inactive_anon)),
            ("Mapped", 0),
            ("Shmem", self.shmem),
            ("KReclaimable", self.slab_reclaimable),
            ("Slab", self.slab_reclaimable.saturating_add(self.slab_unreclaimable)),
            ("SReclaimable", self.slab_reclaimable),
            ("SUnreclaim", self.slab_unreclaimable),
        ];
        let mut text = String::new();
        for (name, bytes) in lines {
            let name = format!("{name}:");
            // Fixed widths, so that a reader in the middle of a refresh finds whole lines.
            writeln!(text, "{name:<16}{:>12} kB", bytes / 1024).expect("writing to a string does not fail");
        }
        text
    }
}

/// The number of processors that a quota amounts to, rounded up, but no more than the host has.
fn processors_for_quota(quota: &str, host: u32) -> u32 {
    let mut words = quota.split_whitespace();
    let quota = words.next().and_then(|word| word.parse::<u64>().ok());
    let period = words.next().and_then(|word| word.parse().ok()).unwrap_or(V1_QUOTA_PERIOD_US).max(1);
    // No number, or -1, means no limit.
    let wanted = quota.map_or(u64::from(host), |quota| quota.div_ceil(period));
    u32::try_from(wanted).unwrap_or(host).clamp(1, host)
}

/// The paragraphs of the first processors.
fn first_processors(cpuinfo: &str, count: u32) -> String {
    let paragraphs = cpuinfo.split_inclusive("\n\n").take(count as usize);
    paragraphs.collect()
}

/// The host's times for the first processors, and their sum; of interrupts only the total.
fn render_stat(stat: &str, count: u32) -> String {
    let is_processor = |line: &&str| {
        line.strip_prefix("cpu").is_some_and(|rest| rest.starts_with(|letter: char| letter.is_ascii_digit()))
    };
    let mut sums: Vec<u64> = Vec::new();
    let mut rows = String::new();
    for (number, line) in stat.lines().filter(is_processor).take(count as usize).enumerate() {
        let times: Vec<u64> = line.split(' ').skip(1).filter_map(|word| word.parse().ok()).collect();
        sums.resize(sums.len().max(times.len()), 0);
        sums.iter_mut().zip(&times).for_each(|(sum, time)| *sum = sum.saturating_add(*time));
        let times: Vec<String> = times.iter().map(u64::to_string).collect();
        writeln!(rows, "cpu{number} {}", times.join(" ")).expect("writing to a string does not fail");
    }
    let sums: Vec<String> = sums.iter().map(u64::to_string).collect();
    let mut text = format!("cpu  {}\n{rows}", sums.join(" "));
    for line in stat.lines().filter(|line| !line.starts_with("cpu")) {
        let line = match line.strip_prefix("intr ") {
            Some(rest) => &line[..line.len() - rest.len() + rest.find(' ').unwrap_or(rest.len())],
            None => line,
        };
        text.push_str(line);
        text.push('\n');
    }
    text
}

/// The text of a kernel file that fits in the buffer.
fn read_short_text<'a>(file: &OwnedFd, buffer: &'a mut [u8]) -> Option<&'a str> {
    let length = rustix::io::pread(file.as_fd(), &mut *buffer, 0).ok()?;
    std::str::from_utf8(&buffer[..length]).ok()
}

fn read_number(file: &OwnedFd) -> Option<u64> {
    let mut text = [0; 32];
    let text = read_short_text(file, &mut text)?.trim();
    // v2 shows a missing limit as `max`.
    if text == "max" { Some(u64::MAX) } else { text.parse().ok() }
}

/// The whole content of a kernel file, up to a maximum; an unreadable file is empty.
fn read_kernel_file(file: &OwnedFd) -> String {
    let mut text = Vec::new();
    let mut chunk = [0; 16 << 10];
    while text.len() < MAX_SOURCE {
        match rustix::io::pread(file.as_fd(), &mut chunk, text.len() as u64) {
            Ok(0) | Err(_) => break,
            Ok(length) => text.extend_from_slice(&chunk[..length]),
        }
    }
    String::from_utf8_lossy(&text).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quota_is_rounded_up_to_whole_processors() {
        for (quota, expected) in [
            ("50000\n", 1),
            ("25000 100000\n", 1),
            ("100000 100000\n", 1),
            ("150000\n", 2),
            ("800000\n", 4),
            ("max 100000\n", 4),
            ("-1\n", 4),
            ("", 4),
        ] {
            assert_eq!(processors_for_quota(quota, 4), expected, "{quota}");
        }
    }

    #[test]
    fn memory_follows_the_limit_and_usage_of_the_group() {
        let legacy =
            "cache 1\nactive_file 1\ntotal_cache 4096\ntotal_active_file 2048\ntotal_inactive_file 1024\n";
        let unified = "anon 7\nfile 4096\nactive_file 2048\ninactive_file 1024\nslab_reclaimable 1024\n";
        let memory = |stat| MemoryStats::new(64 << 10, 16 << 10, stat);
        assert_eq!((memory(legacy).cached, memory(legacy).available_bytes()), (4096, (48 << 10) + 3072));
        assert_eq!((memory(unified).cached, memory(unified).available_bytes()), (4096, (48 << 10) + 4096));
        let text = memory(unified).render_meminfo();
        assert!(
            text.starts_with("MemTotal:                 64 kB\nMemFree:                  48 kB\n"),
            "{text}"
        );
        assert!(text.contains("SwapTotal:                 0 kB\n"), "{text}");
        // Usage may exceed the limit for a moment.
        let over = MemoryStats::new(10, 20, "file 100");
        assert_eq!((over.used, over.cached, over.available_bytes()), (10, 10, 0));
    }

    #[test]
    fn processors_beyond_the_limit_are_not_shown() {
        let info = "processor\t: 0\nmodel\t: x\n\nprocessor\t: 1\nmodel\t: x\n\n";
        assert_eq!(first_processors(info, 1), "processor\t: 0\nmodel\t: x\n\n");
        assert_eq!(first_processors(info, 2), info);
        let stat = "cpu  11 22 33\ncpu0 1 2 3\ncpu1 10 20 30\nintr 5 1 2 3\nctxt 9\nbtime 8\n";
        assert_eq!(render_stat(stat, 1), "cpu  1 2 3\ncpu0 1 2 3\nintr 5\nctxt 9\nbtime 8\n");
        assert!(render_stat(stat, 2).starts_with("cpu  11 22 33\ncpu0 1 2 3\ncpu1 10 20 30\n"));
    }
}
