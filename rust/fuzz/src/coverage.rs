// SPDX-License-Identifier: GPL-2.0

//! Which edges of the instrumented code were passed, and how often.
//!
//! Unsafe because the compiler's constructors call two functions here, with the addresses of the
//! counters, which the instrumented code changes.

#![allow(unsafe_code)]

use std::slice;
use std::sync::Mutex;

/// Counter arrays of the instrumented crates: first byte and length.
static REGIONS: Mutex<Vec<(usize, usize)>> = Mutex::new(Vec::new());

/// Called before `main` for each instrumented crate, with its counters.
///
/// # Safety
///
/// `start` to `stop` are counters that live as long as the program (the compiler's contract).
#[no_mangle]
pub unsafe extern "C" fn __sanitizer_cov_8bit_counters_init(start: *mut u8, stop: *mut u8) {
    let len = (stop as usize).saturating_sub(start as usize);
    let mut regions = REGIONS.lock().expect("no panic while it is held");
    if len != 0 && !regions.contains(&(start as usize, len)) {
        regions.push((start as usize, len));
    }
}

/// Number of edges that are counted; 0 when nothing was instrumented.
pub fn edges() -> usize {
    let regions = REGIONS.lock().expect("no panic while it is held");
    regions.iter().map(|r| r.1).sum()
}

/// Hands each edge that was passed since the last call to `f`, with a class of how often
/// (0 to 7), and starts anew. The code that is counted must not run meanwhile.
pub fn take(mut f: impl FnMut(usize, u8)) {
    let regions = REGIONS.lock().expect("no panic while it is held");
    let mut base = 0;
    for &(start, len) in regions.iter() {
        // SAFETY: The compiler gave this region, which lives as long as the program. Only
        // instrumented code writes to it, and none runs now.
        let counters = unsafe { slice::from_raw_parts_mut(start as *mut u8, len) };
        let mut count = |at: usize, n: &mut u8| {
            if *n != 0 {
                f(base + at, class(*n));
                *n = 0;
            }
        };
        let mut words = counters.chunks_exact_mut(8);
        let mut at = 0;
        for word in words.by_ref() {
            // Most are.
            if *word != [0; 8] {
                for (j, n) in word.iter_mut().enumerate() {
                    count(at + j, n);
                }
            }
            at += 8;
        }
        for (j, n) in words.into_remainder().iter_mut().enumerate() {
            count(at + j, n);
        }
        base += len;
    }
}

fn class(n: u8) -> u8 {
    match n {
        0 | 1 => 0,
        2 => 1,
        3 => 2,
        4..=7 => 3,
        8..=15 => 4,
        16..=31 => 5,
        32..=127 => 6,
        _ => 7,
    }
}
