// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB

//! The send queue by steps: `ibv_wr_start`, operations and their payload, `ibv_wr_complete`.
//!
//! The send queue is held from start to complete or abort. The first error is kept, everything
//! after it ignored, and complete reports it with nothing posted.

use core::ffi::{c_int, c_void};
use core::slice;

use super::qp::{doorbell, state, Qp};
use super::{sges, sys};
use crate::errno::{Errno, EINVAL};
use crate::queue::{may_send, Request, SendQueue, KEEP_FLAGS};
use crate::ring::UserBytes;

use crate::abi::metaroce_sge;

/// The operations that a queue pair can be made for.
pub(super) const SEND_OPS: u64 = (sys::IBV_QP_EX_WITH_RDMA_WRITE
    | sys::IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM
    | sys::IBV_QP_EX_WITH_SEND
    | sys::IBV_QP_EX_WITH_SEND_WITH_IMM
    | sys::IBV_QP_EX_WITH_RDMA_READ
    | sys::IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP
    | sys::IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD
    | sys::IBV_QP_EX_WITH_LOCAL_INV
    | sys::IBV_QP_EX_WITH_SEND_WITH_INV) as u64;

/// Fills in the functions for the operations in `ops`.
pub(super) fn set_ops(qp: &mut sys::ibv_qp_ex, ops: u64) {
    let wanted = |flag: u32| ops & u64::from(flag) != 0;
    if wanted(sys::IBV_QP_EX_WITH_RDMA_WRITE) {
        qp.wr_rdma_write = Some(rdma_write);
    }
    if wanted(sys::IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM) {
        qp.wr_rdma_write_imm = Some(rdma_write_imm);
    }
    if wanted(sys::IBV_QP_EX_WITH_SEND) {
        qp.wr_send = Some(send);
    }
    if wanted(sys::IBV_QP_EX_WITH_SEND_WITH_IMM) {
        qp.wr_send_imm = Some(send_imm);
    }
    if wanted(sys::IBV_QP_EX_WITH_RDMA_READ) {
        qp.wr_rdma_read = Some(rdma_read);
    }
    if wanted(sys::IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP) {
        qp.wr_atomic_cmp_swp = Some(atomic_cmp_swp);
    }
    if wanted(sys::IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD) {
        qp.wr_atomic_fetch_add = Some(atomic_fetch_add);
    }
    if wanted(sys::IBV_QP_EX_WITH_LOCAL_INV) {
        qp.wr_local_inv = Some(local_inv);
    }
    if wanted(sys::IBV_QP_EX_WITH_SEND_WITH_INV) {
        qp.wr_send_inv = Some(send_inv);
    }
    qp.wr_start = Some(start);
    qp.wr_complete = Some(complete);
    qp.wr_abort = Some(abort);
    qp.wr_set_sge = Some(set_sge);
    qp.wr_set_sge_list = Some(set_sge_list);
    qp.wr_set_inline_data = Some(set_inline_data);
    qp.wr_set_inline_data_list = Some(set_inline_data_list);
}

unsafe extern "C" fn start(ex: *mut sys::ibv_qp_ex) {
    // SAFETY: made by `qp`; ibv_qp is at the start of ibv_qp_ex. Held until complete or abort.
    unsafe {
        let qp = Qp::of(ex.cast());
        let allowed = may_send(state(ex.cast()));
        qp.send.hold();
        qp.send.held().start(allowed);
    }
}

/// On an error of the doorbell the requests are in the queue all the same, as with `ibv_post_send`.
unsafe extern "C" fn complete(ex: *mut sys::ibv_qp_ex) -> c_int {
    // SAFETY: held since start; this ends it.
    let result = unsafe {
        let qp = Qp::of(ex.cast());
        let result = qp.send.held().complete();
        qp.send.release();
        result
    };
    match result {
        Ok(false) => 0,
        // SAFETY: made by `qp`.
        Ok(true) => unsafe { doorbell(ex.cast()) }.err().unwrap_or(0),
        Err(error) => error,
    }
}

unsafe extern "C" fn abort(ex: *mut sys::ibv_qp_ex) {
    // SAFETY: held since start; this ends it.
    unsafe {
        let qp = Qp::of(ex.cast());
        qp.send.held().discard();
        qp.send.release();
    }
}

/// A step between start and complete.
///
/// # Safety
///
/// `ex` is between start and complete.
unsafe fn step(ex: *mut sys::ibv_qp_ex, step: impl FnOnce(&mut SendQueue) -> Result<(), Errno>) {
    // SAFETY: held since start.
    unsafe { Qp::of(ex.cast()).send.held() }.step(step);
}

/// Opens a request of `opcode` that `fill` completes.
///
/// # Safety
///
/// As for [`step`].
unsafe fn open(ex: *mut sys::ibv_qp_ex, opcode: u32, fill: impl FnOnce(&mut Request)) {
    // SAFETY: the program sets both fields before it calls an operation. Whether data is inline
    // follows from the function that sets it: the flag is not used here.
    let (wr_id, flags) = unsafe { ((*ex).wr_id, (*ex).wr_flags & !sys::IBV_SEND_INLINE) };
    // SAFETY: the caller's promise.
    unsafe {
        step(ex, |queue| {
            if flags & !KEEP_FLAGS != 0 {
                return Err(EINVAL);
            }
            let mut request = Request { wr_id, opcode, flags, ..Request::default() };
            fill(&mut request);
            queue.open(&request)
        });
    }
}

unsafe extern "C" fn rdma_write(ex: *mut sys::ibv_qp_ex, rkey: u32, remote_addr: u64) {
    // SAFETY: called between start and complete.
    unsafe {
        open(ex, sys::IBV_WR_RDMA_WRITE, |request| {
            request.rkey = rkey;
            request.remote_addr = remote_addr;
        });
    }
}

unsafe extern "C" fn rdma_write_imm(ex: *mut sys::ibv_qp_ex, rkey: u32, remote_addr: u64, imm_data: u32) {
    // SAFETY: called between start and complete.
    unsafe {
        open(ex, sys::IBV_WR_RDMA_WRITE_WITH_IMM, |request| {
            request.rkey = rkey;
            request.remote_addr = remote_addr;
            request.imm_data = imm_data;
        });
    }
}

unsafe extern "C" fn rdma_read(ex: *mut sys::ibv_qp_ex, rkey: u32, remote_addr: u64) {
    // SAFETY: called between start and complete.
    unsafe {
        open(ex, sys::IBV_WR_RDMA_READ, |request| {
            request.rkey = rkey;
            request.remote_addr = remote_addr;
        });
    }
}

unsafe extern "C" fn send(ex: *mut sys::ibv_qp_ex) {
    // SAFETY: called between start and complete.
    unsafe { open(ex, sys::IBV_WR_SEND, |_| {}) }
}

unsafe extern "C" fn send_imm(ex: *mut sys::ibv_qp_ex, imm_data: u32) {
    // SAFETY: called between start and complete.
    unsafe { open(ex, sys::IBV_WR_SEND_WITH_IMM, |request| request.imm_data = imm_data) }
}

unsafe extern "C" fn send_inv(ex: *mut sys::ibv_qp_ex, rkey: u32) {
    // SAFETY: called between start and complete.
    unsafe { open(ex, sys::IBV_WR_SEND_WITH_INV, |request| request.imm_data = rkey) }
}

unsafe extern "C" fn local_inv(ex: *mut sys::ibv_qp_ex, rkey: u32) {
    // SAFETY: called between start and complete.
    unsafe { open(ex, sys::IBV_WR_LOCAL_INV, |request| request.imm_data = rkey) }
}

unsafe extern "C" fn atomic_cmp_swp(
    ex: *mut sys::ibv_qp_ex,
    rkey: u32,
    remote_addr: u64,
    compare: u64,
    swap: u64,
) {
    // SAFETY: called between start and complete.
    unsafe {
        open(ex, sys::IBV_WR_ATOMIC_CMP_AND_SWP, |request| {
            request.rkey = rkey;
            request.remote_addr = remote_addr;
            request.compare_add = compare;
            request.swap = swap;
        });
    }
}

unsafe extern "C" fn atomic_fetch_add(ex: *mut sys::ibv_qp_ex, rkey: u32, remote_addr: u64, add: u64) {
    // SAFETY: called between start and complete.
    unsafe {
        open(ex, sys::IBV_WR_ATOMIC_FETCH_AND_ADD, |request| {
            request.rkey = rkey;
            request.remote_addr = remote_addr;
            request.compare_add = add;
        });
    }
}

unsafe extern "C" fn set_sge(ex: *mut sys::ibv_qp_ex, lkey: u32, addr: u64, length: u32) {
    // SAFETY: called between start and complete.
    unsafe { step(ex, |queue| queue.set_sges(&[metaroce_sge { addr, length, lkey }])) }
}

unsafe extern "C" fn set_sge_list(ex: *mut sys::ibv_qp_ex, count: usize, list: *const sys::ibv_sge) {
    // SAFETY: called between start and complete, with a list of `count` SGEs.
    unsafe { step(ex, |queue| queue.set_sges(sges(list, count)?)) }
}

unsafe extern "C" fn set_inline_data(ex: *mut sys::ibv_qp_ex, address: *mut c_void, length: usize) {
    // SAFETY: called between start and complete, with `length` readable bytes.
    unsafe { step(ex, |queue| queue.set_inline(core::iter::once(UserBytes::new(address.cast(), length)))) }
}

unsafe extern "C" fn set_inline_data_list(
    ex: *mut sys::ibv_qp_ex,
    count: usize,
    list: *const sys::ibv_data_buf,
) {
    // SAFETY: called between start and complete, with a list of `count` buffers that can be read.
    unsafe {
        step(ex, |queue| {
            if count == 0 {
                return queue.set_inline(core::iter::empty());
            }
            // No request takes more, and a slice may not exceed the address space.
            if list.is_null() || count > 0xffff {
                return Err(EINVAL);
            }
            let buffers = slice::from_raw_parts(list, count);
            queue.set_inline(buffers.iter().map(|buffer| UserBytes::new(buffer.addr.cast(), buffer.length)))
        });
    }
}
