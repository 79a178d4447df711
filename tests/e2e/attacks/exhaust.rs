//! Using up what a sandbox shares with its host. These know no success: they take until they
//! are refused, and say how much that was.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::time::Duration;

use crate::call::{call, constant, pointer_mut, signed};
use crate::verdict::{Attempt, Verdict, refusal};

/// Forks without end. Each child forks too, so killing one helps nobody.
pub(crate) fn processes() -> Attempt {
    let mut made = 0_u64;
    loop {
        match call(libc::SYS_fork, &[]) {
            Ok(_) => made += 1,
            Err(error) if made > 0 => {
                // The line tells the watcher that the limit is reached. The bomb then stays where
                // it is and takes every place that becomes free, without eating the processor
                // too: that is another attack.
                println!("stopped: {} after {made}", refusal("fork", &error));
                io::stdout().flush().map_err(|error| error.to_string())?;
                loop {
                    std::thread::park_timeout(Duration::from_secs(5));
                    call(libc::SYS_fork, &[]).ok();
                }
            }
            Err(error) => return Ok(Verdict::Stopped(refusal("fork", &error))),
        }
    }
}

/// Touches memory until it is refused or the kernel ends this process.
pub(crate) fn memory() -> Attempt {
    const PIECE: usize = 1 << 20;
    let mut kept: Vec<Vec<u8>> = Vec::new();
    loop {
        let mut piece = Vec::new();
        if piece.try_reserve_exact(PIECE).is_err() {
            return Ok(Verdict::Stopped(format!("malloc: ENOMEM after {} MiB", kept.len())));
        }
        piece.resize(PIECE, 1);
        kept.push(piece);
    }
}

/// Opens files until it is refused.
pub(crate) fn descriptors() -> Attempt {
    let mut kept = Vec::new();
    loop {
        match File::open("/dev/null") {
            Ok(file) => kept.push(file),
            Err(error) => {
                return Ok(Verdict::Stopped(format!("{} after {}", refusal("open", &error), kept.len())));
            }
        }
    }
}

/// Makes empty files until it is refused.
pub(crate) fn inodes(directory: &str) -> Attempt {
    const ENOUGH: u64 = 10_000_000;
    let place = Path::new(directory).join("inodes");
    fs::create_dir_all(&place).map_err(|error| error.to_string())?;
    for made in 0..ENOUGH {
        if let Err(error) = File::create(place.join(made.to_string())) {
            return Ok(Verdict::Stopped(format!("{} after {made}", refusal("create", &error))));
        }
    }
    Ok(Verdict::Succeeded(format!("{ENOUGH} empty files")))
}

/// Writes to one file until it is refused.
pub(crate) fn disk(directory: &str) -> Attempt {
    const ENOUGH: u64 = 64 << 30;
    let block = vec![0x5a_u8; 1 << 20];
    let mut file = File::create(Path::new(directory).join("filler")).map_err(|error| error.to_string())?;
    let mut written = 0_u64;
    while written < ENOUGH {
        if let Err(error) = file.write_all(&block).and_then(|()| sometimes_sync(&file, written)) {
            return Ok(Verdict::Stopped(format!("{} after {} MiB", refusal("write", &error), written >> 20)));
        }
        written += block.len() as u64;
    }
    Ok(Verdict::Succeeded(format!("{} GiB", ENOUGH >> 30)))
}

/// Writes through every open directory, such as one that lies outside the sandbox's root.
pub(crate) fn disk_through_descriptors(bytes: &str) -> Attempt {
    let enough: u64 = bytes.parse().map_err(|_not_a_number| format!("{bytes} is no number"))?;
    let block = vec![0x5a_u8; 1 << 20];
    let mut written = 0;
    for entry in fs::read_dir("/proc/self/fd").map_err(|error| error.to_string())?.flatten() {
        let Ok(mut file) = File::create(entry.path().join("filler")) else { continue };
        while written < enough && file.write_all(&block).and_then(|()| sometimes_sync(&file, written)).is_ok()
        {
            written += block.len() as u64;
        }
    }
    if written >= enough {
        return Ok(Verdict::Succeeded(format!("{written} bytes")));
    }
    Ok(Verdict::Stopped(format!("write: refused after {} MiB", written >> 20)))
}

/// Some filesystems refuse only when the data is really placed.
fn sometimes_sync(file: &File, written: u64) -> io::Result<()> {
    if written.is_multiple_of(32 << 20) { file.sync_data() } else { Ok(()) }
}

/// Prints that many bytes as fast as it can, in lines.
pub(crate) fn flood(bytes: &str) -> Attempt {
    let mut left: usize = bytes.parse().map_err(|_not_a_number| format!("{bytes} is no number"))?;
    let mut block = [b'f'; 65_536];
    for end in block.iter_mut().skip(127).step_by(128) {
        *end = b'\n';
    }
    let mut out = io::stdout().lock();
    while left > 0 {
        let now = left.min(block.len());
        out.write_all(&block[..now]).map_err(|error| error.to_string())?;
        left -= now;
    }
    Ok(Verdict::Succeeded("all was taken".to_owned()))
}

/// Leaves a child behind that has left its session, its group and its parent, and ignores
/// being asked to end. It prints its pid.
pub(crate) fn daemon(seconds: &str) -> Attempt {
    let seconds: u64 = seconds.parse().map_err(|_not_a_number| format!("{seconds} is no number"))?;
    let forked = |result: io::Result<u64>| result.map_err(|error| format!("fork: {error}"));
    if forked(call(libc::SYS_fork, &[]))? == 0 {
        call(libc::SYS_setsid, &[]).map_err(|error| error.to_string())?;
        if forked(call(libc::SYS_fork, &[]))? == 0 {
            let mut ignored = [constant(libc::SIGTERM), 0];
            call(libc::SYS_rt_sigprocmask, &[0, pointer_mut(&mut ignored), 0, 8])
                .map_err(|error| error.to_string())?;
            println!("daemon {}", std::process::id());
            std::thread::sleep(Duration::from_secs(seconds));
        }
        std::process::exit(0);
    }
    let mut status = 0_i32;
    call(libc::SYS_wait4, &[signed(-1), pointer_mut(&mut status), 0, 0])
        .map_err(|error| error.to_string())?;
    std::thread::sleep(Duration::from_secs(seconds));
    Ok(Verdict::Succeeded("nobody ended it".to_owned()))
}
