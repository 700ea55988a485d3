// SPDX-License-Identifier: GPL-2.0

//! Methods of the driver's own, beside the verbs: ioctls of uverbs. Their attributes are
//! declared in helpers.c, where the RDMA core's macros can be used; the core has checked that
//! they are there, and their least lengths, and has found the QP among those of the caller,
//! who cannot destroy it meanwhile.
//!
//! C header: `include/rdma/uverbs_ioctl.h`.

use super::ib::{self, Operations};
use crate::{
    bindings,
    queue::dv::{modify, query, transitions, MAX_STRIDE},
    verbs::device::Driver,
};
use ::core::{marker::PhantomData, mem::size_of, ptr};
use ::kernel::{
    error::{from_err_ptr, from_result, to_result},
    ffi::c_int,
    prelude::*,
    transmute::{AsBytes, FromBytes},
};

/// What is asked of a QP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// How its connection is.
    Query,
    /// Sets attributes.
    Modify,
    /// What has become of paths.
    Transitions,
}

/// Whether the program that calls may do what only administrators may (CAP_NET_ADMIN). Process
/// context.
pub fn is_net_admin() -> bool {
    // SAFETY: a question about the current task.
    unsafe { bindings::metaroce_is_net_admin() }
}

/// Attributes of the call that runs.
pub struct Arguments<'a> {
    raw: *const bindings::uverbs_attr_bundle,
    _life: PhantomData<&'a ()>,
}

impl Arguments<'_> {
    /// Bytes of an attribute; `None`: it was not given.
    fn len(&self, id: u16) -> Option<usize> {
        // SAFETY: the bundle of the call that runs.
        usize::try_from(unsafe { bindings::metaroce_bundle_len(self.raw, id) }).ok()
    }

    /// Whether an attribute was given.
    pub fn has(&self, id: u16) -> bool {
        self.len(id).is_some()
    }

    /// An attribute of input; a shorter one is filled up with zeros.
    pub fn input<R: FromBytes + Default>(&self, id: u16) -> Result<R> {
        let mut value = R::default();
        // SAFETY: `value` has room for its size; any bytes make a value of it.
        to_result(unsafe {
            bindings::metaroce_bundle_in(self.raw, id, (&raw mut value).cast(), size_of::<R>())
        })?;
        Ok(value)
    }

    /// An attribute of output: cut short or filled up with zeros as the caller has room.
    pub fn output<R: AsBytes>(&self, id: u16, value: &R) -> Result {
        self.write(id, ptr::from_ref(value).cast(), size_of::<R>())
    }

    /// An array as output, as much of it as the caller has room for, in elements of `stride`
    /// bytes. How many that are. `EINVAL`: a stride of 0 or more than [`MAX_STRIDE`].
    pub fn outputs<R: AsBytes>(&self, id: u16, stride: u32, list: &[R]) -> Result<u32> {
        if stride == 0 || stride > MAX_STRIDE {
            return Err(EINVAL);
        }
        let stride = stride as usize;
        let room = self.len(id).ok_or(EINVAL)? / stride;
        let count = list.len().min(room);
        let mut bytes = KVVec::from_elem(0u8, count * stride, GFP_KERNEL)?;
        for (to, from) in bytes.chunks_exact_mut(stride).zip(list) {
            let from = ptr::from_ref(from).cast::<u8>();
            // SAFETY: the bytes of a value without padding.
            let from = unsafe { ::core::slice::from_raw_parts(from, size_of::<R>()) };
            for (to, from) in to.iter_mut().zip(from) {
                *to = *from;
            }
        }
        self.write(id, bytes.as_ptr(), bytes.len())?;
        Ok(count as u32)
    }

    fn write(&self, id: u16, from: *const u8, len: usize) -> Result {
        // SAFETY: the callers pass `len` initialised bytes.
        to_result(unsafe {
            bindings::uverbs_copy_to_struct_or_zero(self.raw, id.into(), from.cast(), len)
        })
    }
}

/// # Safety
///
/// `raw` is the bundle of a call of a method whose attribute `qp` is a QP of this driver.
unsafe fn call(raw: *mut bindings::uverbs_attr_bundle, method: Method, qp: u16) -> c_int {
    from_result(|| {
        // SAFETY: guaranteed by the caller; the QP stays for the length of the call.
        let (device, qp) = unsafe {
            let qp = from_err_ptr(bindings::metaroce_bundle_qp(raw, qp))?;
            ib::qp_of::<Driver>(qp)
        };
        let arguments = Arguments {
            raw,
            _life: PhantomData,
        };
        device.extension(qp, method, &arguments)?;
        Ok(0)
    })
}

/// The method QUERY.
///
/// # Safety
///
/// Called by the RDMA core alone.
#[no_mangle]
unsafe extern "C" fn metaroce_method_query(raw: *mut bindings::uverbs_attr_bundle) -> c_int {
    // SAFETY: the attributes are those declared in helpers.c.
    unsafe { call(raw, Method::Query, query::QP) }
}

/// The method MODIFY.
///
/// # Safety
///
/// Called by the RDMA core alone.
#[no_mangle]
unsafe extern "C" fn metaroce_method_modify(raw: *mut bindings::uverbs_attr_bundle) -> c_int {
    // SAFETY: as above.
    unsafe { call(raw, Method::Modify, modify::QP) }
}

/// The method TRANSITIONS.
///
/// # Safety
///
/// Called by the RDMA core alone.
#[no_mangle]
unsafe extern "C" fn metaroce_method_transitions(raw: *mut bindings::uverbs_attr_bundle) -> c_int {
    // SAFETY: as above.
    unsafe { call(raw, Method::Transitions, transitions::QP) }
}
