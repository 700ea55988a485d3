// SPDX-License-Identifier: GPL-2.0

//! Numbers that are handed out one after the other and come back late.
//!
//! C header: `include/linux/xarray.h`.

use crate::bindings;
use ::core::marker::PhantomPinned;
use ::kernel::{error::to_result, prelude::*, types::Opaque};

/// Hands out numbers of a range cyclically: a number that was given back is used again only
/// when the whole range has been gone through.
#[pin_data(PinnedDrop)]
pub struct Ids {
    #[pin]
    xa: Opaque<bindings::xarray>,
    /// Where the search goes on; guarded by the xarray's lock.
    next: Opaque<u32>,
    min: u32,
    max: u32,
    #[pin]
    _pin: PhantomPinned,
}

// SAFETY: the xarray has its own lock.
unsafe impl Send for Ids {}
// SAFETY: as above.
unsafe impl Sync for Ids {}

impl Ids {
    /// Numbers from `min` (not 0) to `max`, beginning at `first`.
    pub fn new(min: u32, max: u32, first: u32) -> impl PinInit<Self> {
        pin_init!(Self {
            xa <- Opaque::ffi_init(|slot: *mut bindings::xarray| {
                // SAFETY: `slot` is valid and pinned.
                unsafe { bindings::metaroce_xa_init_alloc(slot) }
            }),
            next: Opaque::new(first),
            min,
            max,
            _pin: PhantomPinned,
        })
    }

    /// Takes a number. `ENOSPC` when all are in use, `ENOMEM`. Process context.
    pub fn take(&self) -> Result<u32> {
        let mut id = 0;
        // SAFETY: the xarray is initialised; `next` is only touched under its lock.
        let r = unsafe {
            bindings::metaroce_xa_reserve_cyclic(
                self.xa.get(),
                &mut id,
                self.min,
                self.max,
                self.next.get(),
            )
        };
        to_result(r).map_err(|e| if e == EBUSY { ENOSPC } else { e })?;
        Ok(id)
    }

    /// Gives a number back.
    pub fn give(&self, id: u32) {
        // SAFETY: the xarray is initialised.
        unsafe { bindings::metaroce_xa_erase(self.xa.get(), id) };
    }
}

#[pinned_drop]
impl PinnedDrop for Ids {
    fn drop(self: Pin<&mut Self>) {
        // SAFETY: nobody uses it any more.
        unsafe { bindings::xa_destroy(self.xa.get()) };
    }
}
