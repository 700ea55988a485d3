// SPDX-License-Identifier: GPL-2.0

//! Bindings to the kernel headers listed in `bindings_helper.h`, made by bindgen at build
//! time, and to the helper functions of `helpers.c`.
//!
//! They are raw: only `kernel_ext`, `mem` and `queue` use them, and offer safe wrappers.
//!
//! Their types are not those of `kernel::bindings`, even where the C type is the same one;
//! a pointer that crosses between the two is cast.

// Lints that only newer compilers know.
#![allow(unknown_lints)]
#![allow(
    clippy::all,
    clippy::as_underscore,
    clippy::cast_lossless,
    clippy::ptr_as_ptr,
    clippy::ptr_cast_constness,
    clippy::ref_as_ptr,
    clippy::undocumented_unsafe_blocks,
    dead_code,
    improper_ctypes,
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    unnecessary_transmutes,
    unreachable_pub,
    unsafe_op_in_unsafe_fn
)]

use ::kernel::ffi;
use ::pin_init::{MaybeZeroable, Zeroable};

// Blocklisted in the kernel's bindgen parameters, to be pointer-sized on every architecture.
type __kernel_size_t = usize;
type __kernel_ssize_t = isize;
type __kernel_ptrdiff_t = isize;

// SAFETY: `__BindgenBitfieldUnit<Storage>` is a newtype around `Storage`.
unsafe impl<Storage> Zeroable for __BindgenBitfieldUnit<Storage> where Storage: Zeroable {}

include!(env!("METAROCE_BINDINGS"));
