// SPDX-License-Identifier: GPL-2.0

//! The receive side of a QP: receives bound to messages, whether from a queue of its own or
//! from an SRQ.
//!
//! The provider refuses what it can see when a receive is posted (metaroce(7)). What comes here
//! all the same is found when a message takes the receive; its sender hears of it and both QPs
//! go to ERR:
//!
//! | what is wrong with the receive | status here | at the sender |
//! | --- | --- | --- |
//! | shorter than the message | LOC_LEN_ERR | REM_INV_REQ_ERR |
//! | more SGEs than the queue was made for, a reserved word that is not 0: it has no room | LOC_LEN_ERR | REM_INV_REQ_ERR |
//! | an SGE's lkey, its range, or no right to write there | LOC_PROT_ERR | REM_OP_ERR |

#![forbid(unsafe_code)]

use super::srq::SrqInner;
use crate::{
    mem::Sge,
    queue::{RecvWqe, WorkRing, RECV_HEAD_WORDS, SGE_WORDS},
};
use ::kernel::{prelude::*, sync::Arc};

/// Receives of an SRQ that one QP can have bound and not completed.
const SRQ_BOUND: u32 = 2048;

/// A receive, copied out of its ring.
#[derive(Clone, Copy, Default)]
pub struct RecvEntry {
    /// The program's name for it.
    pub(super) wr_id: u64,
    /// Bytes it can take.
    pub(super) length: u64,
    /// SGEs it has.
    pub(super) count: u32,
    /// The WQE makes no sense: nothing can be put there.
    pub(super) bad: bool,
}

impl RecvEntry {
    /// Copies the WQE of `index` out of `ring`.
    pub(super) fn load(&mut self, ring: &WorkRing, index: u32, sges: &mut [Sge]) {
        let mut head = [0u64; RECV_HEAD_WORDS];
        ring.read(index, 0, &mut head);
        let wqe = RecvWqe::from_words(&head);
        *self = Self {
            wr_id: wqe.wr_id,
            ..Self::default()
        };
        if wqe.num_sge as usize > sges.len() || wqe.reserved != 0 {
            self.bad = true;
            return;
        }
        self.count = wqe.num_sge;
        let mut at = RECV_HEAD_WORDS;
        for to in sges.iter_mut().take(wqe.num_sge as usize) {
            let mut words = [0u64; SGE_WORDS];
            ring.read(index, at, &mut words);
            at += SGE_WORDS;
            *to = Sge::from_words(&words);
            // At most 32 lengths of 32 bits each.
            self.length += u64::from(to.length);
        }
    }
}

/// Where receives come from.
enum Source {
    Own {
        ring: WorkRing,
        /// Ring index of receive message 0.
        base: u32,
    },
    Shared(Arc<SrqInner>),
}

/// Receives of a QP, numbered from 0 as messages take them.
pub struct RecvQueue {
    source: Source,
    /// Room for bound receives, a power of two.
    entries: u32,
    max_sge: usize,
    heads: KVVec<RecvEntry>,
    sges: KVVec<Sge>,
    /// Receives bound so far.
    bound: u32,
    /// Receives completed so far.
    done: u32,
    /// The first flush has been.
    flushed: bool,
}

impl RecvQueue {
    /// A queue of its own.
    pub(super) fn own(ring: WorkRing, max_sge: u32) -> Result<Self> {
        let entries = ring.entries();
        Self::new(Source::Own { ring, base: 0 }, entries, max_sge)
    }

    /// Receives come from `srq`.
    pub(super) fn shared(srq: Arc<SrqInner>) -> Result<Self> {
        let (entries, max_sge) = (srq.entries.min(SRQ_BOUND), srq.max_sge);
        Self::new(Source::Shared(srq), entries, max_sge)
    }

    fn new(source: Source, entries: u32, max_sge: u32) -> Result<Self> {
        let n = entries as usize;
        let max_sge = max_sge as usize;
        let flags = GFP_KERNEL_ACCOUNT;
        Ok(Self {
            source,
            entries,
            max_sge,
            heads: KVVec::from_elem(RecvEntry::default(), n, flags)?,
            sges: KVVec::from_elem(Sge::default(), n * max_sge, flags)?,
            bound: 0,
            done: 0,
            flushed: false,
        })
    }

    fn slot(&self, rmsn: u32) -> usize {
        (rmsn & (self.entries - 1)) as usize
    }

    /// Binds the next receive to message `rmsn`, which must be the next one.
    pub(super) fn bind(&mut self, rmsn: u32) -> Option<u64> {
        if rmsn != self.bound || self.bound.wrapping_sub(self.done) >= self.entries {
            return None;
        }
        let slot = self.slot(rmsn);
        let entry = self.heads.get_mut(slot)?;
        let first = slot * self.max_sge;
        let sges = self.sges.get_mut(first..first + self.max_sge)?;
        match &self.source {
            Source::Own { ring, base } => {
                let index = base.wrapping_add(rmsn);
                if ring.filled(index) == 0 {
                    return None;
                }
                entry.load(ring, index, sges);
                ring.release(index.wrapping_add(1));
            }
            Source::Shared(srq) => {
                if !srq.take(entry, sges) {
                    return None;
                }
            }
        }
        self.bound = self.bound.wrapping_add(1);
        Some(entry.length)
    }

    /// Receives posted and not bound.
    pub(super) fn posted(&self) -> u32 {
        match &self.source {
            Source::Own { ring, base } => ring.filled(base.wrapping_add(self.bound)),
            Source::Shared(srq) => srq.posted(),
        }
    }

    /// The bound receive of message `rmsn` and its scatter list.
    pub(super) fn bound(&self, rmsn: u32) -> Option<(&RecvEntry, &[Sge])> {
        if rmsn.wrapping_sub(self.done) >= self.bound.wrapping_sub(self.done) {
            return None;
        }
        let slot = self.slot(rmsn);
        let entry = self.heads.get(slot)?;
        let first = slot * self.max_sge;
        let sges = self.sges.get(first..first + entry.count as usize)?;
        Some((entry, sges))
    }

    /// Completes message `rmsn`, which must be the oldest; returns its `wr_id`.
    pub(super) fn complete(&mut self, rmsn: u32) -> Option<u64> {
        if rmsn != self.done || self.done == self.bound {
            return None;
        }
        let wr_id = self.heads.get(self.slot(rmsn))?.wr_id;
        self.done = self.done.wrapping_add(1);
        Some(wr_id)
    }

    /// Takes the next receive to flush: bound ones first, then those in the own ring (those
    /// of an SRQ are for others). Returns its `wr_id`.
    pub(super) fn flush_next(&mut self) -> Option<u64> {
        if self.done == self.bound {
            if let Source::Shared(_) = self.source {
                return None;
            }
            self.bind(self.bound)?;
        }
        self.complete(self.done)
    }

    /// Receives that can be bound at a time.
    pub(super) fn capacity(&self) -> u32 {
        self.entries
    }

    /// Whether everything is being flushed for the first time.
    pub(super) fn first_flush(&mut self) -> bool {
        !::core::mem::replace(&mut self.flushed, true)
    }

    /// Whether receives come from an SRQ.
    pub(super) fn is_shared(&self) -> bool {
        matches!(self.source, Source::Shared(_))
    }

    /// Asks the program to ring the doorbell after posting receives (state ERR).
    pub(super) fn want_doorbell(&self, wanted: bool) {
        if let Source::Own { ring, .. } = &self.source {
            ring.want_doorbell(wanted);
        }
    }

    /// Forgets everything that was posted; messages count from 0 again.
    pub(super) fn reset(&mut self) {
        if let Source::Shared(srq) = &self.source {
            srq.lose(self.bound.wrapping_sub(self.done));
        }
        self.bound = 0;
        self.done = 0;
        self.flushed = false;
        if let Source::Own { ring, base } = &mut self.source {
            *base = ring.posted();
            ring.release(*base);
            ring.want_doorbell(false);
        }
    }
}
