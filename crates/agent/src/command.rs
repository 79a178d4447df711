//! A command whose every detail is resolved before the fork.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::os::fd::{AsRawFd, OwnedFd};

use linux::spawn::Words;
use rustix::fs::{Access, MemfdFlags};
use wire::nest::Screen;
use wire::process::{self, Directory, Identity, Missing};
use wire::{AgentConfig, Fault, FaultKind};

use crate::identity::Who;
use crate::limit_view::THREADS_VARIABLE;
use crate::path::{self, expand_path};
use crate::{envfile, fault, screen};

const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Longer text may not fit in one argument of execve(2), whose limit is 128 KiB.
const LONGEST_ARGUMENT: usize = 100 << 10;

/// Everything a child needs to become the command.
#[derive(Debug)]
pub(crate) struct Command {
    pub(crate) who: Who,
    pub(crate) program: Program,
    pub(crate) arguments: Words,
    pub(crate) environment: Words,
    pub(crate) directory: Workdir,
    /// Stay open in the command under their present numbers.
    pub(crate) kept: Vec<OwnedFd>,
    /// Get the numbers 3, 4, … in the command. Here they have higher numbers.
    pub(crate) placed: Vec<OwnedFd>,
    /// For messages.
    pub(crate) program_name: String,
    /// The variables that only the child can look up.
    late: Option<Late>,
}

/// The environment of a command in a sandbox with an env file.
#[derive(Debug)]
struct Late {
    file: CString,
    base: BTreeMap<String, String>,
    own: BTreeMap<String, String>,
    screen: Option<Screen>,
}

/// The paths where a program may be, and its environment.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) programs: Vec<CString>,
    pub(crate) environment: Words,
    /// The working directory, if it was not known before.
    pub(crate) directory: Option<CString>,
}

impl Found {
    fn new(name: &str, env: &BTreeMap<String, String>) -> Result<Self, Fault> {
        let path = env.get("PATH").map_or(DEFAULT_PATH, String::as_str);
        let assignments = env.iter().map(|(name, value)| c_string(&format!("{name}={value}")));
        let environment = Words::new(assignments.collect::<Result<_, _>>()?);
        Ok(Self { programs: candidates(name, path)?, environment, directory: None })
    }
}

/// The program to execute.
#[derive(Debug)]
pub(crate) enum Program {
    /// Tried in this order.
    Paths(Vec<CString>),
    /// The agent's own executable.
    Own,
}

/// The directory where the command starts.
#[derive(Debug)]
pub(crate) struct Workdir {
    /// Resolved as far as possible without the env file.
    pub(crate) path: CString,
    pub(crate) missing: Missing,
    pub(crate) fallback: CString,
    /// For messages.
    pub(crate) shown: String,
    sought: Option<Sought>,
}

/// A directory that depends on variables of the env file.
#[derive(Debug)]
struct Sought {
    directory: Directory,
    base: String,
}

/// The environment that all commands of one identity share.
#[derive(Debug)]
pub(crate) struct Surroundings {
    pub(crate) who: Who,
    pub(crate) env: BTreeMap<String, String>,
    pub(crate) workdir: Workdir,
    /// The request's own variables, which override those of a file.
    own: BTreeMap<String, String>,
    late: Option<Late>,
}

impl Surroundings {
    pub(crate) fn new(
        config: &AgentConfig,
        identity: &Identity,
        env: &BTreeMap<String, String>,
        directory: Option<&Directory>,
    ) -> Result<Self, Fault> {
        let who = Who::find(config, identity)?;
        let base = account_env(config, &who);
        let mut all = base.clone();
        all.extend(env.iter().map(|(name, value)| (name.clone(), value.clone())));
        if let Some(wrong) = all.keys().find(|name| name.is_empty() || name.contains('=')) {
            return Err(fault::plain(FaultKind::Invalid, "set variable", wrong));
        }
        let workdir = Workdir::new(config, &all, directory)?;
        let file = config.env_file.as_ref().map(|path| {
            let path = Directory { path: path.clone(), missing: Missing::Ignore, expand: false };
            c_string(&expand_path(&config.default_directory, &base, &path))
        });
        let own = env.clone();
        let late = file.transpose()?.map(|file| Late { file, base, own: own.clone(), screen: None });
        Ok(Self { who, env: all, workdir, own, late })
    }

    /// Removes the variables that the filter does not let through. The request's own variables
    /// stay.
    pub(crate) fn screen(&mut self, screen: &Screen) -> Result<(), Fault> {
        let passes = screen::passes(screen)?;
        let own = &self.own;
        self.env.retain(|name, _| own.contains_key(name) || passes(name));
        if let Some(late) = &mut self.late {
            late.base.retain(|name, _| passes(name));
            late.screen = Some(screen.clone());
        }
        Ok(())
    }

    /// Sets a variable unless it is set already.
    pub(crate) fn default_variable(&mut self, name: &str, value: &str) {
        self.env.entry(name.to_owned()).or_insert_with(|| value.to_owned());
        if let Some(late) = &mut self.late {
            late.base.entry(name.to_owned()).or_insert_with(|| value.to_owned());
        }
    }
}

impl Command {
    pub(crate) fn new(config: &AgentConfig, start: &process::Start) -> Result<Self, Fault> {
        let mut around = Surroundings::new(config, &start.identity, &start.env, start.directory.as_ref())?;
        if start.terminal.is_some() {
            around.default_variable("TERM", "xterm-256color");
        }
        match &start.command {
            process::Command::Argv(words) => Self::from_words(around, words, Vec::new()),
            process::Command::Shell { text, login } => Self::from_shell(around, text, *login),
        }
    }

    pub(crate) fn from_words(
        around: Surroundings,
        words: &[String],
        kept: Vec<OwnedFd>,
    ) -> Result<Self, Fault> {
        let Some(name) = words.first().filter(|name| !name.is_empty()) else {
            return Err(fault::plain(FaultKind::Invalid, "start", "an empty command"));
        };
        let Surroundings { who, env, workdir, late, .. } = around;
        let Found { programs, environment, .. } = Found::new(name, &env)?;
        Ok(Self {
            who,
            program: Program::Paths(programs),
            arguments: Words::new(words.iter().map(|word| c_string(word)).collect::<Result<_, _>>()?),
            environment,
            directory: workdir,
            kept,
            placed: Vec::new(),
            program_name: name.clone(),
            late,
        })
    }

    /// A kernel, with its two private pipes at descriptors 3 and 4.
    pub(crate) fn kernel(
        around: Surroundings,
        program: &process::Program,
        pipes: [OwnedFd; 2],
    ) -> Result<Self, Fault> {
        let command = match program {
            process::Program::Argv(words) => Self::from_words(around, words, Vec::new())?,
            process::Program::Own(words) => {
                let words: Vec<String> = std::iter::once("coracle".to_owned()).chain(words.clone()).collect();
                Self { program: Program::Own, ..Self::from_words(around, &words, Vec::new())? }
            }
            process::Program::Shell => return Err(fault::plain(FaultKind::Invalid, "start", "a shell")),
        };
        Ok(Self { placed: pipes.into(), ..command })
    }

    /// Adds the variables of the sandbox's env file. Called by the child, after all steps but the
    /// exec.
    pub(crate) fn with_variables_of_file(&self) -> Option<Found> {
        let Late { file, base, own, screen } = self.late.as_ref()?;
        let mut variables = envfile::read(file, base);
        if let Some(screen) = screen {
            // If the filter is invalid, no variable passes.
            let passes = screen::passes(screen).ok();
            variables.retain(|name, _| passes.as_ref().is_some_and(|passes| passes(name)));
        }
        if variables.is_empty() {
            return None;
        }
        let mut env = base.clone();
        env.extend(variables);
        env.extend(own.iter().map(|(name, value)| (name.clone(), value.clone())));
        // Every string was checked when it was received.
        let found = Found::new(&self.program_name, &env).ok()?;
        Some(Found { directory: self.directory.with_variables(&env), ..found })
    }

    pub(crate) fn from_shell(around: Surroundings, text: &str, login: bool) -> Result<Self, Fault> {
        let mut words = vec![shell_path().to_owned()];
        if login {
            words.push("-l".to_owned());
        }
        if text.len() <= LONGEST_ARGUMENT {
            words.extend(["-c".to_owned(), text.to_owned()]);
            return Self::from_words(around, &words, Vec::new());
        }
        let script = script_file(text).map_err(|errno| fault::from_errno(errno, "store script", "memfd"))?;
        words.push(format!("/proc/self/fd/{}", script.as_raw_fd()));
        Self::from_words(around, &words, vec![script])
    }
}

impl Workdir {
    fn new(
        config: &AgentConfig,
        env: &BTreeMap<String, String>,
        directory: Option<&Directory>,
    ) -> Result<Self, Fault> {
        let default =
            || Directory { path: config.default_directory.clone(), missing: Missing::Ignore, expand: false };
        let wanted = directory.cloned().unwrap_or_else(default);
        let base = &config.default_directory;
        let path = expand_path(base, env, &wanted);
        let fallback = if directory.is_some() { base.as_str() } else { "/" };
        let (missing, fallback) = (wanted.missing, c_string(fallback)?);
        let open = config.env_file.is_some() && path::has_variables(&wanted);
        // A path with unresolved variables would only mislead.
        let shown = if open && !path::knows_all(env, &wanted) { &wanted.path } else { &path }.clone();
        let sought = open.then(|| Sought { directory: wanted, base: base.clone() });
        Ok(Self { path: c_string(&path)?, missing, fallback, shown, sought })
    }

    fn with_variables(&self, env: &BTreeMap<String, String>) -> Option<CString> {
        let Sought { directory, base } = self.sought.as_ref()?;
        // Neither a path nor a variable that has reached this point contains a zero byte.
        c_string(&expand_path(base, env, directory)).ok()
    }
}

/// The environment of everything that this user starts. Variables that the sandbox's configuration
/// sets about its default user apply to that user only.
fn account_env(config: &AgentConfig, who: &Who) -> BTreeMap<String, String> {
    let mut env = config.env.clone();
    let shell = if who.shell.is_empty() { "/bin/sh" } else { &who.shell };
    for (name, value) in
        [("HOME", who.home.as_str()), ("USER", &who.name), ("LOGNAME", &who.name), ("SHELL", shell)]
    {
        if !(who.usual && env.contains_key(name)) {
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
fn candidates(name: &str, path: &str) -> Result<Vec<CString>, Fault> {
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

fn script_file(text: &str) -> rustix::io::Result<OwnedFd> {
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
        .ok_or_else(|| fault::plain(FaultKind::Invalid, "start", "a text with a zero byte"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bare_name_is_searched_in_path_without_a_shell() {
        let found = candidates("true", "/a::/b").expect("these are plain words");
        let found: Vec<_> = found.iter().map(|path| path.to_str().expect("the paths are UTF-8")).collect();
        assert_eq!(found, ["/a/true", "true", "/b/true"]);
        assert_eq!(candidates("./x", "/a").expect("a plain word"), [c"./x".to_owned()]);
    }
}
