//! The signals that are sent to processes by name.

/// Asks a process to end.
pub const SIGTERM: i32 = 15;

/// The largest number of a signal; those above are real-time signals, which have no fixed meaning.
pub const MAX_SIGNAL: i32 = 31;

/// Signals by the names that kill(1) gives them.
pub const SIGNAL_NAMES: [(&str, i32); 14] = [
    ("HUP", 1),
    ("INT", 2),
    ("QUIT", 3),
    ("ABRT", 6),
    ("KILL", 9),
    ("USR1", 10),
    ("SEGV", 11),
    ("USR2", 12),
    ("PIPE", 13),
    ("ALRM", 14),
    ("TERM", SIGTERM),
    ("CONT", 18),
    ("STOP", 19),
    ("WINCH", 28),
];

/// The number of a signal that is written as a name, with or without `SIG`, or as a number.
pub fn parse_signal(text: &str) -> Option<i32> {
    if let Ok(number) = text.parse::<i32>() {
        return (1..=MAX_SIGNAL).contains(&number).then_some(number);
    }
    let name = text.to_ascii_uppercase();
    let name = name.strip_prefix("SIG").unwrap_or(&name);
    SIGNAL_NAMES.iter().find(|(known, _)| *known == name).map(|(_, number)| *number)
}
