// SPDX-License-Identifier: GPL-2.0

//! What `rdma -dd resource show` prints of an object beside what the core knows of it.
//!
//! C header: `include/rdma/restrack.h`.

use crate::bindings;
use ::core::{
    fmt::{self, Write},
    marker::PhantomData,
};
use ::kernel::{error::to_result, ffi::c_int, prelude::*, str::NullTerminatedFormatter};

/// Longest text of a value, in bytes.
const TEXT: usize = 64;

/// The values of an object, shown in the order in which they are added.
///
/// All methods fail with `EMSGSIZE` when the message is full: nothing of the object is shown
/// then, and the core tries again with the next message.
pub struct Details<'a> {
    msg: *mut bindings::sk_buff,
    _life: PhantomData<&'a mut ()>,
}

impl Details<'_> {
    /// Adds what `f` adds to `msg`; returns what the core's callbacks return.
    ///
    /// # Safety
    ///
    /// `msg` is a message into which the core is writing an object.
    pub(super) unsafe fn fill(
        msg: *mut bindings::sk_buff,
        f: impl FnOnce(&mut Details<'_>) -> Result,
    ) -> c_int {
        // SAFETY: guaranteed by the caller.
        let nest = unsafe { bindings::metaroce_nest_driver_start(msg) };
        if nest.is_null() {
            return -(bindings::EMSGSIZE as c_int);
        }
        let r = f(&mut Details {
            msg,
            _life: PhantomData,
        });
        // SAFETY: begun above, in the same message.
        unsafe {
            match r {
                Ok(()) => {
                    bindings::metaroce_nla_nest_end(msg, nest);
                    0
                }
                Err(e) => {
                    bindings::metaroce_nla_nest_cancel(msg, nest);
                    e.to_errno()
                }
            }
        }
    }

    /// Adds a decimal number.
    pub fn number(&mut self, name: &'static CStr, value: u64) -> Result {
        // SAFETY: the message is being written; the name ends with a zero.
        to_result(unsafe { bindings::rdma_nl_put_driver_u64(self.msg, name.as_char_ptr(), value) })
    }

    /// Adds a text of up to 63 bytes; `EINVAL` when it is longer.
    pub fn text(&mut self, name: &'static CStr, value: fmt::Arguments<'_>) -> Result {
        let mut text = [0u8; TEXT];
        let mut to = NullTerminatedFormatter::new(&mut text).ok_or(EINVAL)?;
        to.write_fmt(value).map_err(|_| EINVAL)?;
        // SAFETY: as in `number`; the text ends with a zero as well.
        to_result(unsafe {
            bindings::rdma_nl_put_driver_string(self.msg, name.as_char_ptr(), text.as_ptr().cast())
        })
    }
}
