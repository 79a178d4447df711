//! The first instructions of `coracle`: for a client command they start the small program that it contains.
//!
//! ```text
//!   kernel ──► coracle_entry ── choose_program ──► entry of the contained program
//!                                    └───────────► _start of the whole program
//! ```
//! The contained program is mapped from the file of this process, as the kernel maps a program, and gets the
//! stack that the kernel prepared. The mappings of the whole program stay, but no page of them is touched. For all
//! other commands, and whenever something is unexpected, the whole program starts. It has every
//! command, so this is never needed, only faster.
//!
//! Nothing here may depend on relocations or on the C library, which are not set up yet: no panics, no
//! formatting, no trait objects, and no `memcpy` or `memset`, which are chosen for the processor by a relocation. Memory is
//! therefore accessed by volatile reads and writes, which the compiler does not turn into such calls.

use core::arch::{asm, naked_asm};
use core::ffi::CStr;

/// The contained program, at the beginning of a page so that its pages can be mapped.
#[repr(C, align(4096))]
struct PageAligned<T>(T);

#[unsafe(no_mangle)]
static CORACLE_CLIENT_PROGRAM: PageAligned<[u8; include_bytes!(env!("CORACLE_CLIENT_PROGRAM")).len()]> =
    PageAligned(*include_bytes!(env!("CORACLE_CLIENT_PROGRAM")));

/// The command for which the contained program is started; it has the other client commands too.
const CLIENT_COMMAND: &CStr = c"exec";
/// The options that may stand before a command: with a value, and without.
const VALUE_OPTION: &CStr = c"--url";
const PLAIN_OPTION: &CStr = c"--json";
/// [`crate::WHOLE_PROGRAM_VARIABLE`] as it begins in the environment.
const WHOLE_PROGRAM_PREFIX: &CStr = c"CORACLE_WHOLE_PROGRAM=";
/// The file of this process, of which the contained program is a part.
const OWN_FILE: &CStr = c"/proc/self/exe";

const PAGE: usize = 4096;

/// Entries of the auxiliary vector that describe the program; see getauxval(3).
const AT_NULL: usize = 0;
const AT_PHDR: usize = 3;
const AT_PHNUM: usize = 5;
const AT_ENTRY: usize = 9;

/// The entry point of `coracle`. The kernel jumps here with the stack of a new process.
#[unsafe(naked)]
#[unsafe(no_mangle)]
extern "C" fn coracle_entry() -> ! {
    naked_asm!(
        // `rdx` and the stack belong to whichever program starts.
        "mov rbx, rsp",
        "mov r12, rdx",
        "mov rdi, rsp",
        "lea rsi, [rip + {program}]",
        "lea rdx, [rip + __ehdr_start]",
        "and rsp, -16",
        "call {choose}",
        "mov rsp, rbx",
        "mov rdx, r12",
        "test rax, rax",
        "je 2f",
        "jmp rax",
        "2:",
        "jmp _start",
        program = sym CORACLE_CLIENT_PROGRAM,
        choose = sym choose_program,
    )
}

/// Returns the entry of the contained program once it is mapped, or 0 if the whole program shall start.
///
/// # Safety
///
/// `stack` is the stack of a new process, and the other two are the beginnings of program files in memory.
unsafe extern "C" fn choose_program(stack: *mut usize, contained: *const u8, whole: *const u8) -> usize {
    // SAFETY: the kernel puts the number of arguments first, then a pointer to each, a null pointer, a pointer to
    // each variable, a null pointer, and the auxiliary vector.
    unsafe {
        let count = stack.read_volatile();
        let arguments = stack.add(1);
        if !names_client_command(arguments, count) {
            return 0;
        }
        let mut next = arguments.add(count + 1);
        while next.read_volatile() != 0 {
            if starts_with(next.read_volatile() as *const u8, WHOLE_PROGRAM_PREFIX) {
                return 0;
            }
            next = next.add(1);
        }
        let header = ProgramHeader { start: contained };
        let Some(base) = map_program(&header, file_offset(contained, whole)) else { return 0 };
        describe_program(next.add(1), &header, base);
        base + header.entry()
    }
}

/// Whether the first argument that is no option is a client command.
///
/// # Safety
///
/// `arguments` are `count` pointers to strings.
unsafe fn names_client_command(arguments: *const usize, count: usize) -> bool {
    let mut index = 1;
    while index < count {
        // SAFETY: `index` is below the number of arguments.
        let argument = unsafe { arguments.add(index).read_volatile() } as *const u8;
        // SAFETY: each argument is a string.
        unsafe {
            if equals(argument, VALUE_OPTION) {
                index += 2;
            } else if equals(argument, PLAIN_OPTION) {
                index += 1;
            } else {
                return equals(argument, CLIENT_COMMAND);
            }
        }
    }
    false
}

/// # Safety
///
/// `text` is a string that ends with a zero.
unsafe fn equals(text: *const u8, expected: &CStr) -> bool {
    // SAFETY: if it starts with all of `expected`, it is long enough for one more byte.
    unsafe { starts_with(text, expected) && text.add(expected.count_bytes()).read_volatile() == 0 }
}

/// # Safety
///
/// `text` is a string that ends with a zero.
unsafe fn starts_with(text: *const u8, prefix: &CStr) -> bool {
    let (mut index, length, prefix) = (0, prefix.count_bytes(), prefix.as_ptr().cast::<u8>());
    while index < length {
        // SAFETY: all bytes before were equal and not zero, so `text` goes on at least to here.
        let equal = unsafe { text.add(index).read_volatile() == prefix.add(index).read_volatile() };
        if !equal {
            return false;
        }
        index += 1;
    }
    true
}

/// The header of a program file in memory, and the headers of its segments; see elf(5).
struct ProgramHeader {
    start: *const u8,
}

/// A part of a program that is mapped.
struct ProgramSegment {
    flags: u32,
    offset: usize,
    address: usize,
    file_size: usize,
    memory_size: usize,
}

impl ProgramHeader {
    const SEGMENT_HEADER_SIZE: usize = 56;
    const LOAD: u32 = 1;

    fn word(&self, offset: usize) -> usize {
        // SAFETY: the file has been built by us, so it has a complete header, aligned as the file is.
        unsafe { self.start.add(offset).cast::<usize>().read_volatile() }
    }

    fn entry(&self) -> usize {
        self.word(24)
    }

    fn segments_offset(&self) -> usize {
        self.word(32)
    }

    fn segment_count(&self) -> usize {
        // SAFETY: as above.
        usize::from(unsafe { self.start.add(56).cast::<u16>().read_volatile() })
    }

    /// Returns the segment if it is mapped.
    fn loaded_segment(&self, index: usize) -> Option<ProgramSegment> {
        let header = self.segments_offset() + index * Self::SEGMENT_HEADER_SIZE;
        // SAFETY: as above; the kind and the flags are the first two half words.
        let half = |offset: usize| unsafe { self.start.add(header + offset).cast::<u32>().read_volatile() };
        (half(0) == Self::LOAD).then(|| ProgramSegment {
            flags: half(4),
            offset: self.word(header + 8),
            address: self.word(header + 16),
            file_size: self.word(header + 32),
            memory_size: self.word(header + 40),
        })
    }

    /// Returns the size of the program in memory.
    fn memory_size(&self) -> usize {
        let (mut size, mut index) = (0, 0);
        while index < self.segment_count() {
            if let Some(segment) = self.loaded_segment(index) {
                let end = segment.address + segment.memory_size;
                size = if end > size { end } else { size };
            }
            index += 1;
        }
        size
    }
}

/// Returns where in our file the byte at `address` stands.
fn file_offset(address: *const u8, whole: *const u8) -> Option<usize> {
    let header = ProgramHeader { start: whole };
    let address = address as usize - whole as usize;
    let mut index = 0;
    while index < header.segment_count() {
        if let Some(segment) = header.loaded_segment(index)
            && address >= segment.address
            && address < segment.address + segment.file_size
        {
            return Some(segment.offset + (address - segment.address));
        }
        index += 1;
    }
    None
}

/// Maps the program at an address that the kernel chooses, and returns that address.
fn map_program(program: &ProgramHeader, offset: Option<usize>) -> Option<usize> {
    let offset = offset?;
    if offset % PAGE != 0 || program.segment_count() == 0 {
        return None;
    }
    let file = system_call(OPEN, [OWN_FILE.as_ptr() as usize, READ_ONLY | CLOSE_ON_EXEC, 0, 0, 0, 0])?;
    let size = next_page(program.memory_size());
    let base = system_call(MMAP, [0, size, PROTECT_ALL, PRIVATE | ANONYMOUS, usize::MAX, 0])?;
    let mut index = 0;
    while index < program.segment_count() {
        if let Some(segment) = program.loaded_segment(index) {
            map_segment(&segment, base, file, offset)?;
        }
        index += 1;
    }
    system_call(CLOSE, [file, 0, 0, 0, 0, 0])?;
    Some(base)
}

fn map_segment(segment: &ProgramSegment, base: usize, file: usize, offset: usize) -> Option<()> {
    let skipped = segment.address % PAGE;
    let (start, from) = (base + segment.address - skipped, offset + segment.offset - skipped);
    let access = segment_access(segment.flags);
    // Relocations write to nearly every page that may be written, so the kernel copies all of them at once.
    let populate = if access & WRITABLE == 0 { 0 } else { POPULATE };
    system_call(MMAP, [start, skipped + segment.file_size, access, PRIVATE | FIXED | populate, file, from])?;
    if segment.memory_size == segment.file_size {
        return Some(());
    }
    // What is not in the file is zero: the rest of the last page, and further pages.
    let (mut zero, end) =
        (base + segment.address + segment.file_size, base + segment.address + segment.memory_size);
    let mapped = next_page(zero);
    while zero < mapped {
        // SAFETY: the segment has memory that is not in the file, so it is writable, and this page of it was just mapped.
        unsafe { (zero as *mut u8).write_volatile(0) };
        zero += 1;
    }
    if end > mapped {
        system_call(MMAP, [mapped, end - mapped, access, PRIVATE | ANONYMOUS | FIXED, usize::MAX, 0])?;
    }
    Some(())
}

/// Changes the auxiliary vector so that it describes the contained program.
///
/// # Safety
///
/// `vector` is the auxiliary vector of this process.
unsafe fn describe_program(mut vector: *mut usize, program: &ProgramHeader, base: usize) {
    // SAFETY: the vector consists of pairs and ends with a pair whose key is zero.
    unsafe {
        while vector.read_volatile() != AT_NULL {
            let value = vector.add(1);
            match vector.read_volatile() {
                AT_PHDR => value.write_volatile(base + program.segments_offset()),
                AT_PHNUM => value.write_volatile(program.segment_count()),
                AT_ENTRY => value.write_volatile(base + program.entry()),
                _ => {}
            }
            vector = vector.add(2);
        }
    }
}

const fn next_page(address: usize) -> usize {
    (address + PAGE - 1) & !(PAGE - 1)
}

/// The protection of a mapping from the flags of a segment, whose bits stand in the opposite order.
const fn segment_access(flags: u32) -> usize {
    (((flags & 1) << 2) | (flags & 2) | ((flags & 4) >> 2)) as usize
}

// Numbers of system calls and their arguments; see syscalls(2), open(2) and mmap(2).
const OPEN: usize = 2;
const CLOSE: usize = 3;
const MMAP: usize = 9;
const READ_ONLY: usize = 0;
const CLOSE_ON_EXEC: usize = 0o2_000_000;
const PROTECT_ALL: usize = 0;
const WRITABLE: usize = 0x02;
const PRIVATE: usize = 0x02;
const FIXED: usize = 0x10;
const ANONYMOUS: usize = 0x20;
const POPULATE: usize = 0x8000;
/// Results from here on are negative error numbers.
const FIRST_ERROR: usize = usize::MAX - 4094;

/// Returns the result of a system call, or nothing if it failed.
fn system_call(number: usize, arguments: [usize; 6]) -> Option<usize> {
    let result: usize;
    // SAFETY: the calls made here read a constant string, or change only mappings and descriptors that are made here.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number => result,
            in("rdi") arguments[0],
            in("rsi") arguments[1],
            in("rdx") arguments[2],
            in("r10") arguments[3],
            in("r8") arguments[4],
            in("r9") arguments[5],
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    (result < FIRST_ERROR).then_some(result)
}
