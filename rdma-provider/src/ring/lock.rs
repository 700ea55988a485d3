// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB

//! A lock of four bytes: verbs hold a queue from one call to the next (`ibv_wr_start` to
//! `ibv_wr_complete`, `ibv_start_poll` to `ibv_end_poll`), which no guard can express.

use core::cell::UnsafeCell;
use core::hint::spin_loop;
use core::ops::{Deref, DerefMut};
use core::ptr::null_mut;
use core::sync::atomic::{AtomicU32, Ordering};

use crate::ffi::sys;

const FREE: u32 = 0;
const HELD: u32 = 1;
/// Held, and somebody may sleep on the word.
const AWAITED: u32 = 2;

/// Looks at a held lock before going to sleep: about the time that a post or a poll takes.
const SPINS: u32 = 100;

/// A value and the lock that guards it.
pub(crate) struct Lock<T> {
    word: AtomicU32,
    /// False: the owner promised to use it from one thread at a time.
    real: bool,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached through the lock alone (or, for one that is not real, by one thread
// at a time, as its owner promised), so sharing the lock hands the value from thread to thread.
unsafe impl<T: Send> Sync for Lock<T> {}

impl<T> Lock<T> {
    /// A free lock.
    pub(crate) const fn new(value: T) -> Self {
        Lock { word: AtomicU32::new(FREE), real: true, value: UnsafeCell::new(value) }
    }

    /// A lock that excludes nobody, for an object whose owner promised to use it from one thread at
    /// a time.
    pub(crate) const fn single_threaded(value: T) -> Self {
        Lock { word: AtomicU32::new(FREE), real: false, value: UnsafeCell::new(value) }
    }

    /// Waits for the lock and holds it until the guard goes.
    pub(crate) fn lock(&self) -> Guard<'_, T> {
        self.hold();
        Guard { lock: self }
    }

    /// Waits for the lock and holds it until [`Lock::release`].
    pub(crate) fn hold(&self) {
        if !self.real {
            return;
        }
        if self.word.compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed).is_err() {
            self.wait();
        }
    }

    #[cold]
    fn wait(&self) {
        for _ in 0..SPINS {
            spin_loop();
            if self.word.load(Ordering::Relaxed) == FREE
                && self.word.compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed).is_ok()
            {
                return;
            }
        }
        while self.word.swap(AWAITED, Ordering::Acquire) != FREE {
            // SAFETY: the word lives as long as `self`; a return without a wake is handled by the loop.
            unsafe {
                sys::syscall(
                    i64::from(sys::SYS_futex),
                    self.word.as_ptr(),
                    sys::FUTEX_WAIT_PRIVATE,
                    AWAITED,
                    null_mut::<sys::timespec>(),
                );
            }
        }
    }

    /// Ends [`Lock::hold`].
    ///
    /// # Safety
    ///
    /// The caller holds the lock, and uses no reference from [`Lock::held`] any more.
    pub(crate) unsafe fn release(&self) {
        if self.real && self.word.swap(FREE, Ordering::Release) == AWAITED {
            // SAFETY: waking looks at the address of the word only.
            unsafe {
                sys::syscall(i64::from(sys::SYS_futex), self.word.as_ptr(), sys::FUTEX_WAKE_PRIVATE, 1);
            }
        }
    }

    /// The value, between [`Lock::hold`] and [`Lock::release`].
    ///
    /// # Safety
    ///
    /// The caller holds the lock and no other reference to the value.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn held(&self) -> &mut T {
        // SAFETY: the lock excludes everybody else, and the caller has no other reference.
        unsafe { &mut *self.value.get() }
    }
}

/// A held lock.
pub(crate) struct Guard<'a, T> {
    lock: &'a Lock<T>,
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: the guard holds the lock, and lends the value no longer than itself.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the guard holds the lock, and lends the value no longer than itself.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for Guard<'_, T> {
    fn drop(&mut self) {
        // SAFETY: the guard holds the lock, and what it lent is gone.
        unsafe { self.lock.release() }
    }
}
