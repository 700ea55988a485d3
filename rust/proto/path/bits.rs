// SPDX-License-Identifier: GPL-2.0

//! Sets of path sequences: 256 bits, so that loss detection and acknowledgement work on
//! four words and not on single packets.

#![forbid(unsafe_code)]

/// A set of numbers 0..256. For outstanding packets, number `sequence % 256`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Bits(pub(crate) [u64; 4]);

impl Bits {
    pub(crate) const EMPTY: Self = Self([0; 4]);

    /// The `n` numbers from `start` on, modulo 256.
    #[inline]
    pub(crate) fn range(start: u32, n: u32) -> Self {
        if n == 0 {
            return Self::EMPTY;
        }
        if n <= 64 {
            // One word, which may reach into the next one.
            let ones = u64::MAX >> 64u32.wrapping_sub(n);
            let (first, shift) = (((start >> 6) & 3) as usize, start & 63);
            let mut out = [0u64; 4];
            if let Some(w) = out.get_mut(first) {
                *w = ones << shift;
            }
            if shift != 0 {
                if let Some(w) = out.get_mut(first.wrapping_add(1) & 3) {
                    *w = ones >> 64u32.wrapping_sub(shift);
                }
            }
            return Self(out);
        }
        let mut ones = [0u64; 4];
        let mut left = n.min(256);
        for w in &mut ones {
            let here = left.min(64);
            if here != 0 {
                *w = u64::MAX >> 64u32.wrapping_sub(here);
            }
            left = left.wrapping_sub(here);
        }
        Self(ones).rotated(start)
    }

    /// Every number moved up by `k`, modulo 256.
    pub(crate) fn rotated(self, k: u32) -> Self {
        let words = ((k >> 6) & 3) as usize;
        let shift = k & 63;
        let mut out = [0u64; 4];
        for (i, w) in self.0.iter().enumerate() {
            let at = i.wrapping_add(words) & 3;
            if let Some(o) = out.get_mut(at) {
                *o |= w << shift;
            }
            if shift != 0 {
                if let Some(o) = out.get_mut(at.wrapping_add(1) & 3) {
                    *o |= w >> 64u32.wrapping_sub(shift);
                }
            }
        }
        Self(out)
    }

    #[inline]
    pub(crate) fn set(&mut self, n: u32) {
        if let Some(w) = self.0.get_mut(((n >> 6) & 3) as usize) {
            *w |= 1 << (n & 63);
        }
    }

    #[inline]
    pub(crate) fn clear(&mut self, n: u32) {
        if let Some(w) = self.0.get_mut(((n >> 6) & 3) as usize) {
            *w &= !(1 << (n & 63));
        }
    }

    #[inline]
    pub(crate) fn has(&self, n: u32) -> bool {
        self.0
            .get(((n >> 6) & 3) as usize)
            .is_some_and(|w| w & (1 << (n & 63)) != 0)
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.0.iter().all(|w| *w == 0)
    }

    pub(crate) fn len(&self) -> u32 {
        self.0.iter().map(|w| w.count_ones()).sum()
    }

    #[inline]
    pub(crate) fn and(self, o: Self) -> Self {
        self.zip(o, |a, b| a & b)
    }

    #[inline]
    pub(crate) fn or(self, o: Self) -> Self {
        self.zip(o, |a, b| a | b)
    }

    /// What is in `self` and not in `o`.
    #[inline]
    pub(crate) fn without(self, o: Self) -> Self {
        self.zip(o, |a, b| a & !b)
    }

    #[inline]
    fn zip(self, o: Self, f: impl Fn(u64, u64) -> u64) -> Self {
        let mut out = self.0;
        for (a, b) in out.iter_mut().zip(o.0.iter()) {
            *a = f(*a, *b);
        }
        Self(out)
    }

    /// Takes the first number at or after `start`, going round.
    pub(crate) fn first_from(&self, start: u32) -> Option<u32> {
        let first = ((start >> 6) & 3) as usize;
        let below = (1u64 << (start & 63)).wrapping_sub(1);
        for i in 0..5usize {
            let at = first.wrapping_add(i) & 3;
            let w = *self.0.get(at)?;
            let w = match i {
                0 => w & !below,
                4 => w & below,
                _ => w,
            };
            if w != 0 {
                return Some((at as u32) << 6 | w.trailing_zeros());
            }
        }
        None
    }

    /// Removes and gives the lowest number.
    #[inline]
    pub(crate) fn take_lowest(&mut self) -> Option<u32> {
        for (i, w) in self.0.iter_mut().enumerate() {
            if *w != 0 {
                let bit = w.trailing_zeros();
                *w &= w.wrapping_sub(1);
                return Some((i as u32) << 6 | bit);
            }
        }
        None
    }

    /// Number of the greatest element, plus one; 0 when empty.
    #[inline]
    pub(crate) fn end(&self) -> u32 {
        for (i, w) in self.0.iter().enumerate().rev() {
            if *w != 0 {
                return ((i as u32) << 6).wrapping_add(64u32.wrapping_sub(w.leading_zeros()));
            }
        }
        0
    }

    /// Everything moved down by `n`; numbers below `n` fall out.
    pub(crate) fn shifted_down(self, n: u32) -> Self {
        if n >= 256 {
            return Self::EMPTY;
        }
        // What was below `n` comes round to the top: cut it off.
        self.rotated(256u32.wrapping_sub(n) & 255)
            .and(Self::range(0, 256u32.wrapping_sub(n)))
    }
}

#[cfg(any(test, CONFIG_KUNIT = "y"))]
pub(crate) mod tests {
    use super::*;

    /// The same, bit by bit.
    type Set = [bool; 256];

    fn set_of(b: &Bits) -> Set {
        core::array::from_fn(|i| b.has(i as u32))
    }

    fn moved(from: &Set, to: impl Fn(usize) -> Option<usize>) -> Set {
        let mut set = [false; 256];
        for i in (0..256).filter(|i| from[*i]) {
            if let Some(at) = to(i) {
                set[at] = true;
            }
        }
        set
    }

    #[cfg_attr(test, test)]
    pub(crate) fn against_sets() {
        let mut x = 0x1234_5678_9abc_def1u64;
        let mut next = move || {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            x
        };
        for _ in 0..500 {
            let b = Bits([next() & next(), next() & next(), next() & next(), next()]);
            let s = set_of(&b);
            let count = |s: &Set| s.iter().filter(|x| **x).count();
            let k = (next() % 300) as usize;
            let rotated = moved(&s, |i| Some((i + k) % 256));
            assert_eq!(set_of(&b.rotated(k as u32)), rotated);
            let shifted = moved(&s, |i| i.checked_sub(k));
            assert_eq!(set_of(&b.shifted_down(k as u32)), shifted);
            let n = (next() % 257) as usize;
            let range = moved(&[true; 256], |i| (i < n).then_some((i + k) % 256));
            assert_eq!(set_of(&Bits::range(k as u32, n as u32)), range);
            let at = k % 256;
            let expect = (0..256).map(|i| (at + i) % 256).find(|i| s[*i]);
            assert_eq!(b.first_from(at as u32), expect.map(|i| i as u32));
            let end = s.iter().rposition(|x| *x).map_or(0, |last| last + 1);
            assert_eq!(b.end() as usize, end);
            assert_eq!(b.len() as usize, count(&s));
            let mut c = b;
            let lowest = s.iter().position(|x| *x);
            assert_eq!(c.take_lowest(), lowest.map(|i| i as u32));
            assert_eq!(c.len() as usize, count(&s).saturating_sub(1));
        }
    }
}
