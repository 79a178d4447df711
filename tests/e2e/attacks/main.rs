//! The attacker: one attack per name, run inside a sandbox, and outside to show that it works.
//!
//! `attacks NAME [ARGUMENT]...` tries one attack and reports the result: status 0 and `succeeded: ...`,
//! status 1 and `stopped: CALL: ERRNO`, or status 2 if it could not even be tried. With `--apart` before
//! the name, the process first enters its own mount namespace, so that an attack that succeeds outside does
//! no harm.
#![expect(unsafe_code, reason = "an attacker calls the kernel directly; `call` and `asm` do it")]
#![expect(clippy::print_stdout, reason = "the verdict is printed")]
#![expect(clippy::disallowed_methods, reason = "some attacks only wait")]

mod asm;
mod call;
mod devices;
mod exhaust;
mod files;
mod kernel;
mod launcher;
mod malicious_agent;
mod mount_namespace;
mod mounts;
mod processes;
mod serve;
mod sockets;
mod subvert;
mod verdict;

use std::process::ExitCode;

use verdict::{Attempt, Verdict};

fn main() -> ExitCode {
    let mut words: Vec<String> = std::env::args().skip(1).collect();
    if words.first().is_some_and(|word| word == "--apart") {
        words.remove(0);
        if let Err(error) = mount_namespace::enter_own_mount_namespace() {
            println!("broken: own mount namespace: {error}");
            return ExitCode::from(2);
        }
    }
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let (line, code) = format_verdict(&run_attack(&words));
    println!("{line}");
    ExitCode::from(code)
}

/// The line and the status that report the result of an attack.
fn format_verdict(attempt: &Attempt) -> (String, u8) {
    match attempt {
        Ok(Verdict::Succeeded(what)) => (format!("succeeded: {what}"), 0),
        Ok(Verdict::Stopped(why)) => (format!("stopped: {why}"), 1),
        Err(broken) => (format!("broken: {broken}"), 2),
    }
}

/// More than any machine has, in any unit.
const UNREACHABLE_AMOUNT: &str = "1000000000";

fn run_attack(words: &[&str]) -> Attempt {
    match *words {
        ["each", report, ref names @ ..] => subvert::try_each(report, names),
        ["subvert", pid, ref argv @ ..] => subvert::make_exec(pid, argv),

        ["read", path, token] => files::read(path, token),
        ["read-through-proc", path, token] => files::read_through_proc(path, token),
        ["read-through-descriptors", path, token] => files::read_through_descriptors(path, token),
        ["read-through-dots", path, token] => files::read_through_dots(path, token),
        ["read-through-symlink", path, token] => files::read_through_symlink(path, token),
        ["read-after-chroot", path, token] => files::read_after_chroot(path, token),
        ["read-by-handle", path, token] => files::read_by_handle(path, token),
        ["open", mode, path] => files::open(mode, path),
        ["write-file", directory] => files::write_file(directory),

        ["mount-tmpfs"] => mounts::mount_tmpfs(),
        ["mount-proc"] => mounts::mount_proc(),
        ["mount-by-descriptor"] => mounts::mount_by_descriptor(),
        ["remount-writable", path] => mounts::remount_writable(path),
        ["uncover", path] => mounts::uncover(path),
        ["mount-cgroup-release-agent"] => mounts::mount_cgroup_release_agent(),
        ["pivot-root"] => mounts::pivot_root(),
        ["join-namespaces", pid] => mounts::join_namespaces(pid),
        ["unshare", kind] => mounts::unshare(kind),
        ["clone-user-namespace"] => mounts::clone_user_namespace(),
        ["user-namespace-then-mount"] => mounts::user_namespace_then_mount(),

        ["trace", pid] => processes::trace(pid),
        ["read-memory", pid] => processes::read_memory(pid),
        ["steal-descriptor", pid] => processes::steal_descriptor(pid),
        ["signal", pid] => processes::signal(pid),
        ["find-process", text] => processes::find_process(text),
        ["overwrite-binary", pid] => processes::overwrite_binary(pid),
        ["become-root"] => processes::become_root(),
        ["raise-priority"] => processes::raise_priority(),
        ["raise-limit"] => processes::raise_limit(),

        ["socket", kind] => sockets::open(kind),
        ["socketpair", kind] => sockets::open_pair(kind),
        ["connect-unix", name] => sockets::connect_unix(name),
        ["connect-any-unix"] => sockets::connect_any_unix(),
        ["ask-launcher", socket, question] => launcher::ask_launcher(socket, question),
        ["plug-launcher", socket] => launcher::send_stalled_pipe(socket),
        ["lie", kind] => malicious_agent::send_false_messages(kind),
        ["connect-tcp", port] => sockets::connect_tcp(port),
        ["reconnect-tcp", port] => sockets::reconnect_tcp(port),
        ["serve", port] => serve::serve(port),

        ["init-module"] => kernel::init_module(),
        ["bpf"] => kernel::bpf(),
        ["add-key"] => kernel::add_key(),
        ["userfaultfd"] => kernel::userfaultfd(),
        ["io-uring"] => kernel::io_uring(),
        ["perf"] => kernel::perf(),
        ["kernel-log"] => kernel::kernel_log(),
        ["port-io"] => kernel::port_io(),
        ["i386-unshare"] => kernel::i386_unshare(),
        ["x32-unshare"] => kernel::x32_unshare(),
        ["set-clock"] => kernel::set_clock(),
        ["load-filter", way] => kernel::load_filter(way),
        ["see-page-cache", path] => kernel::see_page_cache(path),

        ["make-device", kind] => devices::make_device(kind),
        ["type-into-terminal"] => devices::type_into_terminal(devices::Width::Plain),
        ["type-into-terminal-wide"] => devices::type_into_terminal(devices::Width::HighBitSet),
        ["console-selection"] => devices::console_selection(),
        ["line-discipline"] => devices::line_discipline(),

        ["eat", "processes"] => exhaust::processes(),
        ["eat", "processes", enough] => exhaust::some_processes(enough),
        ["eat", "processor", processes] => exhaust::processor(processes),
        ["eat", "time"] => exhaust::time(),
        ["eat", "memory"] => exhaust::memory(UNREACHABLE_AMOUNT),
        ["eat", "memory", enough] => exhaust::memory(enough),
        ["eat", "refaults", path, mebibytes] => exhaust::refaults(path, mebibytes),
        ["eat", "descriptors"] => exhaust::descriptors(UNREACHABLE_AMOUNT),
        ["eat", "descriptors", enough] => exhaust::descriptors(enough),
        ["eat", "descriptors", each, processes] => exhaust::descriptors_of_processes(each, processes),
        ["eat", "files-in-flight", files] => exhaust::files_in_flight(files),
        ["eat", "terminals", enough] => exhaust::terminals(enough),
        ["eat", "watchers", enough] => exhaust::watchers(enough),
        ["eat", "inodes", directory] => exhaust::inodes(directory, UNREACHABLE_AMOUNT),
        ["eat", "inodes", directory, enough] => exhaust::inodes(directory, enough),
        ["eat", "disk", directory] => exhaust::disk(directory, UNREACHABLE_AMOUNT),
        ["eat", "disk", directory, enough] => exhaust::disk(directory, enough),
        ["eat", "disk-through-descriptors", bytes] => exhaust::disk_through_descriptors(bytes),
        ["flood", bytes] => exhaust::flood(bytes),
        ["daemon", seconds] => exhaust::daemon(seconds),
        _ => Err(format!("no such attack: {words:?}")),
    }
}
