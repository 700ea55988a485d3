// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#![forbid(unsafe_code)]

//! The receive queue, of a queue pair or shared. The kernel looks at it when a message arrives: it
//! needs no doorbell, except in state ERR, where no message arrives and the kernel asks for one.

use crate::abi::{metaroce_recv_wqe, metaroce_sge, RECV_WQE};
use crate::atomic::{fence, AtomicU32, Ordering};
use crate::errno::{Errno, EINVAL, ENOMEM};
use crate::ring::Ring;

/// A receive queue.
pub(crate) struct RecvQueue {
    ring: Ring,
    /// Where the producer in the ring stands.
    published: u32,
    /// The next slot to write; `published` outside of a batch.
    tail: u32,
    /// Slots below are free, when last looked at.
    free: u32,
    /// How many completions have been polled, from where the queue started; whoever polls a CQ
    /// counts.
    polled: &'static AtomicU32,
    /// Several queue pairs take from it.
    shared: bool,
    max_sge: usize,
}

impl RecvQueue {
    /// The queue in `ring`, which has to have room for `max_sge` SGEs in each slot. `polled` is the
    /// queue's alone.
    pub(crate) fn new(ring: Ring, max_sge: usize, shared: bool, polled: &'static AtomicU32) -> Self {
        let start = ring.consumer().load(Ordering::Acquire);
        polled.store(start, Ordering::Relaxed);
        RecvQueue { ring, published: start, tail: start, free: start, polled, shared, max_sge }
    }

    /// Starts over after RESET, where the kernel stands.
    pub(crate) fn reset(&mut self) {
        let start = self.ring.consumer().load(Ordering::Acquire);
        self.published = start;
        self.tail = start;
        self.free = start;
        self.polled.store(start, Ordering::Relaxed);
        self.ring.producer().store(start, Ordering::Release);
    }

    /// A slot is free once the completion of its receive has been polled, or the kernel says that
    /// there will be none: a program that posts until the queue is full cannot overflow a CQ that
    /// is as deep. Completions of a shared queue come in another order than its receives were
    /// taken in: they are counted, and the kernel has to be done with the slot itself, too.
    fn full(&mut self) -> bool {
        let entries = self.ring.entries();
        if self.tail.wrapping_sub(self.free) < entries {
            return false;
        }
        let lost = if self.shared { self.ring.arm().load(Ordering::Acquire) } else { 0 };
        let done = self.polled.load(Ordering::Acquire).wrapping_add(lost).wrapping_sub(self.free);
        let taken = self.ring.consumer().load(Ordering::Acquire).wrapping_sub(self.free);
        self.free = self.free.wrapping_add(done.min(taken).min(entries));
        self.tail.wrapping_sub(self.free) >= entries
    }

    /// Adds a receive into `sges`. EINVAL: too many SGEs. ENOMEM: the queue is full.
    pub(crate) fn push(&mut self, wr_id: u64, sges: &[metaroce_sge]) -> Result<(), Errno> {
        if sges.len() > self.max_sge {
            return Err(EINVAL);
        }
        if self.full() {
            return Err(ENOMEM);
        }
        let num_sge = u32::try_from(sges.len()).map_err(|_| EINVAL)?;
        let slot = self.ring.slot(self.tail);
        slot.put(RECV_WQE, sges).ok_or(EINVAL)?;
        slot.put(0, &[metaroce_recv_wqe { wr_id, num_sge, reserved: 0 }]).ok_or(EINVAL)?;
        self.tail = self.tail.wrapping_add(1);
        Ok(())
    }

    /// Gives what was added to the kernel.
    pub(crate) fn publish(&mut self) {
        if self.tail != self.published {
            self.published = self.tail;
            self.ring.producer().store(self.tail, Ordering::Release);
        }
    }

    /// Does the kernel ask for a doorbell after what was published? Not for shared queues.
    pub(crate) fn wants_doorbell(&self) -> bool {
        // The kernel sets the word and then looks at the producer: one of the two sees the other.
        fence(Ordering::SeqCst);
        self.ring.arm().load(Ordering::Relaxed) != 0
    }
}
