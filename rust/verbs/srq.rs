// SPDX-License-Identifier: GPL-2.0

//! Shared receive queues.
//!
//! A receive is taken out of the mapped ring when a QP binds it to a message, and copied into
//! that QP's own table. The program counts its slot as free once it has polled the completion,
//! or hears that there will be none.
//!
//! | refusal | errno |
//! | --- | --- |
//! | type other than basic, resize | EOPNOTSUPP |
//! | no WRs, more WRs or SGEs than the device has | EINVAL |
//! | a limit above what the SRQ holds | EINVAL |
//!
//! A receive that makes no sense is refused when a message takes it (see `rq`).

#![forbid(unsafe_code)]

use super::{cq::mmap_of, rq::RecvEntry, MAX_SGE, MAX_WR};
use crate::{
    bindings,
    kernel_ext::{
        bh::{self, BhWork},
        ib::{Back, Mapping, Udata},
        ib_attr::SrqAttr,
        restrack::Details,
    },
    mem::Sge,
    queue::{CreateSrqResp, WorkRing},
};
use ::kernel::{
    new_spinlock,
    prelude::*,
    sync::{Arc, SpinLock},
};

/// What the program sees as an SRQ.
pub struct Srq {
    inner: Arc<SrqInner>,
    _mapping: Mapping,
    attr: SrqAttr,
}

/// What softirq works with.
#[pin_data]
pub struct SrqInner {
    back: Arc<Back<bindings::ib_srq>>,
    /// PD of the memory that receives lie in.
    pub(super) pd: u64,
    pub(super) entries: u32,
    pub(super) max_sge: u32,
    #[pin]
    state: SpinLock<State>,
    #[pin]
    work: bh::Item<Self>,
}

struct State {
    ring: WorkRing,
    /// Receives taken so far.
    taken: u32,
    /// Those of them that will have no completion.
    lost: u32,
    /// The event comes when fewer are left; 0 is off.
    limit: u32,
}

impl Srq {
    /// An SRQ; `attr` becomes what it is.
    pub fn new(
        pd: u64,
        number: u32,
        back: Arc<Back<bindings::ib_srq>>,
        attr: &mut SrqAttr,
        udata: &Udata<'_>,
    ) -> Result<Self> {
        udata.no_request()?;
        if attr.max_wr == 0 || attr.max_wr > MAX_WR || attr.max_sge > MAX_SGE {
            return Err(EINVAL);
        }
        let entries = attr.max_wr.next_power_of_two();
        let max_sge = attr.max_sge.max(1);
        if attr.limit > entries {
            return Err(EINVAL);
        }
        let ring = WorkRing::shared(entries, max_sge)?;
        let mapping = udata.map(ring.memory())?;
        let response = CreateSrqResp {
            ring: mmap_of(&mapping),
            srqn: number,
            reserved: 0,
        };
        let state = State {
            ring,
            taken: 0,
            lost: 0,
            limit: attr.limit,
        };
        let inner = Arc::pin_init(
            pin_init!(SrqInner {
                back,
                pd,
                entries,
                max_sge,
                state <- new_spinlock!(state),
                work <- bh::Item::new(),
            }),
            GFP_KERNEL_ACCOUNT,
        )?;
        attr.max_wr = entries;
        attr.max_sge = max_sge;
        udata.respond(&response)?;
        Ok(Self {
            inner,
            _mapping: mapping,
            attr: *attr,
        })
    }

    /// The part for softirq.
    pub fn inner(&self) -> &Arc<SrqInner> {
        &self.inner
    }

    /// Arms the limit event. `EINVAL` when it is above what the SRQ holds.
    pub fn set_limit(&self, limit: u32) -> Result {
        if limit > self.inner.entries {
            return Err(EINVAL);
        }
        {
            let _bh = bh::disable();
            self.inner.state.lock().limit = limit;
        }
        self.inner.check_limit();
        Ok(())
    }

    /// Adds to what `rdma resource show` tells: its receives, and the limit if it is armed.
    pub fn show(&self, out: &mut Details<'_>) -> Result {
        let (posted, limit) = {
            let _bh = bh::disable();
            let state = self.inner.state.lock();
            (state.ring.filled(state.taken), state.limit)
        };
        out.number(c"posted", u64::from(posted))?;
        out.number(c"limit", u64::from(limit))
    }

    /// What it is.
    pub fn query(&self) -> SrqAttr {
        let _bh = bh::disable();
        let limit = self.inner.state.lock().limit;
        SrqAttr { limit, ..self.attr }
    }
}

impl Drop for Srq {
    fn drop(&mut self) {
        // The QPs are gone: nobody queues it any more.
        bh::cancel_sync(&self.inner);
    }
}

impl SrqInner {
    /// Takes a receive into `entry` and `sges`; `false` when there is none. Softirqs are
    /// off.
    pub(super) fn take(self: &Arc<Self>, entry: &mut RecvEntry, sges: &mut [Sge]) -> bool {
        let low = {
            let mut state = self.state.lock();
            let taken = state.taken;
            let left = state.ring.filled(taken);
            if left == 0 {
                return false;
            }
            entry.load(&state.ring, taken, sges);
            state.taken = taken.wrapping_add(1);
            state.ring.release(state.taken);
            state.limit != 0 && left - 1 < state.limit
        };
        if low {
            // The locks of a connection are held: told from a work item.
            bh::queue(self);
        }
        true
    }

    /// Receives posted and not taken.
    pub(super) fn posted(&self) -> u32 {
        let state = self.state.lock();
        state.ring.filled(state.taken)
    }

    /// `count` receives that a QP has taken will have no completion. Softirqs are off.
    pub(super) fn lose(&self, count: u32) {
        let mut state = self.state.lock();
        state.lost = state.lost.wrapping_add(count);
        state.ring.publish_lost(state.lost);
    }

    /// Raises the limit event, once, when too few receives are left.
    fn check_limit(&self) {
        let low = {
            let _bh = bh::disable();
            let mut state = self.state.lock();
            let low = state.limit != 0 && state.ring.filled(state.taken) < state.limit;
            if low {
                state.limit = 0;
            }
            low
        };
        if low {
            self.back.limit_reached();
        }
    }
}

impl BhWork for SrqInner {
    fn item(&self) -> &bh::Item<Self> {
        &self.work
    }

    fn run(this: Arc<Self>) {
        this.check_limit();
    }
}
