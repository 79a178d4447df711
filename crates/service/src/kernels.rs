//! Which program runs the code of each language inside a sandbox.

use domain::{Language, Worker};
use wire::process::{Kernel, Program};

/// The source of the python kernel, passed to the interpreter. It is sent with each request to open a context, so that
/// an older agent runs the newest kernel.
const PYTHON: &str = include_str!("kernels/python.py");

/// The argument that makes the agent's own program act as a kernel.
const OWN: &str = "__kernel";

pub(crate) fn of(language: &Language) -> Kernel {
    let own = |words: &[&str]| {
        Program::Own(std::iter::once(&OWN).chain(words).map(|word| (*word).to_owned()).collect())
    };
    let program = match language.worker() {
        Worker::Python => Program::Argv(["python3", "-c", PYTHON].map(str::to_owned).into()),
        Worker::JavaScript => own(&["javascript"]),
        Worker::TypeScript => own(&["typescript"]),
        Worker::Bash => Program::Shell,
        Worker::Jupyter(name) => own(&["jupyter", name]),
    };
    Kernel { language: language.as_str().to_owned(), program }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The limit of execve(2) for one argument is 128 KiB.
    #[test]
    fn python_kernel_fits_in_one_argument() {
        assert!(PYTHON.len() < 100 << 10);
        assert!(!PYTHON.contains('\0'));
    }

    #[test]
    fn jupyter_language_is_passed_as_a_separate_argument() {
        let language = Language::parse("java").expect("a language");
        let expected = ["__kernel", "jupyter", "java"].map(str::to_owned).to_vec();
        assert_eq!(of(&language).program, Program::Own(expected));
    }
}
