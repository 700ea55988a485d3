// SPDX-License-Identifier: GPL-2.0

//! Copies into registered memory, and atomics on it.

use super::{
    access,
    table::{Recent, Region},
    Frags, Refused, Sge, Table,
};
use crate::{bindings, net::Skb};
use ::core::{
    ptr::{self, NonNull},
    sync::atomic::{fence, AtomicU64, AtomicU8, Ordering},
};

/// SGEs of a WR at the most.
pub const MAX_SGE: usize = 32;

/// Where copied bytes come from.
pub enum Bytes<'a> {
    /// A received packet, from this byte on.
    Skb(&'a Skb, u32),
    /// Plain bytes.
    Slice(&'a [u8]),
}

impl Bytes<'_> {
    /// Bytes there are.
    fn len(&self) -> usize {
        match self {
            Self::Skb(skb, skip) => (skb.len() as usize).saturating_sub(*skip as usize),
            Self::Slice(s) => s.len(),
        }
    }

    /// Copies `[at, at + len)` to `to`.
    ///
    /// # Safety
    ///
    /// `to` is valid for writing `len` bytes.
    unsafe fn copy(&self, at: usize, to: *mut u8, len: usize) -> Result<(), Refused> {
        if at.checked_add(len).is_none_or(|end| end > self.len()) {
            return Err(Refused);
        }
        match self {
            Self::Skb(skb, skip) => {
                // SAFETY: the range lies within the packet (checked above); `to` is valid.
                let r = unsafe {
                    bindings::skb_copy_bits(
                        skb.as_ptr(),
                        *skip as i32 + at as i32,
                        to.cast(),
                        len as i32,
                    )
                };
                if r == 0 {
                    Ok(())
                } else {
                    Err(Refused)
                }
            }
            Self::Slice(s) => {
                // SAFETY: the range lies within the slice (checked above); `to` is valid.
                unsafe { ptr::copy_nonoverlapping(s.as_ptr().add(at), to, len) };
                Ok(())
            }
        }
    }
}

/// A page of a region, mapped on this CPU.
struct Mapped {
    base: *mut u8,
}

impl Mapped {
    /// Maps `page`. Mappings are undone in reverse order (stack discipline).
    ///
    /// # Safety
    ///
    /// `page` is valid and pinned while the mapping lives.
    unsafe fn new(page: NonNull<bindings::page>) -> Self {
        Self {
            // SAFETY: guaranteed by the caller.
            base: unsafe { bindings::metaroce_kmap_local(page.as_ptr()) }.cast(),
        }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: `base` is what the mapping returned.
        unsafe { bindings::metaroce_kunmap_local(self.base.cast()) };
    }
}

impl Region {
    /// Copies all of `from`, beginning at its byte `at`, to `[va, va + len)`. The range must
    /// have been checked.
    pub fn write(&self, va: u64, len: u64, from: &Bytes<'_>, at: usize) -> Result<(), Refused> {
        let mut done = at;
        self.walk(va, len, |page, within, n| {
            // SAFETY: `self` keeps the page pinned; the mapping does not outlive this call.
            let map = unsafe { Mapped::new(page) };
            // SAFETY: `within + n` does not exceed the page. The owner may read or write
            // the same bytes meanwhile; they get what RDMA gives: no promise on their order.
            unsafe { from.copy(done, map.base.add(within), n)? };
            done += n;
            Ok(())
        })
    }

    /// Like [`Region::write`] for the end of a message, for programs that poll the last
    /// bytes: everything before the last aligned eight bytes first, then a release barrier,
    /// then those as one store. When the end is not aligned, its bytes one by one with the
    /// last one last.
    pub fn write_last(
        &self,
        va: u64,
        len: u64,
        from: &Bytes<'_>,
        at: usize,
    ) -> Result<(), Refused> {
        if len == 0 {
            return Ok(());
        }
        let end = va.checked_add(len).ok_or(Refused)?;
        let tail = match end % 8 {
            0 if len >= 8 => 8,
            0 => len,
            odd => odd.min(len),
        };
        let head = len - tail;
        self.write(va, head, from, at)?;
        let mut word = [0u8; 8];
        // SAFETY: `tail <= 8`.
        unsafe {
            from.copy(at + head as usize, word.as_mut_ptr(), tail as usize)?;
        }
        fence(Ordering::Release);
        let mut done = 0usize;
        // The tail lies within one aligned word, hence within one page.
        self.walk(end - tail, tail, |page, within, n| {
            // SAFETY: as in `write`.
            let map = unsafe { Mapped::new(page) };
            // (A zero-based region need not begin at an aligned address.)
            if n == 8 && within % 8 == 0 {
                // SAFETY: the place is aligned to eight bytes and within the page.
                let place = unsafe { AtomicU64::from_ptr(map.base.add(within).cast()) };
                place.store(u64::from_ne_bytes(word), Ordering::Release);
            } else {
                for (i, byte) in word.iter().skip(done).take(n).enumerate() {
                    // SAFETY: within the page, as `i < n`.
                    let place = unsafe { AtomicU8::from_ptr(map.base.add(within + i)) };
                    place.store(*byte, Ordering::Release);
                }
            }
            done += n;
            Ok(())
        })
    }

    /// Does an atomic on the eight bytes at `va` (host byte order) and returns what was
    /// there. `va` must be a multiple of 8, and the range must have been checked.
    pub fn atomic(&self, va: u64, op: Atomic) -> Result<u64, Refused> {
        let mut before = Err(Refused);
        self.walk(va, 8, |page, within, n| {
            if n != 8 || within % 8 != 0 {
                return Err(Refused);
            }
            // SAFETY: as in `write`.
            let map = unsafe { Mapped::new(page) };
            // SAFETY: aligned (checked above) and within the page.
            let place = unsafe { AtomicU64::from_ptr(map.base.add(within).cast()) };
            before = Ok(match op {
                Atomic::CompareSwap { compare, swap } => place
                    .compare_exchange(compare, swap, Ordering::SeqCst, Ordering::SeqCst)
                    .unwrap_or_else(|seen| seen),
                Atomic::FetchAdd(add) => place.fetch_add(add, Ordering::SeqCst),
            });
            Ok(())
        })?;
        before
    }
}

/// An atomic operation.
#[derive(Clone, Copy)]
pub enum Atomic {
    /// Store `swap` when the place holds `compare`.
    CompareSwap {
        /// Expected value.
        compare: u64,
        /// New value.
        swap: u64,
    },
    /// Add, wrapping.
    FetchAdd(u64),
}

/// A gather or scatter list, copied out of its WQE.
#[derive(Clone, Copy)]
pub struct Scatter {
    sges: [Sge; MAX_SGE],
    count: usize,
}

impl Scatter {
    /// An empty list.
    pub const fn new() -> Self {
        Self {
            sges: [Sge {
                addr: 0,
                length: 0,
                lkey: 0,
            }; MAX_SGE],
            count: 0,
        }
    }

    /// The part of `sges` that `[offset, offset + len)` of the message falls on.
    pub fn slice(sges: impl Iterator<Item = Sge>, offset: u64, len: u64) -> Self {
        let mut this = Self::new();
        let _ = each_part(sges, offset, len, |addr, length, lkey| {
            let slot = this.sges.get_mut(this.count).ok_or(Refused)?;
            *slot = Sge { addr, length, lkey };
            this.count += 1;
            Ok(())
        });
        this
    }

    /// The pieces.
    pub fn as_slice(&self) -> &[Sge] {
        self.sges.get(..self.count).unwrap_or(&[])
    }

    /// Copies all of `from`, whose bytes begin at `at`, over the list; `len` bytes. Every
    /// piece must belong to `pd` and be writable. `last`: as [`Region::write_last`].
    pub fn write(
        &self,
        regions: &mut Recent<'_>,
        pd: u64,
        len: u64,
        from: &Bytes<'_>,
        at: usize,
        last: bool,
    ) -> Result<(), Refused> {
        let mut done = 0u64;
        each_part(
            self.as_slice().iter().copied(),
            0,
            len,
            |addr, length, lkey| {
                let region = regions.get(lkey).ok_or(Refused)?;
                let length = u64::from(length);
                region.check(pd, access::LOCAL_WRITE, addr, length)?;
                let start = at + done as usize;
                done += length;
                if last && done == len {
                    region.write_last(addr, length, from, start)
                } else {
                    region.write(addr, length, from, start)
                }
            },
        )
    }
}

impl Default for Scatter {
    fn default() -> Self {
        Self::new()
    }
}

/// Calls `f` with each non-empty part (address, bytes, key) of `[offset, offset + len)` of
/// the message that `sges` describes; `Refused` when the list is shorter than that.
fn each_part(
    sges: impl Iterator<Item = Sge>,
    offset: u64,
    len: u64,
    mut f: impl FnMut(u64, u32, u32) -> Result<(), Refused>,
) -> Result<(), Refused> {
    let mut skip = offset;
    let mut left = len;
    for sge in sges {
        if left == 0 {
            break;
        }
        let length = u64::from(sge.length);
        if skip >= length {
            skip -= length;
            continue;
        }
        let n = (length - skip).min(left);
        let addr = sge.addr.checked_add(skip).ok_or(Refused)?;
        f(addr, n as u32, sge.lkey)?;
        left -= n;
        skip = 0;
    }
    if left == 0 {
        Ok(())
    } else {
        Err(Refused)
    }
}

/// Whether every piece of `sges` may be used by `pd` with the rights `need`.
pub fn check_list(
    table: &Table,
    pd: u64,
    need: u32,
    sges: impl Iterator<Item = Sge>,
) -> Result<(), Refused> {
    for sge in sges.filter(|s| s.length != 0) {
        let region = table.get(sge.lkey).ok_or(Refused)?;
        region.check(pd, need, sge.addr, u64::from(sge.length))?;
    }
    Ok(())
}

/// Puts `[offset, offset + len)` of the message that `sges` describes into `out`, by
/// reference. Every piece must belong to `pd`.
pub fn gather(
    regions: &mut Recent<'_>,
    pd: u64,
    sges: impl Iterator<Item = Sge>,
    offset: u64,
    len: u64,
    out: &mut Frags,
) -> Result<(), Refused> {
    out.clear();
    each_part(sges, offset, len, |addr, length, lkey| {
        let region = regions.get(lkey).ok_or(Refused)?;
        region.check(pd, 0, addr, u64::from(length))?;
        region.gather(addr, u64::from(length), out)
    })
}
