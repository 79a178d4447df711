//! Searches over many files beside `rg` and `find`, and a long text in JSON beside an upload of the same bytes.

use anyhow::{Result, ensure};
use serde_json::json;

use super::client::provision;
use crate::bench::RoundCounts;
use crate::bench::other_runtimes::find_program;
use crate::bench::report::BenchReport;
use crate::bench::server::BenchServer;
use crate::bench::statistics::TimeSamples;
use crate::bench::transfer::{growth_during, time_work};

/// Makes 20,000 files of half a kibibyte in 200 directories; every hundredth contains the text that is searched for.
const MAKE_FILES: &str = r#"mkdir /home/gem/tree && cd /home/gem/tree && printf -v line '%s\n' {1..50}
line="$line$line$line"
for directory in {1..200}; do
    mkdir $directory
    for file in {1..99}; do printf '%s' "$line" > $directory/$file.txt; done
    printf '%sneedle %s\n' "$line" $directory > $directory/100.txt
done"#;
const TREE: &str = "/home/gem/tree";
/// How many of them contain the text, and how many have the name.
const FILES_WITH_NEEDLE: usize = 200;
const FILES_WITH_NAME: usize = 2000;

/// The bytes of a long text: as many as base64 encodes without padding.
const TEXT_BYTES: u64 = (64 << 20) / 3 * 3;
const MAX_GROWTH_MIB: f64 = 32.0;
const BOUNDARY: &str = "border-of-the-parts";

pub(super) fn measure_search(
    server: &BenchServer,
    rounds: RoundCounts,
    report: &mut BenchReport,
) -> Result<()> {
    let mut client = server.client()?;
    let sandbox = provision(&mut client, "search")?;
    sandbox.run(&mut client, "bash/exec", &json!({"command": MAKE_FILES}))?;
    let grep = json!({"path": TREE, "pattern": "needle [0-9]+", "max_results": 1000});
    let glob = json!({"path": TREE, "pattern": "**/*7.txt", "max_results": 5000});
    for (bar, operation, request, key, expected, program, line) in [
        (
            "AIO: grep over 20,000 files",
            "file/grep",
            grep,
            "matches",
            FILES_WITH_NEEDLE,
            "rg",
            format!("rg --line-number 'needle [0-9]+' {TREE}"),
        ),
        (
            "AIO: glob over 20,000 files",
            "file/glob",
            glob,
            "files",
            FILES_WITH_NAME,
            "find",
            format!("find {TREE} -name '*7.txt'"),
        ),
    ] {
        if find_program(program).is_none() {
            report.add_unmeasured(format!("{bar}: `{program}` is not installed"));
            continue;
        }
        let command = json!({"command": line});
        let (mut ours, mut theirs) = (TimeSamples::default(), TimeSamples::default());
        for run in 0..=rounds.long {
            let found = time_work(|| {
                let data = sandbox.call(&mut client, operation, &request)?;
                let count = data[key].as_array().map_or(0, Vec::len);
                ensure!(count == expected, "{operation} has found {count} instead of {expected}");
                Ok(())
            })?;
            let program = time_work(|| sandbox.run(&mut client, "bash/exec", &command).map(drop))?;
            if run > 0 {
                ours.push(found);
                theirs.push(program);
            }
        }
        let (ours, theirs) = (ours.summary(), theirs.summary());
        report.add_time(bar, ours);
        report.add_time(format!("`{program}` over the same files, by bash/exec"), theirs);
        report.require_at_most(bar, ours.p50 / theirs.p50, 2.0, "times the program");
    }
    sandbox.remove(&mut client)
}

pub(super) fn measure_long_text(
    server: &BenchServer,
    rounds: RoundCounts,
    report: &mut BenchReport,
) -> Result<()> {
    let mut client = server.client()?;
    let sandbox = provision(&mut client, "text")?;
    let (write, upload) = (sandbox.path_of("file/write"), sandbox.path_of("file/upload"));
    let remove = json!({"command": "rm /home/gem/long"});
    // The blocks of the client consist of a letter that is also base64.
    let text = [r#"{"file":"/home/gem/long","encoding":"base64","content":""#, r#""}"#];
    let part = |name: &str| format!("--{BOUNDARY}\r\nContent-Disposition: form-data; name=\"{name}\"");
    let parts = [
        &format!("{}\r\n\r\n/home/gem/long\r\n{}; filename=\"long\"\r\n\r\n", part("path"), part("file")),
        &format!("\r\n--{BOUNDARY}--\r\n"),
    ];
    let form = format!("Content-Type: multipart/form-data; boundary={BOUNDARY}\r\n");
    let (mut plain, mut encoded, mut growth) = (TimeSamples::default(), TimeSamples::default(), 0.0_f64);
    for run in 0..=rounds.long {
        let uploaded =
            time_work(|| client.send_large("POST", &upload, &form, parts.map(String::as_str), TEXT_BYTES))?;
        sandbox.run(&mut client, "bash/exec", &remove)?;
        let mut written = None;
        let grown = growth_during(server, || {
            let kind = "Content-Type: application/json\r\n";
            written = Some(time_work(|| client.send_large("POST", &write, kind, text, TEXT_BYTES / 3 * 4))?);
            Ok(())
        })?;
        sandbox.run(&mut client, "bash/exec", &remove)?;
        growth = growth.max(grown);
        if run > 0 {
            plain.push(uploaded);
            written.into_iter().for_each(|time| encoded.push(time));
        }
    }
    sandbox.remove(&mut client)?;
    let (plain, encoded) = (plain.summary(), encoded.summary());
    report.add_time("AIO: upload of 64 MiB", plain);
    report.add_time("AIO: write of 64 MiB as base64", encoded);
    report.require_at_most("AIO: growth of the server while it decodes", growth, MAX_GROWTH_MIB, "MiB");
    let rate = plain.p50 / encoded.p50;
    report.require_at_least("AIO: write of 64 MiB as base64", rate, 0.25, "of the rate of an upload");
    Ok(())
}
