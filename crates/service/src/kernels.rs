//! What runs the code of each language inside a sandbox.

use domain::{Language, Worker};
use wire::process::{Kernel, Program};

/// The python kernel, as the interpreter gets it. It travels with each order to open a context,
/// so that an older agent runs the newest one.
const PYTHON: &str = include_str!("kernels/python.py");

/// How the agent's own program is told to be a kernel.
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
    fn the_python_kernel_fits_one_argument() {
        assert!(PYTHON.len() < 100 << 10);
        assert!(!PYTHON.contains('\0'));
    }

    #[test]
    fn a_name_is_never_taken_for_another_word() {
        let language = Language::parse("java").expect("a language");
        let expected = ["__kernel", "jupyter", "java"].map(str::to_owned).to_vec();
        assert_eq!(of(&language).program, Program::Own(expected));
    }
}
