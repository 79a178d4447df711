//! `GET /v1/sandbox`: the environment of a sandbox. Clients also use it to learn that the sandbox is ready.
//!
//! Versions are detected once for each image and owner: the commands that detect them run inside a sandbox, so one
//! owner could show wrong versions to another if they were shared.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use axum::Json;
use axum::extract::State;
use domain::Owner;
use serde::Serialize;
use service::{SandboxRef, ServiceError};

use super::short_command::read_command_output;
use crate::aio::AioState;
use crate::aio::problem::AioProblem;
use crate::aio::target::AioTarget;

/// The version of AIO's API that this front follows.
pub(in crate::aio) const API_VERSION: &str = "1.9.4";
/// How many images are remembered; beyond that, all are detected again.
const MAX_REMEMBERED_IMAGES: usize = 256;
/// The longest line of a detection that is read.
const MAX_LINE_CHARS: usize = 256;
/// Under how many names the script looks for one tool.
const MAX_NAMES_OF_TOOL: usize = 2;

/// Programs that are worth telling an agent about, by category.
const TOOLS: [(&str, &[&str]); 5] = [
    ("shell", &["bash", "tmux", "jq", "rg", "find", "sed", "awk"]),
    ("version control", &["git", "gh"]),
    ("build", &["gcc", "make", "cmake", "cargo", "go", "javac"]),
    ("network", &["curl", "wget", "ssh"]),
    ("archives", &["tar", "zip", "unzip", "zstd"]),
];

/// The tools that were detected in the image of a sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct DetectedTools {
    os_name: String,
    os_version: String,
    time_zone: String,
    python: Vec<ToolSpec>,
    nodejs: Vec<ToolSpec>,
    npm_version: Option<String>,
    /// The names of the programs of [`TOOLS`] that exist.
    programs: Vec<String>,
}

/// The detected tools by owner and image.
#[derive(Default)]
pub(crate) struct ToolCache(Mutex<HashMap<(Owner, String), Arc<DetectedTools>>>);

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct ToolSpec {
    ver: String,
    bin: String,
    alias: Vec<String>,
}

#[derive(Serialize)]
pub(in crate::aio) struct SandboxContextBody {
    success: bool,
    message: &'static str,
    /// The whole context as text for an agent.
    data: String,
    hint: Option<String>,
    home_dir: String,
    workspace: String,
    version: &'static str,
    detail: ContextDetail,
}

#[derive(Serialize)]
struct ContextDetail {
    system: SystemDetail,
    runtime: RuntimeDetail,
    utils: Vec<ToolCategory>,
}

#[derive(Serialize)]
struct SystemDetail {
    os: String,
    os_version: String,
    arch: &'static str,
    user: String,
    home_dir: String,
    workspace: String,
    timezone: String,
    occupied_ports: Vec<String>,
}

#[derive(Serialize)]
struct RuntimeDetail {
    python: Vec<ToolSpec>,
    nodejs: Vec<ToolSpec>,
}

#[derive(Serialize)]
struct ToolCategory {
    category: &'static str,
    tools: Vec<ToolName>,
}

#[derive(Serialize)]
struct ToolName {
    name: String,
}

/// `GET /v1/sandbox`: responds only if a file can be read, and for a new image only if a command can run.
pub(in crate::aio) async fn get_context(
    State(state): State<AioState>,
    target: AioTarget,
) -> Result<Json<SandboxContextBody>, AioProblem> {
    let ports = target.sandbox.ports().listening_ports().await?;
    let tools = state.tools.detect_tools(&target.sandbox).await?;
    let (user, home, workspace) = target.sandbox.read_state(|sandbox| {
        let guest = &sandbox.spec.guest;
        let account = guest.users.iter().find(|user| user.name == guest.default_user);
        let home = account.map_or("/root", |account| account.home.as_str());
        let workspace =
            sandbox.spec.env.get("WORKSPACE").map_or(guest.default_directory.as_str(), String::as_str);
        (guest.default_user.clone(), home.to_owned(), workspace.to_owned())
    });
    let detail = ContextDetail {
        system: SystemDetail {
            os: tools.os_name.clone(),
            os_version: tools.os_version.clone(),
            arch: std::env::consts::ARCH,
            user,
            home_dir: home.clone(),
            workspace: workspace.clone(),
            timezone: tools.time_zone.clone(),
            occupied_ports: ports.iter().map(u16::to_string).collect(),
        },
        runtime: RuntimeDetail { python: tools.python.clone(), nodejs: tools.nodejs.clone() },
        utils: tool_categories(&tools.programs),
    };
    Ok(Json(SandboxContextBody {
        success: true,
        message: "Sandbox environment",
        data: describe_context(&detail),
        hint: None,
        home_dir: home,
        workspace,
        version: API_VERSION,
        detail,
    }))
}

impl ToolCache {
    /// What the image of a sandbox has; detected by the first request.
    pub(in crate::aio) async fn detect_tools(
        &self,
        sandbox: &SandboxRef,
    ) -> Result<Arc<DetectedTools>, ServiceError> {
        let image = sandbox.read_state(|state| state.spec.image.clone());
        let key = (sandbox.owner().clone(), image);
        if let Some(known) = self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&key) {
            return Ok(Arc::clone(known));
        }
        // Two first requests may both detect, which does no harm.
        let printed = read_command_output(sandbox, &detection_script()).await?;
        let detected = Arc::new(DetectedTools::parse(&printed));
        let mut cache = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if cache.len() >= MAX_REMEMBERED_IMAGES {
            cache.clear();
        }
        cache.insert(key, Arc::clone(&detected));
        Ok(detected)
    }
}

/// Shell text that prints a line for each thing that it has found: a word, a tab and what it found.
fn detection_script() -> String {
    let programs: Vec<_> = TOOLS.iter().flat_map(|(_, programs)| programs.iter().copied()).collect();
    format!(
        r#"say() {{ [ -n "$2" ] && printf '%s\t%s\n' "$1" "$2"; }}
[ -r /etc/os-release ] && . /etc/os-release
say os "$(uname -s)"; say os_version "${{PRETTY_NAME:-$(uname -r)}}"
say zone "${{TZ:-$(readlink /etc/localtime 2>/dev/null | sed 's,.*/zoneinfo/,,')}}"
for name in python3 python; do p=$(command -v "$name") && say python "$name $p $("$p" --version 2>&1 | head -n 1 | sed 's/^Python //')"; done
for name in node nodejs; do p=$(command -v "$name") && say node "$name $p $("$p" --version 2>/dev/null | head -n 1 | sed 's/^v//')"; done
p=$(command -v npm) && say npm "$(sed -n 's/^ *"version": "\([^"]*\)".*/\1/p' "$(dirname "$(readlink -f "$p")")/../package.json" 2>/dev/null | head -n 1)"
for name in {}; do command -v "$name" >/dev/null && say program "$name"; done
true"#,
        programs.join(" ")
    )
}

impl DetectedTools {
    pub(in crate::aio) fn python_version(&self) -> Option<&str> {
        self.python.first().map(|tool| tool.ver.as_str())
    }

    pub(in crate::aio) fn node_version(&self) -> Option<&str> {
        self.nodejs.first().map(|tool| tool.ver.as_str())
    }

    pub(in crate::aio) fn npm_version(&self) -> Option<&str> {
        self.npm_version.as_deref()
    }

    /// Reads what the script printed. Lines that it cannot have printed are left out.
    fn parse(printed: &str) -> Self {
        let mut found = Self { os_name: "Linux".to_owned(), time_zone: "UTC".to_owned(), ..Self::default() };
        for line in printed.lines().filter(|line| line.chars().nth(MAX_LINE_CHARS).is_none()) {
            let Some((word, value)) = line.split_once('\t') else { continue };
            match word {
                "os" => found.os_name = value.to_owned(),
                "os_version" => found.os_version = value.to_owned(),
                "zone" => found.time_zone = value.to_owned(),
                "python" => add_tool(&mut found.python, value),
                "node" => add_tool(&mut found.nodejs, value),
                "npm" => found.npm_version = Some(value.to_owned()),
                "program" if is_known_program(value) => found.programs.push(value.to_owned()),
                _ => {}
            }
        }
        found.programs.sort_unstable();
        found.programs.dedup();
        found
    }
}

/// Adds `name path version`; a second name of the same version becomes an alias.
fn add_tool(tools: &mut Vec<ToolSpec>, text: &str) {
    let mut words = text.splitn(3, ' ');
    let (Some(name), Some(path), Some(version)) = (words.next(), words.next(), words.next()) else { return };
    if let Some(tool) = tools.iter_mut().find(|tool| tool.ver == version) {
        if tool.alias.len() < MAX_NAMES_OF_TOOL {
            tool.alias.push(name.to_owned());
        }
    } else if tools.len() < MAX_NAMES_OF_TOOL {
        tools.push(ToolSpec { ver: version.to_owned(), bin: path.to_owned(), alias: vec![name.to_owned()] });
    }
}

fn is_known_program(name: &str) -> bool {
    TOOLS.iter().any(|(_, programs)| programs.contains(&name))
}

fn tool_categories(found: &[String]) -> Vec<ToolCategory> {
    let has = |name: &&&str| found.iter().any(|known| known == **name);
    let categories = TOOLS.iter().map(|(category, programs)| {
        let tools = programs.iter().filter(has).map(|name| ToolName { name: (*name).to_owned() });
        ToolCategory { category, tools: tools.collect() }
    });
    categories.filter(|category| !category.tools.is_empty()).collect()
}

/// The context as text for an agent.
fn describe_context(detail: &ContextDetail) -> String {
    let ContextDetail { system, runtime, utils } = detail;
    let versions = |tools: &[ToolSpec]| {
        let shown: Vec<_> = tools.iter().map(|tool| format!("{} ({})", tool.ver, tool.bin)).collect();
        if shown.is_empty() { "none".to_owned() } else { shown.join(", ") }
    };
    let mut lines = vec![
        format!("System: {} {} ({})", system.os, system.os_version, system.arch),
        format!("User: {}, home {}, working directory {}", system.user, system.home_dir, system.workspace),
        format!("Time zone: {}", system.timezone),
        format!("Python: {}", versions(&runtime.python)),
        format!("Node.js: {}", versions(&runtime.nodejs)),
    ];
    for category in utils {
        let names: Vec<_> = category.tools.iter().map(|tool| tool.name.as_str()).collect();
        lines.push(format!("Tools for {}: {}", category.category, names.join(", ")));
    }
    if !system.occupied_ports.is_empty() {
        lines.push(format!("Ports in use: {}", system.occupied_ports.join(", ")));
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn detection_is_parsed_and_bounded() {
        let long = "x".repeat(MAX_LINE_CHARS);
        let printed = format!(
            "os\tLinux\nos_version\tDebian 12\nzone\tEtc/UTC\npython\tpython3 /usr/bin/python3 3.11.2\n\
             python\tpython /usr/bin/python 3.11.2\nnode\tnode /usr/bin/node 20.1.0\nprogram\tgit\n\
             program\tgit\nprogram\tmalware\nos\t{long}\nnonsense\npython\tx\n"
        );
        let found = DetectedTools::parse(&printed);
        assert_eq!((found.os_name.as_str(), found.os_version.as_str()), ("Linux", "Debian 12"));
        assert_eq!(found.python.len(), 1);
        assert_eq!(found.python[0].alias, ["python3", "python"]);
        assert_eq!(
            (found.nodejs[0].ver.as_str(), found.programs.as_slice()),
            ("20.1.0", ["git".to_owned()].as_slice())
        );
    }
}
