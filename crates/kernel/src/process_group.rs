//! The members of a process group, from /proc; see proc(5).

use std::fs;

use rustix::process::Pid;

/// The processes that are in a group now.
pub(crate) fn list_members(group: Pid) -> Vec<Pid> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    numbers
        .filter(|number| read_process_group(*number) == Some(group.as_raw_pid()))
        .filter_map(Pid::from_raw)
        .collect()
}

fn read_process_group(process: i32) -> Option<i32> {
    parse_process_group(&fs::read_to_string(format!("/proc/{process}/stat")).ok()?)
}

/// The group is the third field after the name, which may contain anything.
fn parse_process_group(stat: &str) -> Option<i32> {
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_whitespace().nth(2)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_with_brackets_and_spaces_is_parsed() {
        assert_eq!(parse_process_group("12 (a) b (c) S 1 77 77 0"), Some(77));
        assert_eq!(parse_process_group("nothing"), None);
    }

    #[test]
    fn this_process_is_in_its_group() {
        assert!(list_members(rustix::process::getpgrp()).contains(&rustix::process::getpid()));
    }
}
