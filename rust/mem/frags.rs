// SPDX-License-Identifier: GPL-2.0

//! The payload of one packet on its way out.

use crate::bindings;
use ::core::{ptr, ptr::NonNull};

/// Bytes that a send WQE can carry itself.
pub const MAX_INLINE: usize = 512;

/// Pieces of pages in one packet's payload at the most: each SGE of the longest list may
/// begin and end within a page, and a jumbo frame covers a few more.
pub(super) const MAX_PIECES: usize = 72;

/// A piece of a page, with a reference to the page.
pub struct PageRef {
    page: NonNull<bindings::page>,
    offset: u32,
    len: u32,
}

// SAFETY: a page reference may be dropped, and the page read, on any CPU.
unsafe impl Send for PageRef {}
// SAFETY: as above; nothing is mutable through a shared reference.
unsafe impl Sync for PageRef {}

impl PageRef {
    /// Takes a reference to `page`.
    ///
    /// # Safety
    ///
    /// `page` is valid and held (pinned) by the caller for the length of the call;
    /// `offset + len` does not exceed the size of a page.
    pub(super) unsafe fn get(page: NonNull<bindings::page>, offset: u32, len: u32) -> Self {
        // SAFETY: the caller holds the page.
        unsafe { bindings::metaroce_get_page(page.as_ptr()) };
        Self { page, offset, len }
    }

    /// Bytes from the start of the page.
    pub fn offset(&self) -> u32 {
        self.offset
    }

    /// Bytes.
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Whether it is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The page, whose reference passes to the caller.
    pub fn into_raw(self) -> *mut bindings::page {
        let page = self.page.as_ptr();
        ::core::mem::forget(self);
        page
    }

    /// The page; the reference stays here.
    pub fn as_raw(&self) -> *mut bindings::page {
        self.page.as_ptr()
    }

    /// Copies `to.len()` bytes from `at` on; the range has been checked.
    fn read(&self, at: usize, to: &mut [u8]) {
        // SAFETY: the page is held by `self`.
        let base = unsafe { bindings::metaroce_kmap_local(self.page.as_ptr()) };
        // SAFETY: `at + to.len() <= len` (checked by the caller) and `offset + len` lies in
        // the page. A program may write to the page meanwhile: the copy is then made of old
        // and new bytes, as on any RDMA device.
        unsafe {
            ptr::copy_nonoverlapping(
                base.cast::<u8>().add(self.offset as usize + at),
                to.as_mut_ptr(),
                to.len(),
            );
            bindings::metaroce_kunmap_local(base);
        }
    }
}

impl Drop for PageRef {
    fn drop(&mut self) {
        // SAFETY: `self` owns one reference.
        unsafe { bindings::metaroce_put_page(self.page.as_ptr()) };
    }
}

/// The payload of a packet: either pieces of pages (by reference) or bytes (a copy, of an
/// inline WQE). Never both.
pub struct Frags {
    pieces: [Option<PageRef>; MAX_PIECES],
    count: usize,
    bytes: [u8; MAX_INLINE],
    copied: usize,
    len: usize,
}

impl Frags {
    /// No payload.
    pub const fn new() -> Self {
        Self {
            pieces: [const { None }; MAX_PIECES],
            count: 0,
            bytes: [0; MAX_INLINE],
            copied: 0,
            len: 0,
        }
    }

    /// Gives everything back. Any context.
    pub fn clear(&mut self) {
        for piece in self.pieces.iter_mut().take(self.count) {
            *piece = None;
        }
        self.count = 0;
        self.copied = 0;
        self.len = 0;
    }

    /// Bytes of payload.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no payload.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The payload when it is a copy (inline data), else empty.
    pub fn bytes(&self) -> &[u8] {
        self.bytes.get(..self.copied).unwrap_or(&[])
    }

    /// Number of pieces of pages.
    pub fn pieces(&self) -> usize {
        self.count
    }

    /// The pieces of pages, in payload order.
    pub fn iter(&self) -> impl Iterator<Item = &PageRef> {
        self.pieces.iter().take(self.count).flatten()
    }

    /// Takes the pieces out, in payload order; what is not taken is given back.
    pub fn drain(&mut self) -> impl Iterator<Item = PageRef> + '_ {
        let count = ::core::mem::take(&mut self.count);
        self.len = self.copied;
        self.pieces.iter_mut().take(count).filter_map(|p| p.take())
    }

    /// Copies payload from byte `at` on into `to`; `false` (and an undefined part of `to`
    /// written) when it does not reach that far.
    pub fn copy_to(&self, at: usize, to: &mut [u8]) -> bool {
        if self.count == 0 {
            let end = at.saturating_add(to.len());
            return match self.bytes().get(at..end) {
                Some(from) => {
                    to.copy_from_slice(from);
                    true
                }
                None => false,
            };
        }
        let mut skip = at;
        let mut rest = to;
        for piece in self.iter() {
            let len = piece.len as usize;
            if skip >= len {
                skip -= len;
                continue;
            }
            let n = (len - skip).min(rest.len());
            let (now, later) = ::core::mem::take(&mut rest).split_at_mut(n);
            piece.read(skip, now);
            rest = later;
            skip = 0;
            if rest.is_empty() {
                break;
            }
        }
        rest.is_empty()
    }

    /// Appends a piece; `false` when there is no room.
    pub(super) fn push(&mut self, piece: PageRef) -> bool {
        let len = piece.len as usize;
        match self.pieces.get_mut(self.count) {
            Some(slot) if self.copied == 0 => {
                *slot = Some(piece);
                self.count += 1;
                self.len += len;
                true
            }
            _ => false,
        }
    }

    /// Makes the payload a copy of `from`; `false` when it is too long.
    pub fn set_bytes(&mut self, from: &[u8]) -> bool {
        self.clear();
        match self.bytes.get_mut(..from.len()) {
            Some(to) => {
                to.copy_from_slice(from);
                self.copied = from.len();
                self.len = from.len();
                true
            }
            None => false,
        }
    }
}

impl Default for Frags {
    fn default() -> Self {
        Self::new()
    }
}
