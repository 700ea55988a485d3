// SPDX-License-Identifier: GPL-2.0

//! Coverage-guided fuzzing of the protocol core.
//!
//! A [`Target`] is a function that takes bytes and panics when something is wrong. The
//! [`engine`] changes inputs and keeps those that reach new code, as the counters of
//! [`coverage`] tell. A corpus is a text file, one input a line, in hex.

#![deny(unsafe_code)]

pub mod core;
pub mod corpus;
pub mod coverage;
pub mod engine;
mod pick;
pub mod wire;

/// What is fuzzed.
#[derive(Clone, Copy)]
pub struct Target {
    /// Its name, and that of its corpus.
    pub name: &'static str,
    /// Takes any bytes; panics when the core does something that it must not.
    pub run: fn(&[u8]),
    /// Bytes of an input at the most.
    pub longest: usize,
}

/// All targets.
pub const TARGETS: [Target; 2] = [
    Target {
        name: "wire",
        run: wire::run,
        longest: 600,
    },
    Target {
        name: "core",
        run: core::run,
        longest: 256,
    },
];
