// SPDX-License-Identifier: GPL-2.0

//! User pages that stay where they are.

use super::access;
use crate::{bindings, kernel_ext::ib};
use ::core::ptr::NonNull;
use ::kernel::{error::from_err_ptr, prelude::*};

/// Bytes of a page, as a shift.
pub(super) const PAGE_SHIFT: u32 = ::kernel::page::PAGE_SHIFT as u32;
/// Bytes of a page.
pub(super) const PAGE_SIZE: usize = ::kernel::page::PAGE_SIZE;

/// A range of a process's memory, pinned. One entry per page whatever the size of the
/// underlying pages: huge pages and regions of many GiB need no special case.
pub struct Pinned {
    umem: NonNull<bindings::ib_umem>,
    pages: KVVec<NonNull<bindings::page>>,
    start: u64,
    len: u64,
    writable: bool,
}

// SAFETY: the umem is only given back in `drop`; its pages may be used on any CPU.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Pins `[start, start + len)` of the calling process.
    ///
    /// Errors: `EINVAL` for a range that wraps or is empty, `ENOMEM` when the limit of
    /// locked memory (RLIMIT_MEMLOCK) does not allow it, `EFAULT` for unmapped addresses,
    /// `EOPNOTSUPP` for on-demand paging.
    pub fn new(device: &ib::RawDevice, start: u64, len: u64, flags: u32) -> Result<Self> {
        let pages_spanned = (start & (PAGE_SIZE as u64 - 1))
            .checked_add(len)
            .and_then(|n| n.checked_add(PAGE_SIZE as u64 - 1))
            .ok_or(EINVAL)?
            >> PAGE_SHIFT;
        // SAFETY: the device is registered; arguments are checked by the callee; the caller
        // is in process context with the owner's address space.
        let umem = from_err_ptr(unsafe {
            bindings::ib_umem_get_attr_or_va(
                device.as_ptr(),
                ::core::ptr::null(),
                0,
                start,
                len as usize,
                flags as i32,
            )
        })?;
        let umem = NonNull::new(umem).ok_or(ENOMEM)?;
        let mut this = Self {
            umem,
            pages: KVVec::new(),
            start,
            len,
            writable: flags & (access::LOCAL_WRITE | access::REMOTE_WRITE | access::REMOTE_ATOMIC)
                != 0,
        };
        let count = pages_spanned as usize;
        this.pages.reserve(count, GFP_KERNEL_ACCOUNT)?;
        // SAFETY: the umem is ours; the helper writes at most `count` entries into memory
        // that has room for them, and returns how many it has written.
        let written = unsafe {
            bindings::metaroce_umem_pages(umem.as_ptr(), this.pages.as_mut_ptr().cast(), count)
        };
        if written != count {
            return Err(EINVAL);
        }
        // SAFETY: `count` entries have been written, none of them null.
        unsafe { this.pages.inc_len(count) };
        Ok(this)
    }

    /// User address of the first byte.
    pub fn start(&self) -> u64 {
        self.start
    }

    /// Bytes.
    pub fn length(&self) -> u64 {
        self.len
    }

    /// Whether the pages were pinned for writing.
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// The page that holds byte `offset` of the range, the place in it, and how many bytes
    /// of the page follow from there (possibly beyond the range).
    pub(super) fn page_at(&self, offset: u64) -> Option<(NonNull<bindings::page>, usize, usize)> {
        let at = (self.start & (PAGE_SIZE as u64 - 1)).checked_add(offset)?;
        let page = *self.pages.get(usize::try_from(at >> PAGE_SHIFT).ok()?)?;
        let within = at as usize & (PAGE_SIZE - 1);
        Some((page, within, PAGE_SIZE - within))
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: the umem is ours, and nobody uses its pages any more.
        unsafe { bindings::ib_umem_release(self.umem.as_ptr()) };
    }
}
