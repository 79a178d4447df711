//! A command whose every detail is resolved before the fork.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::os::fd::{AsRawFd, OwnedFd};

use linux::spawn::ExecStrings;
use rustix::fs::{Access, MemfdFlags};
use wire::isolated_session::EnvFilter;
use wire::process::{self, MissingDirectory, UserIdentity, WorkingDirectory};
use wire::{AgentConfig, Fault, FaultKind};

use crate::fault;
use crate::identity::ResolvedUser;
use crate::isolation::env_filter;
use crate::isolation::limit_view::THREADS_VARIABLE;
use crate::path::{self, expand_path};
use crate::process::envfile;

const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Longer text may not fit in one argument of execve(2), whose limit is 128 KiB.
const MAX_ARGUMENT_BYTES: usize = 100 << 10;

/// Everything a child needs to become the command.
#[derive(Debug)]
pub(crate) struct PreparedCommand {
    pub(crate) user: ResolvedUser,
    pub(crate) program: ExecProgram,
    pub(crate) arguments: ExecStrings,
    pub(crate) environment: ExecStrings,
    pub(crate) directory: ResolvedDirectory,
    /// Stay open in the command under their present numbers.
    pub(crate) inherited_fds: Vec<OwnedFd>,
    /// Get the numbers 3, 4, … in the command. Here they have higher numbers.
    pub(crate) numbered_fds: Vec<OwnedFd>,
    /// For messages.
    pub(crate) program_name: String,
    /// The variables that only the child can look up.
    env_file_inputs: Option<EnvFileInputs>,
}

/// The environment of a command in a sandbox with an env file.
#[derive(Debug)]
struct EnvFileInputs {
    file: CString,
    base: BTreeMap<String, String>,
    own: BTreeMap<String, String>,
    screen: Option<EnvFilter>,
}

/// The paths where a program may be, and its environment.
#[derive(Debug)]
pub(crate) struct ResolvedProgram {
    pub(crate) programs: Vec<CString>,
    pub(crate) environment: ExecStrings,
    /// The working directory, if it was not known before.
    pub(crate) directory: Option<CString>,
}

impl ResolvedProgram {
    fn new(name: &str, env: &BTreeMap<String, String>) -> Result<Self, Fault> {
        let path = env.get("PATH").map_or(DEFAULT_PATH, String::as_str);
        let assignments = env.iter().map(|(name, value)| c_string(&format!("{name}={value}")));
        let environment = ExecStrings::new(assignments.collect::<Result<_, _>>()?);
        Ok(Self { programs: program_candidates(name, path)?, environment, directory: None })
    }
}

/// The program to execute.
#[derive(Debug)]
pub(crate) enum ExecProgram {
    /// Tried in this order.
    Paths(Vec<CString>),
    /// The agent's own executable.
    Own,
}

/// The directory where the command starts.
#[derive(Debug)]
pub(crate) struct ResolvedDirectory {
    /// Resolved as far as possible without the env file.
    pub(crate) path: CString,
    pub(crate) missing: MissingDirectory,
    pub(crate) fallback: CString,
    /// For messages.
    pub(crate) display_path: String,
    unresolved: Option<UnresolvedDirectory>,
}

/// A directory that depends on variables of the env file.
#[derive(Debug)]
struct UnresolvedDirectory {
    directory: WorkingDirectory,
    base: String,
}

/// The environment that all commands of one identity share.
#[derive(Debug)]
pub(crate) struct ExecEnvironment {
    pub(crate) user: ResolvedUser,
    pub(crate) env: BTreeMap<String, String>,
    pub(crate) workdir: ResolvedDirectory,
    /// The request's own variables, which override those of a file.
    own: BTreeMap<String, String>,
    env_file_inputs: Option<EnvFileInputs>,
}

impl ExecEnvironment {
    pub(crate) fn new(
        config: &AgentConfig,
        identity: &UserIdentity,
        env: &BTreeMap<String, String>,
        directory: Option<&WorkingDirectory>,
    ) -> Result<Self, Fault> {
        Self::with_base(config, identity, env, directory, &config.default_directory)
    }

    /// Like [`ExecEnvironment::new`]; a relative directory starts at `base`.
    pub(crate) fn with_base(
        config: &AgentConfig,
        identity: &UserIdentity,
        env: &BTreeMap<String, String>,
        directory: Option<&WorkingDirectory>,
        base: &str,
    ) -> Result<Self, Fault> {
        let who = ResolvedUser::find(config, identity)?;
        let account = account_env(config, &who);
        let mut all = account.clone();
        all.extend(env.iter().map(|(name, value)| (name.clone(), value.clone())));
        if let Some(wrong) = all.keys().find(|name| name.is_empty() || name.contains('=')) {
            return Err(fault::from_kind(FaultKind::Invalid, "set variable", wrong));
        }
        let workdir = ResolvedDirectory::new(config, &all, directory, base)?;
        let file = config.env_file.as_ref().map(|path| {
            let path =
                WorkingDirectory { path: path.clone(), missing: MissingDirectory::Ignore, expand: false };
            c_string(&expand_path(&config.default_directory, &account, &path))
        });
        let own = env.clone();
        let late = file.transpose()?;
        let late = late.map(|file| EnvFileInputs { file, base: account, own: own.clone(), screen: None });
        Ok(Self { user: who, env: all, workdir, own, env_file_inputs: late })
    }

    /// Removes the variables that the filter does not let through. The request's own variables
    /// stay.
    pub(crate) fn filter_variables(&mut self, filter: &EnvFilter) -> Result<(), Fault> {
        let passes = env_filter::compile_filter(filter)?;
        let own = &self.own;
        self.env.retain(|name, _| own.contains_key(name) || passes(name));
        if let Some(late) = &mut self.env_file_inputs {
            late.base.retain(|name, _| passes(name));
            late.screen = Some(filter.clone());
        }
        Ok(())
    }

    /// Sets a variable unless it is set already.
    pub(crate) fn set_default_variable(&mut self, name: &str, value: &str) {
        self.env.entry(name.to_owned()).or_insert_with(|| value.to_owned());
        if let Some(late) = &mut self.env_file_inputs {
            late.base.entry(name.to_owned()).or_insert_with(|| value.to_owned());
        }
    }
}

impl PreparedCommand {
    pub(crate) fn new(config: &AgentConfig, start: &process::StartProcess) -> Result<Self, Fault> {
        let mut environment =
            ExecEnvironment::new(config, &start.identity, &start.env, start.directory.as_ref())?;
        if start.terminal.is_some() {
            environment.set_default_variable("TERM", "xterm-256color");
        }
        match &start.command {
            process::CommandLine::Argv(words) => Self::from_words(environment, words, Vec::new()),
            process::CommandLine::Shell { text, login } => Self::from_shell(environment, text, *login),
        }
    }

    pub(crate) fn from_words(
        environment: ExecEnvironment,
        words: &[String],
        kept: Vec<OwnedFd>,
    ) -> Result<Self, Fault> {
        let Some(name) = words.first().filter(|name| !name.is_empty()) else {
            return Err(fault::from_kind(FaultKind::Invalid, "start", "an empty command"));
        };
        let ExecEnvironment { user: who, env, workdir, env_file_inputs: late, .. } = environment;
        let ResolvedProgram { programs, environment, .. } = ResolvedProgram::new(name, &env)?;
        Ok(Self {
            user: who,
            program: ExecProgram::Paths(programs),
            arguments: ExecStrings::new(words.iter().map(|word| c_string(word)).collect::<Result<_, _>>()?),
            environment,
            directory: workdir,
            inherited_fds: kept,
            numbered_fds: Vec::new(),
            program_name: name.clone(),
            env_file_inputs: late,
        })
    }

    /// A kernel, with its two private pipes at descriptors 3 and 4.
    pub(crate) fn from_kernel(
        environment: ExecEnvironment,
        program: &process::KernelProgram,
        pipes: [OwnedFd; 2],
    ) -> Result<Self, Fault> {
        let command = match program {
            process::KernelProgram::Argv(words) => Self::from_words(environment, words, Vec::new())?,
            process::KernelProgram::Own(words) => {
                let words: Vec<String> = std::iter::once("coracle".to_owned()).chain(words.clone()).collect();
                Self { program: ExecProgram::Own, ..Self::from_words(environment, &words, Vec::new())? }
            }
            process::KernelProgram::Shell => {
                return Err(fault::from_kind(FaultKind::Invalid, "start", "a shell"));
            }
        };
        Ok(Self { numbered_fds: pipes.into(), ..command })
    }

    /// Adds the variables of the sandbox's env file. Called by the child, after all steps but the
    /// exec.
    pub(crate) fn resolve_with_env_file(&self) -> Option<ResolvedProgram> {
        let EnvFileInputs { file, base, own, screen } = self.env_file_inputs.as_ref()?;
        let mut variables = envfile::read_env_file(file, base);
        if let Some(screen) = screen {
            // If the filter is invalid, no variable passes.
            let passes = env_filter::compile_filter(screen).ok();
            variables.retain(|name, _| passes.as_ref().is_some_and(|passes| passes(name)));
        }
        if variables.is_empty() {
            return None;
        }
        let mut env = base.clone();
        env.extend(variables);
        env.extend(own.iter().map(|(name, value)| (name.clone(), value.clone())));
        // Every string was checked when it was received.
        let found = ResolvedProgram::new(&self.program_name, &env).ok()?;
        Some(ResolvedProgram { directory: self.directory.resolve_with_variables(&env), ..found })
    }

    pub(crate) fn from_shell(environment: ExecEnvironment, text: &str, login: bool) -> Result<Self, Fault> {
        let mut words = vec![shell_path().to_owned()];
        if login {
            words.push("-l".to_owned());
        }
        if text.len() <= MAX_ARGUMENT_BYTES {
            words.extend(["-c".to_owned(), text.to_owned()]);
            return Self::from_words(environment, &words, Vec::new());
        }
        let script =
            create_script_file(text).map_err(|errno| fault::from_errno(errno, "store script", "memfd"))?;
        words.push(format!("/proc/self/fd/{}", script.as_raw_fd()));
        Self::from_words(environment, &words, vec![script])
    }
}

impl ResolvedDirectory {
    fn new(
        config: &AgentConfig,
        env: &BTreeMap<String, String>,
        directory: Option<&WorkingDirectory>,
        base: &str,
    ) -> Result<Self, Fault> {
        let default = || WorkingDirectory {
            path: config.default_directory.clone(),
            missing: MissingDirectory::Ignore,
            expand: false,
        };
        let wanted = directory.cloned().unwrap_or_else(default);
        let path = expand_path(base, env, &wanted);
        let fallback = if directory.is_some() { config.default_directory.as_str() } else { "/" };
        let (missing, fallback) = (wanted.missing, c_string(fallback)?);
        let open = config.env_file.is_some() && path::has_variables(&wanted);
        // A path with unresolved variables would only mislead.
        let shown = if open && !path::all_variables_set(env, &wanted) { &wanted.path } else { &path }.clone();
        let sought = open.then(|| UnresolvedDirectory { directory: wanted, base: base.to_owned() });
        Ok(Self { path: c_string(&path)?, missing, fallback, display_path: shown, unresolved: sought })
    }

    /// The path, unless it depends on variables of the env file.
    pub(crate) fn known_path(&self) -> Option<&str> {
        self.unresolved.is_none().then_some(self.display_path.as_str())
    }

    fn resolve_with_variables(&self, env: &BTreeMap<String, String>) -> Option<CString> {
        let UnresolvedDirectory { directory, base } = self.unresolved.as_ref()?;
        // Neither a path nor a variable that has reached this point contains a zero byte.
        c_string(&expand_path(base, env, directory)).ok()
    }
}

/// The environment of everything that this user starts. Variables that the sandbox's configuration
/// sets about its default user apply to that user only.
fn account_env(config: &AgentConfig, who: &ResolvedUser) -> BTreeMap<String, String> {
    let mut env = config.env.clone();
    let shell = if who.shell.is_empty() { "/bin/sh" } else { &who.shell };
    for (name, value) in
        [("HOME", who.home.as_str()), ("USER", &who.name), ("LOGNAME", &who.name), ("SHELL", shell)]
    {
        if !(who.is_default && env.contains_key(name)) {
            env.insert(name.to_owned(), value.to_owned());
        }
    }
    if let Some(threads) = config.threads {
        env.entry(THREADS_VARIABLE.to_owned()).or_insert_with(|| threads.to_string());
    }
    env
}

/// The paths that execve(2) tries, in order. Nothing is looked up here, because the command may see
/// other directories than the agent.
fn program_candidates(name: &str, path: &str) -> Result<Vec<CString>, Fault> {
    if name.contains('/') {
        return Ok(vec![c_string(name)?]);
    }
    let inside =
        |directory: &str| if directory.is_empty() { name.to_owned() } else { format!("{directory}/{name}") };
    path.split(':').map(|directory| c_string(&inside(directory))).collect()
}

/// The path of bash, or of sh if there is no bash.
pub(crate) fn shell_path() -> &'static str {
    let there = |path: &&str| rustix::fs::access(*path, Access::EXEC_OK).is_ok();
    ["/bin/bash", "/usr/bin/bash"].into_iter().find(there).unwrap_or("/bin/sh")
}

fn create_script_file(text: &str) -> rustix::io::Result<OwnedFd> {
    let file = rustix::fs::memfd_create("script", MemfdFlags::CLOEXEC)?;
    let mut rest = text.as_bytes();
    while !rest.is_empty() {
        rest = &rest[rustix::io::write(&file, rest)?..];
    }
    Ok(file)
}

pub(crate) fn c_string(text: &str) -> Result<CString, Fault> {
    CString::new(text)
        .ok()
        .ok_or_else(|| fault::from_kind(FaultKind::Invalid, "start", "a text with a zero byte"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bare_name_is_searched_in_path_without_a_shell() {
        let found = program_candidates("true", "/a::/b").expect("these are plain words");
        let found: Vec<_> = found.iter().map(|path| path.to_str().expect("the paths are UTF-8")).collect();
        assert_eq!(found, ["/a/true", "true", "/b/true"]);
        assert_eq!(program_candidates("./x", "/a").expect("a plain word"), [c"./x".to_owned()]);
    }
}
