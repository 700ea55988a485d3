// SPDX-License-Identifier: GPL-2.0

//! The queue of events: a radix heap.
//!
//! Time never goes back, so an event needs to be compared only with the time of the last
//! one: the highest bit in which they differ names its bucket. An event moves down a few
//! buckets before it is due; nothing is allocated once the buckets have grown. Events of one
//! time come out in the order in which they went in.

#![forbid(unsafe_code)]

const BUCKETS: usize = 65;

/// Events by time.
pub(crate) struct Queue<T> {
    buckets: Vec<Vec<(u64, T)>>,
    /// Buckets that are not empty, but for the first.
    filled: u64,
    /// How much of the first bucket, whose events are all due at `last`, was taken.
    head: usize,
    last: u64,
}

impl<T: Copy> Queue<T> {
    pub(crate) fn new() -> Self {
        Self {
            buckets: (0..BUCKETS).map(|_| Vec::with_capacity(64)).collect(),
            filled: 0,
            head: 0,
            last: 0,
        }
    }

    pub(crate) fn push(&mut self, at: u64, item: T) {
        let at = at.max(self.last);
        let b = 64 - (at ^ self.last).leading_zeros() as usize;
        if b != 0 {
            self.filled |= 1 << (b - 1);
        }
        self.buckets[b].push((at, item));
    }

    /// When the next event is due.
    pub(crate) fn next_time(&mut self) -> Option<u64> {
        if self.head == self.buckets[0].len() {
            self.buckets[0].clear();
            self.head = 0;
            if self.filled == 0 {
                return None;
            }
            let b = self.filled.trailing_zeros() as usize + 1;
            self.filled &= self.filled - 1;
            let mut bucket = std::mem::take(&mut self.buckets[b]);
            self.last = bucket.iter().map(|e| e.0).min()?;
            for (at, item) in bucket.drain(..) {
                self.push(at, item);
            }
            self.buckets[b] = bucket;
        }
        Some(self.last)
    }

    pub(crate) fn pop(&mut self) -> Option<(u64, T)> {
        self.next_time()?;
        let item = self.buckets[0].get(self.head).copied();
        self.head += 1;
        item
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Rng;

    #[test]
    fn comes_out_in_order() {
        let mut rng = Rng::new(1);
        let mut q = Queue::new();
        let mut now = 0;
        let (mut order, mut left) = (0u32, 0);
        let mut last = (0, 0);
        for _ in 0..100_000 {
            if left == 0 || rng.below(2) == 0 {
                let span = 1 << rng.below(40);
                q.push(now + rng.below(span), order);
                order += 1;
                left += 1;
            } else {
                let (at, item) = q.pop().expect("there is one");
                assert!(at > last.0 || (at == last.0 && item > last.1) || last == (0, 0));
                last = (at, item);
                now = at;
                left -= 1;
            }
        }
    }
}
