//! `test-internet CERTIFICATE COMMAND...`: runs a command on a private host of the test internet, for suites in other
//! languages.
//!
//! The certificate of the test internet's authority is written to the file CERTIFICATE, and added to the certificates that
//! programs of this host trust, as the command sees them. Nothing of the real host changes: the command has its own net and
//! mount namespaces. It ends with the status of the command.

use std::fs;
use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};
use e2e::test_network::{self, TestNetwork};

/// Where programs look for the authorities that they trust: Debian and Alpine, and Fedora.
const TRUST_STORES: [&str; 2] = ["/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt"];

fn main() -> Result<ExitCode> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [certificate, program, rest @ ..] = arguments.as_slice() else {
        bail!("usage: test-internet CERTIFICATE COMMAND...");
    };
    if !testkit::is_root() {
        bail!("only root can make the namespaces of the test internet");
    }
    let _world = TestNetwork::create();
    test_network::use_world_resolver();
    fs::write(certificate, test_network::authority_certificate())
        .with_context(|| format!("could not write {certificate}"))?;
    let place = tempfile::tempdir().context("could not make a directory")?;
    for store in TRUST_STORES.map(Path::new).into_iter().filter(|store| store.exists()) {
        trust_authority(store, place.path())?;
    }
    let status =
        Command::new(program).args(rest).status().with_context(|| format!("could not run {program}"))?;
    Ok(ExitCode::from(u8::try_from(status.code().unwrap_or(1)).unwrap_or(1)))
}

/// Mounts a copy of the file over it, with our authority added.
fn trust_authority(store: &Path, place: &Path) -> Result<()> {
    let mut text =
        fs::read_to_string(store).with_context(|| format!("could not read {}", store.display()))?;
    text.push_str(test_network::authority_certificate());
    let copy = place.join(store.file_name().context("a file has a name")?);
    fs::write(&copy, text).context("could not write a copy")?;
    linux::mounts::bind_mount(&copy, store)
        .with_context(|| format!("could not mount over {}", store.display()))
}
