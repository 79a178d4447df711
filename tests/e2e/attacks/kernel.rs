//! Parts of the kernel with a history of vulnerabilities, and entries that filters overlook.

use std::ffi::c_long;
use std::fs;
use std::os::fd::AsRawFd;

use crate::asm;
use crate::call::{call, constant, pointer, pointer_mut, signed, text};
use crate::verdict::{Attempt, decide, decide_permitted, first_success};

/// The number of cachestat(2), which the C library does not know yet.
const SYS_CACHESTAT: c_long = 451;

/// Loads something that is not a module: a kernel that complains about its contents would have loaded a
/// real one.
pub(crate) fn init_module() -> Attempt {
    let image = [0_u8; 64];
    let options = text("");
    let loaded = call(libc::SYS_init_module, &[pointer(&image), 64, pointer(options.as_c_str())]);
    decide_permitted("init_module", loaded, &[libc::ENOEXEC])
}

pub(crate) fn bpf() -> Attempt {
    const MAP_CREATE: u64 = 0;
    const ARRAY: u32 = 2;
    let mut attributes = [0_u32; 32];
    attributes[..4].copy_from_slice(&[ARRAY, 4, 4, 1]);
    decide("bpf", call(libc::SYS_bpf, &[MAP_CREATE, pointer(&attributes), 128]))
}

/// The kernel's keyrings are not separated by namespaces.
pub(crate) fn add_key() -> Attempt {
    const PROCESS_KEYRING: i64 = -2;
    let (kind, name, secret) = (text("user"), text("attack"), [1_u8; 4]);
    let added = call(
        libc::SYS_add_key,
        &[pointer(kind.as_c_str()), pointer(name.as_c_str()), pointer(&secret), 4, signed(PROCESS_KEYRING)],
    );
    decide("add_key", added)
}

pub(crate) fn userfaultfd() -> Attempt {
    decide("userfaultfd", call(libc::SYS_userfaultfd, &[0]))
}

pub(crate) fn io_uring() -> Attempt {
    let mut parameters = [0_u32; 30];
    decide("io_uring_setup", call(libc::SYS_io_uring_setup, &[2, pointer_mut(&mut parameters)]))
}

pub(crate) fn perf() -> Attempt {
    const SOFTWARE: u32 = 1;
    let mut attributes = [0_u32; 32];
    attributes[0] = SOFTWARE;
    attributes[1] = 128;
    decide(
        "perf_event_open",
        call(libc::SYS_perf_event_open, &[pointer(&attributes), 0, signed(-1), signed(-1), 0]),
    )
}

/// Reads the kernel's log, which contains addresses and other users' processes.
pub(crate) fn kernel_log() -> Attempt {
    const READ_ALL: u64 = 3;
    let mut buffer = vec![0_u8; 4096];
    decide("syslog", call(libc::SYS_syslog, &[READ_ALL, pointer_mut(buffer.as_mut_slice()), 4096]))
}

/// Asks for the processor's input and output instructions, and uses one.
pub(crate) fn port_io() -> Attempt {
    const POST_CODE: u16 = 0x80;
    let allowed = call(libc::SYS_ioperm, &[u64::from(POST_CODE), 1, 1]).map(|_| asm::read_port(POST_CODE));
    decide("ioperm", allowed)
}

/// The i386 entry numbers its calls differently: a filter that looks at numbers alone sees
/// something harmless.
pub(crate) fn i386_unshare() -> Attempt {
    const UNSHARE: u32 = 310;
    let namespace = u32::try_from(libc::CLONE_NEWNS).map_err(|error| error.to_string())?;
    decide("i386 unshare", asm::i386(UNSHARE, namespace))
}

/// The same for the x32 numbers, which use the normal entry.
pub(crate) fn x32_unshare() -> Attempt {
    const X32: i64 = 0x4000_0000;
    decide("x32 unshare", call(X32 | libc::SYS_unshare, &[constant(libc::CLONE_NEWNS)]))
}

/// Sets the length of the host's tick to its present value.
pub(crate) fn set_clock() -> Attempt {
    const TICK: u32 = 0x4000;
    // `struct timex`: the mode is its first word, the tick lies further on.
    let mut clock = [0_u64; 32];
    let set = call(libc::SYS_adjtimex, &[pointer_mut(&mut clock)]).and_then(|_| {
        clock[0] = u64::from(TICK);
        call(libc::SYS_adjtimex, &[pointer_mut(&mut clock)])
    });
    decide("adjtimex", set)
}

/// Loads a filter that allows everything. Its compiled code is counted only for the whole host.
pub(crate) fn load_filter(way: &str) -> Attempt {
    const ALLOW: libc::sock_filter =
        libc::sock_filter { code: 0x06, jt: 0, jf: 0, k: libc::SECCOMP_RET_ALLOW };
    let mut instructions = [ALLOW];
    let program = libc::sock_fprog { len: 1, filter: instructions.as_mut_ptr() };
    let no_new_privs = [constant(libc::PR_SET_NO_NEW_PRIVS), 1];
    call(libc::SYS_prctl, &no_new_privs).map_err(|error| format!("no_new_privs: {error}"))?;
    let mode = constant(libc::SECCOMP_SET_MODE_FILTER);
    match way {
        "seccomp" => decide("seccomp", call(libc::SYS_seccomp, &[mode, 0, pointer(&program)])),
        "prctl" => {
            let filter = constant(libc::SECCOMP_MODE_FILTER);
            let words = [constant(libc::PR_SET_SECCOMP), filter, pointer(&program)];
            decide("prctl", call(libc::SYS_prctl, &words))
        }
        _ => Err(format!("no such way: {way}")),
    }
}

/// Asks which pages of a file are in memory because someone has read them.
pub(crate) fn see_page_cache(path: &str) -> Attempt {
    const PAGE: u64 = 4096;
    let file = fs::File::open(path).map_err(|error| format!("{path}: {error}"))?;
    let fd = signed(i64::from(file.as_raw_fd()));
    let readable = [0, PAGE, constant(libc::PROT_READ), constant(libc::MAP_PRIVATE), fd, 0];
    let mapped = call(libc::SYS_mmap, &readable).map_err(|error| format!("mmap: {error}"))?;
    let mut resident = 0_u8;
    let seen = call(libc::SYS_mincore, &[mapped, PAGE, pointer_mut(&mut resident)]);
    let range = [0_u64, PAGE];
    let mut counts = [0_u64; 5];
    let counted = call(SYS_CACHESTAT, &[fd, pointer(&range), pointer_mut(&mut counts), 0]);
    first_success([("mincore".to_owned(), seen), ("cachestat".to_owned(), counted)])
}
