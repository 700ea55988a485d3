// SPDX-License-Identifier: GPL-2.0

//! The send side of a QP: WQEs copied out of the ring, until they are complete.
//!
//! The provider refuses what it can see when a WR is posted (metaroce(7)). What comes here all
//! the same completes in its turn, nothing of it is sent, and the QP goes to ERR:
//!
//! | what is wrong with the WR | status |
//! | --- | --- |
//! | unknown opcode, BIND_MW | LOC_QP_OP_ERR |
//! | more SGEs or inline bytes than the queue was made for, reserved words that are not 0 | LOC_QP_OP_ERR |
//! | inline READ or atomic | LOC_QP_OP_ERR |
//! | READ or atomic with `max_rd_atomic` 0 | LOC_QP_OP_ERR |
//! | longer than `max_msg_sz`, atomic of other than 8 bytes | LOC_LEN_ERR |
//! | an SGE's lkey, its range, or no right to write there (READ, atomic) | LOC_PROT_ERR |
//! | the same when the memory goes while the WR runs | LOC_PROT_ERR |
//! | LOCAL_INV of a key that is not one of the PD's | LOC_QP_OP_ERR |

#![forbid(unsafe_code)]

use super::MAX_SGE;
use crate::{
    bindings,
    mem::{self, access, Frags, Recent, Scatter, Sge, Table},
    proto::api::{SendWr, Status, WrOp, MAX_MESSAGE},
    queue::{Cqe, SendWqe, WorkRing, SEND_HEAD_WORDS, SGE_WORDS},
};
use ::kernel::{prelude::*, transmute::AsBytes};

/// What a completed WR is to the program; the values of `enum ibv_wc_opcode`.
mod wc {
    pub(super) const SEND: u32 = 0;
    pub(super) const RDMA_WRITE: u32 = 1;
    pub(super) const RDMA_READ: u32 = 2;
    pub(super) const COMP_SWAP: u32 = 3;
    pub(super) const FETCH_ADD: u32 = 4;
    pub(super) const BIND_MW: u32 = 5;
    pub(super) const LOCAL_INV: u32 = 6;
}

mod op {
    use super::bindings as b;
    pub(super) const WRITE: u32 = b::metaroce_send_opcode_METAROCE_WR_RDMA_WRITE;
    pub(super) const WRITE_IMM: u32 = b::metaroce_send_opcode_METAROCE_WR_RDMA_WRITE_WITH_IMM;
    pub(super) const SEND: u32 = b::metaroce_send_opcode_METAROCE_WR_SEND;
    pub(super) const SEND_IMM: u32 = b::metaroce_send_opcode_METAROCE_WR_SEND_WITH_IMM;
    pub(super) const READ: u32 = b::metaroce_send_opcode_METAROCE_WR_RDMA_READ;
    pub(super) const CMP_SWAP: u32 = b::metaroce_send_opcode_METAROCE_WR_ATOMIC_CMP_AND_SWP;
    pub(super) const FETCH_ADD: u32 = b::metaroce_send_opcode_METAROCE_WR_ATOMIC_FETCH_AND_ADD;
    pub(super) const LOCAL_INV: u32 = b::metaroce_send_opcode_METAROCE_WR_LOCAL_INV;
    pub(super) const BIND_MW: u32 = b::metaroce_send_opcode_METAROCE_WR_BIND_MW;
    pub(super) const SEND_INV: u32 = b::metaroce_send_opcode_METAROCE_WR_SEND_WITH_INV;
}

mod flag {
    use super::bindings as b;
    pub(super) const FENCE: u32 = b::metaroce_send_flags_METAROCE_SEND_FENCE;
    pub(super) const SIGNALED: u32 = b::metaroce_send_flags_METAROCE_SEND_SIGNALED;
    pub(super) const SOLICITED: u32 = b::metaroce_send_flags_METAROCE_SEND_SOLICITED;
    pub(super) const INLINE: u32 = b::metaroce_send_flags_METAROCE_SEND_INLINE;
}

/// What is kept of a WQE until it completes.
#[derive(Clone, Copy, Default)]
struct SendEntry {
    wr_id: u64,
    opcode: u32,
    length: u32,
    /// SGEs in the body.
    count: u32,
    /// Inline bytes in the body.
    inline: u32,
    /// Key of a LOCAL_INV.
    key: u32,
    signaled: bool,
}

/// Sends of a QP, numbered from 0 as they are posted.
pub struct SendQueue {
    ring: WorkRing,
    entries: u32,
    /// 64-bit words of a WQE's body.
    body: usize,
    heads: KVVec<SendEntry>,
    bodies: KVVec<u64>,
    signal_all: bool,
    /// Ring index of WR 0.
    base: u32,
    /// WRs fetched so far.
    fetched: u32,
    /// WRs completed so far.
    retired: u32,
    /// WRs beyond `retired` that are to be flushed once no copy is running.
    deferred: u32,
}

impl SendQueue {
    /// A queue over `ring`, whose WQEs have `body` bytes behind their heads.
    pub(super) fn new(ring: WorkRing, body: usize, signal_all: bool) -> Result<Self> {
        let entries = ring.entries();
        let body = body / 8;
        let flags = GFP_KERNEL_ACCOUNT;
        Ok(Self {
            entries,
            body,
            heads: KVVec::from_elem(SendEntry::default(), entries as usize, flags)?,
            bodies: KVVec::from_elem(0, entries as usize * body, flags)?,
            ring,
            signal_all,
            base: 0,
            fetched: 0,
            retired: 0,
            deferred: 0,
        })
    }

    /// WRs it can hold.
    pub(super) fn entries(&self) -> u32 {
        self.entries
    }

    /// WRs fetched and not completed.
    pub(super) fn in_use(&self) -> u32 {
        self.fetched.wrapping_sub(self.retired)
    }

    fn slot(&self, wr: u32) -> usize {
        (wr & (self.entries - 1)) as usize
    }

    /// WQEs in the ring that can be fetched.
    fn room(&self) -> u32 {
        let outstanding = self.fetched.wrapping_sub(self.retired);
        self.ring
            .filled(self.base.wrapping_add(self.fetched))
            .min(self.entries - outstanding)
    }

    /// Copies up to `budget` WQEs out of the ring and hands each to `f`, which may refuse
    /// one (and thereby end it). Returns how many were taken.
    pub(super) fn fetch(
        &mut self,
        budget: usize,
        table: &Table,
        pd: u64,
        f: &mut dyn FnMut(SendWr) -> bool,
    ) -> usize {
        let room = (self.room() as usize).min(budget);
        for n in 0..room {
            let Some(wr) = self.load(table, pd) else {
                return n;
            };
            if !f(wr) {
                return n;
            }
            self.fetched = self.fetched.wrapping_add(1);
        }
        room
    }

    /// Copies the next WQE and makes a WR of it.
    fn load(&mut self, table: &Table, pd: u64) -> Option<SendWr> {
        let index = self.base.wrapping_add(self.fetched);
        let slot = self.slot(self.fetched);
        let mut head = [0u64; SEND_HEAD_WORDS];
        self.ring.read(index, 0, &mut head);
        let wqe = SendWqe::from_words(&head);

        let first = slot * self.body;
        let body = self.bodies.get_mut(first..first + self.body)?;
        let is_inline = wqe.flags & flag::INLINE != 0;
        let (words, fits) = if is_inline {
            let bytes = wqe.inline_len as usize;
            (bytes.div_ceil(8), bytes <= mem::MAX_INLINE)
        } else {
            let count = wqe.num_sge as usize;
            (count.saturating_mul(SGE_WORDS), count <= MAX_SGE as usize)
        };
        let fits = fits && words <= body.len() && wqe.reserved == [0; 2];
        if let (true, Some(to)) = (fits, body.get_mut(..words)) {
            self.ring.read(index, SEND_HEAD_WORDS, to);
        }

        let mut wr = SendWr {
            op: WrOp::Send,
            fence: wqe.flags & flag::FENCE != 0,
            solicited: wqe.flags & flag::SOLICITED != 0,
            signaled: self.signal_all || wqe.flags & flag::SIGNALED != 0,
            length: 0,
            error: None,
        };
        let mut entry = SendEntry {
            wr_id: wqe.wr_id,
            opcode: wqe.opcode,
            signaled: wr.signaled,
            key: wqe.imm_data,
            ..SendEntry::default()
        };
        let mut total = 0u64;
        if fits && is_inline {
            entry.inline = wqe.inline_len;
            total = u64::from(wqe.inline_len);
        } else if fits {
            entry.count = wqe.num_sge;
            total = sges(body, entry.count).map(|s| u64::from(s.length)).sum();
        }
        wr.op = match wqe.opcode {
            op::WRITE => WrOp::Write {
                va: wqe.remote_addr,
                rkey: wqe.rkey,
            },
            op::WRITE_IMM => WrOp::WriteImm {
                va: wqe.remote_addr,
                rkey: wqe.rkey,
                imm: u32::from_be(wqe.imm_data),
            },
            op::SEND => WrOp::Send,
            op::SEND_IMM => WrOp::SendImm {
                imm: u32::from_be(wqe.imm_data),
            },
            op::SEND_INV => WrOp::SendInv { rkey: wqe.imm_data },
            op::READ => WrOp::Read {
                va: wqe.remote_addr,
                rkey: wqe.rkey,
            },
            op::CMP_SWAP => WrOp::CompareSwap {
                va: wqe.remote_addr,
                rkey: wqe.rkey,
                compare: wqe.compare_add,
                swap: wqe.swap,
            },
            op::FETCH_ADD => WrOp::FetchAdd {
                va: wqe.remote_addr,
                rkey: wqe.rkey,
                add: wqe.compare_add,
            },
            op::LOCAL_INV => WrOp::Local,
            _ => {
                wr.error = Some(Status::LocalQpOperation);
                WrOp::Local
            }
        };
        let receives = matches!(wqe.opcode, op::READ | op::CMP_SWAP | op::FETCH_ADD);
        let atomic = matches!(wqe.opcode, op::CMP_SWAP | op::FETCH_ADD);
        if matches!(wr.op, WrOp::Local) {
            total = 0;
        } else if !fits || (is_inline && receives) {
            wr.error = Some(Status::LocalQpOperation);
            total = 0;
        } else if total > u64::from(MAX_MESSAGE) || (atomic && total != 8) {
            wr.error = Some(Status::LocalLength);
            total = 0;
        } else {
            let need = if receives { access::LOCAL_WRITE } else { 0 };
            if mem::check_list(table, pd, need, sges(body, entry.count)).is_err() {
                wr.error = Some(Status::LocalProtection);
            }
        }
        // At most MAX_MESSAGE.
        entry.length = total as u32;
        wr.length = entry.length;
        *self.heads.get_mut(slot)? = entry;
        Some(wr)
    }

    /// The WR, when it is outstanding, and its body.
    fn outstanding(&self, wr: u32) -> Option<(&SendEntry, &[u64])> {
        if wr.wrapping_sub(self.retired) >= self.fetched.wrapping_sub(self.retired) {
            return None;
        }
        let slot = self.slot(wr);
        let first = slot * self.body;
        Some((
            self.heads.get(slot)?,
            self.bodies.get(first..first + self.body)?,
        ))
    }

    /// Puts `[offset, offset + len)` of the WR's message into `out`. `None` when the WR or
    /// its memory is gone.
    pub(super) fn source(
        &self,
        wr: u32,
        offset: u32,
        len: u32,
        regions: &mut Recent<'_>,
        pd: u64,
        out: &mut Frags,
    ) -> Option<()> {
        let (entry, body) = self.outstanding(wr)?;
        if entry.inline != 0 {
            let bytes = AsBytes::as_bytes(body).get(..entry.inline as usize)?;
            let end = (offset as usize).checked_add(len as usize)?;
            let part = bytes.get(offset as usize..end)?;
            return out.set_bytes(part).then_some(());
        }
        mem::gather(
            regions,
            pd,
            sges(body, entry.count),
            u64::from(offset),
            u64::from(len),
            out,
        )
        .ok()
    }

    /// The key that LOCAL_INV WR `wr` names.
    pub(super) fn local_key(&self, wr: u32) -> Option<u32> {
        let (entry, _) = self.outstanding(wr)?;
        (entry.opcode == op::LOCAL_INV).then_some(entry.key)
    }

    /// The part of the WR's scatter list that `[offset, offset + len)` falls on.
    pub(super) fn target(&self, wr: u32, offset: u32, len: u32) -> Option<Scatter> {
        let (entry, body) = self.outstanding(wr)?;
        Some(Scatter::slice(
            sges(body, entry.count),
            u64::from(offset),
            u64::from(len),
        ))
    }

    /// Retires WR `wr`, which must be the oldest. Returns its completion if it has one.
    pub(super) fn retire(&mut self, wr: u32, status: Status) -> Option<Cqe> {
        if wr != self.retired || self.retired == self.fetched {
            return None;
        }
        let entry = *self.heads.get(self.slot(wr))?;
        let index = self.base.wrapping_add(self.retired);
        self.retired = self.retired.wrapping_add(1);
        self.ring.release(self.base.wrapping_add(self.retired));
        if !entry.signaled && status == Status::Success {
            return None;
        }
        let (opcode, byte_len) = match entry.opcode {
            op::WRITE | op::WRITE_IMM => (wc::RDMA_WRITE, 0),
            op::READ => (wc::RDMA_READ, entry.length),
            op::CMP_SWAP => (wc::COMP_SWAP, 8),
            op::FETCH_ADD => (wc::FETCH_ADD, 8),
            op::BIND_MW => (wc::BIND_MW, 0),
            op::LOCAL_INV => (wc::LOCAL_INV, 0),
            _ => (wc::SEND, 0),
        };
        Some(Cqe {
            wr_id: entry.wr_id,
            status: status as u32,
            opcode,
            byte_len,
            wqe_index: index,
            ..Cqe::default()
        })
    }

    /// Puts off the flush of WR `wr` (and keeps the order of those behind it).
    pub(super) fn defer(&mut self, wr: u32) {
        if wr == self.retired.wrapping_add(self.deferred) {
            self.deferred += 1;
        }
    }

    /// Whether flushes are put off.
    pub(super) fn has_deferred(&self) -> bool {
        self.deferred != 0
    }

    /// Retires the next WR whose flush was put off.
    pub(super) fn flush_deferred(&mut self) -> Option<Cqe> {
        self.deferred = self.deferred.checked_sub(1)?;
        self.retire(self.retired, Status::Flushed)
    }

    /// Takes the next WQE out of the ring and retires it as flushed (QPs without a stream).
    pub(super) fn flush_next(&mut self, table: &Table, pd: u64) -> Option<Cqe> {
        if self.retired == self.fetched {
            if self.room() == 0 {
                return None;
            }
            self.load(table, pd)?;
            self.fetched = self.fetched.wrapping_add(1);
        }
        self.retire(self.retired, Status::Flushed)
    }

    /// Forgets everything that was posted; WRs count from 0 again.
    pub(super) fn reset(&mut self) {
        self.fetched = 0;
        self.retired = 0;
        self.deferred = 0;
        self.base = self.ring.posted();
        self.ring.release(self.base);
    }
}

/// The first `count` SGEs in a body.
fn sges(body: &[u64], count: u32) -> impl Iterator<Item = Sge> + '_ {
    body.chunks_exact(SGE_WORDS)
        .take(count as usize)
        .filter_map(|words| match words {
            [addr, rest] => Some(Sge::from_words(&[*addr, *rest])),
            _ => None,
        })
}
