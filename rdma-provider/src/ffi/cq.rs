// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB

//! Completion queues.
//!
//! Two locks: `queue` is held while completions are read, in the extended interface from
//! `start_poll` to `end_poll`; `arm` is held while the arm word is raised, so that a program may
//! arm the queue in the middle of such a poll. Resizing takes both, `queue` first.

use core::cell::UnsafeCell;
use core::ffi::c_int;
use core::ptr::{addr_of_mut, drop_in_place, null_mut};

use super::{allocate, fail, free, qp, sys, zeroed, With};
use crate::abi::{
    metaroce_cqe, metaroce_create_cq_resp, metaroce_resize_cq_resp, METAROCE_ARM_NEXT,
    METAROCE_ARM_SOLICITED, METAROCE_RING_CQ,
};
use crate::errno::{Errno, EINVAL, EIO, ENOENT, EOPNOTSUPP};
use crate::queue::CompletionQueue;
use crate::ring::{ArmWord, Lock, Ring};

/// What an extended completion can be asked for: what a CQE carries, and the three fields of an
/// InfiniBand link layer, which are 0 on Ethernet.
const WC_FLAGS: u64 = (sys::IBV_WC_STANDARD_FLAGS | sys::IBV_WC_EX_WITH_COMPLETION_TIMESTAMP) as u64;

/// A completion queue.
#[repr(C)]
pub(super) struct Cq {
    /// libibverbs writes it while this library has references to the rest.
    vcq: UnsafeCell<sys::verbs_cq>,
    queue: Lock<CompletionQueue>,
    arm: Lock<ArmWord>,
    /// The completion that the extended interface reads from; guarded by `queue`.
    current: UnsafeCell<metaroce_cqe>,
}

const _: () = assert!(core::mem::offset_of!(Cq, vcq) == 0);

impl Cq {
    /// A completion queue without anything else set.
    #[cfg(test)]
    pub(super) fn over(queue: CompletionQueue, arm: ArmWord) -> Cq {
        // SAFETY: integers, pointers and optional functions.
        let vcq = UnsafeCell::new(unsafe { core::mem::zeroed() });
        Cq {
            vcq,
            queue: Lock::new(queue),
            arm: Lock::new(arm),
            current: UnsafeCell::new(metaroce_cqe::default()),
        }
    }

    /// # Safety
    ///
    /// `cq` is one of ours and lives as long as the result.
    unsafe fn of<'a>(cq: *mut sys::ibv_cq) -> &'a Cq {
        // SAFETY: `vcq` is at the start of Cq, and both faces of the queue at the start of it.
        unsafe { &*cq.cast::<Cq>() }
    }

    /// As [`Cq::of`].
    ///
    /// # Safety
    ///
    /// As for it.
    unsafe fn of_ex<'a>(cq: *mut sys::ibv_cq_ex) -> &'a Cq {
        // SAFETY: the caller's promise.
        unsafe { Cq::of(cq.cast()) }
    }

    /// Removes the completions of queue pair `qpn`, of which the kernel writes no more.
    ///
    /// # Safety
    ///
    /// That queue pair is allocated.
    pub(super) unsafe fn purge(&self, qpn: u32) {
        // SAFETY: the caller's promise; the lock is held.
        self.queue.lock().purge(qpn, |cqe| unsafe { qp::polled(cqe) });
    }
}

/// Removes the completions of `qpn` from `cq`, which may be NULL.
///
/// # Safety
///
/// As for [`Cq::of`], when it is not NULL, and for [`Cq::purge`].
pub(super) unsafe fn purge(cq: *mut sys::ibv_cq, qpn: u32) {
    if !cq.is_null() {
        // SAFETY: the caller's promise.
        unsafe { Cq::of(cq).purge(qpn) };
    }
}

/// Maps the ring of a queue that `command` has made, or destroys the queue again.
///
/// # Safety
///
/// `context` is an open device; `command` initialises the ibv_cq it is given, or returns an errno.
unsafe fn make(
    context: *mut sys::ibv_context,
    single_threaded: bool,
    command: impl FnOnce(*mut sys::verbs_cq) -> Result<metaroce_create_cq_resp, Errno>,
) -> *mut Cq {
    let Some(cq) = allocate::<Cq>() else { return null_mut() };
    let cq = cq.as_ptr();
    // SAFETY: `cq` is new and ours alone. `vcq` is at its start.
    unsafe {
        let vcq = cq.cast::<sys::verbs_cq>();
        let response = match command(vcq) {
            Ok(response) => response,
            Err(error) => {
                free(cq);
                return fail(error);
            }
        };
        let ring =
            match Ring::map((*context).cmd_fd, &response.ring, METAROCE_RING_CQ, size_of::<metaroce_cqe>()) {
                Ok(ring) => ring,
                Err(error) => {
                    sys::ibv_cmd_destroy_cq(vcq.cast());
                    free(cq);
                    return fail(error);
                }
            };
        addr_of_mut!((*cq).arm).write(Lock::new(ring.arm_word()));
        let queue = CompletionQueue::new(ring);
        addr_of_mut!((*cq).queue).write(if single_threaded {
            Lock::single_threaded(queue)
        } else {
            Lock::new(queue)
        });
    }
    cq
}

pub(super) unsafe extern "C" fn create_cq(
    context: *mut sys::ibv_context,
    cqe: c_int,
    channel: *mut sys::ibv_comp_channel,
    comp_vector: c_int,
) -> *mut sys::ibv_cq {
    // SAFETY: the response has the given size.
    unsafe {
        make(context, false, |vcq| {
            let mut response: With<sys::ib_uverbs_create_cq_resp, metaroce_create_cq_resp> = zeroed();
            match sys::ibv_cmd_create_cq(
                context,
                cqe,
                channel,
                comp_vector,
                vcq.cast(),
                null_mut(),
                0,
                &mut response.core,
                size_of_val(&response),
            ) {
                0 => Ok(response.driver),
                error => Err(error),
            }
        })
        .cast()
    }
}

pub(super) unsafe extern "C" fn create_cq_ex(
    context: *mut sys::ibv_context,
    attr: *mut sys::ibv_cq_init_attr_ex,
) -> *mut sys::ibv_cq_ex {
    // SAFETY: the program's structure.
    let mut attr = unsafe { *attr };
    let flags = if attr.comp_mask & sys::IBV_CQ_INIT_ATTR_MASK_FLAGS != 0 { attr.flags } else { 0 };
    let known = sys::IBV_CREATE_CQ_ATTR_SINGLE_THREADED | sys::IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN;
    // There are no parent domains, so no comp_mask that could name one.
    if attr.comp_mask & !sys::IBV_CQ_INIT_ATTR_MASK_FLAGS != 0
        || attr.wc_flags & !WC_FLAGS != 0
        || flags & !known != 0
    {
        return fail(EOPNOTSUPP);
    }
    let wc_flags = attr.wc_flags;
    // Every CQE has its time: the kernel need not be asked.
    attr.wc_flags &= !u64::from(sys::IBV_WC_EX_WITH_COMPLETION_TIMESTAMP);
    // SAFETY: the response has the given size.
    let cq = unsafe {
        make(context, flags & sys::IBV_CREATE_CQ_ATTR_SINGLE_THREADED != 0, |vcq| {
            let mut response: With<sys::ib_uverbs_ex_create_cq_resp, metaroce_create_cq_resp> = zeroed();
            match sys::ibv_cmd_create_cq_ex(
                context,
                &attr,
                vcq,
                null_mut(),
                0,
                &mut response.core,
                size_of_val(&response),
                0,
            ) {
                0 => Ok(response.driver),
                error => Err(error),
            }
        })
    };
    let ex = cq.cast::<sys::ibv_cq_ex>();
    if ex.is_null() {
        return ex;
    }
    // SAFETY: new and ours alone; the ibv_cq_ex is at its start.
    unsafe { set_readers(ex, wc_flags) };
    ex
}

/// Fills in the functions of the extended interface that `wc_flags` asks for.
///
/// # Safety
///
/// `ex` is one of ours.
pub(super) unsafe fn set_readers(ex: *mut sys::ibv_cq_ex, wc_flags: u64) {
    // SAFETY: the caller's promise.
    unsafe {
        (*ex).start_poll = Some(start_poll);
        (*ex).next_poll = Some(next_poll);
        (*ex).end_poll = Some(end_poll);
        (*ex).read_opcode = Some(read_opcode);
        (*ex).read_vendor_err = Some(read_vendor_err);
        (*ex).read_wc_flags = Some(read_wc_flags);
        let wanted = |flag: u32| wc_flags & u64::from(flag) != 0;
        if wanted(sys::IBV_WC_EX_WITH_BYTE_LEN) {
            (*ex).read_byte_len = Some(read_byte_len);
        }
        if wanted(sys::IBV_WC_EX_WITH_IMM) {
            (*ex).read_imm_data = Some(read_imm_data);
        }
        if wanted(sys::IBV_WC_EX_WITH_QP_NUM) {
            (*ex).read_qp_num = Some(read_qp_num);
        }
        if wanted(sys::IBV_WC_EX_WITH_SRC_QP) {
            (*ex).read_src_qp = Some(read_src_qp);
        }
        if wanted(sys::IBV_WC_EX_WITH_SLID) {
            (*ex).read_slid = Some(read_zero_u32);
        }
        if wanted(sys::IBV_WC_EX_WITH_SL) {
            (*ex).read_sl = Some(read_zero_u8);
        }
        if wanted(sys::IBV_WC_EX_WITH_DLID_PATH_BITS) {
            (*ex).read_dlid_path_bits = Some(read_zero_u8);
        }
        if wanted(sys::IBV_WC_EX_WITH_COMPLETION_TIMESTAMP) {
            (*ex).read_completion_ts = Some(read_completion_ts);
        }
    }
}

/// A completion in the form of libibverbs.
fn to_wc(cqe: &metaroce_cqe) -> sys::ibv_wc {
    sys::ibv_wc {
        wr_id: cqe.wr_id,
        status: cqe.status,
        opcode: cqe.opcode,
        vendor_err: cqe.vendor_err,
        byte_len: cqe.byte_len,
        __bindgen_anon_1: sys::ibv_wc__bindgen_ty_1 { imm_data: cqe.imm_data },
        qp_num: cqe.qpn,
        src_qp: cqe.src_qpn,
        wc_flags: cqe.wc_flags,
        pkey_index: cqe.pkey_index as u16,
        slid: 0,
        sl: 0,
        dlid_path_bits: 0,
    }
}

pub(super) unsafe extern "C" fn poll_cq(
    cq: *mut sys::ibv_cq,
    entries: c_int,
    mut wc: *mut sys::ibv_wc,
) -> c_int {
    // SAFETY: made by this file.
    let mut queue = unsafe { Cq::of(cq) }.queue.lock();
    let mut count: c_int = 0;
    while count < entries {
        let Some(cqe) = queue.next() else { break };
        // SAFETY: the program's array has `entries` elements.
        unsafe {
            qp::polled(&cqe);
            wc.write(to_wc(&cqe));
            wc = wc.add(1);
        }
        count = count.wrapping_add(1);
    }
    if count > 0 {
        queue.release();
    } else if queue.is_lost() {
        return EIO.wrapping_neg();
    }
    count
}

pub(super) unsafe extern "C" fn req_notify_cq(cq: *mut sys::ibv_cq, solicited_only: c_int) -> c_int {
    let level = if solicited_only != 0 { METAROCE_ARM_SOLICITED } else { METAROCE_ARM_NEXT };
    // SAFETY: made by this file; the lock keeps the ring mapped.
    unsafe { Cq::of(cq).arm.lock().raise(level) };
    0
}

/// Nothing to count: an event takes the arm word back to 0, and the next arming raises it again.
pub(super) unsafe extern "C" fn cq_event(_cq: *mut sys::ibv_cq) {}

pub(super) unsafe extern "C" fn resize_cq(ibcq: *mut sys::ibv_cq, cqe: c_int) -> c_int {
    // SAFETY: made by this file.
    let cq = unsafe { Cq::of(ibcq) };
    // The kernel moves what is not consumed: nobody may consume meanwhile.
    let mut queue = cq.queue.lock();
    let mut arm = cq.arm.lock();
    let mut command: sys::ibv_resize_cq = zeroed();
    let mut response: With<sys::ib_uverbs_resize_cq_resp, metaroce_resize_cq_resp> = zeroed();
    // SAFETY: the structures have the given sizes.
    let error = unsafe {
        sys::ibv_cmd_resize_cq(
            ibcq,
            cqe,
            &mut command,
            size_of_val(&command),
            &mut response.core,
            size_of_val(&response),
        )
    };
    if error != 0 {
        return error;
    }
    // SAFETY: set by libibverbs.
    let fd = unsafe { (*(*ibcq).context).cmd_fd };
    match Ring::map(fd, &response.driver.ring, METAROCE_RING_CQ, size_of::<metaroce_cqe>()) {
        Ok(ring) => {
            *arm = ring.arm_word();
            drop(queue.replace(ring));
            0
        }
        Err(error) => {
            // The kernel has left the old ring. Polling says so once that is empty.
            queue.lose();
            error
        }
    }
}

pub(super) unsafe extern "C" fn destroy_cq(cq: *mut sys::ibv_cq) -> c_int {
    // SAFETY: made by this file.
    let error = unsafe { sys::ibv_cmd_destroy_cq(cq) };
    if error == 0 {
        // SAFETY: the kernel and the program are done with it; dropping the queue unmaps the ring.
        unsafe {
            let cq = cq.cast::<Cq>();
            drop_in_place(addr_of_mut!((*cq).queue));
            free(cq);
        }
    }
    error
}

/// Makes the next completion the current one; the caller holds `queue`.
unsafe fn advance(ex: *mut sys::ibv_cq_ex) -> c_int {
    // SAFETY: the caller holds the lock, which guards `current` too.
    unsafe {
        let cq = Cq::of_ex(ex);
        let Some(cqe) = cq.queue.held().next() else { return ENOENT };
        qp::polled(&cqe);
        (*ex).wr_id = cqe.wr_id;
        (*ex).status = cqe.status;
        cq.current.get().write(cqe);
    }
    0
}

unsafe extern "C" fn start_poll(ex: *mut sys::ibv_cq_ex, attr: *mut sys::ibv_poll_cq_attr) -> c_int {
    // SAFETY: the program's structure; `ex` was made by this file.
    let (mask, cq) = unsafe { ((*attr).comp_mask, Cq::of_ex(ex)) };
    if mask != 0 {
        return EINVAL;
    }
    cq.queue.hold();
    // SAFETY: held by the line above.
    unsafe {
        let result = advance(ex);
        if result != 0 {
            let lost = cq.queue.held().is_lost();
            cq.queue.release();
            if lost {
                return EIO;
            }
        }
        result
    }
}

unsafe extern "C" fn next_poll(ex: *mut sys::ibv_cq_ex) -> c_int {
    // SAFETY: between start_poll and end_poll the lock is held. The one before is consumed.
    unsafe {
        Cq::of_ex(ex).queue.held().release();
        advance(ex)
    }
}

unsafe extern "C" fn end_poll(ex: *mut sys::ibv_cq_ex) {
    // SAFETY: as in next_poll; this ends the holding.
    unsafe {
        let cq = Cq::of_ex(ex);
        cq.queue.held().release();
        cq.queue.release();
    }
}

/// The current completion.
///
/// # Safety
///
/// `ex` was made by this file, and is between start_poll and end_poll.
unsafe fn current<'a>(ex: *mut sys::ibv_cq_ex) -> &'a metaroce_cqe {
    // SAFETY: nobody writes it while the lock is held for this reader.
    unsafe { &*Cq::of_ex(ex).current.get() }
}

macro_rules! readers {
    ($($name:ident: $field:ident as $kind:ty;)*) => {
        $(unsafe extern "C" fn $name(ex: *mut sys::ibv_cq_ex) -> $kind {
            // SAFETY: the program calls readers between start_poll and end_poll only.
            unsafe { current(ex) }.$field
        })*
    };
}

readers! {
    read_opcode: opcode as sys::ibv_wc_opcode;
    read_vendor_err: vendor_err as u32;
    read_byte_len: byte_len as u32;
    read_imm_data: imm_data as u32;
    read_qp_num: qpn as u32;
    read_src_qp: src_qpn as u32;
    read_wc_flags: wc_flags as u32;
    read_completion_ts: timestamp as u64;
}

unsafe extern "C" fn read_zero_u32(_ex: *mut sys::ibv_cq_ex) -> u32 {
    0
}

unsafe extern "C" fn read_zero_u8(_ex: *mut sys::ibv_cq_ex) -> u8 {
    0
}
