// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB

//! What libibverbs calls.
//!
//! Conventions of its provider interface, which every function here keeps: the pointers that come
//! in are valid, and objects are not used after they were destroyed (the program's duty, passed on
//! by libibverbs); a function that makes an object returns NULL and sets errno, the others return
//! a positive errno. Objects of this library begin with the structure of libibverbs, so that a
//! pointer to the one is a pointer to the other; they are made with calloc and freed with free.

pub(crate) mod sys {
    //! rdma-core's declarations, made by bindgen from its own header, and a little libc.
    #![allow(missing_docs, non_camel_case_types, non_upper_case_globals, non_snake_case, dead_code)]
    #![allow(unsafe_op_in_unsafe_fn, improper_ctypes, unreachable_pub)]
    #![allow(
        clippy::all,
        clippy::undocumented_unsafe_blocks,
        clippy::arithmetic_side_effects,
        clippy::indexing_slicing
    )]
    #![allow(clippy::cast_lossless, clippy::missing_safety_doc)]
    include!(concat!(env!("OUT_DIR"), "/verbs.rs"));
}

mod cq;
mod device;
mod dv;
mod memory;
mod qp;
mod srq;
mod wr;

#[cfg(test)]
mod tests;

#[cfg(test)]
use core::ffi::c_int;
use core::ptr::{null_mut, NonNull};
use core::slice;

use crate::abi::{self, metaroce_sge};
use crate::errno::{Errno, EINVAL, EIO};

// The header says that these are libibverbs' values; posting and polling copy them unchanged.
const _: () = {
    assert!(abi::METAROCE_WR_RDMA_WRITE == sys::IBV_WR_RDMA_WRITE);
    assert!(abi::METAROCE_WR_RDMA_WRITE_WITH_IMM == sys::IBV_WR_RDMA_WRITE_WITH_IMM);
    assert!(abi::METAROCE_WR_SEND == sys::IBV_WR_SEND);
    assert!(abi::METAROCE_WR_SEND_WITH_IMM == sys::IBV_WR_SEND_WITH_IMM);
    assert!(abi::METAROCE_WR_RDMA_READ == sys::IBV_WR_RDMA_READ);
    assert!(abi::METAROCE_WR_ATOMIC_CMP_AND_SWP == sys::IBV_WR_ATOMIC_CMP_AND_SWP);
    assert!(abi::METAROCE_WR_ATOMIC_FETCH_AND_ADD == sys::IBV_WR_ATOMIC_FETCH_AND_ADD);
    assert!(abi::METAROCE_WR_LOCAL_INV == sys::IBV_WR_LOCAL_INV);
    assert!(abi::METAROCE_WR_BIND_MW == sys::IBV_WR_BIND_MW);
    assert!(abi::METAROCE_WR_SEND_WITH_INV == sys::IBV_WR_SEND_WITH_INV);
    assert!(abi::METAROCE_SEND_FENCE == sys::IBV_SEND_FENCE);
    assert!(abi::METAROCE_SEND_SIGNALED == sys::IBV_SEND_SIGNALED);
    assert!(abi::METAROCE_SEND_SOLICITED == sys::IBV_SEND_SOLICITED);
    assert!(abi::METAROCE_SEND_INLINE == sys::IBV_SEND_INLINE);
    assert!(size_of::<sys::ibv_sge>() == size_of::<metaroce_sge>());
    assert!(align_of::<sys::ibv_sge>() == align_of::<metaroce_sge>());
    assert!(core::mem::offset_of!(sys::ibv_sge, addr) == core::mem::offset_of!(metaroce_sge, addr));
    assert!(core::mem::offset_of!(sys::ibv_sge, length) == core::mem::offset_of!(metaroce_sge, length));
    assert!(core::mem::offset_of!(sys::ibv_sge, lkey) == core::mem::offset_of!(metaroce_sge, lkey));
};

/// The calling thread's errno.
pub(crate) fn errno() -> Errno {
    // SAFETY: the location is valid for the calling thread.
    unsafe { *sys::__errno_location() }
}

fn set_errno(error: Errno) {
    // SAFETY: the location is valid for the calling thread.
    unsafe { *sys::__errno_location() = error }
}

/// The failure of a function that makes an object.
fn fail<T>(error: Errno) -> *mut T {
    set_errno(if error == 0 { EIO } else { error });
    null_mut()
}

/// Zeroed memory for an object; `None` with errno set when there is none.
fn allocate<T>() -> Option<NonNull<T>> {
    const { assert!(align_of::<T>() <= 16 && size_of::<T>() > 0) };
    // SAFETY: calloc may be called with any numbers.
    NonNull::new(unsafe { sys::calloc(1, size_of::<T>() as _) }.cast::<T>())
}

/// Frees an object.
///
/// # Safety
///
/// `object` came from [`allocate`] (or calloc), and is not used any more.
unsafe fn free<T>(object: *mut T) {
    // SAFETY: the caller's promise.
    unsafe { sys::free(object.cast()) }
}

/// The list of SGEs that a work request names; EINVAL when it cannot be one.
///
/// # Safety
///
/// `list` holds `count` SGEs as long as the result is used.
unsafe fn sges<'a, N: TryInto<usize>>(
    list: *const sys::ibv_sge,
    count: N,
) -> Result<&'a [metaroce_sge], Errno> {
    match count.try_into() {
        Ok(0) => Ok(&[]),
        // No queue takes more, and a slice may not exceed the address space.
        Ok(count) if count <= 0xffff && !list.is_null() => {
            // SAFETY: the caller's promise; the two kinds of SGE have the same layout (asserted above).
            Ok(unsafe { slice::from_raw_parts(list.cast::<metaroce_sge>(), count) })
        }
        _ => Err(EINVAL),
    }
}

#[cfg(not(test))]
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    // SAFETY: abort may be called at any time.
    unsafe { sys::abort() }
}

/// A structure for one of libibverbs' commands, zeroed.
fn zeroed<T: Command>() -> T {
    // SAFETY: the trait's promise.
    unsafe { core::mem::zeroed() }
}

/// Structures of integers and pointers of the command interface.
///
/// # Safety
///
/// All zero bytes are a value.
unsafe trait Command {}

macro_rules! commands {
    ($($name:ident),* $(,)?) => {
        $(
            // SAFETY: integers, raw pointers and unions of them.
            unsafe impl Command for sys::$name {}
        )*
    };
}

commands!(
    ibv_query_port,
    ibv_port_attr,
    ibv_alloc_pd,
    ib_uverbs_alloc_pd_resp,
    ibv_reg_mr,
    ib_uverbs_reg_mr_resp,
    ibv_rereg_mr,
    ib_uverbs_rereg_mr_resp,
    ibv_alloc_mw,
    ib_uverbs_alloc_mw_resp,
    ib_uverbs_create_ah_resp,
    ib_uverbs_ex_query_device_resp,
    ibv_get_context,
    ibv_resize_cq,
    ibv_create_qp,
    ibv_modify_qp,
    ibv_query_qp,
    ibv_create_srq,
    ibv_create_xsrq,
    ibv_modify_srq,
    ibv_query_srq,
    ibv_qp_init_attr_ex,
    timespec,
    ib_uverbs_ioctl_hdr,
    ib_uverbs_attr,
);

/// A command of libibverbs and, right behind it, what this driver adds.
#[repr(C)]
struct With<Core, Driver> {
    core: Core,
    driver: Driver,
}

// SAFETY: all zero bytes are a value of both parts; the structures of `abi` are integers only.
unsafe impl<Core: Command, Driver: Default + Copy> Command for With<Core, Driver> {}

/// Nothing lies between the two parts or behind them: the kernel and libibverbs compute places
/// from sizes.
macro_rules! packed {
    ($($core:ident + $driver:ident),* $(,)?) => {
        $(const _: () = {
            assert!(core::mem::offset_of!(With<sys::$core, abi::$driver>, driver) == size_of::<sys::$core>());
            assert!(size_of::<With<sys::$core, abi::$driver>>() == size_of::<sys::$core>() + size_of::<abi::$driver>());
        };)*
    };
}

packed!(
    ibv_get_context + metaroce_alloc_ucontext_req,
    ib_uverbs_get_context_resp + metaroce_alloc_ucontext_resp,
    ib_uverbs_create_cq_resp + metaroce_create_cq_resp,
    ib_uverbs_ex_create_cq_resp + metaroce_create_cq_resp,
    ib_uverbs_resize_cq_resp + metaroce_resize_cq_resp,
    ib_uverbs_create_qp_resp + metaroce_create_qp_resp,
    ib_uverbs_create_srq_resp + metaroce_create_srq_resp,
);

commands!(
    ib_uverbs_get_context_resp,
    ib_uverbs_create_cq_resp,
    ib_uverbs_ex_create_cq_resp,
    ib_uverbs_resize_cq_resp,
    ib_uverbs_create_qp_resp,
    ib_uverbs_create_srq_resp,
);
