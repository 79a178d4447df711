//! `coracle __egress`: the process that carries the connections of sandboxes without a link, and how `coracle run` starts
//! it.
//!
//! It reads what programs inside and servers outside send: queries, TLS handshakes and HTTP. So it gives up every
//! privilege before it reads anything. Settings, sockets and policies come over the descriptors that it inherits.

use std::ffi::OsString;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use launcher::role_filters::{self, FilterRole};
use linux::caps::CapSet;
use linux::landlock::TcpAccess;
use linux::namespaces::{self, SetgroupsPolicy};
use rustix::process::{DumpableBehavior, Resource, set_dumpable_behavior};

use crate::egress_stand_in as egress;
use crate::pull_process::{CERTIFICATE_VARIABLES, NETWORK_FILES};
use crate::serve::child_settings::{self, ReceivedStartup};
use crate::serve::egress::EgressStart;

/// The internal subcommand that runs this binary as egress.
pub(crate) const EGRESS_SUBCOMMAND: &str = "__egress";

/// The variables that it inherits: where certificates lie, and what shows the cause of a crash.
pub(crate) const EGRESS_VARIABLES: [&str; 3] = ["SSL_CERT_FILE", "SSL_CERT_DIR", "RUST_BACKTRACE"];

pub(crate) fn run_egress(arguments: &[String]) -> Result<ExitCode> {
    let parent = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get().unsigned_abs());
    let startup: ReceivedStartup<EgressStart> = child_settings::receive_startup(arguments)?;
    let ReceivedStartup { settings, ready, others, .. } = startup;
    let mut others = others.into_iter();
    let Some(keeper) = others.next() else { bail!("the connection to the keeper of sockets was not passed") };
    linux::descriptors::raise_open_file_limit().context("could not raise the limit on open files")?;
    drop_privileges(&settings)?;
    // The kernel clears the parent death signal when ids change.
    child_settings::end_with_supervisor(parent.context("the supervisor is gone")?)?;
    crate::tracing_output::start_logging(&settings.log);
    FilterRole::Egress.load_filter()?;
    File::from(ready).write_all(b"r").context("the supervisor is gone")?;
    let options = egress::EgressOptions { keeper, server_listener: others.next() };
    egress::run(options).context("egress broke")?;
    Ok(ExitCode::SUCCESS)
}

fn drop_privileges(settings: &EgressStart) -> Result<()> {
    if let Some(uid) = settings.uid {
        role_filters::empty_bounding_set()?;
        namespaces::switch_ids(uid, uid, SetgroupsPolicy::Allow).context("could not take on another uid")?;
    }
    // Without a uid of its own the process may still have capabilities: those of root in a container.
    linux::caps::set_capabilities(CapSet::NONE).context("could not drop capabilities")?;
    // It holds secrets, which no core file and no process of the same user may show.
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    namespaces::set_resource_limit(Resource::Core, 0)?;
    linux::set_no_new_privs()?;
    let named: Vec<OsString> = CERTIFICATE_VARIABLES.iter().filter_map(std::env::var_os).collect();
    let readable = NETWORK_FILES.iter().map(Path::new).chain(named.iter().map(Path::new));
    let readable: Vec<&Path> = readable.collect();
    let enforced = linux::landlock::confine_process(&readable, &[], TcpAccess::Connect);
    if !enforced.context("could not confine the egress process")? {
        bail!("this kernel has no Landlock, so nothing would confine the egress process");
    }
    Ok(())
}
