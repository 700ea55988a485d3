// SPDX-License-Identifier: GPL-2.0

//! The clock, and a one-shot high resolution timer that runs in softirq and keeps its owner
//! alive while it is armed.
//!
//! The `kernel` crate's timer hands out a handle that waits for the handler when it goes. A
//! timer that is moved for each batch of packets, in softirq, under the lock that its
//! handler takes, needs the contrary: arming never waits.
//!
//! C header: `include/linux/hrtimer.h`.

use crate::bindings;
use crate::kernel_ext::bh;
use ::core::{marker::PhantomPinned, ptr};
use ::kernel::{
    new_spinlock,
    prelude::*,
    sync::{Arc, SpinLock},
    types::Opaque,
};

/// Nanoseconds of the monotonic clock (`ktime_get_ns()`).
pub fn now() -> u64 {
    // SAFETY: May be called in every context.
    u64::try_from(unsafe { bindings::ktime_get() }).unwrap_or(0)
}

/// The owner of a [`Timer`].
pub trait Handler: Send + Sync + Sized + 'static {
    /// The timer inside the owner.
    fn timer(&self) -> &Timer<Self>;

    /// The time has come. Runs in softirq, one call at a time. A call may come early or
    /// twice: look at the clock.
    fn expired(this: Arc<Self>);
}

/// The timer: a field of its owner `T`, which lives in an `Arc`.
///
/// An armed timer owns a reference to `T`, so an owner never goes while its timer is armed,
/// and may go in softirq, at the end of `expired`. The handler runs in softirq: a module
/// whose timers have all been cancelled may go after one RCU grace period.
#[repr(C)]
#[pin_data]
pub struct Timer<T> {
    #[pin]
    raw: Opaque<bindings::hrtimer>,
    #[pin]
    held: SpinLock<Held<T>>,
    #[pin]
    _pin: PhantomPinned,
}

/// The reference that belongs to the queued timer, or to one that has expired and whose
/// handler has not taken it yet; null when there is none.
struct Held<T>(*const T);

// SAFETY: The pointer stands for an `Arc<T>`.
unsafe impl<T: Send + Sync> Send for Held<T> {}
// SAFETY: The C timer may be used from anywhere, under the lock of its base.
unsafe impl<T: Send + Sync> Send for Timer<T> {}
// SAFETY: As above.
unsafe impl<T: Send + Sync> Sync for Timer<T> {}

impl<T: Handler> Timer<T> {
    /// A timer that is not armed.
    pub fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            raw <- Opaque::ffi_init(|slot: *mut bindings::hrtimer| {
                // SAFETY: `slot` is valid and will not move (pinned).
                unsafe {
                    bindings::hrtimer_setup(
                        slot,
                        Some(run::<T>),
                        bindings::CLOCK_MONOTONIC as bindings::clockid_t,
                        bindings::hrtimer_mode_HRTIMER_MODE_ABS_SOFT,
                    )
                }
            }),
            held <- new_spinlock!(Held(ptr::null()), "metaroce_timer"),
            _pin: PhantomPinned,
        })
    }
}

/// Sees to it that [`Handler::expired`] runs at `deadline` ([`now`]'s clock) or earlier. A
/// timer that is armed for an earlier time stays as it is: deadlines mostly move away, and
/// an early call costs less than moving the timer each time. Any context but hard
/// interrupts.
pub fn arm<T: Handler>(owner: &Arc<T>, deadline: u64) {
    let timer = owner.timer();
    let raw = timer.raw.get();
    let deadline = i64::try_from(deadline).unwrap_or(i64::MAX);
    let _bh = bh::disable();
    let mut held = timer.held.lock();
    // SAFETY: The timer is initialised; only holders of `held` change its expiry.
    let queued = unsafe { bindings::metaroce_hrtimer_is_queued(raw) };
    // SAFETY: As above.
    if queued && unsafe { bindings::metaroce_hrtimer_get_expires(raw) } <= deadline {
        return;
    }
    if held.0.is_null() {
        held.0 = Arc::into_raw(owner.clone());
    }
    // SAFETY: The timer is initialised, and `held` keeps its memory until it has run or was
    // cancelled.
    unsafe {
        bindings::hrtimer_start_range_ns(
            raw,
            deadline,
            0,
            bindings::hrtimer_mode_HRTIMER_MODE_ABS_SOFT,
        )
    }
}

/// Disarms the timer, unless its handler is just running. Waits for nothing: any context but
/// hard interrupts.
pub fn cancel<T: Handler>(owner: &Arc<T>) {
    let timer = owner.timer();
    let _bh = bh::disable();
    let mut held = timer.held.lock();
    // SAFETY: The timer is initialised, and alive through `owner`.
    if unsafe { bindings::hrtimer_try_to_cancel(timer.raw.get()) } == 1 {
        let taken = ::core::mem::replace(&mut held.0, ptr::null());
        // SAFETY: It came from `Arc::into_raw` in `arm`, and belonged to the timer, which was
        // queued and is no more. Not the last one: there is `owner`.
        drop(unsafe { Arc::from_raw(taken) });
    }
}

/// Disarms the timer and waits for a running handler. Process context, outside of every lock
/// that the handler takes. The caller sees to it that nobody arms it again.
pub fn cancel_sync<T: Handler>(owner: &Arc<T>) {
    let timer = owner.timer();
    // SAFETY: The timer is initialised, and alive through `owner`.
    unsafe { bindings::hrtimer_cancel(timer.raw.get()) };
    let taken = {
        let _bh = bh::disable();
        let mut held = timer.held.lock();
        ::core::mem::replace(&mut held.0, ptr::null())
    };
    if !taken.is_null() {
        // SAFETY: It came from `Arc::into_raw` in `arm`, and the timer, which is neither
        // queued nor running, has no more use for it.
        drop(unsafe { Arc::from_raw(taken) });
    }
}

/// # Safety
///
/// Only called by the kernel, for a timer that `arm` queued.
unsafe extern "C" fn run<T: Handler>(raw: *mut bindings::hrtimer) -> bindings::hrtimer_restart {
    // SAFETY: `raw` is the first field of a `repr(C)` timer, which lives: its owner's
    // reference is in `held` until it is taken below.
    let timer = unsafe { &*raw.cast::<Timer<T>>() };
    let owner = {
        let mut held = timer.held.lock();
        // SAFETY: The timer is initialised.
        if unsafe { bindings::metaroce_hrtimer_is_queued(raw) } {
            // Armed again since it expired: the reference belongs to the queued timer.
            // SAFETY: It came from `Arc::into_raw`, and cannot be taken under the lock.
            let queued = unsafe { Arc::from_raw(held.0) };
            let own = queued.clone();
            let _ = Arc::into_raw(queued);
            own
        } else {
            let taken = ::core::mem::replace(&mut held.0, ptr::null());
            // SAFETY: `arm` put it there, and nobody takes it from a timer whose handler
            // runs (`cancel_sync` waits for the handler first).
            unsafe { Arc::from_raw(taken) }
        }
    };
    T::expired(owner);
    bindings::hrtimer_restart::HRTIMER_NORESTART
}
