//! Builds the programs that `coracle` contains: the agent, and in a release the client.
//!
//! They are built by further runs of cargo in a directory of their own below the target directory, which all
//! profiles share. They always have the profile `embedded`: a debug build of `coracle` contains the same agent
//! as a release.

use std::env;
use std::fs::{self, File};
use std::os::unix::process::parent_id;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The files that decide how the programs are built.
const BUILD_FILES: [&str; 3] = ["Cargo.toml", "Cargo.lock", ".cargo/config.toml"];

/// A program, and the crates of ours that it consists of.
struct EmbeddedProgram {
    package: &'static str,
    binary: &'static str,
    arguments: &'static [&'static str],
    crates: &'static [&'static str],
}

const AGENT: EmbeddedProgram = EmbeddedProgram {
    package: "coracle-agent",
    binary: "coracle-agent",
    arguments: &[],
    crates: &["agent", "linux", "wire"],
};

/// The client commands of `coracle` alone.
const CLIENT: EmbeddedProgram = EmbeddedProgram {
    package: "coracle-cli",
    binary: "coracle",
    arguments: &["--no-default-features"],
    crates: &["cli", "client", "domain", "linux"],
};

fn main() {
    println!("cargo::rustc-check-cfg=cfg(client_program)");
    let features = env::var("CARGO_CFG_TARGET_FEATURE").unwrap_or_default();
    assert!(
        features.split(',').any(|feature| feature == "crt-static"),
        "sandboxes need static programs: build with `-C target-feature=+crt-static`, as .cargo/config.toml does"
    );
    let root = env_path("CARGO_MANIFEST_DIR").join("../..");
    for file in BUILD_FILES {
        println!("cargo::rerun-if-changed={}", root.join(file).display());
    }
    println!("cargo::rustc-env=CORACLE_AGENT_PROGRAM={}", AGENT.build(&root).display());
    if contains_client() {
        println!("cargo::rustc-env=CORACLE_CLIENT_PROGRAM={}", CLIENT.build(&root).display());
        println!("cargo::rustc-cfg=client_program");
        // Read by the build script of `coracle`.
        println!("cargo::metadata=entry=coracle_entry");
    }
}

/// Whether the client is built. It is only about speed, so debug builds go without it; its entry is written for
/// one processor.
fn contains_client() -> bool {
    env_text("PROFILE") == "release" && env_text("CARGO_CFG_TARGET_ARCH") == "x86_64"
}

impl EmbeddedProgram {
    fn build(&self, root: &Path) -> PathBuf {
        for name in self.crates {
            for part in ["src", "Cargo.toml"] {
                let path = root.join("crates").join(name).join(part);
                println!("cargo::rerun-if-changed={}", path.display());
            }
        }
        let target = program_target();
        let directory = shared_target_dir().join("embedded");
        // Another build with other flags would replace the program before it is copied.
        let lock = directory.with_extension("lock");
        let lock = File::create(&lock).unwrap_or_else(|error| panic!("{}: {error}", lock.display()));
        lock.lock().expect("a file can be locked");
        let mut cargo = Command::new(env_path("CARGO"));
        cargo
            .current_dir(root)
            .args(["build", "--locked", "--profile", "embedded", "--package", self.package])
            .args(["--bin", self.binary, "--target", &target])
            .args(self.arguments)
            .arg("--target-dir")
            .arg(&directory);
        if builds_offline() {
            cargo.arg("--offline");
        }
        // Of the variables that cargo sets for this script, only those about the whole build hold there.
        let of_this_package = ["CARGO_FEATURE_", "CARGO_CFG_", "CARGO_PKG_", "CARGO_MANIFEST_", "DEP_"];
        for (name, _) in env::vars_os() {
            let text = name.to_string_lossy();
            if of_this_package.iter().any(|prefix| text.starts_with(prefix)) {
                cargo.env_remove(&name);
            }
        }
        // Lints are checked where the package itself is built.
        cargo.env_remove("RUSTC_WORKSPACE_WRAPPER");
        let status = cargo.status().expect("cargo runs");
        assert!(status.success(), "could not build `{}`", self.binary);
        let built = directory.join(target).join("embedded").join(self.binary);
        let copy = env_path("OUT_DIR").join(self.binary);
        fs::copy(&built, &copy).unwrap_or_else(|error| panic!("{}: {error}", built.display()));
        copy
    }
}

/// The target of the programs. With musl they start faster: at every start, glibc asks the processor dozens of
/// times for its features and caches, and each answer is slow in a virtual machine.
fn program_target() -> String {
    let target = env_text("TARGET");
    if target != env_text("HOST") {
        // A user who builds for another machine has set up a linker for that target alone.
        return target;
    }
    let musl = target.replace("-gnu", "-musl");
    let printed = Command::new(env_path("RUSTC")).args(["--print", "sysroot"]).output().expect("rustc runs");
    let root = String::from_utf8(printed.stdout).expect("the directory of rustc is UTF-8");
    let targets = Path::new(root.trim_end()).join("lib/rustlib");
    // A target that is added later is used by the next build.
    println!("cargo::rerun-if-changed={}", targets.display());
    if targets.join(&musl).join("lib").exists() {
        return musl;
    }
    println!("cargo::warning=sandboxes start slower without musl; `rustup target add {musl}` installs it");
    target
}

/// Whether the cargo that runs this script may not use the network. It passes a setting of its configuration or
/// environment on, but not its own flags, so these are read from its command line.
fn builds_offline() -> bool {
    let path = format!("/proc/{}/cmdline", parent_id());
    let line = fs::read(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
    // Behind `--` are arguments of the program that cargo runs.
    let mut flags = line.split(|byte| *byte == 0).take_while(|argument| *argument != b"--");
    flags.any(|argument| argument == b"--offline" || argument == b"--frozen")
}

/// The target directory, which contains the output directory of this script. Cargo marks it with a file.
fn shared_target_dir() -> PathBuf {
    let out = env_path("OUT_DIR");
    let mut marked = out.ancestors().filter(|directory| directory.join("CACHEDIR.TAG").exists());
    marked.next().map_or_else(|| out.clone(), Path::to_owned)
}

fn env_text(name: &str) -> String {
    env::var(name).unwrap_or_else(|_| panic!("cargo sets {name}"))
}

fn env_path(name: &str) -> PathBuf {
    env_text(name).into()
}
