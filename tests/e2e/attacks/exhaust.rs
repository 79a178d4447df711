//! Attacks that exhaust resources a sandbox shares with its host.
//!
//! Each attack takes until it is refused and reports how much it got. Given an amount, it succeeds once it
//! has that amount, so that it can be shown to work where no limit applies.

use std::fs::{self, File};
use std::io::{self, BufRead, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::call::{call, constant, pointer, pointer_mut, signed};
use crate::verdict::{Attempt, Verdict, refusal};

/// Forks without end. Each child forks too, so killing one has no effect.
pub(crate) fn processes() -> Attempt {
    const FORK_INTERVAL: Duration = Duration::from_secs(5);
    let mut made = 0_u64;
    let error = loop {
        match call(libc::SYS_fork, &[]) {
            Ok(_) => made += 1,
            Err(error) => break error,
        }
    };
    // This line signals to the observer that the limit is reached. The bomb then stays and takes every
    // process slot that becomes free, without using up the processor too: that is another attack.
    println!("stopped: {} after {made}", refusal("fork", &error));
    io::stdout().flush().map_err(|error| error.to_string())?;
    loop {
        std::thread::sleep(FORK_INTERVAL);
        call(libc::SYS_fork, &[]).ok();
    }
}

/// Starts that many processes, which end with this one.
pub(crate) fn some_processes(enough: &str) -> Attempt {
    let enough = number(enough)?;
    let mut made = Vec::new();
    let refused = loop {
        match Command::new("/proc/self/exe").args(["eat", "time"]).stdin(Stdio::piped()).spawn() {
            Ok(child) => made.push(child),
            Err(error) => break Some(error),
        }
        if made.len() as u64 == enough {
            break None;
        }
    };
    let count = made.len();
    for mut child in made {
        drop(child.stdin.take());
        child.wait().map_err(|error| error.to_string())?;
    }
    Ok(match refused {
        None => Verdict::Succeeded(format!("{count} processes")),
        Some(error) => Verdict::Stopped(format!("{} after {count}", refusal("fork", &error))),
    })
}

/// Forks that many processes, says so, and spins in all of them.
pub(crate) fn processor(processes: &str) -> Attempt {
    for _ in 1..number(processes)? {
        if call(libc::SYS_fork, &[]).map_err(|error| format!("fork: {error}"))? == 0 {
            spin();
        }
    }
    println!("spinning");
    io::stdout().flush().map_err(|error| error.to_string())?;
    spin()
}

fn spin() -> ! {
    loop {
        std::hint::spin_loop();
    }
}

/// Waits until standard input ends.
pub(crate) fn time() -> Attempt {
    io::copy(&mut io::stdin(), &mut io::sink()).map_err(|error| error.to_string())?;
    Ok(Verdict::Succeeded("it may end".to_owned()))
}

fn number(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_not_a_number| format!("{text} is no number"))
}

/// Touches memory until it is refused, the kernel ends this process, or it has the given number of MiB.
pub(crate) fn memory(enough: &str) -> Attempt {
    const PIECE: usize = 1 << 20;
    // The attacker's own code must stay in memory: if it did not fit beside the data, it would be read from
    // the disk again and again, which the kernel takes for progress and kills no process. Processes that
    // may not lock pages run that risk.
    call(libc::SYS_mlockall, &[constant(libc::MCL_CURRENT)]).ok();
    let enough = number(enough)?;
    let mut kept: Vec<Vec<u8>> = Vec::new();
    loop {
        if kept.len() as u64 == enough {
            return Ok(Verdict::Succeeded(format!("{enough} MiB")));
        }
        let mut piece = Vec::new();
        if piece.try_reserve_exact(PIECE).is_err() {
            return Ok(Verdict::Stopped(format!("malloc: ENOMEM after {} MiB", kept.len())));
        }
        piece.resize(PIECE, 1);
        kept.push(piece);
    }
}

/// Holds this many MiB of data and reads a file again and again, for which there is no room beside them. The kernel takes
/// that for progress.
pub(crate) fn refaults(path: &str, mebibytes: &str) -> Attempt {
    let count = usize::try_from(number(mebibytes)?).map_err(|_too_large| "too many".to_owned())?;
    let data = vec![1_u8; count << 20];
    println!("holding {} bytes", data.len());
    loop {
        let mut file = std::fs::File::open(path).map_err(|error| format!("open: {error}"))?;
        std::io::copy(&mut file, &mut std::io::sink()).map_err(|error| format!("read: {error}"))?;
        std::hint::black_box(&data);
    }
}

/// Opens files until it is refused, after raising the limit as far as possible.
pub(crate) fn descriptors(enough: &str) -> Attempt {
    let enough = number(enough)?;
    let kind = u64::from(libc::RLIMIT_NOFILE);
    let raise = |most: u64| call(libc::SYS_prlimit64, &[0, kind, pointer(&[most, most]), 0]);
    if raise(enough + 64).is_err() {
        raise(read_ceiling(kind)?).map_err(|error| error.to_string())?;
    }
    let mut kept = Vec::new();
    let verdict = loop {
        if kept.len() as u64 == enough {
            break Verdict::Succeeded(format!("{enough} descriptors"));
        }
        match File::open("/dev/null") {
            Ok(file) => kept.push(file),
            Err(error) => {
                break Verdict::Stopped(format!("{} after {}", refusal("open", &error), kept.len()));
            }
        }
    };
    if std::env::var_os(KEEP_UNTIL_END_OF_INPUT).is_some() {
        println!("{} files", kept.len());
        io::stdout().flush().map_err(|error| error.to_string())?;
        time()?;
    }
    Ok(verdict)
}

/// The variable that makes a process keep its files until its input ends.
const KEEP_UNTIL_END_OF_INPUT: &str = "ATTACKS_KEEP";

/// Opens that many files in each of that many processes, says how many all of them have, and keeps them until
/// its input ends.
pub(crate) fn descriptors_of_processes(each: &str, processes: &str) -> Attempt {
    let mut children = Vec::new();
    for _ in 0..number(processes)? {
        let mut child = Command::new("/proc/self/exe")
            .args(["eat", "descriptors", each])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .env(KEEP_UNTIL_END_OF_INPUT, "1")
            .spawn()
            .map_err(|error| refusal("fork", &error))?;
        let mut verdict = String::new();
        let output = child.stdout.take().ok_or("a pipe")?;
        io::BufReader::new(output).read_line(&mut verdict).map_err(|error| error.to_string())?;
        children.push((child, verdict));
    }
    println!("{}", children.first().map_or("", |(_, verdict)| verdict.trim()));
    println!("holding");
    io::stdout().flush().map_err(|error| error.to_string())?;
    time()?;
    Ok(Verdict::Succeeded(format!("{} processes kept their files", children.len())))
}

/// Sends files through sockets and never receives them, so that they are open without a descriptor. The kernel
/// allows each user only as many as a process may have descriptors, so it becomes another user for each few
/// hundred.
pub(crate) fn files_in_flight(files: &str) -> Attempt {
    const PER_USER: u64 = 500;
    let files = number(files)?;
    let mut sent = 0;
    let mut pairs = Vec::new();
    for uid in 1..=files.div_ceil(PER_USER) {
        let pair = UnixDatagram::pair().map_err(|error| error.to_string())?;
        let child = call(libc::SYS_fork, &[]).map_err(|error| refusal("fork", &error))?;
        if child == 0 {
            let code = match call(libc::SYS_setresuid, &[uid, uid, uid])
                .and_then(|_| send_files(&pair.0, PER_USER))
            {
                Ok(()) => 0,
                Err(_) => 1,
            };
            std::process::exit(code);
        }
        let mut status = 0_i32;
        call(libc::SYS_wait4, &[child, pointer_mut(&mut status), 0, 0]).map_err(|error| error.to_string())?;
        if status != 0 {
            return Ok(Verdict::Stopped(format!("sendmsg: refused after {sent}")));
        }
        sent += PER_USER;
        pairs.push(pair);
    }
    println!("holding {sent}");
    io::stdout().flush().map_err(|error| error.to_string())?;
    time()?;
    Ok(Verdict::Succeeded(format!("{sent} files without a descriptor")))
}

/// Sends new files, a hundred in each message.
fn send_files(socket: &UnixDatagram, files: u64) -> io::Result<()> {
    const PER_MESSAGE: usize = 100;
    #[repr(C)]
    struct Control {
        length: usize,
        level: i32,
        kind: i32,
        descriptors: [i32; PER_MESSAGE],
    }
    for _ in 0..files / PER_MESSAGE as u64 {
        let opened: Vec<File> =
            (0..PER_MESSAGE).map(|_| File::open("/dev/null")).collect::<io::Result<_>>()?;
        let mut control = Control {
            length: std::mem::size_of::<Control>(),
            level: libc::SOL_SOCKET,
            kind: libc::SCM_RIGHTS,
            descriptors: [0; PER_MESSAGE],
        };
        for (place, file) in control.descriptors.iter_mut().zip(&opened) {
            *place = file.as_raw_fd();
        }
        let byte = [0_u8; 1];
        let vector = [pointer(&byte), 1_u64];
        let header = [0, 0, pointer(&vector), 1, pointer(&control), std::mem::size_of::<Control>() as u64, 0];
        let socket = signed(i64::from(socket.as_raw_fd()));
        call(libc::SYS_sendmsg, &[socket, pointer(&header), 0])?;
    }
    Ok(())
}

/// Opens terminals until it is refused or has that many.
pub(crate) fn terminals(enough: &str) -> Attempt {
    take("terminals", "open", enough, || File::options().read(true).write(true).open("/dev/ptmx"))
}

/// Makes inotify instances until it is refused or has that many.
pub(crate) fn watchers(enough: &str) -> Attempt {
    take("inotify instances", "inotify_init1", enough, || call(libc::SYS_inotify_init1, &[0]))
}

/// Takes one after the other and keeps them.
fn take<T>(what: &str, operation: &str, enough: &str, one: impl Fn() -> io::Result<T>) -> Attempt {
    let enough = number(enough)?;
    let mut kept = Vec::new();
    while (kept.len() as u64) < enough {
        match one() {
            Ok(taken) => kept.push(taken),
            Err(error) => {
                return Ok(Verdict::Stopped(format!("{} after {}", refusal(operation, &error), kept.len())));
            }
        }
    }
    Ok(Verdict::Succeeded(format!("{enough} {what}")))
}

fn read_ceiling(kind: u64) -> Result<u64, String> {
    let mut limit = [0_u64; 2];
    call(libc::SYS_prlimit64, &[0, kind, 0, pointer_mut(&mut limit)]).map_err(|error| error.to_string())?;
    Ok(limit[1])
}

/// Makes empty files until it is refused. Their names are long, so that a filesystem that counts the bytes
/// of its directories refuses soon.
pub(crate) fn inodes(directory: &str, enough: &str) -> Attempt {
    let enough = number(enough)?;
    let place = Path::new(directory).join("inodes");
    fs::create_dir_all(&place).map_err(|error| error.to_string())?;
    for made in 0..enough {
        if let Err(error) = File::create(place.join(format!("{made:0>240}"))) {
            return Ok(Verdict::Stopped(format!("{} after {made}", refusal("create", &error))));
        }
    }
    Ok(Verdict::Succeeded(format!("{enough} empty files")))
}

/// Writes to one file until it is refused or the given number of MiB is written.
pub(crate) fn disk(directory: &str, enough: &str) -> Attempt {
    let enough = number(enough)? << 20;
    let block = vec![0x5a_u8; 1 << 20];
    let mut file = File::create(Path::new(directory).join("filler")).map_err(|error| error.to_string())?;
    let mut written = 0_u64;
    while written < enough {
        if let Err(error) = file.write_all(&block).and_then(|()| sometimes_sync(&file, written)) {
            return Ok(Verdict::Stopped(format!("{} after {} MiB", refusal("write", &error), written >> 20)));
        }
        written += block.len() as u64;
    }
    Ok(Verdict::Succeeded(format!("{} MiB", enough >> 20)))
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

/// Syncs now and then: some filesystems refuse only when the data is really allocated.
fn sometimes_sync(file: &File, written: u64) -> io::Result<()> {
    if written.is_multiple_of(32 << 20) { file.sync_data() } else { Ok(()) }
}

/// Prints the given number of bytes as fast as it can, in lines.
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

/// Leaves a child behind that has left its session, group and parent and ignores requests to end. It prints
/// its pid.
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
    Ok(Verdict::Succeeded("the process was not ended".to_owned()))
}
