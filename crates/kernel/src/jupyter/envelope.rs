//! The frames of a Jupyter message: its addressees, a signature, and four JSON texts.
//!
//! ```text
//! identities …, "<IDS|MSG>", signature, header, parent header, metadata, content, buffers …
//! ```

use ring::hmac;
use serde_json::{Value, json};
use zeromq::ZmqMessage;

use super::message::JupyterMessage;

const DELIMITER: &[u8] = b"<IDS|MSG>";

/// Signs requests and verifies messages.
#[derive(Debug, Clone)]
pub(super) struct MessageSigner {
    key: hmac::Key,
    session: String,
    /// The number of requests so far; part of their ids.
    count: u64,
}

impl MessageSigner {
    pub(super) fn new(key: &str, session: String) -> Self {
        Self { key: hmac::Key::new(hmac::HMAC_SHA256, key.as_bytes()), session, count: 0 }
    }

    /// A request, and the id by which the kernel will refer to it.
    pub(super) fn sign_request(&mut self, kind: &str, content: &Value) -> (String, ZmqMessage) {
        self.count += 1;
        let id = format!("{}-{}", self.session, self.count);
        let header = json!({
            "msg_id": id,
            "msg_type": kind,
            "session": self.session,
            "username": "coracle",
            "date": jiff::Timestamp::now().to_string(),
            "version": "5.3",
        });
        let pieces = [header.to_string(), "{}".to_owned(), "{}".to_owned(), content.to_string()];
        let signature =
            self.sign(&pieces).as_ref().iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let mut parts = ZmqMessage::from(DELIMITER.to_vec());
        for frame in std::iter::once(signature).chain(pieces) {
            parts.push_back(frame.into_bytes().into());
        }
        (id, parts)
    }

    /// Parses a message if it is valid and has our signature.
    pub(super) fn verify_message(&self, frames: &[impl AsRef<[u8]>]) -> Option<JupyterMessage> {
        let start = frames.iter().position(|frame| frame.as_ref() == DELIMITER)?;
        let [signature, header, parent, metadata, content, ..] = &frames[start + 1..] else { return None };
        let (header, parent, content) = (header.as_ref(), parent.as_ref(), content.as_ref());
        let mut signed = Vec::new();
        for piece in [header, parent, metadata.as_ref(), content] {
            signed.extend_from_slice(piece);
        }
        hmac::verify(&self.key, &signed, &decode_hex(signature.as_ref())?).ok()?;
        JupyterMessage::parse(header, parent, content)
    }

    fn sign(&self, pieces: &[String]) -> hmac::Tag {
        let mut context = hmac::Context::with_key(&self.key);
        for piece in pieces {
            context.update(piece.as_bytes());
        }
        context.sign()
    }
}

fn decode_hex(text: &[u8]) -> Option<Vec<u8>> {
    let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    let pairs = text.chunks(2).map(|pair| Some(digit(*pair.first()?)? << 4 | digit(*pair.get(1)?)?));
    pairs.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frames(signer: &mut MessageSigner) -> Vec<Vec<u8>> {
        let (_, parts) = signer.sign_request("execute_request", &json!({"code": "1"}));
        parts.into_vec().into_iter().map(|frame| frame.to_vec()).collect()
    }

    #[test]
    fn only_signed_messages_are_opened() {
        let mut signer = MessageSigner::new("secret", "session".to_owned());
        let sent = frames(&mut signer);
        let opened = signer.verify_message(&sent).expect("the signature is valid");
        assert_eq!((opened.kind.as_str(), &opened.content), ("execute_request", &json!({"code": "1"})));
        // With an identity in front it is the same message.
        let mut routed = sent.clone();
        routed.insert(0, b"identity".to_vec());
        assert!(signer.verify_message(&routed).is_some());
        let mut changed = sent.clone();
        changed[5] = b"{\"code\": \"2\"}".to_vec();
        assert_eq!(signer.verify_message(&changed), None);
        assert_eq!(MessageSigner::new("other", String::new()).verify_message(&sent), None);
        for length in 0..sent.len() {
            assert_eq!(signer.verify_message(&sent[..length]), None, "{length}");
        }
        assert_eq!(
            signer.verify_message(&[
                b"<IDS|MSG>".to_vec(),
                b"xyz".to_vec(),
                b"{}".to_vec(),
                b"{}".to_vec(),
                b"{}".to_vec(),
                b"{}".to_vec()
            ]),
            None
        );
    }

    #[test]
    fn request_ids_are_never_reused() {
        let mut signer = MessageSigner::new("k", "s".to_owned());
        let mut name = || signer.sign_request("x", &json!({})).0;
        assert_ne!(name(), name());
    }
}
