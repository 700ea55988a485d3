// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#![forbid(unsafe_code)]

//! The receive queue, of a queue pair or shared. The kernel looks at it when a message arrives: it
//! needs no doorbell, except in state ERR, where no message arrives and the kernel asks for one.

use core::sync::atomic::{fence, Ordering};

use crate::abi::{metaroce_recv_wqe, metaroce_sge, RECV_WQE};
use crate::errno::{Errno, EINVAL, ENOMEM};
use crate::ring::Ring;

/// A receive queue.
pub(crate) struct RecvQueue {
    ring: Ring,
    /// Where the producer in the ring stands.
    published: u32,
    /// The next slot to write; `published` outside of a batch.
    tail: u32,
    /// The consumer when last looked at.
    taken: u32,
    max_sge: usize,
}

impl RecvQueue {
    /// The queue in `ring`, which has to have room for `max_sge` SGEs in each slot.
    pub(crate) fn new(ring: Ring, max_sge: usize) -> Self {
        let start = ring.consumer().load(Ordering::Acquire);
        RecvQueue { ring, published: start, tail: start, taken: start, max_sge }
    }

    /// Starts over after RESET, where the kernel stands.
    pub(crate) fn reset(&mut self) {
        let start = self.ring.consumer().load(Ordering::Acquire);
        self.published = start;
        self.tail = start;
        self.taken = start;
        self.ring.producer().store(start, Ordering::Release);
    }

    fn full(&mut self) -> bool {
        if self.tail.wrapping_sub(self.taken) < self.ring.entries() {
            return false;
        }
        self.taken = self.ring.consumer().load(Ordering::Acquire);
        self.tail.wrapping_sub(self.taken) >= self.ring.entries()
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
