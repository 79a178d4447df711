//! Gives `coracle` the entry point that starts the client program it contains, if it contains one.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if let Ok(entry) = std::env::var("DEP_CORACLE_EMBEDDED_ENTRY") {
        println!("cargo::rustc-link-arg-bins=-Wl,--entry={entry}");
    }
}
