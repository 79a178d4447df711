//! A command, worked out to the last word before anything is forked.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::os::fd::{AsRawFd, OwnedFd};

use linux::spawn::Words;
use rustix::fs::{Access, MemfdFlags};
use wire::process::{self, Directory, Identity, Missing};
use wire::{AgentConfig, Fault, FaultKind};

use crate::fault;
use crate::identity::Who;

const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Text longer than this does not fit one argument of execve(2) (128 KiB) with certainty.
const LONGEST_ARGUMENT: usize = 100 << 10;

/// What a child needs to become the command.
#[derive(Debug)]
pub(crate) struct Command {
    pub(crate) who: Who,
    pub(crate) program: Program,
    pub(crate) arguments: Words,
    pub(crate) environment: Words,
    pub(crate) directory: Workdir,
    /// Stays open in the command under the number it has here.
    pub(crate) kept: Vec<OwnedFd>,
    /// Lie at the numbers 3, 4, … in the command. They have higher ones here.
    pub(crate) placed: Vec<OwnedFd>,
    /// For messages.
    pub(crate) program_name: String,
}

/// What is executed.
#[derive(Debug)]
pub(crate) enum Program {
    /// Tried in this order.
    Paths(Vec<CString>),
    /// The agent's own.
    Own,
}

/// Where the command starts.
#[derive(Debug)]
pub(crate) struct Workdir {
    pub(crate) path: CString,
    pub(crate) missing: Missing,
    pub(crate) fallback: CString,
}

/// What all commands of one identity have in common.
#[derive(Debug)]
pub(crate) struct Surroundings {
    pub(crate) who: Who,
    pub(crate) env: BTreeMap<String, String>,
    pub(crate) workdir: Workdir,
}

impl Surroundings {
    pub(crate) fn new(
        config: &AgentConfig,
        identity: &Identity,
        env: &BTreeMap<String, String>,
        directory: Option<&Directory>,
    ) -> Result<Self, Fault> {
        let who = Who::find(config, identity)?;
        let env = effective_env(config, &who, env)?;
        let workdir = Workdir::new(config, &env, directory)?;
        Ok(Self { who, env, workdir })
    }
}

impl Command {
    pub(crate) fn new(config: &AgentConfig, start: &process::Start) -> Result<Self, Fault> {
        let mut around = Surroundings::new(config, &start.identity, &start.env, start.directory.as_ref())?;
        if start.terminal.is_some() {
            around.env.entry("TERM".to_owned()).or_insert_with(|| "xterm-256color".to_owned());
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
        let Surroundings { who, env, workdir } = around;
        let path = env.get("PATH").map_or(DEFAULT_PATH, String::as_str);
        let assignments = env.iter().map(|(name, value)| c_string(&format!("{name}={value}")));
        Ok(Self {
            who,
            program: Program::Paths(candidates(name, path)?),
            arguments: Words::new(words.iter().map(|word| c_string(word)).collect::<Result<_, _>>()?),
            environment: Words::new(assignments.collect::<Result<_, _>>()?),
            directory: workdir,
            kept,
            placed: Vec::new(),
            program_name: name.clone(),
        })
    }

    /// A kernel, which finds its two private pipes at 3 and 4.
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

    fn from_shell(around: Surroundings, text: &str, login: bool) -> Result<Self, Fault> {
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
        let path = expand_path(&config.default_directory, env, &wanted);
        let fallback = if directory.is_some() { config.default_directory.as_str() } else { "/" };
        Ok(Self { path: c_string(&path)?, missing: wanted.missing, fallback: c_string(fallback)? })
    }
}

/// Replaces `~` at the start and, if asked, variables; a relative path starts at `base`.
pub(crate) fn expand_path(base: &str, env: &BTreeMap<String, String>, directory: &Directory) -> String {
    let home = env.get("HOME").map_or("/", String::as_str);
    let path = match directory.path.strip_prefix('~') {
        Some(rest) if rest.is_empty() || rest.starts_with('/') => format!("{home}{rest}"),
        _ => directory.path.clone(),
    };
    let path = if directory.expand { expand_variables(&path, env) } else { path };
    match path.as_str() {
        "" => base.to_owned(),
        absolute if absolute.starts_with('/') => path,
        relative => format!("{base}/{relative}"),
    }
}

/// Replaces `$NAME` and `${NAME}`; a name that is not set becomes nothing, as in a shell.
fn expand_variables(text: &str, env: &BTreeMap<String, String>) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('$') {
        out.push_str(before);
        let (name, following) = match after.strip_prefix('{').and_then(|inner| inner.split_once('}')) {
            Some(braced) => braced,
            None => {
                let end = after.find(|c: char| !c.is_ascii_alphanumeric() && c != '_');
                after.split_at(end.unwrap_or(after.len()))
            }
        };
        match name {
            "" => out.push('$'),
            name => out.push_str(env.get(name).map_or("", String::as_str)),
        }
        rest = following;
    }
    out.push_str(rest);
    out
}

fn effective_env(
    config: &AgentConfig,
    who: &Who,
    own: &BTreeMap<String, String>,
) -> Result<BTreeMap<String, String>, Fault> {
    let mut env = config.env.clone();
    let shell = if who.shell.is_empty() { "/bin/sh" } else { &who.shell };
    for (name, value) in
        [("HOME", who.home.as_str()), ("USER", &who.name), ("LOGNAME", &who.name), ("SHELL", shell)]
    {
        env.insert(name.to_owned(), value.to_owned());
    }
    env.extend(own.iter().map(|(name, value)| (name.clone(), value.clone())));
    match env.keys().find(|name| name.is_empty() || name.contains('=')) {
        Some(wrong) => Err(fault::plain(FaultKind::Invalid, "set variable", wrong)),
        None => Ok(env),
    }
}

/// Where execve(2) is to look, in order. Nothing is looked up here: the command may see other
/// directories than we do.
fn candidates(name: &str, path: &str) -> Result<Vec<CString>, Fault> {
    if name.contains('/') {
        return Ok(vec![c_string(name)?]);
    }
    let inside =
        |directory: &str| if directory.is_empty() { name.to_owned() } else { format!("{directory}/{name}") };
    path.split(':').map(|directory| c_string(&inside(directory))).collect()
}

/// The best shell there is.
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
        .ok_or_else(|| fault::plain(FaultKind::Invalid, "start", "a text with a zero byte in it"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expected: &str) {
        let env = BTreeMap::from([("A".to_owned(), "one".to_owned()), ("HOME".to_owned(), "/h".to_owned())]);
        assert_eq!(expand_variables(text, &env), expected, "{text}");
    }

    #[test]
    fn variables_are_replaced_as_a_shell_would() {
        check("/x/$A/y", "/x/one/y");
        check("${A}b$A", "onebone");
        check("$NONE/a", "/a");
        check("$", "$");
        check("a$$A", "a$one");
        check("${A", "${A");
        check("$HOME", "/h");
    }

    #[test]
    fn a_bare_name_is_looked_for_in_the_path_and_no_shell_is_involved() {
        let found = candidates("true", "/a::/b").expect("these are plain words");
        let found: Vec<_> = found.iter().map(|path| path.to_str().expect("they are text")).collect();
        assert_eq!(found, ["/a/true", "true", "/b/true"]);
        assert_eq!(candidates("./x", "/a").expect("a plain word"), [c"./x".to_owned()]);
    }
}
