// SPDX-License-Identifier: GPL-2.0
//! A small random source whose whole state is its seed, and the byte patterns made from it.

#![forbid(unsafe_code)]

/// splitmix64: enough for test data, equal on both ends for equal seeds.
#[derive(Clone, Debug)]
pub struct Rng(u64);

/// Mixes `x` into 64 bits without visible structure.
pub fn mix(x: u64) -> u64 {
    let mut z = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Rng {
    /// A source for `seed`.
    pub fn new(seed: u64) -> Self {
        Rng(mix(seed))
    }

    /// A source of its own for each list of words: `Rng::of(&[seed, batch, qp])`.
    pub fn of(words: &[u64]) -> Self {
        Rng(words.iter().fold(0x5851_f42d_4c95_7f2d, |state, word| mix(state ^ mix(*word))))
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number below `bound`; 0 for bound 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        if bound == 0 {
            return 0;
        }
        self.bits() % bound
    }

    /// A number in `low..=high`.
    pub fn range(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high.saturating_sub(low).saturating_add(1))
    }

    /// True once in `n` calls on average.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// One of `items`, which must not be empty.
    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        let index = usize::try_from(self.below(items.len() as u64)).unwrap_or(0);
        &items[index]
    }
}

/// The 8 bytes at offset `8 * index` of the pattern `seed`. Every word of a pattern differs
/// from its neighbours, so data placed at the wrong offset is seen.
pub fn pattern_word(seed: u64, index: u64) -> u64 {
    let x = seed ^ index.wrapping_mul(0xd6e8_feb8_6659_fd93);
    (x ^ (x >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9)
}

/// Fills `out` with the bytes of pattern `seed` from pattern offset 0.
pub fn fill(out: &mut [u8], seed: u64) {
    let mut index = 0;
    let mut chunks = out.chunks_exact_mut(8);
    for chunk in &mut chunks {
        chunk.copy_from_slice(&pattern_word(seed, index).to_le_bytes());
        index += 1;
    }
    let rest = chunks.into_remainder();
    let word = pattern_word(seed, index).to_le_bytes();
    let length = rest.len();
    rest.copy_from_slice(&word[..length]);
}

/// A place where bytes are not what they must be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// Offset of the first wrong byte.
    pub offset: usize,
    /// What must be there.
    pub expected: u8,
    /// What is there.
    pub found: u8,
    /// How many bytes are wrong in all.
    pub wrong: usize,
    /// Offset of the last wrong byte.
    pub last: usize,
}

impl std::fmt::Display for Mismatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.wrong == 0 {
            return write!(f, "bytes were wrong at first sight and right a moment later");
        }
        write!(
            f,
            "{} wrong bytes in {:#x}..={:#x}, the first is {:#04x} instead of {:#04x}",
            self.wrong, self.offset, self.last, self.found, self.expected
        )
    }
}

/// Compares `found` with `expected`; both have the same length.
pub fn compare(found: &[u8], expected: &[u8]) -> Result<(), Mismatch> {
    if found == expected {
        return Ok(());
    }
    let mut result: Option<Mismatch> = None;
    for (offset, (f, e)) in found.iter().zip(expected).enumerate() {
        if f != e {
            let entry =
                result.get_or_insert(Mismatch { offset, expected: *e, found: *f, wrong: 0, last: offset });
            entry.wrong += 1;
            entry.last = offset;
        }
    }
    // Lengths differ and the common part is equal.
    Err(result.unwrap_or(Mismatch {
        offset: found.len().min(expected.len()),
        expected: 0,
        found: 0,
        wrong: found.len().abs_diff(expected.len()),
        last: found.len().max(expected.len()),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_seeds_equal_numbers() {
        let (mut a, mut b) = (Rng::of(&[1, 2]), Rng::of(&[1, 2]));
        assert!((0..100).all(|_| a.bits() == b.bits()));
        assert_ne!(Rng::of(&[1, 2]).bits(), Rng::of(&[2, 1]).bits());
    }

    #[test]
    fn compare_reports_extent() {
        let mut a = vec![0; 32];
        fill(&mut a, 7);
        let mut b = a.clone();
        assert_eq!(compare(&b, &a), Ok(()));
        b[3] ^= 1;
        b[9] ^= 1;
        let m = compare(&b, &a).unwrap_err();
        assert_eq!((m.offset, m.last, m.wrong), (3, 9, 2));
    }
}
