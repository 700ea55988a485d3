// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB

//! A ring that the kernel made: a header with the indices, then the slots.
//!
//! This module knows where things lie and checks that every access stays inside the mapping; which
//! index belongs to whom, and what a slot holds, is the business of `queue`.
//!
//! The geometry is read from the header once, checked against the size of the mapping and kept:
//! what a wild write of the program does to the header later cannot lead an access out of the ring.

mod lock;

use core::marker::PhantomData;
use core::mem::offset_of;
use core::ptr::{self, null_mut, NonNull};
use core::sync::atomic::{fence, AtomicU32, Ordering};

use crate::abi::{
    metaroce_cqe, metaroce_mmap, metaroce_recv_wqe, metaroce_ring, metaroce_send_wqe, metaroce_sge,
    METAROCE_RING_MAGIC,
};
use crate::errno::{Errno, ENOMEM, EPROTO};
use crate::ffi::sys;

pub(crate) use lock::Lock;

/// Types without padding or pointers, for which any bytes are a value.
///
/// # Safety
///
/// The type is so.
pub(crate) unsafe trait Plain: Copy {}

// SAFETY: integers only, and the asserts in `abi` leave no room for padding.
unsafe impl Plain for metaroce_send_wqe {}
// SAFETY: as above.
unsafe impl Plain for metaroce_recv_wqe {}
// SAFETY: as above.
unsafe impl Plain for metaroce_sge {}
// SAFETY: as above.
unsafe impl Plain for metaroce_cqe {}

/// Bytes of the program that are to be copied into a slot.
#[derive(Clone, Copy)]
pub(crate) struct UserBytes {
    address: *const u8,
    length: usize,
}

impl UserBytes {
    /// `length` bytes at `address`.
    ///
    /// # Safety
    ///
    /// They can be read as long as the value is used; `address` may be anything when `length` is 0.
    pub(crate) const unsafe fn new(address: *const u8, length: usize) -> Self {
        UserBytes { address, length }
    }

    /// The number of bytes.
    pub(crate) const fn len(&self) -> usize {
        self.length
    }
}

/// The low bits that are clear in a place for a 64-bit value.
const ALIGNED: usize = 7;

/// A mapped ring.
pub(crate) struct Ring {
    base: NonNull<u8>,
    /// Bytes mapped at `base`; 0 when somebody else unmaps them.
    mapped: usize,
    slots: NonNull<u8>,
    entries: u32,
    stride: usize,
}

// SAFETY: a ring is memory and where it lies; any thread may use it. Its methods take care that
// the indices are atomics and that slots are written through `&self` only by their owner.
unsafe impl Send for Ring {}

impl Ring {
    /// Maps the ring at `place` of `fd`, which has to be of `kind` with slots of at least
    /// `stride_min` bytes. A forked child does not get the mapping.
    ///
    /// Fails with the errno of mmap, or with EPROTO when the header makes no sense.
    pub(crate) fn map(fd: i32, place: &metaroce_mmap, kind: u32, stride_min: usize) -> Result<Ring, Errno> {
        let length = usize::try_from(place.size).map_err(|_| EPROTO)?;
        let offset = i64::try_from(place.offset).map_err(|_| EPROTO)?;
        if length < size_of::<metaroce_ring>() {
            return Err(EPROTO);
        }
        let protection = (sys::PROT_READ | sys::PROT_WRITE) as i32;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let start = unsafe { sys::mmap(null_mut(), length, protection, sys::MAP_SHARED as i32, fd, offset) };
        if start as isize == -1 {
            let error = crate::ffi::errno();
            return Err(if error == 0 { ENOMEM } else { error });
        }
        let Some(base) = NonNull::new(start.cast::<u8>()) else { return Err(ENOMEM) };
        // A child that touched the rings of its parent would corrupt them. Where this fails (no
        // madvise in the kernel) the ring still works.
        // SAFETY: the range is the mapping just made.
        unsafe { sys::madvise(start, length, sys::MADV_DONTFORK as i32) };
        // SAFETY: `length` bytes are mapped at `base` for reading and writing, page-aligned.
        let ring = unsafe { Ring::adopt(base, length, kind, stride_min) };
        if ring.is_err() {
            // SAFETY: the mapping just made, to which nothing refers.
            unsafe { sys::munmap(start, length) };
        }
        ring
    }

    /// Takes over `length` mapped bytes at `base`, after checking the header.
    ///
    /// # Safety
    ///
    /// The bytes are mapped shared for reading and writing, aligned for the header, and the ring
    /// becomes the one to unmap them.
    unsafe fn adopt(base: NonNull<u8>, length: usize, kind: u32, stride_min: usize) -> Result<Ring, Errno> {
        // SAFETY: the caller checked that the header fits, and nobody else writes these fields.
        let header = unsafe { ptr::read(base.as_ptr().cast::<metaroce_ring>()) };
        let stride = header.stride as usize;
        let slots_offset = header.slots_offset as usize;
        let end =
            stride.checked_mul(header.entries as usize).and_then(|bytes| bytes.checked_add(slots_offset));
        let sound = header.magic == METAROCE_RING_MAGIC
            && header.kind == kind
            && header.entries.is_power_of_two()
            && stride >= stride_min
            && stride & ALIGNED == 0
            && slots_offset >= size_of::<metaroce_ring>()
            && slots_offset & ALIGNED == 0
            && end.is_some_and(|end| end <= length);
        if !sound {
            return Err(EPROTO);
        }
        // SAFETY: `slots_offset` is inside the mapping.
        let slots = unsafe { base.add(slots_offset) };
        Ok(Ring { base, mapped: length, slots, entries: header.entries, stride })
    }

    /// Slots, a power of two.
    pub(crate) const fn entries(&self) -> u32 {
        self.entries
    }

    fn word(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: the offsets are those of aligned words of the header, which is inside the
        // mapping; both sides access these words atomically only.
        unsafe { AtomicU32::from_ptr(self.base.add(offset).as_ptr().cast::<u32>()) }
    }

    /// The producer's index.
    pub(crate) fn producer(&self) -> &AtomicU32 {
        self.word(offset_of!(metaroce_ring, producer))
    }

    /// The consumer's index.
    pub(crate) fn consumer(&self) -> &AtomicU32 {
        self.word(offset_of!(metaroce_ring, consumer))
    }

    /// The arm word.
    pub(crate) fn arm(&self) -> &AtomicU32 {
        self.word(offset_of!(metaroce_ring, arm))
    }

    /// The arm word apart from the ring.
    pub(crate) fn arm_word(&self) -> ArmWord {
        ArmWord(NonNull::from(self.arm()))
    }

    /// The slot of the free-running `index`.
    pub(crate) fn slot(&self, index: u32) -> Slot<'_> {
        // `entries` is a power of two, so at least 1.
        let number = index & self.entries.wrapping_sub(1);
        let offset = self.stride.wrapping_mul(number as usize);
        // SAFETY: `number` is below `entries`, and all slots are inside the mapping (`adopt`).
        Slot { start: unsafe { self.slots.add(offset) }, size: self.stride, ring: PhantomData }
    }

    /// A ring in anonymous memory, as the kernel would make it.
    #[cfg(test)]
    pub(crate) fn anonymous(kind: u32, entries: u32, stride: usize) -> Ring {
        let header = metaroce_ring {
            magic: METAROCE_RING_MAGIC,
            kind,
            entries,
            stride: stride as u32,
            slots_offset: size_of::<metaroce_ring>() as u32,
            ..Default::default()
        };
        Ring::anonymous_with(header, kind, stride).expect("sound header")
    }

    /// A ring in anonymous memory with any header.
    #[cfg(test)]
    pub(crate) fn anonymous_with(header: metaroce_ring, kind: u32, stride_min: usize) -> Result<Ring, Errno> {
        const LENGTH: usize = 1 << 20;
        let protection = (sys::PROT_READ | sys::PROT_WRITE) as i32;
        let flags = (sys::MAP_SHARED | sys::MAP_ANONYMOUS) as i32;
        // SAFETY: a new mapping.
        let start = unsafe { sys::mmap(null_mut(), LENGTH, protection, flags, -1, 0) };
        assert_ne!(start as isize, -1);
        let base = NonNull::new(start.cast::<u8>()).expect("address");
        // SAFETY: the mapping is larger than the header and page-aligned.
        unsafe { base.as_ptr().cast::<metaroce_ring>().write(header) };
        // SAFETY: as above; the ring unmaps it.
        unsafe { Ring::adopt(base, LENGTH, kind, stride_min) }
    }

    /// The same ring as the other side sees it. It does not unmap: drop it before the original.
    #[cfg(test)]
    pub(crate) fn other_side(&self) -> Ring {
        Ring { mapped: 0, ..*self }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        if self.mapped != 0 {
            // SAFETY: `adopt` took the mapping over, and the ring was the last to use it.
            unsafe { sys::munmap(self.base.as_ptr().cast(), self.mapped) };
        }
    }
}

/// A slot: its bytes, from its start to the start of the next.
///
/// Methods take `&self`: a slot has one owner at a time by the indices, not by the borrow checker,
/// and the bytes are reached through raw pointers alone.
pub(crate) struct Slot<'a> {
    start: NonNull<u8>,
    size: usize,
    ring: PhantomData<&'a Ring>,
}

impl Slot<'_> {
    fn at(&self, offset: usize, length: usize) -> Option<*mut u8> {
        if offset > self.size || length > self.size.wrapping_sub(offset) {
            return None;
        }
        // SAFETY: the offset is inside the slot, and so inside the mapping.
        Some(unsafe { self.start.as_ptr().add(offset) })
    }

    /// Copies `values` to `offset` bytes from the start; `None` when they do not fit.
    #[must_use]
    pub(crate) fn put<T: Plain>(&self, offset: usize, values: &[T]) -> Option<()> {
        let length = size_of_val(values);
        let target = self.at(offset, length)?;
        // SAFETY: `length` bytes are readable at `values` and writable at `target`, which is
        // shared memory that no Rust reference covers.
        unsafe { ptr::copy_nonoverlapping(values.as_ptr().cast::<u8>(), target, length) };
        Some(())
    }

    /// Copies bytes of the program to `offset` bytes from the start; `None` when they do not fit.
    #[must_use]
    pub(crate) fn put_user(&self, offset: usize, bytes: UserBytes) -> Option<()> {
        let target = self.at(offset, bytes.length)?;
        if bytes.length != 0 {
            // SAFETY: readable by the promise of `UserBytes::new`; the program may have pointed
            // it at the ring itself, so the ranges may overlap.
            unsafe { ptr::copy(bytes.address, target, bytes.length) };
        }
        Some(())
    }

    /// The value at the start of the slot; `None` when the slot is smaller.
    pub(crate) fn get<T: Plain>(&self) -> Option<T> {
        let source = self.at(0, size_of::<T>())?;
        // SAFETY: `size_of::<T>()` bytes are readable, and any bytes are a `T`.
        Some(unsafe { ptr::read_unaligned(source.cast::<T>()) })
    }

    /// Bytes from `offset`, as the other side reads them.
    #[cfg(test)]
    pub(crate) fn bytes(&self, offset: usize, length: usize) -> Vec<u8> {
        let source = self.at(offset, length).expect("inside the slot");
        let mut bytes = vec![0; length];
        // SAFETY: both ranges are `length` bytes long.
        unsafe { ptr::copy_nonoverlapping(source, bytes.as_mut_ptr(), length) };
        bytes
    }
}

/// The arm word of a CQ, apart from its ring: arming does not wait for a poll in progress.
pub(crate) struct ArmWord(NonNull<AtomicU32>);

// SAFETY: it is the address of an atomic.
unsafe impl Send for ArmWord {}

impl ArmWord {
    /// Raises the word to `level` and orders this before every later look at the producer.
    ///
    /// # Safety
    ///
    /// The ring is still mapped.
    pub(crate) unsafe fn raise(&self, level: u32) {
        // SAFETY: the caller keeps the ring mapped.
        unsafe { self.0.as_ref() }.fetch_max(level, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }
}
