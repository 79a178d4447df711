//! Counting the open files of sandboxes, to find the one that uses up the host's table.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use domain::SandboxId;

use super::Launcher;

/// If the sandbox with the most descriptors has less than this part of the host's files, files that were
/// sent through sockets and not received are counted too, which takes much longer.
const SUSPICIOUS_PART: u64 = 8;

impl Launcher {
    /// Returns the number of open files of each running sandbox. A file that several processes share is
    /// counted for each of them.
    pub fn count_open_files(&self) -> io::Result<Vec<(SandboxId, u64)>> {
        let processes = self.processes_of_sandboxes()?;
        let count = |count: fn(&Path) -> u64| -> Vec<(SandboxId, u64)> {
            let sum = |pids: &Vec<i32>| pids.iter().map(|pid| count(&process_path(*pid))).sum();
            processes.iter().map(|(id, pids)| (id.clone(), sum(pids))).collect()
        };
        let counted = count(count_descriptors);
        let largest = counted.iter().map(|(_, files)| *files).max().unwrap_or(0);
        if largest >= host_open_files()? / SUSPICIOUS_PART {
            return Ok(counted);
        }
        Ok(count(|process| count_descriptors(process) + count_files_in_flight(process)))
    }

    /// The processes of each running sandbox: those in its control groups, or, for an ordinary user without
    /// control groups, those in its pid namespace.
    fn processes_of_sandboxes(&self) -> io::Result<BTreeMap<SandboxId, Vec<i32>>> {
        let running = self.records.list()?.into_iter().filter_map(|id| {
            let process =
                self.records.read(&id).filter(|record| !record.stopped && !record.foreign)?.process?;
            Some((id, process))
        });
        let running: Vec<_> = running.collect();
        if let Some(groups) = self.rights.groups() {
            return Ok(running.into_iter().map(|(id, _)| (id.clone(), groups.process_ids(&id))).collect());
        }
        let mut processes: BTreeMap<SandboxId, Vec<i32>> = BTreeMap::new();
        for entry in fs::read_dir("/proc")? {
            let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else {
                continue;
            };
            // The processes of others cannot be looked at.
            let Ok(namespace) = fs::metadata(process_path(pid).join("ns/pid")) else { continue };
            if let Some((id, _)) = running.iter().find(|(_, process)| process.namespace == namespace.ino()) {
                processes.entry(id.clone()).or_default().push(pid);
            }
        }
        Ok(processes)
    }
}

fn process_path(pid: i32) -> PathBuf {
    PathBuf::from(format!("/proc/{pid}"))
}

/// Counts the descriptors of a process; a process that has ended has none. Since Linux 6.2 the size of the
/// directory is their number.
fn count_descriptors(process: &Path) -> u64 {
    let directory = process.join("fd");
    match fs::metadata(&directory) {
        Ok(found) if found.size() > 0 => found.size(),
        Ok(_) => fs::read_dir(directory).map_or(0, |entries| entries.count() as u64),
        Err(_) => 0,
    }
}

/// Counts the files that wait in the unix sockets of a process. See unix(7), `SCM_RIGHTS`, and
/// proc_pid_fdinfo(5).
fn count_files_in_flight(process: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(process.join("fdinfo")) else { return 0 };
    let waiting =
        |text: String| text.lines().find_map(|line| line.strip_prefix("scm_fds:")?.trim().parse().ok());
    entries
        .flatten()
        .filter_map(|entry| fs::read_to_string(entry.path()).ok())
        .filter_map(waiting)
        .fold(0, u64::saturating_add)
}

/// The number of files that are open on the host.
fn host_open_files() -> io::Result<u64> {
    let text = fs::read_to_string("/proc/sys/fs/file-nr")?;
    let used = text.split_whitespace().next().and_then(|word| word.parse().ok());
    used.ok_or_else(|| io::ErrorKind::InvalidData.into())
}

#[cfg(test)]
mod tests {
    use std::io::{IoSlice, Write};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

    use super::*;

    #[test]
    fn files_that_wait_in_a_socket_are_counted() {
        let own = Path::new("/proc/self");
        let before = count_files_in_flight(own);
        let (mut ours, theirs) = UnixStream::pair().expect("a pair");
        ours.write_all(b"x").expect("the pair has room");
        let file = fs::File::open("/dev/null").expect("a device");
        let files = [file.as_fd(), file.as_fd(), file.as_fd()];
        let mut space = [std::mem::MaybeUninit::uninit(); 64];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&files)));
        sendmsg(&ours, &[IoSlice::new(b"y")], &mut control, SendFlags::empty()).expect("the pair has room");
        assert!(count_files_in_flight(own) >= before + 3);
        assert!(count_descriptors(own) >= 3);
        drop(theirs);
    }
}
