// SPDX-License-Identifier: GPL-2.0

//! One bit for each sequence of a window.

#![forbid(unsafe_code)]

use super::WINDOW_MAX;
use crate::os::{AllocError, Vec};

/// Bits of the sequences of a window of at most [`WINDOW_MAX`] packets.
pub(super) struct Bitmap {
    words: Vec<u64>,
}

const _: () = assert!(WINDOW_MAX.is_power_of_two() && WINDOW_MAX >= 64);

impl Bitmap {
    pub(super) fn new() -> Result<Self, AllocError> {
        Ok(Self {
            words: Vec::from_fn((WINDOW_MAX / 64) as usize, |_| 0)?,
        })
    }

    const fn place(sseq: u32) -> (usize, u64) {
        let bit = sseq & (WINDOW_MAX - 1);
        ((bit >> 6) as usize, 1 << (bit & 63))
    }

    pub(super) fn get(&self, sseq: u32) -> bool {
        let (word, bit) = Self::place(sseq);
        self.words.get(word).is_some_and(|w| w & bit != 0)
    }

    pub(super) fn set(&mut self, sseq: u32) {
        let (word, bit) = Self::place(sseq);
        if let Some(w) = self.words.get_mut(word) {
            *w |= bit;
        }
    }

    /// Clears a bit and returns what it was.
    pub(super) fn take(&mut self, sseq: u32) -> bool {
        let (word, bit) = Self::place(sseq);
        let Some(w) = self.words.get_mut(word) else {
            return false;
        };
        let was = *w & bit != 0;
        *w &= !bit;
        was
    }

    pub(super) fn reset(&mut self) {
        self.words.fill(0);
    }
}
