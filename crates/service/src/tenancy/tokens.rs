//! Secrets: the server's own, and the tokens derived from it.
//!
//! A token is a keyed hash of its purpose, the sandbox and an epoch, so no token is stored, and a restarted server
//! derives the same one again.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use domain::{KeyHandle, SandboxId};
use subtle::ConstantTimeEq;

const SECRET_BYTES: usize = 32;

/// Text that must not be logged; it prints as `***`.
#[derive(Clone)]
pub struct Secret(String);

impl Secret {
    pub(crate) fn new(text: String) -> Self {
        Self(text)
    }

    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

impl fmt::Display for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// Derives tokens from the server's secret.
pub(crate) struct TokenMint([u8; SECRET_BYTES]);

impl TokenMint {
    /// Reads the server's secret, or creates it on the first start.
    pub(crate) fn open(state_dir: &Path) -> io::Result<Self> {
        let path = state_dir.join("secret");
        match File::open(&path) {
            Ok(file) => read_secret(file).map(Self),
            Err(error) if error.kind() == io::ErrorKind::NotFound => make_secret(&path).map(Self),
            Err(error) => Err(error),
        }
    }

    pub(crate) fn derive_token(&self, id: &SandboxId, purpose: &str, epoch: u64) -> Secret {
        self.derive_text(purpose, id.as_str(), epoch)
    }

    /// A token that belongs to a key instead of one sandbox. `purpose` differs from those of sandboxes.
    pub(crate) fn derive_key_token(&self, handle: &KeyHandle, purpose: &str, epoch: u64) -> Secret {
        self.derive_text(purpose, handle.as_str(), epoch)
    }

    fn derive_text(&self, purpose: &str, subject: &str, epoch: u64) -> Secret {
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        hasher.update(purpose.as_bytes()).update(&[0]);
        hasher.update(subject.as_bytes()).update(&[0]);
        hasher.update(&epoch.to_le_bytes());
        Secret(hasher.finalize().to_hex().to_string())
    }

    pub(crate) fn is_valid_token(&self, id: &SandboxId, purpose: &str, epoch: u64, presented: &str) -> bool {
        let right = self.derive_token(id, purpose, epoch);
        right.expose().as_bytes().ct_eq(presented.as_bytes()).into()
    }
}

fn read_secret(file: File) -> io::Result<[u8; SECRET_BYTES]> {
    let mut bytes = Vec::new();
    file.take(SECRET_BYTES as u64 + 1).read_to_end(&mut bytes)?;
    let wrong = |_: Vec<u8>| io::Error::new(io::ErrorKind::InvalidData, "the file `secret` is damaged");
    bytes.try_into().map_err(wrong)
}

/// Writes under another name first, so that a crash leaves no incomplete secret.
fn make_secret(path: &Path) -> io::Result<[u8; SECRET_BYTES]> {
    let secret = random_bytes()?;
    let draft = path.with_extension("new");
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&draft)?;
    file.write_all(&secret)?;
    file.sync_all()?;
    std::fs::rename(&draft, path)?;
    Ok(secret)
}

/// Random bytes from the kernel.
pub(crate) fn random_bytes<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    let mut filled = 0;
    while filled < N {
        filled += rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty())?;
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn id(byte: u8) -> SandboxId {
        SandboxId::from_entropy([byte; 20])
    }

    #[test]
    fn tokens_are_the_same_after_a_restart() -> io::Result<()> {
        let dir = tempfile::tempdir()?;
        let first = TokenMint::open(dir.path())?.derive_token(&id(1), "exec", 0);
        let again = TokenMint::open(dir.path())?.derive_token(&id(1), "exec", 0);
        assert_eq!(first.expose(), again.expose());
        let mode = std::fs::metadata(dir.path().join("secret"))?.permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        Ok(())
    }

    #[test]
    fn token_opens_one_sandbox_for_one_purpose_in_one_epoch() -> io::Result<()> {
        let dir = tempfile::tempdir()?;
        let mint = TokenMint::open(dir.path())?;
        let token = mint.derive_token(&id(1), "exec", 0);
        assert!(mint.is_valid_token(&id(1), "exec", 0, token.expose()));
        for (other, purpose, epoch) in [(id(2), "exec", 0), (id(1), "egress", 0), (id(1), "exec", 1)] {
            assert!(!mint.is_valid_token(&other, purpose, epoch, token.expose()));
        }
        assert!(!mint.is_valid_token(&id(1), "exec", 0, ""));
        assert!(!mint.is_valid_token(&id(1), "exec", 0, &token.expose()[1..]));
        Ok(())
    }

    #[test]
    fn another_server_derives_other_tokens() -> io::Result<()> {
        let (one, two) = (tempfile::tempdir()?, tempfile::tempdir()?);
        let token = TokenMint::open(one.path())?.derive_token(&id(1), "exec", 0);
        assert!(!TokenMint::open(two.path())?.is_valid_token(&id(1), "exec", 0, token.expose()));
        Ok(())
    }

    #[test]
    fn damaged_secret_is_refused_and_not_replaced() -> io::Result<()> {
        let dir = tempfile::tempdir()?;
        std::fs::write(dir.path().join("secret"), b"short")?;
        assert!(TokenMint::open(dir.path()).is_err());
        assert_eq!(std::fs::read(dir.path().join("secret"))?, b"short");
        Ok(())
    }

    #[test]
    fn secret_is_never_printed() {
        let secret = Secret("hunter2".to_owned());
        assert_eq!(format!("{secret} {secret:?}"), "*** ***");
    }
}
