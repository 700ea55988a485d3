// SPDX-License-Identifier: GPL-2.0
//! Bindings made by build.rs; used by `dv`, `verbs` and `sys` only.
//!
//! Unsafe because C functions are declared here.

#![allow(
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    dead_code,
    unsafe_op_in_unsafe_fn,
    clippy::all,
    clippy::undocumented_unsafe_blocks
)]

include!(concat!(env!("OUT_DIR"), "/verbs.rs"));
