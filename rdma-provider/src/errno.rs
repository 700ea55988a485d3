// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#![forbid(unsafe_code)]

//! Error numbers as verbs return them: positive.

use crate::ffi::sys;

/// A positive error number of `errno.h`.
pub(crate) type Errno = i32;

macro_rules! errnos {
    ($($name:ident),*) => {
        $(pub(crate) const $name: Errno = sys::$name as Errno;)*
    };
}

errnos!(EACCES, EINTR, EINVAL, EIO, ENOENT, ENOMEM, EOPNOTSUPP, EPROTO);
