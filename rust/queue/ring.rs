// SPDX-License-Identifier: GPL-2.0

//! Memory of a ring and access to it.

use super::order::{self, Words};
use crate::bindings;
use ::core::{
    mem::{offset_of, size_of},
    ptr::NonNull,
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
};
use ::kernel::{page::PAGE_SIZE, prelude::*, sync::Arc};

/// 64-bit words of a send WQE's head.
pub const SEND_HEAD_WORDS: usize = 8;
/// 64-bit words of a receive WQE's head.
pub const RECV_HEAD_WORDS: usize = 2;
/// 64-bit words of an SGE.
pub const SGE_WORDS: usize = 2;
/// 64-bit words of a CQE.
const CQE_WORDS: usize = 8;

/// Bytes before slot 0.
const HEAD: usize = size_of::<bindings::metaroce_ring>();

/// Bytes of a ring at the most; also keeps all offsets far from overflow.
const MAX_BYTES: usize = 1 << 30;

/// Zeroed pages that user space can map, counted for the control group of the program that
/// makes them. A mapping holds page references of its own, so the memory may go while a program
/// still has it mapped.
pub struct Memory {
    base: NonNull<u8>,
    size: usize,
}

// SAFETY: plain memory; all access is by atomics or volatile copies.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// At least `size` bytes, rounded up to whole pages. Process context.
    pub fn new(size: usize) -> Result<Arc<Self>> {
        if size == 0 || size > MAX_BYTES {
            return Err(EINVAL);
        }
        let size = size.next_multiple_of(PAGE_SIZE);
        // SAFETY: no requirements.
        let base = unsafe { bindings::metaroce_ring_alloc(size) };
        let base = NonNull::new(base.cast()).ok_or(ENOMEM)?;
        Ok(Arc::new(Self { base, size }, GFP_KERNEL_ACCOUNT)?)
    }

    /// Bytes, a multiple of the page size.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Start of the memory, whole pages.
    pub fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// A word that user space may write at any time. `offset` is a multiple of 4.
    fn word32(&self, offset: usize) -> &AtomicU32 {
        debug_assert!(offset % 4 == 0 && offset + 4 <= self.size);
        // SAFETY: within the memory and aligned; only ever used atomically by the kernel.
        unsafe { AtomicU32::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }

    /// Like [`Self::word32`] for 64 bits; `None` outside the memory.
    fn word64(&self, offset: usize) -> Option<&AtomicU64> {
        if offset % 8 != 0 || offset.checked_add(8)? > self.size {
            return None;
        }
        // SAFETY: within the memory and aligned (checked above).
        Some(unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(offset).cast()) })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated by `metaroce_ring_alloc`; callable in any context but hard interrupts.
        unsafe { bindings::metaroce_ring_free(self.base.as_ptr().cast()) };
    }
}

/// What both kinds of ring share.
struct Ring {
    mem: Arc<Memory>,
    entries: u32,
    stride: usize,
}

impl Ring {
    fn new(kind: u32, entries: u32, stride: usize) -> Result<Self> {
        if !entries.is_power_of_two() || stride % 8 != 0 {
            return Err(EINVAL);
        }
        let size = stride
            .checked_mul(entries as usize)
            .and_then(|n| n.checked_add(HEAD))
            .ok_or(EINVAL)?;
        let mem = Memory::new(size)?;
        let head = [
            bindings::METAROCE_RING_MAGIC,
            kind,
            entries,
            stride as u32,
            HEAD as u32,
        ];
        for (i, value) in head.iter().enumerate() {
            mem.word32(i * 4).store(*value, Ordering::Relaxed);
        }
        Ok(Self {
            mem,
            entries,
            stride,
        })
    }

    /// Offset of word `word` of the slot of `index`.
    fn at(&self, index: u32, word: usize) -> usize {
        HEAD + (index & (self.entries - 1)) as usize * self.stride + word * 8
    }
}

impl Words for Ring {
    fn producer(&self) -> &AtomicU32 {
        self.mem
            .word32(offset_of!(bindings::metaroce_ring, producer))
    }

    fn consumer(&self) -> &AtomicU32 {
        self.mem
            .word32(offset_of!(bindings::metaroce_ring, consumer))
    }

    fn arm(&self) -> &AtomicU32 {
        self.mem.word32(offset_of!(bindings::metaroce_ring, arm))
    }

    fn entries(&self) -> u32 {
        self.entries
    }

    fn read(&self, index: u32, word: usize, to: &mut [u64]) {
        for (i, to) in to.iter_mut().enumerate() {
            *to = match self.mem.word64(self.at(index, word + i)) {
                Some(w) if (word + i) * 8 < self.stride => w.load(Ordering::Relaxed),
                _ => 0,
            };
        }
    }

    fn write(&self, index: u32, from: &[u64]) {
        for (i, from) in from.iter().enumerate() {
            if let Some(w) = self.mem.word64(self.at(index, i)) {
                w.store(*from, Ordering::Relaxed);
            }
        }
    }
}

/// A ring that the program fills: SQ, RQ or SRQ.
pub struct WorkRing(Ring);

impl WorkRing {
    /// An SQ of `entries` (a power of two) slots with room for `body` bytes of SGEs or
    /// inline data each. `ENOMEM`, `EINVAL` when too large.
    pub fn send(entries: u32, body: usize) -> Result<Self> {
        let stride = (SEND_HEAD_WORDS * 8 + body).next_multiple_of(64);
        Ring::new(
            bindings::metaroce_ring_kind_METAROCE_RING_SQ,
            entries,
            stride,
        )
        .map(Self)
    }

    /// An RQ of `entries` slots with room for `sges` SGEs each.
    pub fn receive(entries: u32, sges: u32) -> Result<Self> {
        Self::receives(bindings::metaroce_ring_kind_METAROCE_RING_RQ, entries, sges)
    }

    /// An SRQ of `entries` slots with room for `sges` SGEs each.
    pub fn shared(entries: u32, sges: u32) -> Result<Self> {
        Self::receives(
            bindings::metaroce_ring_kind_METAROCE_RING_SRQ,
            entries,
            sges,
        )
    }

    fn receives(kind: u32, entries: u32, sges: u32) -> Result<Self> {
        let body = sges as usize * SGE_WORDS * 8;
        Ring::new(kind, entries, RECV_HEAD_WORDS * 8 + body).map(Self)
    }

    /// The memory, to be mapped.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.0.mem
    }

    /// Slots.
    pub fn entries(&self) -> u32 {
        self.0.entries
    }

    /// Slots filled and not yet taken, when the kernel has taken all before `taken`; never
    /// more than there are slots. What they hold may be read afterwards.
    pub fn filled(&self, taken: u32) -> u32 {
        order::filled(&self.0, taken)
    }

    /// The program's index as it is.
    pub fn posted(&self) -> u32 {
        order::posted(&self.0)
    }

    /// Tells the program that all slots before `index` are free.
    pub fn release(&self, index: u32) {
        order::release(&self.0, index);
    }

    /// Copies words of the slot of `index`, from word `word` on.
    pub fn read(&self, index: u32, word: usize, to: &mut [u64]) {
        self.0.read(index, word, to);
    }

    /// Tells the program how many receives of an SRQ, all in all, have gone without a
    /// completion.
    pub fn publish_lost(&self, count: u32) {
        order::publish_lost(&self.0, count);
    }

    /// Asks the program to ring the doorbell for receives (or no longer to). Whoever sets
    /// it looks at the ring afterwards: the program has posted before it looks here.
    pub fn want_doorbell(&self, wanted: bool) {
        order::want_doorbell(&self.0, wanted);
    }
}

/// A ring that the kernel fills: a CQ.
pub struct CqRing {
    ring: Ring,
    /// The kernel's own index, not read back from the mapping.
    producer: u32,
}

impl CqRing {
    /// A CQ of `entries` (a power of two) slots. `ENOMEM`, `EINVAL` when too large.
    pub fn new(entries: u32) -> Result<Self> {
        Ok(Self {
            ring: Ring::new(
                bindings::metaroce_ring_kind_METAROCE_RING_CQ,
                entries,
                CQE_WORDS * 8,
            )?,
            producer: 0,
        })
    }

    /// The memory, to be mapped.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.ring.mem
    }

    /// Slots.
    pub fn entries(&self) -> u32 {
        self.ring.entries
    }

    /// Completions that the program has not consumed; more than there are slots when its
    /// index makes no sense.
    pub fn unpolled(&self) -> u32 {
        order::unpolled(&self.ring, self.producer)
    }

    /// Appends a completion; `false` when the ring is full.
    pub fn push(&mut self, words: &[u64; 8]) -> bool {
        order::push(&self.ring, &mut self.producer, words)
    }

    /// Whether the program waits for what has just been pushed; disarms if so.
    pub fn take_arm(&self, solicited: bool) -> bool {
        order::take_arm(&self.ring, solicited)
    }

    /// Moves what is unpolled, and the arm word, to `to`, an unused ring. `EINVAL` when it
    /// does not fit in.
    pub fn move_to(&self, to: &mut CqRing) -> Result {
        let count = self.unpolled();
        if count > self.ring.entries || count > to.ring.entries {
            return Err(EINVAL);
        }
        let first = self.producer.wrapping_sub(count);
        let mut words = [0u64; CQE_WORDS];
        for i in 0..count {
            self.ring.read(first.wrapping_add(i), 0, &mut words);
            if !to.push(&words) {
                return Err(EINVAL);
            }
        }
        let arm = self.ring.arm().load(Ordering::Relaxed);
        to.ring.arm().store(arm, Ordering::Release);
        Ok(())
    }
}
