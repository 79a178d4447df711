//! What the kernel reports about this thread: capabilities and signal actions. See
//! proc_pid_status(5).

use std::io;

use crate::caps::CapSet;
use crate::signals::SignalSet;

/// The parts of `/proc/thread-self/status` that a starting process needs, from one read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessStatus {
    pub effective: CapSet,
    pub bounding: CapSet,
    /// The signals that are ignored or have a handler.
    pub changed_signals: SignalSet,
}

impl ProcessStatus {
    pub fn of_this_thread() -> io::Result<Self> {
        Self::parse(&std::fs::read_to_string("/proc/thread-self/status")?)
    }

    fn parse(text: &str) -> io::Result<Self> {
        let mask = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            let mask = line.and_then(|text| u64::from_str_radix(text.trim(), 16).ok());
            mask.ok_or_else(|| io::Error::other(format!("the kernel shows no {name} line")))
        };
        Ok(Self {
            effective: CapSet(mask("CapEff")?),
            bounding: CapSet(mask("CapBnd")?),
            changed_signals: SignalSet(mask("SigIgn")? | mask("SigCgt")?),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_are_read_from_their_lines() {
        let text = "Name:\tx\nSigIgn:\t0000000000001000\nSigCgt:\t0000000000000440\n\
                    CapEff:\t0000000000000001\nCapBnd:\t000001ffffffffff\n";
        let status = ProcessStatus::parse(text).expect("all lines are present");
        assert_eq!(status.effective, CapSet(1));
        assert_eq!(status.bounding, CapSet(0x1ff_ffff_ffff));
        assert_eq!(
            status.changed_signals.numbers().collect::<Vec<_>>(),
            [libc::SIGBUS, libc::SIGSEGV, libc::SIGPIPE]
        );
        assert!(ProcessStatus::parse("CapEff:\t0\nSigIgn:\t0\nSigCgt:\t0\n").is_err(), "no bounding set");
    }
}
