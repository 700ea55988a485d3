// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB

//! Shared receive queues. Their size is fixed at creation.

use core::ffi::c_int;
use core::ptr::{addr_of_mut, drop_in_place, null_mut};
use core::sync::atomic::AtomicU32;

use super::{allocate, fail, free, sges, sys, zeroed, With};
use crate::abi::{metaroce_create_srq_resp, METAROCE_RING_SRQ, RECV_WQE, SGE};
use crate::errno::{Errno, EOPNOTSUPP};
use crate::queue::RecvQueue;
use crate::ring::{Lock, Ring};

/// A shared receive queue.
#[repr(C)]
struct Srq {
    vsrq: sys::verbs_srq,
    queue: Lock<RecvQueue>,
    /// Receives whose completions have been polled.
    polled: AtomicU32,
}

const _: () = assert!(core::mem::offset_of!(Srq, vsrq) == 0);

/// Where the polled completions of `srq` are counted.
///
/// # Safety
///
/// `srq` is one of ours.
pub(super) unsafe fn polled(srq: *mut sys::ibv_srq) -> *const AtomicU32 {
    // SAFETY: the caller's promise; ibv_srq is at the start of Srq.
    unsafe { addr_of_mut!((*srq.cast::<Srq>()).polled) }
}

/// Posts the list `wr` to `queue`; `bad` gets the first that was not posted.
///
/// # Safety
///
/// `wr` is a list of valid requests, `bad` writable.
pub(super) unsafe fn post(
    queue: &mut RecvQueue,
    mut wr: *mut sys::ibv_recv_wr,
    bad: *mut *mut sys::ibv_recv_wr,
) -> c_int {
    let mut error = 0;
    while !wr.is_null() {
        // SAFETY: the caller's promise.
        let result =
            unsafe { sges((*wr).sg_list, (*wr).num_sge).and_then(|sges| queue.push((*wr).wr_id, sges)) };
        if let Err(reason) = result {
            error = reason;
            // SAFETY: as above.
            unsafe { *bad = wr };
            break;
        }
        // SAFETY: as above.
        wr = unsafe { (*wr).next };
    }
    queue.publish();
    error
}

type Response = With<sys::ib_uverbs_create_srq_resp, metaroce_create_srq_resp>;

/// Maps the ring of a queue that `command` has made with slots of the number of SGEs it returns.
///
/// # Safety
///
/// `context` is an open device; `command` initialises the verbs_srq it is given, or returns an errno.
unsafe fn make(
    context: *mut sys::ibv_context,
    command: impl FnOnce(*mut sys::verbs_srq) -> Result<(Response, u32), Errno>,
) -> *mut sys::ibv_srq {
    let Some(srq) = allocate::<Srq>() else { return null_mut() };
    let srq = srq.as_ptr();
    // SAFETY: `srq` is new and ours alone; ibv_srq is at the start of verbs_srq.
    unsafe {
        let vsrq = addr_of_mut!((*srq).vsrq);
        let (response, max_sge) = match command(vsrq) {
            Ok(made) => made,
            Err(error) => {
                free(srq);
                return fail(error);
            }
        };
        let max_sge = max_sge as usize;
        let stride = RECV_WQE.saturating_add(max_sge.saturating_mul(SGE));
        match Ring::map((*context).cmd_fd, &response.driver.ring, METAROCE_RING_SRQ, stride) {
            Ok(ring) => {
                addr_of_mut!((*srq).polled).write(AtomicU32::new(0));
                // The queue lives in `srq` and goes with it.
                let polled: &'static AtomicU32 = &*addr_of_mut!((*srq).polled);
                let queue = RecvQueue::new(ring, max_sge, true, polled);
                addr_of_mut!((*srq).queue).write(Lock::new(queue));
                vsrq.cast()
            }
            Err(error) => {
                sys::ibv_cmd_destroy_srq(vsrq.cast());
                free(srq);
                fail(error)
            }
        }
    }
}

pub(super) unsafe extern "C" fn create_srq(
    pd: *mut sys::ibv_pd,
    attr: *mut sys::ibv_srq_init_attr,
) -> *mut sys::ibv_srq {
    // SAFETY: the structures have the given sizes.
    unsafe {
        make((*pd).context, |vsrq| {
            let mut command: sys::ibv_create_srq = zeroed();
            let mut response: Response = zeroed();
            match sys::ibv_cmd_create_srq(
                pd,
                vsrq.cast(),
                attr,
                &mut command,
                size_of_val(&command),
                &mut response.core,
                size_of_val(&response),
            ) {
                0 => Ok((response, (*attr).attr.max_sge)),
                error => Err(error),
            }
        })
    }
}

/// Plain queues only: no XRC, no tag matching.
pub(super) unsafe extern "C" fn create_srq_ex(
    context: *mut sys::ibv_context,
    attr: *mut sys::ibv_srq_init_attr_ex,
) -> *mut sys::ibv_srq {
    // SAFETY: the program's structure.
    let (mask, kind) = unsafe { ((*attr).comp_mask, (*attr).srq_type) };
    let plain = mask & sys::IBV_SRQ_INIT_ATTR_TYPE == 0 || kind == sys::IBV_SRQT_BASIC;
    if mask & !(sys::IBV_SRQ_INIT_ATTR_PD | sys::IBV_SRQ_INIT_ATTR_TYPE) != 0 || !plain {
        return fail(EOPNOTSUPP);
    }
    // SAFETY: the structures have the given sizes.
    unsafe {
        make(context, |vsrq| {
            let mut command: sys::ibv_create_xsrq = zeroed();
            let mut response: Response = zeroed();
            match sys::ibv_cmd_create_srq_ex(
                context,
                vsrq,
                attr,
                &mut command,
                size_of_val(&command),
                &mut response.core,
                size_of_val(&response),
            ) {
                0 => Ok((response, (*attr).attr.max_sge)),
                error => Err(error),
            }
        })
    }
}

pub(super) unsafe extern "C" fn modify_srq(
    srq: *mut sys::ibv_srq,
    attr: *mut sys::ibv_srq_attr,
    mask: c_int,
) -> c_int {
    if mask as u32 & sys::IBV_SRQ_MAX_WR != 0 {
        return EOPNOTSUPP;
    }
    let mut command: sys::ibv_modify_srq = zeroed();
    // SAFETY: the structure has the given size.
    unsafe { sys::ibv_cmd_modify_srq(srq, attr, mask, &mut command, size_of_val(&command)) }
}

pub(super) unsafe extern "C" fn query_srq(srq: *mut sys::ibv_srq, attr: *mut sys::ibv_srq_attr) -> c_int {
    let mut command: sys::ibv_query_srq = zeroed();
    // SAFETY: the structure has the given size.
    unsafe { sys::ibv_cmd_query_srq(srq, attr, &mut command, size_of_val(&command)) }
}

pub(super) unsafe extern "C" fn destroy_srq(srq: *mut sys::ibv_srq) -> c_int {
    // SAFETY: made by this file.
    let error = unsafe { sys::ibv_cmd_destroy_srq(srq) };
    if error == 0 {
        // SAFETY: the kernel and the program are done with it; dropping the queue unmaps the ring.
        unsafe {
            let srq = srq.cast::<Srq>();
            drop_in_place(addr_of_mut!((*srq).queue));
            free(srq);
        }
    }
    error
}

pub(super) unsafe extern "C" fn post_srq_recv(
    srq: *mut sys::ibv_srq,
    wr: *mut sys::ibv_recv_wr,
    bad: *mut *mut sys::ibv_recv_wr,
) -> c_int {
    // SAFETY: made by this file; ibv_srq is at the start of Srq.
    unsafe { post(&mut (*srq.cast::<Srq>()).queue.lock(), wr, bad) }
}
