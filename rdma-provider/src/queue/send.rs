// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#![forbid(unsafe_code)]

//! The send queue.
//!
//! Requests are written one by one behind the published producer, then published together: a batch
//! is one `ibv_post_send` or one `ibv_wr_start` … `ibv_wr_complete`. A request is open from
//! [`SendQueue::open`] until the next one or the end of the batch; its payload is set in between.

use crate::abi::{
    metaroce_send_wqe, metaroce_sge, METAROCE_SEND_FENCE, METAROCE_SEND_INLINE, METAROCE_SEND_SIGNALED,
    METAROCE_SEND_SOLICITED, METAROCE_WR_ATOMIC_CMP_AND_SWP, METAROCE_WR_ATOMIC_FETCH_AND_ADD,
    METAROCE_WR_LOCAL_INV, METAROCE_WR_RDMA_READ, METAROCE_WR_RDMA_WRITE, METAROCE_WR_RDMA_WRITE_WITH_IMM,
    METAROCE_WR_SEND, METAROCE_WR_SEND_WITH_IMM, METAROCE_WR_SEND_WITH_INV, SEND_WQE,
};
use crate::atomic::{AtomicU32, Ordering};
use crate::errno::{Errno, EINVAL, ENOMEM};
use crate::ring::{Ring, UserBytes};

/// The flags that a request may carry; INLINE follows from how its payload is set.
pub(crate) const KEEP_FLAGS: u32 = METAROCE_SEND_FENCE | METAROCE_SEND_SIGNALED | METAROCE_SEND_SOLICITED;

/// Bytes that an atomic operation fetches.
const ATOMIC_LENGTH: u64 = 8;

/// What a request may be.
#[derive(Clone, Copy)]
pub(crate) struct Limits {
    /// SGEs.
    pub(crate) max_sge: usize,
    /// Inline bytes.
    pub(crate) max_inline: usize,
    /// Bytes of a message.
    pub(crate) max_message: u64,
}

/// A work request without its payload; fields that the opcode does not use are 0.
#[derive(Clone, Copy, Default)]
pub(crate) struct Request {
    /// Returned in the completion.
    pub(crate) wr_id: u64,
    /// `enum metaroce_send_opcode`.
    pub(crate) opcode: u32,
    /// Flags out of [`KEEP_FLAGS`].
    pub(crate) flags: u32,
    /// Address at the other side.
    pub(crate) remote_addr: u64,
    /// Key of the memory there.
    pub(crate) rkey: u32,
    /// Immediate data in network order, or the key to invalidate.
    pub(crate) imm_data: u32,
    /// Operand of an atomic.
    pub(crate) compare_add: u64,
    /// Second operand of compare-and-swap.
    pub(crate) swap: u64,
}

/// The send queue of a queue pair.
pub(crate) struct SendQueue {
    ring: Ring,
    /// Where the producer in the ring stands.
    published: u32,
    /// The next slot to write; `published` outside of a batch.
    tail: u32,
    /// Slots below are free, when last looked at.
    free: u32,
    /// Everything below has been polled; whoever polls the CQ stores it.
    polled: &'static AtomicU32,
    limits: Limits,
    signal_all: bool,
    open: Option<metaroce_send_wqe>,
    /// The first error of the batch of an `ibv_wr_start`; 0 for none.
    error: Errno,
}

impl SendQueue {
    /// The queue in `ring`, which has to have room for `limits` in each slot. `signal_all`: every
    /// request completes visibly. `polled` is the queue's alone.
    pub(crate) fn new(ring: Ring, limits: Limits, signal_all: bool, polled: &'static AtomicU32) -> Self {
        let start = ring.consumer().load(Ordering::Acquire);
        polled.store(start, Ordering::Relaxed);
        SendQueue {
            ring,
            published: start,
            tail: start,
            free: start,
            polled,
            limits,
            signal_all,
            open: None,
            error: 0,
        }
    }

    /// Starts over after RESET, where the kernel stands.
    pub(crate) fn reset(&mut self) {
        let start = self.ring.consumer().load(Ordering::Acquire);
        self.published = start;
        self.tail = start;
        self.free = start;
        self.polled.store(start, Ordering::Relaxed);
        self.open = None;
        self.error = 0;
        self.ring.producer().store(start, Ordering::Release);
    }

    /// The most inline bytes of a request.
    pub(crate) fn max_inline(&self) -> usize {
        self.limits.max_inline
    }

    /// A slot is free once the kernel is done with it and, when its request was signaled, its
    /// completion has been polled: a program that posts until the queue is full cannot overflow a
    /// CQ that is as deep.
    fn full(&mut self) -> bool {
        let entries = self.ring.entries();
        if self.tail.wrapping_sub(self.free) < entries {
            return false;
        }
        let done = self.ring.consumer().load(Ordering::Acquire).wrapping_sub(self.free);
        let polled = self.polled.load(Ordering::Acquire).wrapping_sub(self.free);
        let mut free = if polled <= done { polled } else { 0 };
        while free < done.min(entries) && !self.is_signaled(self.free.wrapping_add(free)) {
            free = free.wrapping_add(1);
        }
        self.free = self.free.wrapping_add(free);
        self.tail.wrapping_sub(self.free) >= entries
    }

    fn is_signaled(&self, index: u32) -> bool {
        self.ring
            .slot(index)
            .get::<metaroce_send_wqe>()
            .is_none_or(|wqe| wqe.flags & METAROCE_SEND_SIGNALED != 0)
    }

    /// Closes the open request and opens another, without payload so far.
    ///
    /// ENOMEM: the queue is full. EINVAL: opcode or flags are unknown, or the request that was
    /// open is not complete. On an error no request is open.
    pub(crate) fn open(&mut self, request: &Request) -> Result<(), Errno> {
        self.close()?;
        if self.full() {
            return Err(ENOMEM);
        }
        if request.flags & !KEEP_FLAGS != 0 {
            return Err(EINVAL);
        }
        match request.opcode {
            METAROCE_WR_RDMA_WRITE
            | METAROCE_WR_RDMA_WRITE_WITH_IMM
            | METAROCE_WR_SEND
            | METAROCE_WR_SEND_WITH_IMM
            | METAROCE_WR_RDMA_READ
            | METAROCE_WR_ATOMIC_CMP_AND_SWP
            | METAROCE_WR_ATOMIC_FETCH_AND_ADD
            | METAROCE_WR_LOCAL_INV
            | METAROCE_WR_SEND_WITH_INV => {}
            _ => return Err(EINVAL),
        }
        self.open = Some(metaroce_send_wqe {
            wr_id: request.wr_id,
            opcode: request.opcode,
            flags: if self.signal_all { request.flags | METAROCE_SEND_SIGNALED } else { request.flags },
            remote_addr: request.remote_addr,
            rkey: request.rkey,
            imm_data: request.imm_data,
            compare_add: request.compare_add,
            swap: request.swap,
            num_sge: 0,
            inline_len: 0,
            reserved: [0; 2],
        });
        Ok(())
    }

    /// Lets the open request send from, or fetch into, `sges`.
    ///
    /// EINVAL: no request is open, there are too many SGEs or bytes, or an atomic has less than
    /// its 8 bytes.
    pub(crate) fn set_sges(&mut self, sges: &[metaroce_sge]) -> Result<(), Errno> {
        let open = self.open.as_mut().ok_or(EINVAL)?;
        if sges.len() > self.limits.max_sge {
            return Err(EINVAL);
        }
        // At most `max_sge` lengths of 32 bits: no overflow.
        let total = sges.iter().fold(0u64, |total, sge| total.wrapping_add(u64::from(sge.length)));
        if total > self.limits.max_message || (atomic(open.opcode) && total < ATOMIC_LENGTH) {
            return Err(EINVAL);
        }
        self.ring.slot(self.tail).put(SEND_WQE, sges).ok_or(EINVAL)?;
        open.num_sge = u32::try_from(sges.len()).map_err(|_| EINVAL)?;
        open.inline_len = 0;
        open.flags &= !METAROCE_SEND_INLINE;
        Ok(())
    }

    /// Lets the open request carry `pieces`, one after the other.
    ///
    /// EINVAL: no request is open, its opcode takes no inline data, or there are more bytes than
    /// the queue pair takes.
    pub(crate) fn set_inline(&mut self, pieces: impl Iterator<Item = UserBytes>) -> Result<(), Errno> {
        let open = self.open.as_mut().ok_or(EINVAL)?;
        match open.opcode {
            METAROCE_WR_RDMA_WRITE
            | METAROCE_WR_RDMA_WRITE_WITH_IMM
            | METAROCE_WR_SEND
            | METAROCE_WR_SEND_WITH_IMM
            | METAROCE_WR_SEND_WITH_INV => {}
            _ => return Err(EINVAL),
        }
        let slot = self.ring.slot(self.tail);
        let mut length = 0usize;
        for piece in pieces {
            if piece.len() > self.limits.max_inline.wrapping_sub(length) {
                return Err(EINVAL);
            }
            // Below `max_inline`, which is below the size of a slot: no overflow.
            slot.put_user(SEND_WQE.wrapping_add(length), piece).ok_or(EINVAL)?;
            length = length.wrapping_add(piece.len());
        }
        open.num_sge = 0;
        open.inline_len = u32::try_from(length).map_err(|_| EINVAL)?;
        if length == 0 {
            open.flags &= !METAROCE_SEND_INLINE;
        } else {
            open.flags |= METAROCE_SEND_INLINE;
        }
        Ok(())
    }

    /// Closes the open request, if there is one.
    fn close(&mut self) -> Result<(), Errno> {
        let Some(wqe) = self.open.take() else { return Ok(()) };
        if atomic(wqe.opcode) && wqe.num_sge == 0 {
            return Err(EINVAL);
        }
        self.ring.slot(self.tail).put(0, &[wqe]).ok_or(EINVAL)?;
        self.tail = self.tail.wrapping_add(1);
        Ok(())
    }

    /// Adds a whole request with `payload`, which sets its payload. On an error the batch is as it
    /// was before.
    pub(crate) fn push(
        &mut self,
        request: &Request,
        payload: impl FnOnce(&mut Self) -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        let result = self.open(request).and_then(|()| payload(self)).and_then(|()| self.close());
        if result.is_err() {
            self.open = None;
        }
        result
    }

    /// Gives the batch to the kernel; true when there is something, so that the doorbell is due.
    pub(crate) fn publish(&mut self) -> bool {
        if self.tail == self.published {
            return false;
        }
        self.published = self.tail;
        self.ring.producer().store(self.tail, Ordering::Release);
        true
    }

    /// Takes the batch back.
    pub(crate) fn discard(&mut self) {
        self.open = None;
        self.tail = self.published;
    }

    /// Starts the batch of an `ibv_wr_start`.
    pub(crate) fn start(&mut self, allowed: Result<(), Errno>) {
        self.discard();
        self.error = allowed.err().unwrap_or(0);
    }

    /// A step of that batch: done unless an earlier one failed; the first error is kept.
    pub(crate) fn step(&mut self, step: impl FnOnce(&mut Self) -> Result<(), Errno>) {
        if self.error == 0 {
            if let Err(error) = step(self) {
                self.error = error;
            }
        }
    }

    /// Ends that batch: all of it is published, or, after an error, none. True: the doorbell is due.
    pub(crate) fn complete(&mut self) -> Result<bool, Errno> {
        self.step(Self::close);
        if self.error != 0 {
            self.discard();
            return Err(self.error);
        }
        Ok(self.publish())
    }
}

fn atomic(opcode: u32) -> bool {
    opcode == METAROCE_WR_ATOMIC_CMP_AND_SWP || opcode == METAROCE_WR_ATOMIC_FETCH_AND_ADD
}
