//! Times in JSON.

use std::time::SystemTime;

use jiff::Timestamp;

/// Formats a time as RFC 3339.
pub(crate) fn format_rfc3339(time: SystemTime) -> String {
    Timestamp::try_from(time).unwrap_or(Timestamp::UNIX_EPOCH).to_string()
}

/// Parses a time; without a zone it is taken as UTC.
pub(crate) fn parse_time(text: &str) -> Option<SystemTime> {
    let zoned = text.parse::<Timestamp>().ok();
    let naive = || text.parse::<jiff::civil::DateTime>().ok()?.to_zoned(jiff::tz::TimeZone::UTC).ok();
    zoned.or_else(|| naive().map(|zoned| zoned.timestamp())).map(SystemTime::from)
}

/// Milliseconds since the epoch, the unit of event timestamps.
pub(crate) fn now_ms() -> i64 {
    Timestamp::now().as_millisecond()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_with_and_without_a_zone_are_parsed() {
        let at = |text: &str| parse_time(text).map(format_rfc3339);
        for text in [
            "2026-11-15T10:30:00Z",
            "2026-11-15T11:30:00.000+01:00",
            "2026-11-15T10:30:00",
            "2026-11-15 10:30:00",
        ] {
            assert_eq!(at(text).as_deref(), Some("2026-11-15T10:30:00Z"), "{text}");
        }
        assert_eq!(at("tomorrow"), None);
    }
}
