// SPDX-License-Identifier: GPL-2.0

//! A pointer that readers follow under the RCU read lock while a writer replaces it.

use ::core::marker::PhantomData;
use ::core::ptr;
use ::core::sync::atomic::{AtomicPtr, Ordering};
use ::kernel::alloc::KBox;
use ::kernel::sync::rcu;

use crate::bindings;

/// Waits until every RCU read-side section (softirq handlers included) that runs now has
/// ended. Sleeps.
pub fn synchronize() {
    // SAFETY: May be called in every context that may sleep.
    unsafe { bindings::synchronize_rcu() }
}

/// An optional value that is read under RCU and replaced as a whole. Writers do not exclude
/// each other: the owner's lock does that where it matters.
pub struct Rcu<T> {
    ptr: AtomicPtr<T>,
    owns: PhantomData<T>,
}

// SAFETY: The value is shared by reference between threads and dropped on whichever thread
// replaces it.
unsafe impl<T: Send + Sync> Send for Rcu<T> {}
// SAFETY: As above.
unsafe impl<T: Send + Sync> Sync for Rcu<T> {}

impl<T> Rcu<T> {
    /// Nothing yet.
    pub const fn empty() -> Self {
        Self {
            ptr: AtomicPtr::new(ptr::null_mut()),
            owns: PhantomData,
        }
    }

    /// The value of now, or `None` when there is none; valid as long as `guard`.
    pub fn get<'a>(&'a self, _guard: &'a rcu::Guard) -> Option<&'a T> {
        // SAFETY: A non-null pointer is that of a `KBox` which `set` or `drop` frees only after
        // a grace period, which the read lock holds back.
        unsafe { self.ptr.load(Ordering::Acquire).as_ref() }
    }

    /// Publishes `new`, waits until nobody can read the old value any more, and returns it.
    /// Sleeps.
    pub fn set(&self, new: Option<KBox<T>>) -> Option<KBox<T>> {
        let new = new.map_or(ptr::null_mut(), KBox::into_raw);
        let old = self.ptr.swap(new, Ordering::AcqRel);
        if old.is_null() {
            return None;
        }
        synchronize();
        // SAFETY: `old` came from `KBox::into_raw` in an earlier call, left the cell in this
        // one, and its readers are gone.
        Some(unsafe { KBox::from_raw(old) })
    }
}

impl<T> Drop for Rcu<T> {
    fn drop(&mut self) {
        let old = *self.ptr.get_mut();
        if !old.is_null() {
            // SAFETY: `old` came from `KBox::into_raw`. Readers borrow the cell, so there are
            // none left.
            drop(unsafe { KBox::from_raw(old) });
        }
    }
}
