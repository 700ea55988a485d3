// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB

//! Queue pairs.
//!
//! Destroying one: after the kernel has destroyed its own, completions may still lie unread in the
//! CQs and have to go. But the number is free again by then: another thread may get it for a new
//! queue pair, whose completions must stay. So a queue pair is listed in [`Dying`] before the
//! kernel is asked, and whoever comes first removes the completions, under the lock of that list:
//! the destroyer once the kernel returns, or the creator of a queue pair that got the same number.

use core::cell::UnsafeCell;
use core::ffi::{c_int, c_void};
use core::ptr::{addr_of_mut, drop_in_place, null_mut};
use core::sync::atomic::{AtomicU32, Ordering};

use super::device::Context;
use super::{allocate, cq, errno, fail, free, sges, srq, sys, wr, zeroed, With};
use crate::abi::{
    metaroce_cqe, metaroce_create_qp_req, metaroce_create_qp_resp, METAROCE_RING_RQ, METAROCE_RING_SQ,
    RECV_WQE, SEND_WQE, SGE,
};
use crate::errno::{Errno, EACCES, EINTR, EINVAL, EIO, EOPNOTSUPP, EPROTO};
use crate::queue::{may_receive, may_send, Limits, RecvQueue, Request, SendQueue, KEEP_FLAGS};
use crate::ring::{Lock, Ring, UserBytes};

/// A queue pair.
#[repr(C)]
pub(super) struct Qp {
    /// libibverbs writes it while this library has references to the rest.
    vqp: UnsafeCell<sys::verbs_qp>,
    /// The send queue; held from `ibv_wr_start` to `ibv_wr_complete`.
    pub(super) send: Lock<SendQueue>,
    /// The receive queue, unless there is a shared one.
    receive: Lock<Option<RecvQueue>>,
    /// Send WQEs whose completions have been polled, as an index of the ring; see [`polled`].
    polled: AtomicU32,
    /// The same for the own receive queue.
    received: AtomicU32,
    /// `received`, or its like of the shared receive queue.
    receives: *const AtomicU32,
    /// The next in the list of those being destroyed; guarded by the lock of that list.
    next_dying: *mut Qp,
}

const _: () = assert!(core::mem::offset_of!(Qp, vqp) == 0);

/// The queue pairs whose completions are still to be removed after the kernel has destroyed them.
pub(crate) struct Dying {
    first: *mut Qp,
}

// SAFETY: the list is reached under its lock alone, and a queue pair stays allocated while listed.
unsafe impl Send for Dying {}

impl Default for Dying {
    fn default() -> Self {
        Dying { first: null_mut() }
    }
}

impl Dying {
    /// # Safety
    ///
    /// `qp` stays allocated until [`Dying::take`] has found it.
    pub(super) unsafe fn add(&mut self, qp: *mut Qp) {
        // SAFETY: the caller holds the lock that guards the field.
        unsafe { (*qp).next_dying = self.first };
        self.first = qp;
    }

    /// Takes the first queue pair that is `wanted` off the list.
    pub(super) fn take(&mut self, wanted: impl Fn(*mut Qp) -> bool) -> Option<*mut Qp> {
        let mut link: *mut *mut Qp = &mut self.first;
        // SAFETY: the list is ours, and what is on it allocated.
        unsafe {
            while !(*link).is_null() {
                let qp = *link;
                if wanted(qp) {
                    *link = (*qp).next_dying;
                    return Some(qp);
                }
                link = &raw mut (*qp).next_dying;
            }
        }
        None
    }
}

impl Qp {
    /// The face of the queue pair that libibverbs knows.
    fn ibv(qp: *mut Qp) -> *mut sys::ibv_qp {
        // `vqp` is at the start of Qp, and ibv_qp at the start of it.
        qp.cast()
    }

    /// A queue pair with the given queues, and nothing else set.
    #[cfg(test)]
    pub(super) fn over(send: SendQueue, receive: Option<RecvQueue>) -> Qp {
        // SAFETY: integers, pointers and optional functions.
        let vqp = UnsafeCell::new(unsafe { core::mem::zeroed() });
        Qp {
            vqp,
            send: Lock::new(send),
            receive: Lock::new(receive),
            polled: AtomicU32::new(0),
            received: AtomicU32::new(0),
            receives: core::ptr::null(),
            next_dying: null_mut(),
        }
    }

    /// # Safety
    ///
    /// `qp` is one of ours and lives as long as the result.
    pub(super) unsafe fn of<'a>(qp: *mut sys::ibv_qp) -> &'a Qp {
        // SAFETY: the caller's promise.
        unsafe { &*qp.cast::<Qp>() }
    }
}

/// The state as far as libibverbs knows; it writes the field when a modify or query has succeeded.
///
/// # Safety
///
/// `qp` is a queue pair.
pub(super) unsafe fn state(qp: *mut sys::ibv_qp) -> u32 {
    // SAFETY: the field is an aligned word, which another thread may write at the same time.
    unsafe { AtomicU32::from_ptr(&raw mut (*qp).state) }.load(Ordering::Relaxed)
}

/// Removes the completions of `qp` from its CQs.
///
/// # Safety
///
/// `qp` is a queue pair, of whose completions the kernel writes no more.
unsafe fn purge(qp: *mut sys::ibv_qp) {
    // SAFETY: the CQs outlive the queue pair.
    unsafe {
        let (send, receive, qpn) = ((*qp).send_cq, (*qp).recv_cq, (*qp).qp_num);
        cq::purge(send, qpn);
        if receive != send {
            cq::purge(receive, qpn);
        }
    }
}

/// A completion has been polled. Of a send queue: its slot, and those before it, are free. Of a
/// receive queue: one more is.
///
/// # Safety
///
/// The completion came from a CQ whose lock is held: a queue pair takes its completions out of it,
/// under that lock, before it goes, and a shared receive queue outlives its queue pairs.
pub(super) unsafe fn polled(cqe: &metaroce_cqe) {
    let qp = cqe.cookie as *const Qp;
    if qp.is_null() {
        return;
    }
    // SAFETY: the cookie is what this file gave the kernel, and the queue pair still exists.
    unsafe {
        if cqe.opcode & sys::IBV_WC_RECV == 0 {
            (*qp).polled.store(cqe.wqe_index.wrapping_add(1), Ordering::Release);
        } else if let Some(receives) = (*qp).receives.as_ref() {
            receives.fetch_add(1, Ordering::Release);
        }
    }
}

/// Maps the rings of a new queue pair and starts its queues.
///
/// # Safety
///
/// `qp` has been made by the kernel with `attr` and `response`; its queues are not written so far.
unsafe fn start(
    qp: *mut Qp,
    attr: &mut sys::ibv_qp_init_attr_ex,
    response: &metaroce_create_qp_resp,
    context: &Context,
    fd: c_int,
) -> Result<(), Errno> {
    let limits = Limits {
        max_sge: attr.cap.max_send_sge as usize,
        max_inline: response.max_inline as usize,
        max_message: context.max_message,
    };
    let payload = limits.max_sge.saturating_mul(SGE).max(limits.max_inline);
    let send = Ring::map(fd, &response.sq, METAROCE_RING_SQ, SEND_WQE.saturating_add(payload))?;
    // SAFETY: `qp` is ours alone.
    unsafe {
        addr_of_mut!((*qp).polled).write(AtomicU32::new(0));
        addr_of_mut!((*qp).received).write(AtomicU32::new(0));
    }
    // SAFETY: just written; the queues live in `qp` and go with it.
    let (polled, received): (&'static AtomicU32, &'static AtomicU32) =
        unsafe { (&*addr_of_mut!((*qp).polled), &*addr_of_mut!((*qp).received)) };
    let receive = match (response.rq.size, attr.srq.is_null()) {
        (0, false) => None,
        (_, false) | (0, true) => return Err(EPROTO),
        (_, true) => {
            let max_sge = attr.cap.max_recv_sge as usize;
            let stride = RECV_WQE.saturating_add(max_sge.saturating_mul(SGE));
            let ring = Ring::map(fd, &response.rq, METAROCE_RING_RQ, stride)?;
            Some(RecvQueue::new(ring, max_sge, false, received))
        }
    };
    // What is advertised is what a request may carry.
    attr.cap.max_inline_data = response.max_inline;
    // SAFETY: `qp` is ours alone; a shared queue, if there is one, is one of ours.
    unsafe {
        let receives = if attr.srq.is_null() { received } else { srq::polled(attr.srq) };
        addr_of_mut!((*qp).receives).write(receives);
        addr_of_mut!((*qp).send).write(Lock::new(SendQueue::new(send, limits, attr.sq_sig_all != 0, polled)));
        addr_of_mut!((*qp).receive).write(Lock::new(receive));
    }
    Ok(())
}

/// Makes a queue pair; `attr` gets the capacities.
unsafe fn make(context: *mut sys::ibv_context, attr: &mut sys::ibv_qp_init_attr_ex) -> *mut sys::ibv_qp {
    let send_ops = if attr.comp_mask & sys::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS != 0 {
        Some(attr.send_ops_flags)
    } else {
        None
    };
    if attr.comp_mask & !(sys::IBV_QP_INIT_ATTR_PD | sys::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS) != 0
        || send_ops.is_some_and(|ops| ops & !wr::SEND_OPS != 0 || attr.qp_type != sys::IBV_QPT_RC)
    {
        return fail(EOPNOTSUPP);
    }
    let Some(qp) = allocate::<Qp>() else { return null_mut() };
    let qp = qp.as_ptr();
    let mut command: With<sys::ibv_create_qp, metaroce_create_qp_req> = zeroed();
    command.driver.cookie = qp as u64;
    let mut response: With<sys::ib_uverbs_create_qp_resp, metaroce_create_qp_resp> = zeroed();
    // SAFETY: the structures have the given sizes; `qp` is new and ours alone; the context is one
    // of ours.
    unsafe {
        let vqp = qp.cast::<sys::verbs_qp>();
        let error = sys::ibv_cmd_create_qp_ex(
            context,
            vqp,
            attr,
            &mut command.core,
            size_of_val(&command),
            &mut response.core,
            size_of_val(&response),
        );
        if error != 0 {
            free(qp);
            return fail(error);
        }
        let ibqp = Qp::ibv(qp);
        // A queue pair that had this number may still have completions that are in nobody's way
        // now, and would be mistaken for ours later.
        let ours = Context::of(context);
        {
            let qpn = (*ibqp).qp_num;
            let mut dying = ours.dying.lock();
            if let Some(former) = dying.take(|former| (*Qp::ibv(former)).qp_num == qpn) {
                purge(Qp::ibv(former));
            }
        }
        if let Err(error) = start(qp, attr, &response.driver, ours, (*context).cmd_fd) {
            sys::ibv_cmd_destroy_qp(ibqp);
            free(qp);
            return fail(error);
        }
        if let Some(ops) = send_ops {
            wr::set_ops(&mut *ibqp.cast::<sys::ibv_qp_ex>(), ops);
            (*vqp).comp_mask |= sys::VERBS_QP_EX;
        }
        ibqp
    }
}

pub(super) unsafe extern "C" fn create_qp(
    pd: *mut sys::ibv_pd,
    attr: *mut sys::ibv_qp_init_attr,
) -> *mut sys::ibv_qp {
    // SAFETY: the program's structures.
    unsafe {
        let attr = &mut *attr;
        let mut full: sys::ibv_qp_init_attr_ex = zeroed();
        full.qp_context = attr.qp_context;
        full.send_cq = attr.send_cq;
        full.recv_cq = attr.recv_cq;
        full.srq = attr.srq;
        full.cap = attr.cap;
        full.qp_type = attr.qp_type;
        full.sq_sig_all = attr.sq_sig_all;
        full.comp_mask = sys::IBV_QP_INIT_ATTR_PD;
        full.pd = pd;
        let qp = make((*pd).context, &mut full);
        if !qp.is_null() {
            attr.cap = full.cap;
        }
        qp
    }
}

pub(super) unsafe extern "C" fn create_qp_ex(
    context: *mut sys::ibv_context,
    attr: *mut sys::ibv_qp_init_attr_ex,
) -> *mut sys::ibv_qp {
    // SAFETY: the program's structure.
    unsafe { make(context, &mut *attr) }
}

pub(super) unsafe extern "C" fn query_qp(
    qp: *mut sys::ibv_qp,
    attr: *mut sys::ibv_qp_attr,
    mask: c_int,
    init: *mut sys::ibv_qp_init_attr,
) -> c_int {
    let mut command: sys::ibv_query_qp = zeroed();
    // SAFETY: the structure has the given size.
    let error = unsafe { sys::ibv_cmd_query_qp(qp, attr, mask, init, &mut command, size_of_val(&command)) };
    if error == 0 {
        // SAFETY: both were just filled in; the queue pair is one of ours.
        unsafe {
            (*init).cap.max_inline_data = Qp::of(qp).send.lock().max_inline() as u32;
            (*attr).cap = (*init).cap;
        }
    }
    error
}

/// Packets are placed as they arrive, in any order.
pub(super) unsafe extern "C" fn query_qp_data_in_order(
    _qp: *mut sys::ibv_qp,
    _opcode: sys::ibv_wr_opcode,
    _flags: u32,
) -> c_int {
    0
}

pub(super) unsafe extern "C" fn modify_qp(
    qp: *mut sys::ibv_qp,
    attr: *mut sys::ibv_qp_attr,
    mask: c_int,
) -> c_int {
    let mut command: sys::ibv_modify_qp = zeroed();
    // SAFETY: the structure has the given size.
    let error = unsafe { sys::ibv_cmd_modify_qp(qp, attr, mask, &mut command, size_of_val(&command)) };
    if error != 0 {
        return error;
    }
    // SAFETY: the program's structure; the queue pair is one of ours, and after RESET the kernel
    // writes no completion for what was posted before.
    unsafe {
        if mask as u32 & sys::IBV_QP_STATE != 0 && (*attr).qp_state == sys::IBV_QPS_RESET {
            purge(qp);
            let ours = Qp::of(qp);
            ours.send.lock().reset();
            if let Some(queue) = ours.receive.lock().as_mut() {
                queue.reset();
            }
        }
    }
    0
}

pub(super) unsafe extern "C" fn destroy_qp(ibqp: *mut sys::ibv_qp) -> c_int {
    let qp = ibqp.cast::<Qp>();
    // SAFETY: made by this file; it is freed after it has left the list of the dying.
    unsafe {
        let context = Context::of((*ibqp).context);
        context.dying.lock().add(qp);
        let error = sys::ibv_cmd_destroy_qp(ibqp);
        let mut dying = context.dying.lock();
        let listed = dying.take(|listed| listed == qp).is_some();
        if error != 0 {
            return error;
        }
        if listed {
            purge(ibqp);
        }
        drop(dying);
        drop_in_place(addr_of_mut!((*qp).send));
        drop_in_place(addr_of_mut!((*qp).receive));
        free(qp);
    }
    0
}

/// The doorbell: POST_SEND of the uverbs write interface, without requests.
#[repr(C)]
struct Doorbell {
    header: sys::ib_uverbs_cmd_hdr,
    command: sys::ib_uverbs_post_send,
}

const _: () = {
    assert!(core::mem::offset_of!(Doorbell, command) == size_of::<sys::ib_uverbs_cmd_hdr>());
    assert!(size_of::<Doorbell>() % 4 == 0 && size_of::<sys::ib_uverbs_post_send_resp>() % 4 == 0);
};

/// Tells the kernel that the send queue has new requests.
///
/// # Safety
///
/// `qp` is one of ours.
pub(super) unsafe fn doorbell(qp: *mut sys::ibv_qp) -> Result<(), Errno> {
    let mut response = sys::ib_uverbs_post_send_resp { bad_wr: 0 };
    // SAFETY: set by libibverbs.
    let (fd, handle) = unsafe { ((*(*qp).context).cmd_fd, (*qp).handle) };
    let doorbell = Doorbell {
        header: sys::ib_uverbs_cmd_hdr {
            command: sys::IB_USER_VERBS_CMD_POST_SEND,
            in_words: (size_of::<Doorbell>() / 4) as u16,
            out_words: (size_of::<sys::ib_uverbs_post_send_resp>() / 4) as u16,
        },
        command: sys::ib_uverbs_post_send {
            response: &raw mut response as u64,
            qp_handle: handle,
            wr_count: 0,
            sge_count: 0,
            wqe_size: size_of::<sys::ib_uverbs_send_wr>() as u32,
            send_wr: sys::__IncompleteArrayField::new(),
        },
    };
    loop {
        // SAFETY: the command has the given size, and names a response that the kernel may write.
        let written =
            unsafe { sys::write(fd, (&raw const doorbell).cast::<c_void>(), size_of::<Doorbell>()) };
        if written == size_of::<Doorbell>() as isize {
            return Ok(());
        }
        match if written < 0 { errno() } else { EIO } {
            EINTR => {}
            // The kernel refuses write() from a process that changed its credentials since it
            // opened the device; the same command by ioctl, slower, is allowed.
            EACCES => {
                let mut bad = null_mut();
                // SAFETY: an empty list of requests.
                let error = unsafe { sys::ibv_cmd_post_send(qp, null_mut(), &mut bad) };
                return if error == 0 { Ok(()) } else { Err(error) };
            }
            error => return Err(error),
        }
    }
}

/// Copies the fields of `wr` that its opcode uses.
///
/// # Safety
///
/// `wr` is a valid request.
unsafe fn request(wr: &sys::ibv_send_wr) -> Request {
    let mut request = Request {
        wr_id: wr.wr_id,
        opcode: wr.opcode,
        flags: wr.send_flags & !sys::IBV_SEND_INLINE,
        ..Request::default()
    };
    // SAFETY: the opcode tells which member of each union the program has set.
    unsafe {
        match wr.opcode {
            sys::IBV_WR_RDMA_WRITE | sys::IBV_WR_RDMA_READ | sys::IBV_WR_RDMA_WRITE_WITH_IMM => {
                request.remote_addr = wr.wr.rdma.remote_addr;
                request.rkey = wr.wr.rdma.rkey;
            }
            sys::IBV_WR_ATOMIC_CMP_AND_SWP | sys::IBV_WR_ATOMIC_FETCH_AND_ADD => {
                request.remote_addr = wr.wr.atomic.remote_addr;
                request.rkey = wr.wr.atomic.rkey;
                request.compare_add = wr.wr.atomic.compare_add;
                if wr.opcode == sys::IBV_WR_ATOMIC_CMP_AND_SWP {
                    request.swap = wr.wr.atomic.swap;
                }
            }
            _ => {}
        }
        match wr.opcode {
            sys::IBV_WR_SEND_WITH_IMM | sys::IBV_WR_RDMA_WRITE_WITH_IMM => {
                request.imm_data = wr.__bindgen_anon_1.imm_data
            }
            sys::IBV_WR_SEND_WITH_INV | sys::IBV_WR_LOCAL_INV => {
                request.imm_data = wr.__bindgen_anon_1.invalidate_rkey
            }
            _ => {}
        }
    }
    request
}

/// Adds `wr` to the batch of `queue`.
///
/// # Safety
///
/// `wr` is a valid request.
unsafe fn push(queue: &mut SendQueue, wr: &sys::ibv_send_wr) -> Result<(), Errno> {
    if wr.opcode == sys::IBV_WR_BIND_MW {
        return Err(EOPNOTSUPP);
    }
    if wr.send_flags & !(KEEP_FLAGS | sys::IBV_SEND_INLINE) != 0 {
        return Err(EINVAL);
    }
    // SAFETY: the caller's promise.
    let (request, sges) = unsafe { (request(wr), sges(wr.sg_list, wr.num_sge)?) };
    queue.push(&request, |queue| {
        if wr.opcode == sys::IBV_WR_LOCAL_INV {
            return Ok(());
        }
        if wr.send_flags & sys::IBV_SEND_INLINE != 0 {
            queue.set_inline(sges.iter().map(|sge| {
                // SAFETY: the program says that its SGEs name memory it may read.
                unsafe { UserBytes::new(sge.addr as *const u8, sge.length as usize) }
            }))
        } else {
            queue.set_sges(sges)
        }
    })
}

/// When the doorbell fails, the requests are in the queue all the same and the kernel may still
/// execute them: the error says that this is uncertain, `bad` that none is known to be posted.
pub(super) unsafe extern "C" fn post_send(
    qp: *mut sys::ibv_qp,
    wr: *mut sys::ibv_send_wr,
    bad: *mut *mut sys::ibv_send_wr,
) -> c_int {
    // SAFETY: made by this file.
    let (ours, allowed) = unsafe { (Qp::of(qp), may_send(state(qp))) };
    if let Err(error) = allowed {
        // SAFETY: the program's pointer.
        unsafe { *bad = wr };
        return error;
    }
    let mut result = 0;
    let mut queue = ours.send.lock();
    let mut next = wr;
    while !next.is_null() {
        // SAFETY: a request of the program's list.
        unsafe {
            if let Err(error) = push(&mut queue, &*next) {
                *bad = next;
                result = error;
                break;
            }
            next = (*next).next;
        }
    }
    let due = queue.publish();
    drop(queue);
    if due {
        // SAFETY: as above.
        unsafe {
            if let Err(error) = doorbell(qp) {
                *bad = wr;
                result = error;
            }
        }
    }
    result
}

pub(super) unsafe extern "C" fn post_recv(
    qp: *mut sys::ibv_qp,
    wr: *mut sys::ibv_recv_wr,
    bad: *mut *mut sys::ibv_recv_wr,
) -> c_int {
    // SAFETY: made by this file; the list is the program's.
    unsafe {
        let mut queue = Qp::of(qp).receive.lock();
        let (result, due) = match (may_receive(state(qp)), queue.as_mut()) {
            (Ok(()), Some(queue)) => (srq::post(queue, wr, bad), queue.wants_doorbell()),
            (Err(error), _) => {
                *bad = wr;
                return error;
            }
            // Receives go to the shared queue.
            (Ok(()), None) => {
                *bad = wr;
                return EINVAL;
            }
        };
        drop(queue);
        if due {
            if let Err(error) = doorbell(qp) {
                *bad = wr;
                return error;
            }
        }
        result
    }
}

pub(super) unsafe extern "C" fn attach_mcast(
    _qp: *mut sys::ibv_qp,
    _gid: *const sys::ibv_gid,
    _lid: u16,
) -> c_int {
    EOPNOTSUPP
}

pub(super) unsafe extern "C" fn detach_mcast(
    _qp: *mut sys::ibv_qp,
    _gid: *const sys::ibv_gid,
    _lid: u16,
) -> c_int {
    EOPNOTSUPP
}
