// SPDX-License-Identifier: GPL-2.0

//! Memory that is lent to the CPU which works, for as long as the work takes.
//!
//! C header: `include/linux/smp.h`.

use crate::bindings;
use crate::os::Box;
use ::core::{
    ops::{Deref, DerefMut},
    ptr::{self, NonNull},
    sync::atomic::{AtomicPtr, Ordering},
};
use ::kernel::prelude::*;

/// Objects of a pool at the most.
const MOST: usize = 64;

/// An object for each CPU, up to 64.
pub struct Pool<T> {
    /// Null while it is lent.
    objects: KVec<AtomicPtr<T>>,
}

// SAFETY: an object is one CPU's at a time, and may be another one's next.
unsafe impl<T: Send> Send for Pool<T> {}
// SAFETY: as above: objects are taken out of a shared pool, and not looked at inside of it.
unsafe impl<T: Send> Sync for Pool<T> {}

impl<T> Pool<T> {
    /// A pool of objects that `make` makes. `ENOMEM`, or what `make` says. Process context.
    pub fn new(mut make: impl FnMut() -> Result<Box<T>>) -> Result<Self> {
        // SAFETY: a plain read.
        let cpus = unsafe { bindings::metaroce_cpu_ids() } as usize;
        let count = cpus.clamp(1, MOST);
        // What has been made is freed with it when there is no memory for more.
        let mut pool = Self {
            objects: KVec::with_capacity(count, GFP_KERNEL)?,
        };
        for _ in 0..count {
            let object = AtomicPtr::new(Box::into_raw(make()?));
            // There is room, made above.
            if let Err(e) = pool.objects.push_within_capacity(object) {
                // SAFETY: it came from `into_raw` just now.
                drop(unsafe { Box::from_raw(e.0.into_inner()) });
            }
        }
        Ok(pool)
    }

    /// Takes an object out, that of this CPU if it is there. `None`: all are lent. Any context;
    /// never waits.
    pub fn take(&self) -> Option<Lent<'_, T>> {
        // SAFETY: a plain read; it is a hint.
        let cpu = unsafe { bindings::metaroce_this_cpu() } as usize;
        let first = cpu.checked_rem(self.objects.len())?;
        let (before, from) = self.objects.split_at_checked(first)?;
        Self::find(from).or_else(|| Self::find(before))
    }

    fn find(places: &[AtomicPtr<T>]) -> Option<Lent<'_, T>> {
        places.iter().find_map(|place| {
            // Acquire: what the last one did with it has happened. It is ours alone then.
            let raw = place.swap(ptr::null_mut(), Ordering::Acquire);
            NonNull::new(raw).map(|object| Lent { place, object })
        })
    }
}

impl<T> Drop for Pool<T> {
    fn drop(&mut self) {
        for place in self.objects.iter_mut() {
            let raw = *place.get_mut();
            if !raw.is_null() {
                // SAFETY: it came from `into_raw`; nobody else can have it any more.
                drop(unsafe { Box::from_raw(raw) });
            }
        }
    }
}

/// An object that was lent; goes back when dropped.
pub struct Lent<'a, T> {
    place: &'a AtomicPtr<T>,
    object: NonNull<T>,
}

impl<T> Deref for Lent<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: it came out of a box, and is this borrower's alone.
        unsafe { self.object.as_ref() }
    }
}

impl<T> DerefMut for Lent<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above.
        unsafe { self.object.as_mut() }
    }
}

impl<T> Drop for Lent<'_, T> {
    fn drop(&mut self) {
        // Nobody else fills the place: it was emptied by `take`. Release: see there.
        self.place.store(self.object.as_ptr(), Ordering::Release);
    }
}
