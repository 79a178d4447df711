//! Addresses of sandboxes: a handle, and a code that proves that we gave the address out.
//!
//! ```text
//! /aio/{handle}.{mac}/…             as a path
//! aio-{handle}-{mac}.domain         as a host, below the gateway's domain
//! {port}-aio-{handle}-{mac}.domain  a port of the sandbox
//! ```
//! The handle stands for a key, so a successor of a crashed sandbox has the same address. The code covers the epoch of
//! the key, which is drawn when a sandbox is created and inherited only after a crash: an address from before a delete,
//! an expiry or an eviction opens nothing.

use domain::{KeyHandle, Phase, SandboxId, SandboxKey};
use service::{SandboxRef, Service};
use subtle::ConstantTimeEq;

use super::ORIGIN;
use super::notes::AioNotes;

/// How much of a token is used: 128 bits in hexadecimal digits. Host labels are limited to 63 characters.
const MAC_DIGITS: usize = 32;
/// The beginning of every label of this front.
const LABEL_PREFIX: &str = "aio-";
/// The purpose of the tokens in addresses of keys.
const KEY_PURPOSE: &str = "aio address of a key";

/// An address as a client wrote it, not verified yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SandboxAddress {
    handle: String,
    mac: String,
}

/// The target of a host label of this front.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct AddressLabel {
    pub(super) address: SandboxAddress,
    /// A port of the sandbox instead of its API.
    pub(super) port: Option<u16>,
}

/// The sandbox that a verified address leads to.
pub(super) struct AddressedSandbox {
    pub(super) sandbox: SandboxRef,
    pub(super) key: SandboxKey,
}

impl SandboxAddress {
    /// The address of the sandbox that a key leads to.
    pub(super) fn of_key(service: &Service, key: &SandboxKey, notes: &AioNotes) -> Self {
        let token = service.key_token(key, KEY_PURPOSE, notes.epoch);
        Self { handle: service.key_handle(key).as_str().to_owned(), mac: truncate_token(token.expose()) }
    }

    /// Parses `{handle}.{mac}`.
    pub(super) fn parse(text: &str) -> Option<Self> {
        Self::from_parts(text.split_once('.')?)
    }

    fn from_parts((handle, mac): (&str, &str)) -> Option<Self> {
        let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        let is_valid =
            SandboxId::parse(handle).is_ok() && mac.len() == MAC_DIGITS && mac.bytes().all(is_digit);
        is_valid.then(|| Self { handle: handle.to_owned(), mac: mac.to_owned() })
    }

    /// The first segments of its paths.
    pub(super) fn to_path(&self) -> String {
        format!("/aio/{}.{}", self.handle, self.mac)
    }

    /// The host label of the API, or of a port.
    pub(super) fn to_label(&self, port: Option<u16>) -> String {
        let port = port.map(|port| format!("{port}-")).unwrap_or_default();
        format!("{port}{LABEL_PREFIX}{}-{}", self.handle, self.mac)
    }

    /// Finds the sandbox, dead or alive. All reasons to refuse an address look the same.
    pub(super) fn resolve(&self, service: &Service) -> Option<AddressedSandbox> {
        let key = service.find_key(&KeyHandle::from_text(&self.handle)?)?;
        let sandbox = service.sandbox_of_key(&key)?;
        let is_ending = sandbox.is_being_removed()
            || sandbox.read_state(|state| matches!(state.phase, Phase::Stopping | Phase::Stopped));
        if is_ending || sandbox.read_state(|state| state.origin != ORIGIN) {
            return None;
        }
        let token = service.key_token(&key, KEY_PURPOSE, AioNotes::of_sandbox(&sandbox).epoch);
        self.is_opened_by(token.expose()).then_some(AddressedSandbox { sandbox, key })
    }

    fn is_opened_by(&self, token: &str) -> bool {
        truncate_token(token).as_bytes().ct_eq(self.mac.as_bytes()).into()
    }
}

impl AddressLabel {
    pub(super) fn parse(label: &str) -> Option<Self> {
        let (port, rest) = match label.strip_prefix(LABEL_PREFIX) {
            Some(rest) => (None, rest),
            None => {
                let (port, rest) = label.split_once('-')?;
                (Some(port), rest.strip_prefix(LABEL_PREFIX)?)
            }
        };
        let port = port
            .map(|port| port.parse().ok().filter(|port: &u16| *port > 0))
            .map_or(Some(None), |port| port.map(Some))?;
        Some(Self { address: SandboxAddress::from_parts(rest.split_once('-')?)?, port })
    }
}

/// Whether a host label has the form of this front.
pub(super) fn claims_label(label: &str) -> bool {
    AddressLabel::parse(label).is_some()
}

fn truncate_token(token: &str) -> String {
    token.chars().take(MAC_DIGITS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const HANDLE: &str = "abcdefghij0123456789";
    const MAC: &str = "0123456789abcdef0123456789abcdef";

    fn address() -> SandboxAddress {
        SandboxAddress { handle: HANDLE.to_owned(), mac: MAC.to_owned() }
    }

    #[test]
    fn paths_and_labels_are_parsed_again() {
        assert_eq!(
            SandboxAddress::parse(address().to_path().strip_prefix("/aio/").unwrap()),
            Some(address())
        );
        for port in [None, Some(1), Some(65535)] {
            let label = address().to_label(port);
            assert!(label.len() <= 63, "{label}");
            assert_eq!(AddressLabel::parse(&label), Some(AddressLabel { address: address(), port }));
        }
    }

    #[test]
    fn other_texts_are_no_addresses() {
        let upper = MAC.to_ascii_uppercase();
        for text in [
            "",
            ".",
            HANDLE,
            &format!("{HANDLE}."),
            &format!("{HANDLE}.{}", &MAC[1..]),
            &format!("{HANDLE}.{MAC}0"),
            &format!("{HANDLE}.{upper}"),
            &format!("x.{MAC}"),
        ] {
            assert_eq!(SandboxAddress::parse(text), None, "{text}");
        }
        for label in [
            "aio",
            "aio-",
            &format!("0-aio-{HANDLE}-{MAC}"),
            &format!("65536-aio-{HANDLE}-{MAC}"),
            &format!("x-aio-{HANDLE}-{MAC}"),
            &format!("8080-{HANDLE}-{MAC}"),
            &format!("{HANDLE}-8080"),
        ] {
            assert!(!claims_label(label), "{label}");
        }
    }
}
