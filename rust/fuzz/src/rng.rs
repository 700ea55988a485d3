// SPDX-License-Identifier: GPL-2.0

//! A small generator of random numbers (xorshift64*).

#![forbid(unsafe_code)]

/// The generator.
pub struct Rng(u64);

impl Rng {
    /// Starts from a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// The next number.
    pub fn bits(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// One below `n`; 0 when `n` is.
    pub fn below(&mut self, n: usize) -> usize {
        ((self.bits() >> 32) as usize).checked_rem(n).unwrap_or(0)
    }
}
