//! Runs qemu and reads the machine's serial console.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use anyhow::Context;

use super::VmOutcome;

const KERNEL_COMMAND_LINE: &str = "console=ttyS0 quiet loglevel=1 panic=-1 cgroup_no_v1=all mitigations=off";

/// A machine to boot.
pub(crate) struct VirtualMachine<'a> {
    pub(crate) kernel: &'a Path,
    pub(crate) initramfs: &'a Path,
    pub(crate) disk: &'a Path,
    /// Words that its scripts read from the kernel's command line.
    pub(crate) options: String,
    pub(crate) disk_writes: DiskWrites,
    pub(crate) processors: u8,
    /// Emulation is some twenty times slower than the processor, and the host may be busy.
    pub(crate) timeout: Duration,
}

/// What becomes of the files that a machine writes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum DiskWrites {
    Kept,
    Dropped,
}

/// The results that the machine reported.
#[derive(Default)]
pub(crate) struct ConsoleReport {
    passed: usize,
    failures: Vec<String>,
    skipped: Vec<String>,
    complete: bool,
    /// The machine is about to reset itself and must be booted again.
    reboot: bool,
    /// The machine was switched off because it took too long.
    late: bool,
    /// The last lines of the console, for a machine that never came up.
    tail: Vec<String>,
}

/// Boots the machine, once more with the same disk if it asks for that, and reads its console until it
/// switches itself off or its time is over.
pub(crate) fn boot_machine(machine: &VirtualMachine<'_>) -> anyhow::Result<VmOutcome> {
    let mut report = ConsoleReport::default();
    let end = Instant::now() + machine.timeout;
    read_console(start_qemu(machine)?, &mut report, end)?;
    if report.reboot && !report.late {
        read_console(start_qemu(machine)?, &mut report, end)?;
    }
    Ok(report.into_outcome(machine.timeout))
}

/// Reads the console of a machine until it ends.
fn read_console(mut machine: Child, report: &mut ConsoleReport, end: Instant) -> anyhow::Result<()> {
    let console = machine.stdout.take().expect("the console is a pipe");
    let (sender, lines) = mpsc::channel();
    let reader = std::thread::spawn(move || {
        for line in BufReader::new(console).split(b'\n').map_while(Result::ok) {
            if sender.send(String::from_utf8_lossy(&line).trim_end().to_owned()).is_err() {
                break;
            }
        }
    });
    loop {
        match lines.recv_timeout(end.saturating_duration_since(Instant::now())) {
            Ok(line) => report.read_line(&line)?,
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {
                report.late = true;
                break;
            }
        }
    }
    machine.kill().context("could not end qemu")?;
    machine.wait().context("could not wait for qemu")?;
    reader.join().expect("the reader of the console does not panic");
    Ok(())
}

fn start_qemu(machine: &VirtualMachine<'_>) -> anyhow::Result<Child> {
    let snapshot = if machine.disk_writes == DiskWrites::Dropped { "on" } else { "off" };
    Command::new("qemu-system-x86_64")
        .args(["-accel", "tcg,thread=multi", "-cpu", "max", "-m", "2048"])
        .args(["-smp", &machine.processors.to_string()])
        .args(["-display", "none", "-monitor", "none", "-serial", "stdio", "-nic", "none", "-no-reboot"])
        .arg("-kernel")
        .arg(machine.kernel)
        .arg("-initrd")
        .arg(machine.initramfs)
        .arg("-append")
        .arg(format!("{KERNEL_COMMAND_LINE} {}", machine.options))
        .arg("-drive")
        .arg(format!("file={},format=raw,if=virtio,cache=unsafe,snapshot={snapshot}", machine.disk.display()))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("could not start qemu")
}

impl ConsoleReport {
    /// Handles one line of the console; lines meant for people are passed on.
    fn read_line(&mut self, line: &str) -> anyhow::Result<()> {
        // The firmware's escape sequences may precede our words.
        if let Some((_, words)) = line.split_once("VM ") {
            writeln!(std::io::stderr(), "vm: {words}")?;
            if words.starts_with("PASS ") {
                self.passed += 1;
            } else if let Some(name) = words.strip_prefix("FAIL ") {
                self.failures.push(name.to_owned());
            } else if let Some(name) = words.strip_prefix("SKIP ") {
                self.skipped.push(name.to_owned());
            } else if words == "REBOOT" {
                self.reboot = true;
            } else if words == "DONE" {
                self.complete = true;
            }
        }
        self.tail.push(line.to_owned());
        if self.tail.len() > 40 {
            self.tail.remove(0);
        }
        Ok(())
    }

    fn into_outcome(mut self, timeout: Duration) -> VmOutcome {
        if self.late && self.failures.is_empty() {
            let reason = format!("the emulated machine did not end within {} s", timeout.as_secs());
            return VmOutcome::Skipped(format!("{reason}; {} checks had passed", self.passed));
        }
        if !self.complete {
            self.failures.push(format!("the machine ended before its last check:\n{}", self.tail.join("\n")));
        }
        let checks = self.passed + self.failures.len();
        if self.failures.is_empty() {
            VmOutcome::Passed { checks, skipped: self.skipped }
        } else {
            VmOutcome::Failed { checks, failures: self.failures }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(lines: &[&str]) -> VmOutcome {
        let mut report = ConsoleReport::default();
        for line in lines {
            report.read_line(line).expect("standard error can be written");
        }
        report.into_outcome(Duration::from_secs(1))
    }

    #[test]
    fn all_checks_must_pass_and_the_final_line_must_arrive() {
        assert!(matches!(report(&["\u{1b}cVM PASS a", "VM DONE"]), VmOutcome::Passed { checks: 1, .. }));
        assert!(matches!(report(&["VM PASS a"]), VmOutcome::Failed { .. }));
        let VmOutcome::Failed { checks, failures } =
            report(&["VM PASS a", "VM FAIL b (status 1)", "VM DONE"])
        else {
            panic!("a failure was not seen");
        };
        assert_eq!((checks, failures), (2, vec!["b (status 1)".to_owned()]));
    }
}
