//! The journal file, read as `docs/journal.md` says, by somebody who has nothing but the file.

use wire::process::{Ended, Exit, Retention};

use crate::client::shell;
use crate::harness::{TestAgent, Trees};

struct Record {
    stream: u8,
    time_ms: u64,
    offset: u64,
    bytes: Vec<u8>,
}

fn word(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes[..8].try_into().unwrap())
}

fn read_journal(bytes: &[u8]) -> Vec<Record> {
    assert_eq!(&bytes[..8], b"CRCLJRN1");
    let (hole_start, hole_end) = (word(&bytes[8..]), word(&bytes[16..]));
    let mut records = Vec::new();
    let mut position = 32;
    while position < bytes.len() {
        if position as u64 == hole_start && hole_end > hole_start {
            position = usize::try_from(hole_end).unwrap();
        }
        let header = &bytes[position..position + 21];
        let length = u32::from_le_bytes(header[17..21].try_into().unwrap()) as usize;
        let bytes = bytes[position + 21..position + 21 + length].to_vec();
        records.push(Record {
            stream: header[0],
            time_ms: word(&header[1..]),
            offset: word(&header[9..]),
            bytes,
        });
        position += 21 + length;
    }
    records
}

fn journal(agent: &TestAgent, process: &str) -> Vec<Record> {
    // The end is told before it is written; the next answer comes after that.
    assert_eq!(agent.reply(wire::Request::Ping), wire::Reply::Ok);
    read_journal(&std::fs::read(agent.journal(process)).unwrap())
}

#[test]
fn the_file_alone_tells_output_and_end() {
    let agent = TestAgent::with_trees(Trees::Runners);
    let output = agent.run(shell("told", "echo out; exec 1>&-; echo err >&2; exit 9"));
    let records = journal(&agent, "told");
    let [first, second, last] = &records[..] else { panic!("three records, not {}", records.len()) };
    assert_eq!((first.stream, first.offset, first.bytes.as_slice()), (1, 0, b"out\n".as_slice()));
    assert_eq!((second.stream, second.offset, second.bytes.as_slice()), (2, 4, b"err\n".as_slice()));
    assert!(first.time_ms <= last.time_ms);
    assert_eq!((last.stream, last.offset), (0, 8));
    let ended: Ended = serde_json::from_slice(&last.bytes).unwrap();
    assert_eq!((ended.exit, &ended), (Exit::Code(9), &output.ended));
}

#[test]
fn the_file_alone_tells_what_was_dropped() {
    let agent = TestAgent::with_trees(Trees::Runners);
    let mut start = shell("much", "seq 1 300000");
    start.retention = Retention { first: 5000, last: 50_000, hold: false, stall_ms: None };
    let written = agent.run(start).ended.written;
    let expected: String = (1..=300_000).map(|number| format!("{number}\n")).collect();
    let records = journal(&agent, "much");
    let (end, output) = records.split_last().unwrap();
    assert_eq!((end.stream, end.offset), (0, written));
    let mut next = 0;
    let mut gaps = Vec::new();
    for record in output {
        if record.offset != next {
            gaps.push((next, record.offset));
        }
        let place = usize::try_from(record.offset).unwrap();
        assert_eq!(&expected.as_bytes()[place..place + record.bytes.len()], record.bytes);
        next = record.offset + record.bytes.len() as u64;
    }
    assert_eq!(next, written);
    assert_eq!(gaps, agent.follow("much", 0).output().gaps);
}

#[test]
fn a_process_that_prints_single_bytes_does_not_fill_the_file_with_headers() {
    let agent = TestAgent::with_trees(Trees::Runners);
    let output = agent.run(shell("drops", "for i in {1..2000}; do printf x; done"));
    assert_eq!(output.ended.written, 2000);
    let size = std::fs::metadata(agent.journal("drops")).unwrap().len();
    assert!(size < 4000, "{size} bytes for 2000");
}
