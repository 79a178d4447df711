//! Attacks.
fn main() {}
