//! Kernel entries that filters written for one architecture overlook.

use std::arch::asm;
use std::io;

/// A call through the i386 entry with up to one argument.
pub(crate) fn i386(number: u32, argument: u32) -> io::Result<u32> {
    let result: i64;
    // SAFETY: `int 0x80` takes its registers as they are named here and changes no others but
    // r8 to r11, which are given up; rbx belongs to the compiler, so it is swapped in and out.
    unsafe {
        asm!(
            "xchg rbx, {argument}",
            "int 0x80",
            "xchg rbx, {argument}",
            argument = inout(reg) u64::from(argument) => _,
            inlateout("rax") u64::from(number) => result,
            out("r8") _, out("r9") _, out("r10") _, out("r11") _,
        );
    }
    // The i386 entry answers in 32 bits; a negative answer is an error.
    let low = u32::try_from(result & 0xffff_ffff).expect("it was cut to 32 bits");
    let signed = low.cast_signed();
    if (-4095..0).contains(&signed) { Err(io::Error::from_raw_os_error(-signed)) } else { Ok(low) }
}

/// Whether the processor lets this process talk to devices by port numbers.
pub(crate) fn read_port(port: u16) -> u8 {
    let value: u8;
    // SAFETY: reading the POST-code port has no effect; without permission it is a SIGSEGV,
    // which ends the attacker.
    unsafe { asm!("in al, dx", in("dx") port, out("al") value) };
    value
}
