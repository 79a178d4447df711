//! Amounts with their unit in the type, and the grammar in which users write them.

use std::fmt;

/// A number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bytes(pub u64);

/// The minimum memory of a sandbox: enough to start a shell and an interpreter. With less, the kernel
/// kills the first command before it has printed anything.
pub const MIN_MEMORY: Bytes = Bytes::from_mib(4);

/// The minimum disk of a sandbox or volume: its file system needs some of it for its own tables.
pub const MIN_DISK: Bytes = Bytes::from_mib(8);

/// The largest number of processes that a control group can be limited to: PID_MAX_LIMIT of a 64-bit kernel.
pub const MAX_PIDS: u32 = 4 << 20;

/// The largest number of cores in a limit.
const MAX_CORES: u32 = 1000;

/// Processor time in thousandths of one core.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MilliCpus(pub u32);

/// The error for text that is not a valid amount, or an amount that no limit can have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuantityError {
    #[error("`{0}` is not {1}")]
    Malformed(String, &'static str),
    #[error("`{0}` is more than {MAX_CORES} cores, the most that a limit can be")]
    TooManyCores(String),
}

impl Bytes {
    pub const fn from_mib(count: u64) -> Self {
        Self(count << 20)
    }

    /// Parses `512`, `64Mi`, `1G`, `2GiB`: an integer, then `k|m|g|t`, then `i` for powers of 1024,
    /// then `b`, in any case. This is the grammar of the reference API.
    pub fn parse(text: &str) -> Result<Self, QuantityError> {
        Self::parse_with_base(text, 1000)
    }

    /// Like [`Bytes::parse`], but a bare `k|m|g|t` means powers of 1024, as on command lines.
    pub fn parse_binary(text: &str) -> Result<Self, QuantityError> {
        Self::parse_with_base(text, 1024)
    }

    fn parse_with_base(text: &str, bare_base: u64) -> Result<Self, QuantityError> {
        let wrong = || QuantityError::Malformed(text.to_owned(), "an amount of bytes such as `512Mi`");
        let digits = text.bytes().take_while(u8::is_ascii_digit).count();
        let (number, suffix) = text.split_at(digits);
        let number: u64 = number.parse().ok().ok_or_else(wrong)?;
        let suffix = suffix.to_ascii_lowercase();
        let unit = suffix.strip_suffix('b').unwrap_or(&suffix);
        let (unit, base) = match unit.strip_suffix('i') {
            Some(unit) if !unit.is_empty() => (unit, 1024),
            Some(_) => return Err(wrong()),
            None => (unit, bare_base),
        };
        let power = match unit {
            "" => 0,
            "k" => 1,
            "m" => 2,
            "g" => 3,
            "t" => 4,
            _ => return Err(wrong()),
        };
        let bytes = u64::checked_pow(base, power).and_then(|factor| number.checked_mul(factor));
        match bytes {
            Some(bytes) if bytes > 0 => Ok(Self(bytes)),
            _ => Err(wrong()),
        }
    }
}

impl MilliCpus {
    /// Parses `1`, `0.5` or `500m`.
    pub fn parse(text: &str) -> Result<Self, QuantityError> {
        let wrong = || QuantityError::Malformed(text.to_owned(), "a number of cores such as `0.5` or `500m`");
        let plain = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit() || b == b'.');
        let (number, factor) = match text.strip_suffix('m') {
            Some(number) => (number, 1.0),
            None => (text, 1000.0),
        };
        if !plain(number) {
            return Err(wrong());
        }
        let cores: f64 = number.parse().ok().ok_or_else(wrong)?;
        let thousandths = (cores * factor).round();
        if thousandths > f64::from(MAX_CORES * 1000) {
            return Err(QuantityError::TooManyCores(text.to_owned()));
        }
        if thousandths < 1.0 {
            return Err(wrong());
        }
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "the range was just checked"
        )]
        Ok(Self(thousandths as u32))
    }
}

impl Bytes {
    /// The amount for people, to one decimal: `1.5 GiB`.
    pub fn human_readable(self) -> String {
        let (mut whole, mut tenths, mut unit) = (self.0, 0, "B");
        for larger in ["KiB", "MiB", "GiB", "TiB"] {
            if whole < 1024 {
                break;
            }
            tenths = whole % 1024 * 10 / 1024;
            (whole, unit) = (whole / 1024, larger);
        }
        if unit == "B" { format!("{whole} B") } else { format!("{whole}.{tenths} {unit}") }
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (unit, size) in [("Ti", 1 << 40), ("Gi", 1 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10)] {
            if self.0 >= size && self.0.is_multiple_of(size) {
                return write!(f, "{}{unit}", self.0 / size);
            }
        }
        write!(f, "{}", self.0)
    }
}

impl fmt::Display for MilliCpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", f64::from(self.0) / 1000.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn bytes_follow_the_reference_grammar() {
        for (text, expected) in [
            ("1", 1),
            ("64Mi", 64 << 20),
            ("2Gi", 2 << 30),
            ("1k", 1000),
            ("1KiB", 1024),
            ("3gb", 3_000_000_000),
            ("7b", 7),
        ] {
            assert_eq!(Bytes::parse(text), Ok(Bytes(expected)), "{text}");
        }
        assert_eq!(Bytes::parse_binary("256m"), Ok(Bytes::from_mib(256)));
        for text in
            ["", "Mi", "-1", "1.5G", "0", "1 Mi", "1i", "1x", "99999999999999999999", "99999999999T", "NaN"]
        {
            assert!(Bytes::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn cores_are_decimal_or_thousandths() {
        for (text, expected) in [("1", 1000), ("0.5", 500), ("500m", 500), ("100m", 100), ("2.25", 2250)] {
            assert_eq!(MilliCpus::parse(text), Ok(MilliCpus(expected)), "{text}");
        }
        for text in ["", "0", "-1", "nan", "inf", "1e3", "m", "1mm", "1_0", "1..2"] {
            assert!(MilliCpus::parse(text).is_err(), "{text}");
        }
        assert_eq!(MilliCpus::parse("1000"), Ok(MilliCpus(1_000_000)));
        let above = MilliCpus::parse("10000").expect_err("it is too many").to_string();
        assert_eq!(above, "`10000` is more than 1000 cores, the most that a limit can be");
    }

    proptest! {
        #[test]
        fn parsing_never_panics(text in ".*") {
            drop(Bytes::parse(&text));
            drop(MilliCpus::parse(&text));
        }

        #[test]
        fn printed_amount_parses_back(amount in 1u64..u64::MAX) {
            prop_assert_eq!(Bytes::parse(&Bytes(amount).to_string()), Ok(Bytes(amount)));
        }
    }
}
