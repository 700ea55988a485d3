// SPDX-License-Identifier: GPL-2.0

//! The protocol core of metaroce as ordinary Rust: the same source that the kernel module
//! compiles, for tests, simulation and fuzzing.

#![no_std]
#![forbid(unsafe_code)]

pub mod os;
pub mod proto;
