//! The result of an attack.

use std::io;

pub(crate) enum Verdict {
    /// The attack reached its goal; the text says which.
    Succeeded(String),
    /// It was refused, as `CALL: ERRNO`, one for each attempt.
    Stopped(String),
}

/// The outer error means that the attack could not be tried at all.
pub(crate) type Attempt = Result<Verdict, String>;

/// Formats one refusal, by the name of its error if it has one.
pub(crate) fn refusal(call: &str, error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(number) => format!("{call}: {}", errno_name(number)),
        None => format!("{call}: {error}"),
    }
}

/// A verdict from the one call that decides.
pub(crate) fn decide<T>(call: &str, result: io::Result<T>) -> Attempt {
    Ok(match result {
        Ok(_) => Verdict::Succeeded(call.to_owned()),
        Err(error) => Verdict::Stopped(refusal(call, &error)),
    })
}

/// As [`decide`], where certain errors show that the permission was granted: the kernel checked the
/// arguments, which are invalid on purpose.
pub(crate) fn decide_permitted<T>(call: &str, result: io::Result<T>, permitted: &[i32]) -> Attempt {
    match result {
        Err(error) if error.raw_os_error().is_some_and(|number| permitted.contains(&number)) => {
            Ok(Verdict::Succeeded(format!("permitted, though {}", refusal(call, &error))))
        }
        other => decide(call, other),
    }
}

/// Tries several variants; the first that works is a success.
pub(crate) fn first_success<T>(ways: impl IntoIterator<Item = (String, io::Result<T>)>) -> Attempt {
    let mut refusals = Vec::new();
    for (way, result) in ways {
        match result {
            Ok(_) => return Ok(Verdict::Succeeded(way)),
            Err(error) => refusals.push(refusal(&way, &error)),
        }
    }
    Ok(Verdict::Stopped(if refusals.is_empty() {
        "no way was found".to_owned()
    } else {
        refusals.join("; ")
    }))
}

fn errno_name(number: i32) -> String {
    let known = match number {
        libc::EPERM => "EPERM",
        libc::ENOENT => "ENOENT",
        libc::ESRCH => "ESRCH",
        libc::EIO => "EIO",
        libc::ENXIO => "ENXIO",
        libc::EBADF => "EBADF",
        libc::EAGAIN => "EAGAIN",
        libc::ENOMEM => "ENOMEM",
        libc::EACCES => "EACCES",
        libc::EFAULT => "EFAULT",
        libc::EBUSY => "EBUSY",
        libc::ENODEV => "ENODEV",
        libc::ENOTDIR => "ENOTDIR",
        libc::EINVAL => "EINVAL",
        libc::EMFILE => "EMFILE",
        libc::ENOTTY => "ENOTTY",
        libc::ETXTBSY => "ETXTBSY",
        libc::ENOSPC => "ENOSPC",
        libc::EROFS => "EROFS",
        libc::EDQUOT => "EDQUOT",
        libc::ELOOP => "ELOOP",
        libc::ENOSYS => "ENOSYS",
        libc::ENOEXEC => "ENOEXEC",
        libc::EOPNOTSUPP => "EOPNOTSUPP",
        libc::EAFNOSUPPORT => "EAFNOSUPPORT",
        libc::ESOCKTNOSUPPORT => "ESOCKTNOSUPPORT",
        libc::EPROTONOSUPPORT => "EPROTONOSUPPORT",
        libc::ECONNREFUSED => "ECONNREFUSED",
        libc::ENETUNREACH => "ENETUNREACH",
        libc::EUSERS => "EUSERS",
        _ => return format!("errno {number}"),
    };
    known.to_owned()
}
