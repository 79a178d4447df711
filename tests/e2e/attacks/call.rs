//! Direct system calls, without a library wrapper between the attacker and the kernel.

use std::ffi::{CString, c_long};
use std::io;

/// Any system call with any arguments. Pointers are handed over by [`pointer`].
pub(crate) fn call(number: c_long, arguments: &[u64]) -> io::Result<u64> {
    let at = |index: usize| arguments.get(index).copied().unwrap_or(0);
    // SAFETY: pointers among the arguments come from values that the caller keeps alive; a call
    // that harms this process harms only the attacker.
    let result = unsafe { libc::syscall(number, at(0), at(1), at(2), at(3), at(4), at(5)) };
    u64::try_from(result).map_err(|_negative| io::Error::last_os_error())
}

/// The address of a value, as an argument.
pub(crate) fn pointer<T: ?Sized>(value: &T) -> u64 {
    std::ptr::from_ref(value).cast::<u8>().expose_provenance() as u64
}

/// The address of a value that the kernel will write to.
pub(crate) fn pointer_mut<T: ?Sized>(value: &mut T) -> u64 {
    std::ptr::from_mut(value).cast::<u8>().expose_provenance() as u64
}

/// Converts text to a C string for the kernel; our texts contain no zero byte.
pub(crate) fn text(text: &str) -> CString {
    CString::new(text).unwrap_or_default()
}

/// Converts a negative descriptor or flag to the form the kernel takes.
pub(crate) fn signed(number: i64) -> u64 {
    number.cast_unsigned()
}

/// Converts a libc constant, whose C types vary, to an argument.
pub(crate) fn constant(number: impl Into<i64>) -> u64 {
    number.into().cast_unsigned()
}
