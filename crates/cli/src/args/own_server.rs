//! The flags of commands that start a server of one's own.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Args;

use super::{LimitArgs, NetworkChoice, StateArgs};
use crate::values;

/// Where a server of one's own listens, and the sandbox that it serves.
#[derive(Debug, Args)]
pub(crate) struct OwnServerArgs {
    /// Listen on this port of 127.0.0.1; 0 chooses a free one [default: a socket that only you can open]
    #[arg(long, value_name = "PORT", conflicts_with_all = ["listen", "socket"])]
    pub port: Option<u16>,

    /// Listen on this address; any address other than loopback requires credentials
    #[arg(long, value_name = "ADDRESS", conflicts_with = "socket")]
    pub listen: Option<SocketAddr>,

    /// Path of the socket [default: in the temporary state directory]
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,

    /// The image to run in [default: host]
    #[arg(long)]
    pub image: Option<String>,

    /// Network access of the sandbox [default: the host's configuration]
    #[arg(long, value_enum)]
    pub network: Option<NetworkChoice>,

    #[command(flatten)]
    pub limits: LimitArgs,

    /// Set an environment variable; without a value, pass on the caller's value
    #[arg(long = "env", short = 'e', value_name = "K=V", value_parser = values::parse_variable)]
    pub env: Vec<(String, String)>,

    #[command(flatten)]
    pub state: StateArgs,
}

#[derive(Debug, Args)]
#[command(after_help = AIO_HELP)]
pub(crate) struct AioArgs {
    #[command(flatten)]
    pub server: OwnServerArgs,
}

const AIO_HELP: &str = "\
`coracle aio --port 8080` replaces `docker run -p 8080:8080` of AIO Sandbox. The sandbox, its files and everything \
else are removed at the end. Variables of AIO's image are read from the environment and from --env: WORKSPACE, \
USER_UID, USER_GID, TZ, SANDBOX_API_KEY, JWT_PUBLIC_KEY, TICKET_TTL_SECONDS, MAX_SHELL_SESSIONS, \
SHELL_SESSION_TIMEOUT, MAX_BASH_SESSIONS, BASH_SESSION_TIMEOUT, RUN_HOOK_INIT, RUN_HOOK_PRE_SERVICES, \
RUN_HOOK_POST_READY, PIP_INDEX_URL, UV_DEFAULT_INDEX and NPM_CONFIG_REGISTRY; others of that image are named as \
without effect. Flags are visible to every user of the host: pass secrets by name, as in `--env GITHUB_TOKEN`.";
