//! Notices a sandbox that is at its memory limit and makes no progress.
//!
//! Where almost all memory is data, the little that is left for code and files is replaced all the time: the program
//! reads the same pages from the disk again and again. The kernel takes that for progress and kills nothing, so the
//! server has the largest process killed.

use std::collections::HashMap;
use std::time::Duration;

use backend::SandboxUsage;
use domain::SandboxId;

/// The part of its limit that a sandbox at the limit uses, in percent.
const MIN_USED_PERCENT: u64 = 95;
/// Files take at most a sixteenth of the limit when a program begins to stall.
const START_FILES_DIVISOR: u64 = 16;
/// Once it stalls, files take at most an eighth: the share varies, and must not restart the count.
const STALLED_FILES_DIVISOR: u64 = 8;
/// How often in a second all pages of files are read again, on average, where a program stalls.
const MIN_REREADS_PER_SECOND: u64 = 5;
/// After how many such samples in a row a process is killed.
const MAX_STALLED_SAMPLES: u32 = 3;

const PAGE_BYTES: u64 = 4096;

/// What is known about the sandboxes that are at their limit.
#[derive(Default)]
pub(crate) struct StallWatch(HashMap<SandboxId, StallState>);

#[derive(Clone, Copy)]
struct StallState {
    time: Duration,
    refaults: u64,
    samples: u32,
}

impl StallWatch {
    /// Takes a sample at a time since boot; `true` if a process must be killed.
    pub(crate) fn add_sample(&mut self, id: &SandboxId, time: Duration, usage: &SandboxUsage) -> bool {
        let before = self.0.get(id).copied();
        let files_divisor = match before {
            Some(before) if before.samples > 0 => STALLED_FILES_DIVISOR,
            _ => START_FILES_DIVISOR,
        };
        let Some((refaults, file_bytes)) = reread_pages(usage, files_divisor) else {
            self.0.remove(id);
            return false;
        };
        let stalls = before.is_some_and(|before| {
            let seconds = time.saturating_sub(before.time).as_secs().max(1);
            let pages = (file_bytes / PAGE_BYTES).max(1);
            let reread = refaults.saturating_sub(before.refaults);
            reread >= pages.saturating_mul(MIN_REREADS_PER_SECOND).saturating_mul(seconds)
        });
        let samples = if stalls { before.map_or(0, |before| before.samples) + 1 } else { 0 };
        let ends = samples >= MAX_STALLED_SAMPLES;
        let samples = if ends { 0 } else { samples };
        self.0.insert(id.clone(), StallState { time, refaults, samples });
        ends
    }

    /// Forgets sandboxes that no longer exist.
    pub(crate) fn retain(&mut self, exists: impl Fn(&SandboxId) -> bool) {
        self.0.retain(|id, _| exists(id));
    }
}

/// The pages that were read again so far, and the memory that files have, of a sandbox at its limit whose files take at
/// most a part of it.
fn reread_pages(usage: &SandboxUsage, files_divisor: u64) -> Option<(u64, u64)> {
    let (memory, limit) = (usage.memory?.0, usage.memory_limit?.0);
    let file_bytes = usage.file_memory?.0;
    let at_limit = u128::from(memory) * 100 >= u128::from(limit) * u128::from(MIN_USED_PERCENT);
    (at_limit && file_bytes <= limit / files_divisor).then_some((usage.refaults?, file_bytes))
}

#[cfg(test)]
mod tests {
    use domain::Bytes;

    use super::*;

    const LIMIT: u64 = 64 << 20;

    /// A sandbox at its limit with 2 MiB of files.
    fn at_limit(refaults: u64) -> SandboxUsage {
        SandboxUsage {
            memory: Some(Bytes(LIMIT - 4096)),
            memory_limit: Some(Bytes(LIMIT)),
            refaults: Some(refaults),
            file_memory: Some(Bytes(2 << 20)),
            ..SandboxUsage::default()
        }
    }

    /// The decisions about samples that are ten seconds apart.
    fn decide(samples: &[SandboxUsage]) -> Vec<bool> {
        let (mut watch, id) = (StallWatch::default(), SandboxId::from_entropy([1; 20]));
        let sample = |(index, usage): (usize, &SandboxUsage)| {
            watch.add_sample(&id, Duration::from_secs(10 * index as u64), usage)
        };
        samples.iter().enumerate().map(sample).collect()
    }

    #[test]
    fn process_is_killed_after_three_stalled_samples() {
        // 512 pages, each read again 70 times a second: what a real program at its limit showed.
        let stalled = |index: u64| at_limit(index * 512 * 700);
        let samples: Vec<_> = (0..5).map(stalled).collect();
        assert_eq!(decide(&samples), [false, false, false, true, false]);
    }

    #[test]
    fn count_goes_on_while_the_memory_of_files_varies() {
        let files = |index: u64, bytes: u64| SandboxUsage {
            file_memory: Some(Bytes(bytes)),
            ..at_limit(index * 1024 * 700)
        };
        // What a program at 59 of 64 MiB showed: files around a sixteenth of the limit.
        let (less, more) = (LIMIT / 16 - 45_056, LIMIT / 16 + 28_672);
        let samples = [files(0, less), files(1, less), files(2, more), files(3, more)];
        assert_eq!(decide(&samples), [false, false, false, true]);
        let samples: Vec<_> = (0..8).map(|index| files(index, more)).collect();
        assert!(!decide(&samples).contains(&true), "it never began to stall");
    }

    #[test]
    fn progress_between_two_samples_begins_a_new_count() {
        let mut samples: Vec<_> = (0..3).map(|index| at_limit(index * 512 * 700)).collect();
        samples.push(at_limit(2 * 512 * 700 + 512 * 10));
        samples.extend((3..6).map(|index| at_limit(index * 512 * 700)));
        assert!(!decide(&samples[..6]).contains(&true));
    }

    #[test]
    fn sandbox_below_its_limit_or_with_room_for_files_is_left_alone() {
        let roomy =
            |index: u64| SandboxUsage { file_memory: Some(Bytes(LIMIT / 8)), ..at_limit(index * 1_000_000) };
        let below =
            |index: u64| SandboxUsage { memory: Some(Bytes(LIMIT / 2)), ..at_limit(index * 1_000_000) };
        let unknown = |index: u64| SandboxUsage { refaults: None, ..at_limit(index) };
        for samples in [
            (0..8).map(roomy).collect::<Vec<_>>(),
            (0..8).map(below).collect(),
            (0..8).map(unknown).collect(),
        ] {
            assert!(!decide(&samples).contains(&true), "{samples:?}");
        }
    }
}
