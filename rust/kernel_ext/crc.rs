// SPDX-License-Identifier: GPL-2.0

//! CRC32C: the kernel's, or a table method that takes 16 bytes a step, whichever
//! [`choose`] finds faster on this machine. The kernel's own fallback takes one byte a step
//! (five to seven times as slow as the tables), and a processor that is emulated may do so
//! for the instructions too.
//!
//! C header: `include/linux/crc32.h`.

use super::{skb::SkbReader, timer};
use crate::bindings;
use core::{
    hint::black_box,
    sync::atomic::{AtomicBool, Ordering},
};

/// The kernel's is the faster one.
static BY_KERNEL: AtomicBool = AtomicBool::new(false);

/// Finds the faster method for packets of the usual size; takes below a millisecond.
/// Process context; until it has run, the tables are used.
pub fn choose() {
    const TRIALS: usize = 8;
    static SAMPLE: [u8; 4096] = [0x5a; 4096];
    let time = |by_kernel| {
        let mut best = u64::MAX;
        // The shortest is the one that nothing interrupted.
        for _ in 0..TRIALS {
            let begin = timer::now();
            let mut crc = Crc32c {
                state: !0,
                by_kernel,
            };
            crc.update(black_box(&SAMPLE));
            black_box(crc.finish());
            best = best.min(timer::now().saturating_sub(begin));
        }
        best
    };
    BY_KERNEL.store(time(true) <= time(false), Ordering::Relaxed);
}

/// The polynomial of Castagnoli, bits reversed.
const POLYNOMIAL: u32 = 0x82f6_3b78;

/// `TABLES[n][b]`: what byte `b` adds to the CRC when `n` bytes follow it.
static TABLES: [[u32; 256]; 16] = tables();

const fn tables() -> [[u32; 256]; 16] {
    let mut tables = [[0u32; 256]; 16];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 1 != 0 {
                crc >> 1 ^ POLYNOMIAL
            } else {
                crc >> 1
            };
            bit += 1;
        }
        tables[0][byte] = crc;
        byte += 1;
    }
    let mut n = 1;
    while n < 16 {
        let mut byte = 0;
        while byte < 256 {
            let before = tables[n - 1][byte];
            tables[n][byte] = before >> 8 ^ tables[0][(before & 0xff) as usize];
            byte += 1;
        }
        n += 1;
    }
    tables
}

/// A CRC32C under way.
#[derive(Clone, Copy)]
pub struct Crc32c {
    state: u32,
    by_kernel: bool,
}

impl Crc32c {
    /// The CRC of nothing yet.
    pub fn begin() -> Self {
        Self {
            state: !0,
            by_kernel: BY_KERNEL.load(Ordering::Relaxed),
        }
    }

    /// Appends bytes.
    pub fn update(&mut self, data: &[u8]) {
        self.state = if self.by_kernel {
            // SAFETY: `data` is valid for its length.
            unsafe { bindings::crc32c(self.state, data.as_ptr().cast(), data.len()) }
        } else {
            by_table(self.state, data)
        };
    }

    /// Appends the bytes of a packet from `at` on; `false` when it ends before.
    pub fn update_skb(&mut self, skb: SkbReader<'_>, at: u32) -> bool {
        let Some(len) = skb.bytes().checked_sub(at) else {
            return false;
        };
        if self.by_kernel {
            let state = self.state;
            // SAFETY: The range lies within the packet, which lives; lengths of packets fit
            // an `int`.
            let state = unsafe { bindings::skb_crc32c(skb.as_ptr(), at as i32, len as i32, state) };
            self.state = state;
            return true;
        }
        skb.for_each_piece(at, |piece| self.state = by_table(self.state, piece));
        true
    }

    /// The CRC.
    pub fn finish(self) -> u32 {
        !self.state
    }
}

/// The entry of table `n` for the lowest byte of `word` behind `shift` bits.
#[inline(always)]
fn entry(n: usize, word: u64, shift: u32) -> u32 {
    match TABLES
        .get(n)
        .and_then(|t| t.get((word >> shift) as u8 as usize))
    {
        Some(e) => *e,
        None => 0,
    }
}

fn by_table(mut crc: u32, data: &[u8]) -> u32 {
    let mut steps = data.chunks_exact(16);
    for step in &mut steps {
        let (Some(low), Some(high)) = (step.first_chunk::<8>(), step.last_chunk::<8>()) else {
            break;
        };
        let low = u64::from_le_bytes(*low) ^ u64::from(crc);
        let high = u64::from_le_bytes(*high);
        crc = entry(15, low, 0)
            ^ entry(14, low, 8)
            ^ entry(13, low, 16)
            ^ entry(12, low, 24)
            ^ entry(11, low, 32)
            ^ entry(10, low, 40)
            ^ entry(9, low, 48)
            ^ entry(8, low, 56)
            ^ entry(7, high, 0)
            ^ entry(6, high, 8)
            ^ entry(5, high, 16)
            ^ entry(4, high, 24)
            ^ entry(3, high, 32)
            ^ entry(2, high, 40)
            ^ entry(1, high, 48)
            ^ entry(0, high, 56);
    }
    for byte in steps.remainder() {
        crc = crc >> 8 ^ entry(0, u64::from(crc as u8 ^ byte), 0);
    }
    crc
}
