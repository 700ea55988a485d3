// SPDX-License-Identifier: GPL-2.0

//! Which earlier Write a Write must not overtake ("Overlap"): the targets of the last
//! Writes that may be unaccepted, exactly; those before them as one range.

#![forbid(unsafe_code)]

use super::before;
use crate::os::{AllocError, Vec};

/// Targets that are kept exactly.
const EXACT: usize = 64;

#[derive(Clone, Copy, Default)]
struct Range {
    start: u64,
    end: u64,
    /// Last stream sequence of the Write.
    last: u32,
}

impl Range {
    fn overlaps(&self, start: u64, end: u64) -> bool {
        self.start < end && start < self.end
    }
}

pub(super) struct Overlaps {
    ring: Vec<Range>,
    /// Index of the next one to be written.
    at: usize,
    len: usize,
    older: Option<Range>,
}

impl Overlaps {
    /// Bytes of its list.
    pub(super) const MEMORY: usize = EXACT * core::mem::size_of::<Range>();

    pub(super) fn new() -> Result<Self, AllocError> {
        Ok(Self {
            ring: Vec::from_fn(EXACT, |_| Range::default())?,
            at: 0,
            len: 0,
            older: None,
        })
    }

    pub(super) fn reset(&mut self) {
        self.at = 0;
        self.len = 0;
        self.older = None;
    }

    /// The last sequence of the newest Write that is not accepted (everything below `cum`
    /// is) and overlaps `[start, end)`. At most [`EXACT`] steps, one when each Write goes
    /// to the same buffer.
    pub(super) fn last_overlap(&self, cum: u32, start: u64, end: u64) -> Option<u32> {
        for back in 1..=self.len {
            let i = (self.at + EXACT - back) % EXACT;
            let r = self.ring.get(i)?;
            if before(r.last, cum) {
                return None;
            }
            if r.overlaps(start, end) {
                return Some(r.last);
            }
        }
        self.older
            .filter(|r| !before(r.last, cum) && r.overlaps(start, end))
            .map(|r| r.last)
    }

    /// Adds the Write to `[start, end)` whose last packet is `last`.
    pub(super) fn push(&mut self, cum: u32, start: u64, end: u64, last: u32) {
        if self.older.is_some_and(|r| before(r.last, cum)) {
            self.older = None;
        }
        let Some(slot) = self.ring.get_mut(self.at) else {
            return;
        };
        let old = core::mem::replace(slot, Range { start, end, last });
        self.at = (self.at + 1) % EXACT;
        if self.len < EXACT {
            self.len += 1;
        } else if !before(old.last, cum) {
            self.older = Some(match self.older {
                Some(r) => Range {
                    start: r.start.min(old.start),
                    end: r.end.max(old.end),
                    last: old.last,
                },
                None => old,
            });
        }
    }
}
