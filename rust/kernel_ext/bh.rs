// SPDX-License-Identifier: GPL-2.0

//! Bottom halves: switching them off, and work items that run in them or in process context.
//!
//! C headers: `include/linux/bottom_half.h`, `include/linux/workqueue.h`.

use crate::bindings;
use ::kernel::{
    prelude::*,
    sync::Arc,
    types::{NotThreadSafe, Opaque},
};
use core::{marker::PhantomPinned, ptr};

/// Softirqs are off on this CPU while this lives. A spinlock that softirq takes as well is
/// locked with it in scope (together they are what `spin_lock_bh` is). The lock's guard has to
/// go first: not as a temporary of a block's last expression, which outlives the block's locals.
pub struct Disabled(NotThreadSafe);

/// Switches softirqs off; they run at the latest when the guard goes.
pub fn disable() -> Disabled {
    // SAFETY: callable from any context but hard interrupts; nests.
    unsafe { bindings::metaroce_local_bh_disable() };
    Disabled(NotThreadSafe)
}

impl Drop for Disabled {
    fn drop(&mut self) {
        // SAFETY: pairs with `disable`, on the same CPU and task (the guard is not `Send`).
        unsafe { bindings::metaroce_local_bh_enable() };
    }
}

/// An object with one work item that runs on one CPU at a time.
pub trait BhWork: Send + Sync + Sized {
    /// Runs in process context, and may sleep; otherwise in softirq context.
    const SLEEPS: bool = false;

    /// The item inside the object.
    fn item(&self) -> &Item<Self>;

    /// Does the work.
    fn run(this: Arc<Self>);
}

/// A work item of the bottom-half or another workqueue inside a `T`. While it is queued it owns a
/// reference to its object.
#[repr(C)]
#[pin_data]
pub struct Item<T> {
    #[pin]
    work: Opaque<bindings::work_struct>,
    /// The object; set when the item is queued for the first time.
    owner: core::sync::atomic::AtomicPtr<T>,
    #[pin]
    _pin: PhantomPinned,
}

// SAFETY: work_struct is made to be queued from anywhere; `owner` only ever holds one value.
unsafe impl<T: Send + Sync> Send for Item<T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync> Sync for Item<T> {}

impl<T: BhWork> Item<T> {
    /// An idle item.
    pub fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            work <- Opaque::ffi_init(|slot: *mut bindings::work_struct| {
                // SAFETY: `slot` is valid and will not move (pinned).
                unsafe { bindings::metaroce_init_work(slot, Some(work_run::<T>), T::SLEEPS) }
            }),
            owner: core::sync::atomic::AtomicPtr::new(ptr::null_mut()),
            _pin: PhantomPinned,
        })
    }
}

/// Queues `object`'s item, one for softirq context on this CPU, unless it is queued already.
/// Any context. What the item is to find has been written under a lock that it takes, or by an
/// atomic read-modify-write operation: a plain store could become visible only after it was
/// decided here that an item which is about to begin needs no queueing.
pub fn queue<T: BhWork>(object: &Arc<T>) {
    // SAFETY: `hand_over` passes an item that was initialised at creation.
    hand_over(object, |work| unsafe {
        if T::SLEEPS {
            bindings::metaroce_queue_work(work)
        } else {
            bindings::metaroce_queue_bh_work(work)
        }
    });
}

/// Takes `object`'s item, if it is queued and has not begun, to another CPU, which `hint` chooses,
/// if there is another. Softirqs are off.
pub fn move_elsewhere<T: BhWork>(object: &Arc<T>, hint: u32) {
    let Some(cpu) = other_cpu(hint) else { return };
    let work = object.item().work.get();
    // SAFETY: the item was initialised at creation; this does not wait for one that runs.
    if !unsafe { bindings::cancel_work(work) } {
        return;
    }
    // The reference that the queued item owned goes with it; when somebody has queued the item
    // meanwhile, with a reference of his own, it is too many.
    // SAFETY: the item was initialised at creation; the CPU is online.
    if !unsafe { bindings::metaroce_queue_bh_work_on(cpu as i32, work) } {
        let raw: *const T = Arc::as_ptr(object);
        // SAFETY: see above.
        drop(unsafe { Arc::from_raw(raw) });
    }
}

/// Another CPU than this one that is online, chosen by `hint`; `None`: that one is not, or there is
/// no other. Softirqs are off: a CPU that goes waits until this one has ended its own.
fn other_cpu(hint: u32) -> Option<u32> {
    // SAFETY: plain reads.
    let (this, ids) = unsafe { (bindings::metaroce_this_cpu(), bindings::metaroce_cpu_ids()) };
    // The distance to it: 1 to `ids` - 1.
    let step = 1 + hint.checked_rem(ids.saturating_sub(1))?;
    let other = this.wrapping_add(step).checked_rem(ids)?;
    // SAFETY: `other` is below the number of CPU ids.
    unsafe { bindings::metaroce_cpu_online(other) }.then_some(other)
}

fn hand_over<T: BhWork>(object: &Arc<T>, queue: impl FnOnce(*mut bindings::work_struct) -> bool) {
    let item = object.item();
    // Queued and not begun: it will see what the caller has done before, as `queue` says (it
    // begins with a full barrier). Most calls end here, without switching interrupts off.
    // SAFETY: the item was initialised at creation.
    if unsafe { bindings::metaroce_work_pending(item.work.get()) } {
        return;
    }
    let raw = Arc::into_raw(object.clone());
    item.owner
        .store(raw.cast_mut(), core::sync::atomic::Ordering::Relaxed);
    // The item was initialised at creation, is pinned in the Arc, and the reference that
    // `raw` stands for keeps it alive until it has run.
    if !queue(item.work.get()) {
        // SAFETY: the reference made above was not handed over.
        drop(unsafe { Arc::from_raw(raw) });
    }
}

/// Takes the item back if it is queued and waits for it if it runs. Process context. The
/// caller sees to it that nobody queues it again.
pub fn cancel_sync<T: BhWork>(object: &Arc<T>) {
    let item = object.item();
    // SAFETY: initialised at creation; alive through `object`.
    if unsafe { bindings::cancel_work_sync(item.work.get()) } {
        let raw: *const T = Arc::as_ptr(object);
        // SAFETY: the item was queued, so it owned a reference, and it will not run.
        drop(unsafe { Arc::from_raw(raw) });
    }
}

/// What the workqueue calls for an item.
///
/// # Safety
///
/// `work` is that of an item that [`queue`] handed over, once for each time that it did.
unsafe extern "C" fn work_run<T: BhWork>(work: *mut bindings::work_struct) {
    // `work` is the first field of the `repr(C)` item.
    let item: *mut Item<T> = work.cast();
    // SAFETY: the item lives: its queued state owns a reference to the object around it.
    let raw = unsafe { (*item).owner.load(core::sync::atomic::Ordering::Relaxed) };
    // SAFETY: `queue` stored the pointer of the Arc whose reference now passes to us.
    let object = unsafe { Arc::from_raw(raw.cast_const()) };
    T::run(object);
}
