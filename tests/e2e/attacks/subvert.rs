//! Puts one of our processes, an agent or a server, under the attacker's control.
//!
//! Host root stops it by ptrace and makes it execute the attacker's program instead of its own. That
//! program then has exactly what a subverted process would have: its ids, capabilities, filter, groups,
//! descriptors and, for an agent, its position as pid 1. The product needs no test hook for this.
//!
//! A process whose filter forbids to execute programs is traced with its filter suspended until it has executed this
//! one; an attacker would inject code instead. From then on the filter is in force again.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::call::{call, constant, pointer, pointer_mut, signed};
use crate::verdict::{Attempt, Verdict};

/// Tries each attack in its own process and writes `NAME: VERDICT` lines to a file. An attack's arguments
/// follow its name after colons.
pub(crate) fn try_each(report: &str, attacks: &[&str]) -> Attempt {
    let place = Path::new(report).parent().unwrap_or(Path::new("/")).to_owned();
    let mut report = OpenOptions::new()
        .create(true)
        .append(true)
        .open(report)
        .map_err(|error| format!("open report: {error}"))?;
    let own = fs::read_link("/proc/self/exe")
        .unwrap_or_else(|_unreadable| std::env::args().next().unwrap_or_default().into());
    for attack in attacks {
        // Not every victim may open the null device, or write to the usual directory for temporary files.
        let mut command = Command::new(&own);
        command.args(attack.split(':')).env("TMPDIR", &place).stdin(Stdio::inherit());
        let verdict = match command.output() {
            Ok(output) => String::from_utf8_lossy(&output.stdout).trim().to_owned(),
            // The victim may start no process, so the attack runs in this one.
            Err(error) if error.raw_os_error() == Some(libc::EPERM) => {
                crate::format_verdict(&crate::run_attack(&attack.split(':').collect::<Vec<_>>())).0
            }
            Err(error) => format!("broken: {error}"),
        };
        writeln!(report, "{attack} {verdict}").map_err(|error| error.to_string())?;
    }
    writeln!(report, "done").map_err(|error| error.to_string())?;
    if std::process::id() == 1 {
        // The sandbox ends with its first process, and the report with the sandbox.
        std::thread::sleep(Duration::from_secs(600));
    }
    Ok(Verdict::Succeeded("all were tried".to_owned()))
}

const ATTACH: i64 = 16;
const DETACH: i64 = 17;
const SINGLE_STEP: i64 = 9;
const GET_REGISTERS: i64 = 12;
const SET_REGISTERS: i64 = 13;
const SET_OPTIONS: i64 = 0x4200;

/// Options: stop after an exec, and do not apply the filter while traced.
const TRACE_EXEC: u64 = 0x10;
const SUSPEND_FILTER: u64 = 1 << 21;
/// The status of a process that stopped after an exec, without its lowest byte.
const STOPPED_AFTER_EXEC: i32 = libc::SIGTRAP | 4 << 8;

/// The relevant registers, by their index in `user_regs_struct` of x86-64.
const RAX: usize = 10;
const RDX: usize = 12;
const RSI: usize = 13;
const RDI: usize = 14;
const ORIG_RAX: usize = 15;
const RIP: usize = 16;
const RSP: usize = 19;

type Registers = [u64; 27];

/// Makes process `pid` execute `argv`, as itself and with every descriptor it has.
pub(crate) fn make_exec(pid: &str, argv: &[&str]) -> Attempt {
    let pid: u64 = pid.parse().map_err(|_not_a_number| format!("{pid} is no pid"))?;
    match take_over(pid, argv) {
        Ok(()) => Ok(Verdict::Succeeded("it executes our program".to_owned())),
        Err(error) => Err(format!("it could not be taken over: {error}")),
    }
}

fn take_over(pid: u64, argv: &[&str]) -> io::Result<()> {
    let registers = stop_in_a_call(pid)?;
    ptrace(SET_OPTIONS, pid, TRACE_EXEC | SUSPEND_FILTER)?;
    for descriptor in descriptors(pid)? {
        let keep = [descriptor, constant(libc::F_SETFD), 0];
        step(pid, &registers, libc::SYS_fcntl, keep)?;
    }
    // Not every victim may write to the usual directory for temporary files.
    let place = Path::new(argv[0]).parent().unwrap_or(Path::new("/"));
    let environment = format!("TMPDIR={}", place.display());
    let StackImage { bytes, address, arguments, environment } =
        stack_image(registers[RSP], argv, &environment);
    memory(pid)?.write_all_at(&bytes, address)?;
    set_call(pid, &registers, libc::SYS_execve, [address, arguments, environment])?;
    ptrace(SINGLE_STEP, pid, 0)?;
    let status = wait_for_stop(pid)?;
    if status >> 8 != STOPPED_AFTER_EXEC {
        return Err(io::Error::other("it did not execute the program"));
    }
    ptrace(DETACH, pid, 0)
}

/// Stops the process while it waits in a system call, and returns its registers, set back to the
/// `syscall` instruction.
fn stop_in_a_call(pid: u64) -> io::Result<Registers> {
    const SYSCALL: [u8; 2] = [0x0f, 0x05];
    for _ in 0..100 {
        ptrace(ATTACH, pid, 0)?;
        wait_for_stop(pid)?;
        let mut registers: Registers = [0; 27];
        ptrace(GET_REGISTERS, pid, pointer_mut(&mut registers))?;
        registers[RIP] -= 2;
        let mut instruction = [0_u8; 2];
        memory(pid)?.read_exact_at(&mut instruction, registers[RIP])?;
        if instruction == SYSCALL {
            return Ok(registers);
        }
        ptrace(DETACH, pid, 0)?;
        std::thread::sleep(Duration::from_millis(10));
    }
    Err(io::Error::other("it never waits"))
}

/// Makes the stopped process execute one system call.
fn step(pid: u64, registers: &Registers, number: i64, arguments: [u64; 3]) -> io::Result<()> {
    set_call(pid, registers, number, arguments)?;
    ptrace(SINGLE_STEP, pid, 0)?;
    wait_for_stop(pid).map(drop)
}

fn set_call(pid: u64, registers: &Registers, number: i64, arguments: [u64; 3]) -> io::Result<()> {
    let mut registers = *registers;
    registers[RAX] = signed(number);
    [registers[RDI], registers[RSI], registers[RDX]] = arguments;
    // The interrupted call must not be restarted.
    registers[ORIG_RAX] = signed(-1);
    ptrace(SET_REGISTERS, pid, pointer(&registers))
}

/// Waits until the process stops, and returns its status.
fn wait_for_stop(pid: u64) -> io::Result<i32> {
    let mut status = 0_i32;
    call(libc::SYS_wait4, &[pid, pointer_mut(&mut status), constant(libc::__WALL), 0])?;
    if libc::WIFSTOPPED(status) { Ok(status) } else { Err(io::Error::other("it ended")) }
}

fn descriptors(pid: u64) -> io::Result<Vec<u64>> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd"))?;
    Ok(entries.flatten().filter_map(|entry| entry.file_name().to_string_lossy().parse().ok()).collect())
}

/// The words of an exec and the lists of pointers to them, for memory below the end of the stack.
struct StackImage {
    bytes: Vec<u8>,
    /// The address of the bytes, and of the first word.
    address: u64,
    /// The addresses of the lists.
    arguments: u64,
    environment: u64,
}

fn stack_image(stack: u64, argv: &[&str], variable: &str) -> StackImage {
    let mut bytes = Vec::new();
    let address = (stack - 16_384) & !0xf;
    let mut pointers = Vec::new();
    for word in argv.iter().chain([&variable]) {
        pointers.push(address + bytes.len() as u64);
        bytes.extend_from_slice(word.as_bytes());
        bytes.push(0);
    }
    bytes.resize(bytes.len().next_multiple_of(8), 0);
    let arguments = address + bytes.len() as u64;
    let environment = arguments + 8 * (argv.len() as u64 + 1);
    let (words, variables) = pointers.split_at(argv.len());
    for pointer in words.iter().chain([&0]).chain(variables).chain([&0]) {
        bytes.extend_from_slice(&pointer.to_ne_bytes());
    }
    StackImage { bytes, address, arguments, environment }
}

fn ptrace(request: i64, pid: u64, data: u64) -> io::Result<()> {
    call(libc::SYS_ptrace, &[signed(request), pid, 0, data]).map(drop)
}

fn memory(pid: u64) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(format!("/proc/{pid}/mem"))
}
