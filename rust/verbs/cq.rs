// SPDX-License-Identifier: GPL-2.0

//! Completion queues.
//!
//! A completion goes into the mapped ring at once. When the program has armed the CQ for it,
//! the CQ is remembered in a [`Notify`] and the program told once all locks are dropped.
//!
//! A CQ that is full when a completion comes has overflowed: IBV_EVENT_CQ_ERR, nothing more
//! is written into it, and each QP that would have had a completion goes to ERR.
//!
//! | refusal | errno |
//! | --- | --- |
//! | no CQEs, or more than the device has | EINVAL |
//! | a new size below what is unpolled (the old ring stays) | EINVAL |
//! | creation flags other than timestamps, which every completion has | EOPNOTSUPP |

#![forbid(unsafe_code)]

use super::{notify::Notify, MAX_CQE};
use crate::{
    bindings,
    kernel_ext::{
        bh::{self, BhWork},
        ib::{Back, Mapping, Udata},
        restrack::Details,
    },
    net,
    queue::{CqRing, Cqe, CreateCqResp, Mmap, ResizeCqResp},
};
use ::core::sync::atomic::{AtomicU32, Ordering};
use ::kernel::{
    new_mutex, new_spinlock,
    prelude::*,
    sync::{Arc, Mutex, SpinLock},
};

/// There is a completion that the program waits for.
const COMPLETED: u32 = 1;
/// It has overflowed, and the program does not know yet.
const FAILED: u32 = 2;

/// What the program sees as a CQ.
pub struct Cq {
    inner: Arc<CqInner>,
    mapping: Pin<KBox<Mutex<Mapping>>>,
}

/// What softirq works with.
#[pin_data]
pub struct CqInner {
    back: Arc<Back<bindings::ib_cq>>,
    #[pin]
    state: SpinLock<State>,
    /// [`COMPLETED`], [`FAILED`]: what is still to be told.
    pending: AtomicU32,
    #[pin]
    work: bh::Item<Self>,
}

struct State {
    ring: CqRing,
    overflowed: bool,
}

/// Where a ring is mapped from, for a response.
pub(super) fn mmap_of(mapping: &Mapping) -> Mmap {
    Mmap {
        offset: mapping.offset(),
        size: mapping.size(),
    }
}

/// Slots of a ring for `wanted` completions.
fn slots(wanted: u32) -> Result<u32> {
    if wanted == 0 || wanted > MAX_CQE {
        return Err(EINVAL);
    }
    Ok(wanted.next_power_of_two())
}

impl Cq {
    /// A CQ of at least `entries`; returns it and what it holds.
    pub fn new(
        back: Arc<Back<bindings::ib_cq>>,
        entries: u32,
        number: u32,
        udata: &Udata<'_>,
    ) -> Result<(Self, u32)> {
        udata.no_request()?;
        let ring = CqRing::new(slots(entries)?)?;
        let entries = ring.entries();
        let mapping = udata.map(ring.memory())?;
        let response = CreateCqResp {
            ring: mmap_of(&mapping),
            entries,
            cqn: number,
        };
        let state = State {
            ring,
            overflowed: false,
        };
        let inner = Arc::pin_init(
            pin_init!(CqInner {
                back,
                state <- new_spinlock!(state),
                pending: AtomicU32::new(0),
                work <- bh::Item::new(),
            }),
            GFP_KERNEL_ACCOUNT,
        )?;
        let mapping = KBox::pin_init(new_mutex!(mapping), GFP_KERNEL_ACCOUNT)?;
        udata.respond(&response)?;
        Ok((Self { inner, mapping }, entries))
    }

    /// Takes a ring of at least `entries` instead, with what is unpolled. `EINVAL` when that
    /// does not fit in.
    pub fn resize(&self, entries: u32, udata: &Udata<'_>) -> Result<u32> {
        udata.no_request()?;
        let mut mapping = self.mapping.lock();
        let mut ring = CqRing::new(slots(entries)?)?;
        let entries = ring.entries();
        let new = udata.map(ring.memory())?;
        // The program hears where the new ring is before it is used: after the change
        // nothing can fail any more.
        udata.respond(&ResizeCqResp {
            ring: mmap_of(&new),
            entries,
            reserved: 0,
        })?;
        let old = {
            let _bh = bh::disable();
            let mut state = self.inner.state.lock();
            state.ring.move_to(&mut ring)?;
            ::core::mem::replace(&mut state.ring, ring)
        };
        drop(old);
        *mapping = new;
        Ok(entries)
    }

    /// Adds to what `rdma resource show` tells: what waits to be polled, and whether it has
    /// overflowed.
    pub fn show(&self, out: &mut Details<'_>) -> Result {
        let (unpolled, overflowed) = {
            let _bh = bh::disable();
            let state = self.inner.state.lock();
            (state.ring.unpolled(), state.overflowed)
        };
        out.number(c"unpolled", u64::from(unpolled))?;
        out.number(c"overflowed", u64::from(overflowed))
    }

    /// The part for softirq.
    pub fn inner(&self) -> &Arc<CqInner> {
        &self.inner
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        // The QPs are gone: nobody queues it any more.
        bh::cancel_sync(&self.inner);
    }
}

impl CqInner {
    /// Writes a completion. `false` when the CQ has overflowed. Softirqs are off.
    pub(super) fn push(
        self: &Arc<Self>,
        mut cqe: Cqe,
        solicited: bool,
        notify: &mut Notify,
    ) -> bool {
        cqe.timestamp = net::now();
        let what = {
            let mut state = self.state.lock();
            if state.overflowed {
                return false;
            }
            if !state.ring.push(&cqe.to_words()) {
                state.overflowed = true;
                FAILED
            } else if state.ring.take_arm(solicited || cqe.status != 0) {
                COMPLETED
            } else {
                return true;
            }
        };
        // Whoever finds it marked already relies on the one who marked it: the mark goes
        // before the program is told.
        if self.pending.fetch_or(what, Ordering::AcqRel) == 0 && !notify.add_cq(self) {
            bh::queue(self);
        }
        what == COMPLETED
    }

    /// Tells the program what is pending. No lock is held.
    pub(super) fn tell(&self) {
        let what = self.pending.swap(0, Ordering::AcqRel);
        if what & COMPLETED != 0 {
            self.back.complete();
        }
        if what & FAILED != 0 {
            self.back.error();
        }
    }
}

impl BhWork for CqInner {
    fn item(&self) -> &bh::Item<Self> {
        &self.work
    }

    fn run(this: Arc<Self>) {
        this.tell();
    }
}
