// SPDX-License-Identifier: GPL-2.0
//! What the programs of this folder share: safe wrappers over libibverbs and a few system
//! calls, the connection between two ends, test output, and a repeatable random source.
//!
//! Unsafe code stands in `dv`, `ffi`, `sys` and `verbs` only.

pub mod args;
#[allow(unsafe_code)]
pub mod dv;
pub mod endpoint;
#[allow(unsafe_code)]
pub(crate) mod ffi;
pub mod ktap;
pub mod oob;
pub mod rng;
pub mod single;
pub mod sys;
pub mod verbs;
