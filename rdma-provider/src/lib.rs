// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB

//! The libibverbs provider of the metaroce device.
//!
//! Layers, from the outside in:
//!
//! - `ffi`: what libibverbs calls: C structures in, C structures out;
//! - `queue`: what posting and polling mean: checks, work queue elements, completions; safe code;
//! - `ring`: memory shared with the kernel, and the lock around it.
//!
//! Posting writes work queue elements into the ring and enters the kernel once per call (the
//! doorbell); polling and arming never enter it. The ABI is `uapi/rdma/metaroce-abi.h`.
//!
//! The library uses `core` and libc alone, so that it brings no runtime into other people's
//! processes. It does not panic: `check-plugin` fails when the linked library still holds a panic.
//! If one were reached all the same, the process ends there; nothing unwinds into C.
#![cfg_attr(not(test), no_std)]
#![deny(unsafe_code)]
#![cfg_attr(
    test,
    allow(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing,
        clippy::arithmetic_side_effects
    )
)]

mod abi;
mod errno;
#[allow(unsafe_code)]
mod ffi;
mod queue;
#[allow(unsafe_code)]
mod ring;
#[cfg(test)]
mod tests;

// By this name: the model checker (rust/model) compiles `queue` with atomics of its own.
use core::sync::atomic;
