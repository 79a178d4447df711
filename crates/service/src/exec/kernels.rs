//! Which program runs the code of each language inside a sandbox.

use domain::{Language, LanguageRuntime};
use wire::process::{KernelProgram, KernelSpec};

/// The source of the python kernel, passed to the interpreter. It is sent with each request to open a context, so that
/// an older agent runs the newest kernel.
const PYTHON_KERNEL: &str = include_str!("kernels/python.py");

/// The argument that makes the agent's own program act as a kernel.
const KERNEL_SUBCOMMAND: &str = "__kernel";

pub(crate) fn kernel_for(language: &Language) -> KernelSpec {
    let own = |words: &[&str]| {
        KernelProgram::Own(
            std::iter::once(&KERNEL_SUBCOMMAND).chain(words).map(|word| (*word).to_owned()).collect(),
        )
    };
    let program = match language.runtime() {
        LanguageRuntime::Python => {
            KernelProgram::Argv(["python3", "-c", PYTHON_KERNEL].map(str::to_owned).into())
        }
        LanguageRuntime::JavaScript => own(&["javascript"]),
        LanguageRuntime::TypeScript => own(&["typescript"]),
        LanguageRuntime::Bash => KernelProgram::Shell,
        LanguageRuntime::Jupyter(name) => own(&["jupyter", name]),
    };
    KernelSpec { language: language.as_str().to_owned(), program }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The limit of execve(2) for one argument is 128 KiB.
    #[test]
    fn python_kernel_fits_in_one_argument() {
        assert!(PYTHON_KERNEL.len() < 100 << 10);
        assert!(!PYTHON_KERNEL.contains('\0'));
    }

    #[test]
    fn jupyter_language_is_passed_as_a_separate_argument() {
        let language = Language::parse("java").expect("a language");
        let expected = ["__kernel", "jupyter", "java"].map(str::to_owned).to_vec();
        assert_eq!(kernel_for(&language).program, KernelProgram::Own(expected));
    }
}
