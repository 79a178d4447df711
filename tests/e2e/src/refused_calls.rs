//! System calls of our own processes that a filter refused, as the kernel logs them.
//!
//! The filters of supervisor, launcher and server refuse a call that is missing in them with an error, which a library may hide.
//! So every test with a server looks into the kernel's log at its end. Where only a daemon gets these records, or the log
//! cannot be read, nothing is found.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// The type of an audit record about a filter.
const FILTER_RECORD: &str = "type=1326";

/// The kernel's log from the moment this value was made.
pub struct RefusedCallLog(Option<File>);

impl RefusedCallLog {
    pub fn begin() -> Self {
        let opened = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open("/dev/kmsg");
        Self(opened.ok().filter(|mut log| log.seek(SeekFrom::End(0)).is_ok()))
    }

    /// The records about `program`.
    pub fn read(&mut self, program: &Path) -> Vec<String> {
        let Some(log) = &mut self.0 else { return Vec::new() };
        let executable = format!("exe=\"{}\"", program.display());
        let mut records = Vec::new();
        let mut record = [0; 8192];
        loop {
            match log.read(&mut record) {
                Ok(length) => {
                    let text = String::from_utf8_lossy(&record[..length]).into_owned();
                    if text.contains(FILTER_RECORD) && text.contains(&executable) {
                        records.push(text);
                    }
                }
                // The kernel has overwritten records that were not read yet.
                Err(error) if error.kind() == ErrorKind::BrokenPipe => {}
                Err(_) => return records,
            }
        }
    }
}
