// SPDX-License-Identifier: GPL-2.0

//! Regions and their keys.

use super::{
    access,
    frags::{Frags, PageRef},
    pinned::Pinned,
    Refused,
};
use crate::bindings;
use ::core::{
    marker::PhantomPinned,
    ptr::{self, NonNull},
    sync::atomic::{fence, AtomicBool, AtomicU32, AtomicUsize, Ordering},
};
use ::kernel::{
    error::to_result,
    prelude::*,
    sync::{rcu, Arc, Completion},
    types::Opaque,
};

/// Key bits that are the index in the table; the other eight change with each use of an
/// index, so that an old key does not open a new region.
const INDEX_BITS: u32 = 24;
const TAG_BITS: u32 = 32 - INDEX_BITS;

/// Regions of a device at the most.
pub const MAX_REGIONS: u32 = (1 << INDEX_BITS) - 2;

/// Set in [`Region::state`] once the region is on its way out.
const DEAD: usize = 1;
/// One user in [`Region::state`].
const USER: usize = 2;

/// What a region is made from.
pub struct RegionInit {
    /// The pages.
    pub pinned: Arc<Pinned>,
    /// Protection domain: its number, unique within the device.
    pub pd: u64,
    /// Address of the first byte in the region's own address space.
    pub iova: u64,
    /// Rights ([`access`]).
    pub access: u32,
}

/// A registered region.
#[pin_data]
pub struct Region {
    key: u32,
    pd: u64,
    iova: u64,
    access: u32,
    pinned: Arc<Pinned>,
    /// Peers may no longer use the key.
    invalid: AtomicBool,
    /// Users times [`USER`], plus [`DEAD`].
    state: AtomicUsize,
    #[pin]
    unused: Completion,
}

/// The regions of a device by key.
#[pin_data(PinnedDrop)]
pub struct Table {
    #[pin]
    xa: Opaque<bindings::xarray>,
    /// Where the search for a free index goes on; guarded by the xarray's lock.
    next: Opaque<u32>,
    tag: AtomicU32,
    #[pin]
    _pin: PhantomPinned,
}

// SAFETY: the xarray has its own lock and is read under RCU.
unsafe impl Send for Table {}
// SAFETY: as above.
unsafe impl Sync for Table {}

impl Table {
    /// An empty table.
    pub fn new() -> Result<Arc<Self>> {
        Arc::pin_init(
            pin_init!(Self {
                xa <- Opaque::ffi_init(|slot: *mut bindings::xarray| {
                    // SAFETY: `slot` is valid and pinned.
                    unsafe { bindings::metaroce_xa_init_alloc(slot) }
                }),
                next: Opaque::new(1),
                tag: AtomicU32::new(crate::kernel_ext::net::random_u64() as u32),
                _pin: PhantomPinned,
            }),
            GFP_KERNEL,
        )
    }

    /// Registers a region. `ENOMEM`; `ENOSPC` when all keys are in use.
    pub fn register(self: &Arc<Self>, init: RegionInit) -> Result<Registration> {
        let mut index = 0u32;
        // SAFETY: the xarray is initialised; `next` is only touched under its lock.
        to_result(unsafe {
            bindings::metaroce_xa_reserve_cyclic(
                self.xa.get(),
                &mut index,
                1,
                MAX_REGIONS,
                self.next.get(),
            )
        })
        .map_err(|e| if e == EBUSY { ENOSPC } else { e })?;
        let tag = self.tag.fetch_add(1, Ordering::Relaxed) & ((1 << TAG_BITS) - 1);
        let region = KBox::pin_init(
            pin_init!(Region {
                key: (index << TAG_BITS) | tag,
                pd: init.pd,
                iova: init.iova,
                access: init.access,
                pinned: init.pinned,
                invalid: AtomicBool::new(false),
                state: AtomicUsize::new(0),
                unused <- Completion::new(),
            }),
            GFP_KERNEL_ACCOUNT,
        );
        let region = match region {
            Ok(region) => region,
            Err(e) => {
                // SAFETY: the index was reserved above.
                unsafe { bindings::metaroce_xa_erase(self.xa.get(), index) };
                return Err(e);
            }
        };
        // SAFETY: the region stays where it is until `Registration::drop` frees it.
        let raw = KBox::into_raw(unsafe { Pin::into_inner_unchecked(region) });
        // SAFETY: the index is reserved, so storing there needs no memory; the pointer comes
        // from a box and is thus not null and aligned.
        unsafe {
            bindings::metaroce_xa_store(self.xa.get(), index, raw.cast());
        }
        Ok(Registration {
            table: self.clone(),
            // SAFETY: a box's pointer is not null.
            region: unsafe { NonNull::new_unchecked(raw) },
        })
    }

    /// The region with this key, as long as it is registered. Any context.
    pub fn get(&self, key: u32) -> Option<RegionRef> {
        let guard = rcu::read_lock();
        // SAFETY: the xarray is initialised; the read lock is held.
        let raw = unsafe { bindings::metaroce_xa_load(self.xa.get(), key >> TAG_BITS) };
        let region = NonNull::new(raw.cast::<Region>())?;
        // SAFETY: the memory of a region that the table has shown is freed only after a
        // grace period.
        let state = unsafe { &(*region.as_ptr()).state };
        let mut seen = state.load(Ordering::Relaxed);
        loop {
            if seen & DEAD != 0 {
                return None;
            }
            match state.compare_exchange_weak(
                seen,
                seen + USER,
                Ordering::Acquire,
                Ordering::Relaxed,
            ) {
                Ok(_) => break,
                Err(now) => seen = now,
            }
        }
        drop(guard);
        let found = RegionRef { region };
        (found.key == key).then_some(found)
    }
}

/// Regions by key, for a row of packets: most name the same region as the one ahead of them, which
/// is kept in use and not looked up again. Lives as long as one batch does, like a [`RegionRef`].
pub struct Recent<'a> {
    table: &'a Table,
    last: Option<RegionRef>,
}

impl<'a> Recent<'a> {
    /// Of the regions of `table`, with none kept yet.
    pub fn new(table: &'a Table) -> Self {
        Self { table, last: None }
    }

    /// As [`Table::get`]. A region that is on its way out is not found any more.
    pub fn get(&mut self, key: u32) -> Option<&Region> {
        if !self
            .last
            .as_ref()
            .is_some_and(|r| r.key == key && r.is_registered())
        {
            self.last = self.table.get(key);
        }
        self.last.as_deref()
    }
}

#[pinned_drop]
impl PinnedDrop for Table {
    fn drop(self: Pin<&mut Self>) {
        // SAFETY: every `Registration` holds the table, so it is empty, and nobody reads it.
        unsafe { bindings::xa_destroy(self.xa.get()) };
    }
}

/// Keeps a region registered. Dropping it takes the key away, waits for the copies that
/// use the region, and lets go of the pages. Process context.
pub struct Registration {
    table: Arc<Table>,
    region: NonNull<Region>,
}

// SAFETY: it owns the region, which is Send and Sync.
unsafe impl Send for Registration {}
// SAFETY: as above.
unsafe impl Sync for Registration {}

impl Registration {
    /// The region.
    pub fn region(&self) -> &Region {
        // SAFETY: alive until `drop`.
        unsafe { self.region.as_ref() }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let region = self.region.as_ptr();
        // SAFETY: the region is alive: it is freed below.
        let this = unsafe { &*region };
        // SAFETY: the region's entry is in the table.
        unsafe { bindings::metaroce_xa_erase(self.table.xa.get(), this.key >> TAG_BITS) };
        if this.state.fetch_or(DEAD, Ordering::AcqRel) != 0 {
            this.unused.wait_for_completion();
        }
        // SAFETY: no users are left and no new ones can come. A reader that has still seen
        // the pointer looks at `state` only, which needs no dropping and whose memory stays
        // for a grace period.
        unsafe {
            ptr::drop_in_place(region);
            bindings::metaroce_kfree_rcu(region.cast());
        }
    }
}

/// A region in use. Short-lived: deregistration waits for it.
pub struct RegionRef {
    region: NonNull<Region>,
}

// SAFETY: the user count keeps the region alive on whichever CPU.
unsafe impl Send for RegionRef {}
// SAFETY: as above.
unsafe impl Sync for RegionRef {}

impl ::core::ops::Deref for RegionRef {
    type Target = Region;
    fn deref(&self) -> &Region {
        // SAFETY: `self` counts as a user.
        unsafe { self.region.as_ref() }
    }
}

impl Drop for RegionRef {
    fn drop(&mut self) {
        // SAFETY: `self` counts as a user until the line below.
        let region = unsafe { self.region.as_ref() };
        if region.state.fetch_sub(USER, Ordering::Release) == USER | DEAD {
            fence(Ordering::Acquire);
            // The last user of a dead region: the owner waits for exactly this.
            region.unused.complete_all();
        }
    }
}

impl Region {
    /// The key, local and remote.
    pub fn key(&self) -> u32 {
        self.key
    }

    /// Protection domain.
    pub fn pd(&self) -> u64 {
        self.pd
    }

    /// Address of the first byte.
    pub fn iova(&self) -> u64 {
        self.iova
    }

    /// Whether nobody has begun to deregister it.
    fn is_registered(&self) -> bool {
        self.state.load(Ordering::Relaxed) & DEAD == 0
    }

    /// Rights.
    pub fn access(&self) -> u32 {
        self.access
    }

    /// The pages.
    pub fn pinned(&self) -> &Arc<Pinned> {
        &self.pinned
    }

    /// Whether nobody looks at data in it before its completion.
    pub fn is_relaxed(&self) -> bool {
        self.access & access::RELAXED_ORDERING != 0
    }

    /// Whether `pd` may use `[va, va + len)` with the rights `need`.
    pub fn check(&self, pd: u64, need: u32, va: u64, len: u64) -> Result<(), Refused> {
        if pd != self.pd || self.access & need != need {
            return Err(Refused);
        }
        if need & access::REMOTE != 0 && self.invalid.load(Ordering::Acquire) {
            return Err(Refused);
        }
        let offset = va.checked_sub(self.iova).ok_or(Refused)?;
        let room = self.pinned.length().checked_sub(offset).ok_or(Refused)?;
        if len <= room {
            Ok(())
        } else {
            Err(Refused)
        }
    }

    /// Takes the key away from peers until the region is registered again; the owner keeps
    /// it. Refused for regions of another PD, or that no peer may use anyway.
    pub fn invalidate(&self, pd: u64) -> Result<(), Refused> {
        if pd != self.pd || self.access & access::REMOTE == 0 {
            return Err(Refused);
        }
        match self.invalid.swap(true, Ordering::AcqRel) {
            false => Ok(()),
            true => Err(Refused),
        }
    }

    /// Calls `f` with each piece of `[va, va + len)`: page, place in it, bytes. The range
    /// must have been checked; a piece outside the region ends the walk with `Refused`.
    pub(super) fn walk(
        &self,
        va: u64,
        len: u64,
        mut f: impl FnMut(NonNull<bindings::page>, usize, usize) -> Result<(), Refused>,
    ) -> Result<(), Refused> {
        let mut offset = va.checked_sub(self.iova).ok_or(Refused)?;
        let mut left = len;
        while left != 0 {
            let (page, at, room) = self.pinned.page_at(offset).ok_or(Refused)?;
            let n = left.min(room as u64);
            f(page, at, n as usize)?;
            offset += n;
            left -= n;
        }
        Ok(())
    }

    /// Appends `[va, va + len)` to `out` by reference. The range must have been checked.
    pub fn gather(&self, va: u64, len: u64, out: &mut Frags) -> Result<(), Refused> {
        self.walk(va, len, |page, at, n| {
            // SAFETY: the page is pinned while the region lives, and `self` keeps it alive;
            // `walk` stays within pages.
            let piece = unsafe { PageRef::get(page, at as u32, n as u32) };
            if out.push(piece) {
                Ok(())
            } else {
                Err(Refused)
            }
        })
    }
}
