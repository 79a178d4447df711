//! The disk of `coracle run`: its limit, what is left of it, and many runs at once.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use e2e::host::{self, HostState};
use e2e::run::{RunCommand, TestUser};
use tempfile::TempDir;

fn run() -> RunCommand {
    RunCommand::new(TestUser::Same)
}

/// A state directory that no other test uses.
fn make_state_directory() -> TempDir {
    tempfile::Builder::new().prefix("coracle-").tempdir().expect("the temporary directory can be written")
}

/// Whether disks are images here. Where they cannot be formatted, runs use a pool, and an ordinary user's disks are
/// in memory.
fn disks_are_images() -> bool {
    let formats = ["/usr/sbin/mkfs.ext4", "/sbin/mkfs.ext4"].iter().any(|path| Path::new(path).exists());
    if !formats {
        testkit::skip_test("`mkfs.ext4` is not installed");
    }
    formats && testkit::needs_root()
}

/// The images that runs with this state directory use in turns.
fn images(state: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(state.join("oneshot/disk/oneshot")).expect("a run has made it");
    let paths = entries.map(|entry| entry.expect("our own directory").path());
    paths.filter(|path| path.extension().is_some_and(|word| word == "img")).collect()
}

fn allocated_bytes(path: &Path) -> u64 {
    fs::metadata(path).expect("it is listed").blocks() * 512
}

fn loop_devices_of(state: &Path) -> Vec<String> {
    let name = state.to_str().expect("our own name").to_owned();
    HostState::capture(state).mentioning(&[name]).loop_devices.into_iter().collect()
}

#[test]
fn disk_is_not_limited_by_memory() {
    if !testkit::needs_root() {
        return;
    }
    // More than the memory is written, then space is allocated up to the limit, and nothing beyond it.
    let text = "head -c 400m /dev/zero > /root/written && fallocate -l 1580m /root/within && echo within; \
                fallocate -l 200m /root/beyond || echo refused; df -i /root | awk 'END { print $2 }'";
    let ended = run().flag("--memory", "256m").flag("--disk", "2g").run_shell(text);
    let lines: Vec<&str> = ended.stdout.lines().collect();
    let [within, refused, inodes] = lines[..] else { panic!("{ended:?}") };
    assert_eq!((within, refused), ("within", "refused"), "{ended:?}");
    let inodes: u64 = inodes.parse().expect("a number");
    assert!((100_000..=600_000).contains(&inodes), "{inodes} files fit into 2 GiB");
}

#[test]
fn full_disk_loses_no_output() {
    let text = "head -c 100m /dev/zero > /root/filler; seq 1 1000000; exit 3";
    let run = run().flag("--disk", "16m");
    let mut command = run.command(&["sh", "-c", text]);
    let ended = command.stdin(Stdio::null()).output().expect("the binary runs");
    assert_eq!(ended.status.code(), Some(3), "{}", String::from_utf8_lossy(&ended.stderr));
    assert_eq!(String::from_utf8_lossy(&ended.stdout).lines().count(), 1_000_000);
}

#[test]
fn killed_run_leaves_no_disk() {
    if !disks_are_images() {
        return;
    }
    let state = make_state_directory();
    let run = run().state(state.path());
    let mark = format!("{}", 600_000 + std::process::id());
    let text = format!("head -c 64m /dev/zero > /root/large; exec sleep {mark}");
    let mut child = run.command(&["sh", "-c", &text]).spawn().expect("the binary runs");
    // The shell's own command line contains the words too; it is `sleep` once the file is written.
    let sleeping = || {
        host::pids_with_command_line(&format!("sleep {mark}")).into_iter().any(|pid| {
            fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.starts_with(b"sleep\0"))
        })
    };
    e2e::eventually("the command runs", sleeping);
    assert_ne!(loop_devices_of(run.state_directory()), Vec::<String>::new(), "the disk has no device");
    child.kill().expect("it is our child");
    child.wait().expect("it is our child");
    e2e::eventually("the device of the disk is gone", || loop_devices_of(run.state_directory()).is_empty());
    assert_eq!(run.run_argv(&["true"]).code, Some(0));
    let left: Vec<u64> = images(run.state_directory()).iter().map(|path| allocated_bytes(path)).collect();
    assert!(left.iter().sum::<u64>() < 8 << 20, "images still take {left:?} bytes");
}

#[test]
fn runs_killed_at_any_moment_leave_nothing() {
    if !disks_are_images() {
        return;
    }
    let state = make_state_directory();
    let run = run().state(state.path());
    assert_eq!(run.run_argv(&["true"]).code, Some(0));
    for round in 0..20_u32 {
        // Each round waits a little longer before the kill, so that the rounds hit different steps of a run.
        let mut command = run.command(&["true"]);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the binary runs");
        let steps = round * 500;
        for _ in 0..steps {
            std::hint::black_box(fs::metadata(run.state_directory()).is_ok());
        }
        child.kill().expect("it is our child");
        child.wait().expect("it is our child");
    }
    e2e::eventually("the devices of the disks are gone", || {
        loop_devices_of(run.state_directory()).is_empty()
    });
    assert_eq!(run.run_argv(&["true"]).code, Some(0));
    let left = fs::read_dir(run.state_directory().join("oneshot/alive")).expect("a run has made it").count();
    assert_eq!(left, 0, "killed runs were not swept");
}

#[test]
fn many_runs_at_once_have_disks_of_their_own() {
    const RUNS: usize = 12;
    let state = make_state_directory();
    let run = run().state(state.path());
    assert_eq!(run.run_argv(&["true"]).code, Some(0));
    let text = "test ! -e /root/mark && echo $1 > /root/mark && sleep 0.3 && cat /root/mark";
    let start = |number: usize| {
        let mut command = run.command(&["sh", "-c", text, "sh", &number.to_string()]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().expect("the binary runs")
    };
    let children: Vec<_> = (0..RUNS).map(start).collect();
    for (number, child) in children.into_iter().enumerate() {
        let output = child.wait_with_output().expect("it is our child");
        assert!(output.status.success(), "run {number}: {output:?}");
        assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), number.to_string());
    }
}

#[test]
fn images_do_not_grow_with_the_number_of_runs() {
    if !disks_are_images() {
        return;
    }
    let state = make_state_directory();
    let run = run().state(state.path());
    for _ in 0..15 {
        assert_eq!(run.run_shell("test ! -e /root/mark && echo x > /root/mark").code, Some(0));
    }
    let images = images(run.state_directory());
    // A device may be released a moment after its process has ended, and the next run then takes another image.
    assert!((1..=2).contains(&images.len()), "{images:?}");
    let taken: u64 = images.iter().map(|path| allocated_bytes(path)).sum();
    assert!(taken < 4 << 20, "images take {taken} bytes");
}
