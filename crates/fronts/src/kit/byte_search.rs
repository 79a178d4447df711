//! Searches long texts for bytes of a kind.

/// How many bytes are tested at once.
const BLOCK_BYTES: usize = 64;

/// Whether a byte matches. Each block is tested to its end, so that the compiler can use vector instructions: for a
/// long text without a match this is many times faster than a test that may stop at any byte.
pub(crate) fn any_byte(bytes: &[u8], matches: impl Fn(u8) -> bool) -> bool {
    bytes.chunks(BLOCK_BYTES).any(|block| block.iter().fold(false, |found, byte| found | matches(*byte)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_match_is_found_at_every_position() {
        let mut bytes = [b'a'; 2 * BLOCK_BYTES + 1];
        assert!(!any_byte(&bytes, |byte| byte == b'b') && !any_byte(b"", |_| true));
        for at in 0..bytes.len() {
            bytes[at] = b'b';
            assert!(any_byte(&bytes, |byte| byte == b'b'), "at {at}");
            bytes[at] = b'a';
        }
    }
}
