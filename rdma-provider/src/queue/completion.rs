// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#![forbid(unsafe_code)]

//! The completion queue.

use crate::abi::metaroce_cqe;
use crate::atomic::Ordering;
use crate::ring::Ring;

/// A completion queue.
pub(crate) struct CompletionQueue {
    ring: Ring,
    /// The next slot to read; ahead of the consumer in the ring until [`CompletionQueue::release`].
    consumer: u32,
    /// The producer when last looked at.
    produced: u32,
    /// The kernel writes to a ring that could not be mapped.
    lost: bool,
}

impl CompletionQueue {
    /// The queue in `ring`.
    pub(crate) fn new(ring: Ring) -> Self {
        let consumer = ring.consumer().load(Ordering::Acquire);
        CompletionQueue { ring, consumer, produced: consumer, lost: false }
    }

    /// Goes on in `ring`, to which the kernel moved what was not yet consumed; returns the old one.
    pub(crate) fn replace(&mut self, ring: Ring) -> Ring {
        self.consumer = ring.consumer().load(Ordering::Acquire);
        self.produced = self.consumer;
        core::mem::replace(&mut self.ring, ring)
    }

    /// Marks the queue as one that will see no completion any more.
    pub(crate) fn lose(&mut self) {
        self.lost = true;
    }

    /// Is it such a queue?
    pub(crate) fn is_lost(&self) -> bool {
        self.lost
    }

    /// The oldest completion, which is consumed; its slot goes back with [`CompletionQueue::release`].
    pub(crate) fn next(&mut self) -> Option<metaroce_cqe> {
        if self.consumer == self.produced {
            self.produced = self.ring.producer().load(Ordering::Acquire);
            if self.consumer == self.produced {
                return None;
            }
        }
        let cqe = self.ring.slot(self.consumer).get()?;
        self.consumer = self.consumer.wrapping_add(1);
        Some(cqe)
    }

    /// Gives the consumed slots back to the kernel.
    pub(crate) fn release(&mut self) {
        self.ring.consumer().store(self.consumer, Ordering::Release);
    }

    /// Removes the completions of queue pair `qpn`, of which the kernel writes no more, and shows
    /// each to `removed`.
    ///
    /// What is kept moves towards the producer in the slots that this side owns, in its order, and
    /// the consumer follows.
    pub(crate) fn purge(&mut self, qpn: u32, mut removed: impl FnMut(&metaroce_cqe)) {
        let produced = self.ring.producer().load(Ordering::Acquire);
        if produced.wrapping_sub(self.consumer) > self.ring.entries() {
            return;
        }
        self.produced = produced;
        let mut read = produced;
        let mut write = produced;
        while read != self.consumer {
            read = read.wrapping_sub(1);
            let Some(cqe) = self.ring.slot(read).get::<metaroce_cqe>() else { return };
            if cqe.qpn == qpn {
                removed(&cqe);
                continue;
            }
            write = write.wrapping_sub(1);
            if write != read && self.ring.slot(write).put(0, &[cqe]).is_none() {
                return;
            }
        }
        self.consumer = write;
        self.release();
    }
}
