//! An ordinary user's way out: a program that carries the packets of one sandbox.
