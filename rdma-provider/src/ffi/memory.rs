// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB

//! Protection domains, memory regions and windows, address handles: the kernel keeps them, and
//! says what it does not have (EOPNOTSUPP); this side passes the calls on.

use core::ffi::{c_int, c_void};
use core::ptr::{addr_of_mut, null_mut};

use super::{allocate, fail, free, sys, zeroed};
use crate::errno::{Errno, EOPNOTSUPP};

/// Makes an object with `command`, and frees it again when that fails.
///
/// # Safety
///
/// `command` initialises the object it is given, or returns an errno.
unsafe fn make<T>(command: impl FnOnce(*mut T) -> Errno) -> *mut T {
    let Some(object) = allocate::<T>() else { return null_mut() };
    let error = command(object.as_ptr());
    if error != 0 {
        // SAFETY: made above, and not passed on.
        unsafe { free(object.as_ptr()) };
        return fail(error);
    }
    object.as_ptr()
}

/// Frees `object` once `error` says that the kernel has destroyed its own.
///
/// # Safety
///
/// As for [`free`], when `error` is 0.
unsafe fn unmake<T>(object: *mut T, error: Errno) -> c_int {
    if error == 0 {
        // SAFETY: the caller's promise.
        unsafe { free(object) };
    }
    error
}

pub(super) unsafe extern "C" fn alloc_pd(context: *mut sys::ibv_context) -> *mut sys::ibv_pd {
    let mut command: sys::ibv_alloc_pd = zeroed();
    let mut response: sys::ib_uverbs_alloc_pd_resp = zeroed();
    // SAFETY: the structures have the given sizes.
    unsafe {
        make(|pd| {
            sys::ibv_cmd_alloc_pd(
                context,
                pd,
                &mut command,
                size_of_val(&command),
                &mut response,
                size_of_val(&response),
            )
        })
    }
}

pub(super) unsafe extern "C" fn dealloc_pd(pd: *mut sys::ibv_pd) -> c_int {
    // SAFETY: made by `alloc_pd`.
    unsafe { unmake(pd, sys::ibv_cmd_dealloc_pd(pd)) }
}

pub(super) unsafe extern "C" fn reg_mr(
    pd: *mut sys::ibv_pd,
    address: *mut c_void,
    length: usize,
    hca_va: u64,
    access: c_int,
) -> *mut sys::ibv_mr {
    let mut command: sys::ibv_reg_mr = zeroed();
    let mut response: sys::ib_uverbs_reg_mr_resp = zeroed();
    // SAFETY: the structures have the given sizes; ibv_mr is at the start of verbs_mr.
    unsafe {
        make(|mr: *mut sys::verbs_mr| {
            sys::ibv_cmd_reg_mr(
                pd,
                address,
                length,
                hca_va,
                access,
                mr,
                &mut command,
                size_of_val(&command),
                &mut response,
                size_of_val(&response),
            )
        })
        .cast()
    }
}

pub(super) unsafe extern "C" fn rereg_mr(
    mr: *mut sys::verbs_mr,
    flags: c_int,
    pd: *mut sys::ibv_pd,
    address: *mut c_void,
    length: usize,
    access: c_int,
) -> c_int {
    let mut command: sys::ibv_rereg_mr = zeroed();
    let mut response: sys::ib_uverbs_rereg_mr_resp = zeroed();
    // SAFETY: the structures have the given sizes.
    unsafe {
        sys::ibv_cmd_rereg_mr(
            mr,
            flags as u32,
            address,
            length,
            address as u64,
            access,
            pd,
            &mut command,
            size_of_val(&command),
            &mut response,
            size_of_val(&response),
        )
    }
}

pub(super) unsafe extern "C" fn dereg_mr(mr: *mut sys::verbs_mr) -> c_int {
    // SAFETY: made by `reg_mr` or `reg_dmabuf_mr`.
    unsafe { unmake(mr, sys::ibv_cmd_dereg_mr(mr)) }
}

/// The kernel looks at the descriptor only after it has said whether it supports this at all.
pub(super) unsafe extern "C" fn reg_dmabuf_mr(
    pd: *mut sys::ibv_pd,
    offset: u64,
    length: usize,
    iova: u64,
    fd: c_int,
    access: c_int,
) -> *mut sys::ibv_mr {
    // SAFETY: there is nothing of this driver in the command; ibv_mr is at the start of verbs_mr.
    unsafe {
        make(|mr: *mut sys::verbs_mr| {
            sys::ibv_cmd_reg_dmabuf_mr(pd, offset, length, iova, fd, access, mr, null_mut())
        })
        .cast()
    }
}

pub(super) unsafe extern "C" fn alloc_mw(pd: *mut sys::ibv_pd, kind: sys::ibv_mw_type) -> *mut sys::ibv_mw {
    let mut command: sys::ibv_alloc_mw = zeroed();
    let mut response: sys::ib_uverbs_alloc_mw_resp = zeroed();
    // SAFETY: the structures have the given sizes.
    unsafe {
        make(|mw| {
            sys::ibv_cmd_alloc_mw(
                pd,
                kind,
                mw,
                &mut command,
                size_of_val(&command),
                &mut response,
                size_of_val(&response),
            )
        })
    }
}

pub(super) unsafe extern "C" fn dealloc_mw(mw: *mut sys::ibv_mw) -> c_int {
    // SAFETY: made by `alloc_mw`.
    unsafe { unmake(mw, sys::ibv_cmd_dealloc_mw(mw)) }
}

/// Work queue elements of this ABI version carry no bind.
pub(super) unsafe extern "C" fn bind_mw(
    _qp: *mut sys::ibv_qp,
    _mw: *mut sys::ibv_mw,
    _bind: *mut sys::ibv_mw_bind,
) -> c_int {
    EOPNOTSUPP
}

pub(super) unsafe extern "C" fn create_ah(
    pd: *mut sys::ibv_pd,
    attr: *mut sys::ibv_ah_attr,
) -> *mut sys::ibv_ah {
    let mut response: sys::ib_uverbs_create_ah_resp = zeroed();
    // SAFETY: the structure has the given size.
    unsafe {
        make(|ah: *mut sys::ibv_ah| {
            addr_of_mut!((*ah).context).write((*pd).context);
            sys::ibv_cmd_create_ah(pd, ah, attr, &mut response, size_of_val(&response))
        })
    }
}

pub(super) unsafe extern "C" fn destroy_ah(ah: *mut sys::ibv_ah) -> c_int {
    // SAFETY: made by `create_ah`.
    unsafe { unmake(ah, sys::ibv_cmd_destroy_ah(ah)) }
}
