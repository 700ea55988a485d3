// SPDX-License-Identifier: GPL-2.0

//! Protection domains: a number that regions and QPs share. None is refused: numbers have 64 bits,
//! memory is the limit.

#![forbid(unsafe_code)]

/// A protection domain.
pub struct Pd(u64);

impl Pd {
    /// The domain with this number, which the device has not used before.
    pub fn new(number: u64) -> Self {
        Self(number)
    }

    /// Its number.
    pub fn number(&self) -> u64 {
        self.0
    }
}
