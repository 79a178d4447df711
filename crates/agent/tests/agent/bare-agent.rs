//! The agent without a jail, for tests: it takes paths where the real one takes descriptors, and ends
//! with the thread that started it.
//!
//! `bare-agent SOCKET JOURNALS CONFIG [group=DIR] [tasks=FILE] [oom=FILE]`; the byte that reports
//! "ready" goes to its standard output. `bare-agent __echo` is the kernel that runs when a request
//! names the agent's own program, and `bare-agent __search` answers searches for text.

use std::error::Error;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{IntoRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::fs::{MemfdFlags, Mode, OFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};
use rustix::process::{PidfdFlags, PidfdGetfdFlags, Signal};
use wire::config::CONFIG_FD;
use wire::search::{CONNECTION_FD, GrepMatch, GrepRequest, GrepSummary, REQUEST_FD, SEARCH_SUBCOMMAND};
use wire::{AgentReply, Frame, Greeting};

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    match std::env::args().nth(1).as_deref() {
        Some("__echo") => return echo(),
        Some(SEARCH_SUBCOMMAND) => return describe_search(),
        _ => {}
    }
    // Without a jail, nothing else would end it if its test is interrupted.
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    // The first descriptor that is opened gets the number where the agent expects its
    // configuration.
    let config_file = rustix::fs::memfd_create("config", MemfdFlags::empty())?.into_raw_fd();
    assert_eq!(config_file, CONFIG_FD, "descriptor {CONFIG_FD} is in use already");
    let mut words = std::env::args().skip(1);
    let mut word = || words.next().ok_or("an argument is missing");
    let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(word()?)?)?;
    let journals = open_directory(&word()?)?;
    let mut config: wire::AgentConfig = serde_json::from_str(&word()?)?;
    config.listen_fd = socket.into_raw_fd();
    config.journal_fd = journals.into_raw_fd();
    config.ready_fd = rustix::io::dup(rustix::stdio::stdout())?.into_raw_fd();
    for word in words {
        let (name, path) = word.split_once('=').ok_or("unknown argument")?;
        match name {
            "group" => config.commands_fd = Some(open_directory(path)?.into_raw_fd()),
            "tasks" => config.tasks_fds.push(open_file(path, OFlags::WRONLY)?.into_raw_fd()),
            "oom" => config.oom_fd = Some(open_file(path, OFlags::RDONLY)?.into_raw_fd()),
            _ => return Err("unknown argument".into()),
        }
    }
    std::fs::write(format!("/proc/self/fd/{CONFIG_FD}"), serde_json::to_vec(&config)?)?;
    match agent::run()? {}
}

/// A kernel for tests: it reports the text of each order.
fn echo() -> Result<(), Box<dyn Error>> {
    let orders = BufReader::new(File::open("/proc/self/fd/3")?);
    let mut reports = File::options().write(true).open("/proc/self/fd/4")?;
    writeln!(reports, "ready")?;
    for order in orders.lines() {
        let order = order?;
        let mut words = order.splitn(3, ' ').skip(1);
        let (key, json) = words.next().zip(words.next()).ok_or("invalid order")?;
        writeln!(reports, "tell {key} {json}\ndone {key}")?;
    }
    Ok(())
}

/// A search for tests: its one match is a line about this process, with the request.
fn describe_search() -> Result<(), Box<dyn Error>> {
    let request: GrepRequest = serde_json::from_reader(File::open(format!("/proc/self/fd/{REQUEST_FD}"))?)?;
    let mut fds: Vec<String> = std::fs::read_dir("/proc/self/fd")?
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect::<Result<_, std::io::Error>>()?;
    fds.sort_unstable();
    let status = std::fs::read_to_string("/proc/self/status")?;
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
        line.split_whitespace().next().unwrap_or_default().to_owned()
    };
    let text =
        ["Uid:", "CapEff:", "CapBnd:", "NoNewPrivs:"].map(|name| format!("{name}{}", field(name))).join(" ");
    let found = GrepMatch {
        path: request.path,
        line: 1,
        text,
        cut: false,
        before: vec![request.pattern, std::env::var("HOME")?],
        after: fds,
    };
    let end = GrepSummary { files_searched: 1, files_matched: 1, truncated: false };
    let mut bytes = Vec::new();
    Frame::from_message(&Greeting { version: wire::VERSION }).encode(&mut bytes);
    Frame::from_message(&AgentReply::GrepMatches(vec![found])).encode(&mut bytes);
    Frame::from_message(&AgentReply::GrepEnd(end)).encode(&mut bytes);
    // A socket cannot be opened by its path.
    let own = rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::empty())?;
    let connection = rustix::process::pidfd_getfd(own, CONNECTION_FD, PidfdGetfdFlags::empty())?;
    Ok(UnixStream::from(connection).write_all(&bytes)?)
}

fn open_directory(path: &str) -> rustix::io::Result<OwnedFd> {
    rustix::fs::open(path, OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty())
}

fn open_file(path: &str, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    rustix::fs::open(path, flags, Mode::empty())
}
