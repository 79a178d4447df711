//! The journal file, read as `docs/journal.md` describes, using nothing but the file.

use wire::process::{ExitReason, OutputRetention, ProcessEnd};

use crate::client::shell;
use crate::harness::{TestAgent, TreeMode};

struct JournalRecord {
    stream: u8,
    time_ms: u64,
    offset: u64,
    bytes: Vec<u8>,
}

fn word(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes[..8].try_into().unwrap())
}

fn read_journal(file: &[u8]) -> Vec<JournalRecord> {
    assert_eq!(&file[..8], b"CRCLJRN3");
    let numbers: Vec<u64> = (1..5).map(|index| word(&file[8 * index..])).collect();
    let [gap_start, gap_end, ring, end] = numbers[..] else { panic!("four numbers") };
    let end = if ring == 0 { file.len() as u64 } else { end };
    // Bytes at a position, which may wrap at the end of the ring.
    let bytes_at = |position: u64, length: u64| -> Vec<u8> {
        let offset_of = |at: u64| match at >= gap_start && ring > 0 {
            true => gap_start + (at - gap_start) % ring,
            false => at,
        };
        (position..position + length).map(|at| file[usize::try_from(offset_of(at)).unwrap()]).collect()
    };
    let mut records = Vec::new();
    let mut position = 40;
    while position < end {
        if position == gap_start && gap_end > gap_start {
            position = gap_end;
        }
        let header = bytes_at(position, 29);
        let length = u64::from(u32::from_le_bytes(header[17..21].try_into().unwrap()));
        records.push(JournalRecord {
            stream: header[0],
            time_ms: word(&header[1..]),
            offset: word(&header[9..]),
            bytes: bytes_at(position + 29, length),
        });
        position += 29 + length;
    }
    records
}

fn journal(agent: &TestAgent, process: &str) -> Vec<JournalRecord> {
    // The end is reported before it is written; the next reply comes after that.
    assert_eq!(agent.reply(wire::AgentRequest::Ping), wire::AgentReply::Ok);
    read_journal(&std::fs::read(agent.journal(process)).unwrap())
}

#[test]
fn file_alone_contains_output_and_end() {
    let agent = TestAgent::with_trees(TreeMode::Runners);
    let output = agent.run(shell("recorded", "echo out; exec 1>&-; echo err >&2; exit 9"));
    let records = journal(&agent, "recorded");
    let [first, second, last] = &records[..] else { panic!("three records, not {}", records.len()) };
    assert_eq!((first.stream, first.offset, first.bytes.as_slice()), (1, 0, b"out\n".as_slice()));
    assert_eq!((second.stream, second.offset, second.bytes.as_slice()), (2, 4, b"err\n".as_slice()));
    assert!(first.time_ms <= last.time_ms);
    assert_eq!((last.stream, last.offset), (0, 8));
    let ended: ProcessEnd = serde_json::from_slice(&last.bytes).unwrap();
    assert_eq!((ended.exit, &ended), (ExitReason::Code(9), &output.ended));
}

#[test]
fn file_alone_shows_dropped_output() {
    for last in [100_000, 1_500_000] {
        check_file_with_a_gap(last);
    }
}

/// Prints the numbers up to `last`; the larger `last` wraps around the ring of the file.
fn check_file_with_a_gap(last: u32) {
    let agent = TestAgent::with_trees(TreeMode::Runners);
    let mut start = shell("much", &format!("seq 1 {last}"));
    start.retention = OutputRetention { first: 5000, last: 50_000, lossless: false, stall_ms: None };
    let written = agent.run(start).ended.written;
    let expected: String = (1..=last).map(|number| format!("{number}\n")).collect();
    let records = journal(&agent, "much");
    let (end, output) = records.split_last().unwrap();
    assert_eq!((end.stream, end.offset), (0, written));
    let mut next = 0;
    let mut gaps = Vec::new();
    for record in output {
        if record.offset != next {
            gaps.push((next, record.offset));
        }
        let start = usize::try_from(record.offset).unwrap();
        assert_eq!(&expected.as_bytes()[start..start + record.bytes.len()], record.bytes);
        next = record.offset + record.bytes.len() as u64;
    }
    assert_eq!(next, written);
    assert_eq!(gaps, agent.follow("much", 0).output().gaps);
}

#[test]
fn single_byte_writes_do_not_fill_the_file_with_headers() {
    let agent = TestAgent::with_trees(TreeMode::Runners);
    let output = agent.run(shell("drops", "for i in {1..2000}; do printf x; done"));
    assert_eq!(output.ended.written, 2000);
    let size = std::fs::metadata(agent.journal("drops")).unwrap().len();
    assert!(size < 4000, "{size} bytes for 2000");
}
