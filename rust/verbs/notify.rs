// SPDX-License-Identifier: GPL-2.0

//! What programs have to be told once all locks are dropped.
//!
//! Nothing is refused here: whoever collects looks at [`Notify::is_full`] and delivers in time.

#![forbid(unsafe_code)]

use super::{cq::CqInner, qp::QpInner};
use ::kernel::{prelude::*, sync::Arc};

/// CQs remembered at the most.
const CQS: usize = 32;
/// QPs remembered at the most.
const QPS: usize = 16;
/// What the handling of one event can need.
const MARGIN: usize = 4;

/// CQs with a completion that a program waits for, and QPs with an asynchronous event. Small
/// enough for a kernel stack (each CQ and QP is in it once at the most).
///
/// Collected under locks, told outside of them.
pub struct Notify {
    cqs: [Option<Arc<CqInner>>; CQS],
    cq_count: usize,
    qps: [Option<Arc<QpInner>>; QPS],
    qp_count: usize,
}

impl Notify {
    /// Nothing to tell.
    pub fn new() -> Result<Self> {
        Ok(Self::empty())
    }

    /// Nothing to tell.
    pub(super) const fn empty() -> Self {
        Self {
            cqs: [const { None }; CQS],
            cq_count: 0,
            qps: [const { None }; QPS],
            qp_count: 0,
        }
    }

    /// Whether it should be delivered before more events are handled.
    pub fn is_full(&self) -> bool {
        self.cq_count + MARGIN > CQS || self.qp_count + MARGIN > QPS
    }

    /// Remembers a CQ that has marked itself. `false`: no room.
    pub(super) fn add_cq(&mut self, cq: &Arc<CqInner>) -> bool {
        match self.cqs.get_mut(self.cq_count) {
            Some(slot) => {
                *slot = Some(cq.clone());
                self.cq_count += 1;
                true
            }
            None => false,
        }
    }

    /// Remembers a QP that has marked itself. `false`: no room.
    pub(super) fn add_qp(&mut self, qp: &Arc<QpInner>) -> bool {
        match self.qps.get_mut(self.qp_count) {
            Some(slot) => {
                *slot = Some(qp.clone());
                self.qp_count += 1;
                true
            }
            None => false,
        }
    }

    /// Tells. No lock of the driver is held; any context but hard interrupts.
    pub fn deliver(&mut self) {
        for slot in self.cqs.iter_mut().take(self.cq_count) {
            if let Some(cq) = slot.take() {
                cq.tell();
            }
        }
        self.cq_count = 0;
        for slot in self.qps.iter_mut().take(self.qp_count) {
            if let Some(qp) = slot.take() {
                qp.tell();
            }
        }
        self.qp_count = 0;
    }
}
