// SPDX-License-Identifier: GPL-2.0

//! Numbers of a stream that this end receives. "Received" refuses duplicates, "in place"
//! orders and acknowledges; a packet is received when it arrives and in place when its
//! bytes are where they belong. While nothing is missing both are one counter
//! each; the bitmaps only hold what is above a gap.

#![forbid(unsafe_code)]

use super::{before, bitmap::Bitmap};
use crate::os::AllocError;

/// What a sequence number is to the receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arrival {
    /// Not seen before.
    New,
    /// Seen before, or so old that it must have been.
    Duplicate,
    /// In no window of this stream.
    Outside,
}

pub(super) struct Inbound {
    window: u32,
    /// Everything below was received.
    next: u32,
    /// Nothing at or above was received.
    high: u32,
    /// Everything below is in place.
    done: u32,
    /// Nothing at or above is in place.
    placed_high: u32,
    received: Bitmap,
    placed: Bitmap,
    /// Packets above a gap that end a message and are in place.
    lasts: Bitmap,
}

impl Inbound {
    /// Bytes of its bitmaps.
    pub(super) const MEMORY: usize = 3 * super::WINDOW_MAX as usize / 8;

    pub(super) fn new() -> Result<Self, AllocError> {
        Ok(Self {
            window: super::WINDOW_MAX,
            next: 0,
            high: 0,
            done: 0,
            placed_high: 0,
            received: Bitmap::new()?,
            placed: Bitmap::new()?,
            lasts: Bitmap::new()?,
        })
    }

    /// Starts at `psn` with nothing received.
    pub(super) fn start(&mut self, psn: u32, window: u32) {
        self.window = window.clamp(1, super::WINDOW_MAX);
        self.next = psn;
        self.high = psn;
        self.done = psn;
        self.placed_high = psn;
        self.received.reset();
        self.placed.reset();
        self.lasts.reset();
    }

    pub(super) fn done(&self) -> u32 {
        self.done
    }

    pub(super) fn arrival(&self, sseq: u32) -> Arrival {
        let above = sseq.wrapping_sub(self.done);
        if above < self.window {
            if before(sseq, self.next) || (before(sseq, self.high) && self.received.get(sseq)) {
                Arrival::Duplicate
            } else {
                Arrival::New
            }
        } else if self.done.wrapping_sub(sseq) <= self.window {
            Arrival::Duplicate
        } else {
            Arrival::Outside
        }
    }

    /// Notes the arrival of a packet that is [`Arrival::New`].
    pub(super) fn receive(&mut self, sseq: u32) {
        let after = sseq.wrapping_add(1);
        if sseq != self.next {
            self.received.set(sseq);
            if before(self.high, after) {
                self.high = after;
            }
            return;
        }
        self.next = after;
        if before(self.high, after) {
            // Nothing is above: the way of a stream without gaps.
            self.high = after;
            return;
        }
        while self.next != self.high && self.received.take(self.next) {
            self.next = self.next.wrapping_add(1);
        }
    }

    /// Gives up a packet that is received and not in place, as if it had not arrived.
    pub(super) fn unreceive(&mut self, sseq: u32) {
        if !before(sseq, self.next) {
            self.received.take(sseq);
            return;
        }
        let mut above = sseq.wrapping_add(1);
        while above != self.next {
            self.received.set(above);
            above = above.wrapping_add(1);
        }
        self.next = sseq;
    }

    /// Notes that a received packet is in place when it is the lowest that was not, and
    /// none above is.
    pub(super) fn place_in_order(&mut self, sseq: u32) -> bool {
        if sseq != self.done || self.placed_high != self.done || sseq == self.next {
            return false;
        }
        self.done = sseq.wrapping_add(1);
        self.placed_high = self.done;
        true
    }

    /// Notes that a received packet is in place. False when it was already.
    pub(super) fn place(&mut self, sseq: u32, last: bool) -> bool {
        if before(sseq, self.done)
            || !before(sseq, self.high)
            || (before(sseq, self.placed_high) && self.placed.get(sseq))
        {
            return false;
        }
        if !before(sseq, self.next) && !self.received.get(sseq) {
            // It was given up while it was copied.
            self.receive(sseq);
        }
        self.placed.set(sseq);
        if last {
            self.lasts.set(sseq);
        }
        let after = sseq.wrapping_add(1);
        if before(self.placed_high, after) {
            self.placed_high = after;
        }
        true
    }

    /// Whether packet [`Inbound::done`] is in place, which only lasts while somebody keeps
    /// the cursor from passing it.
    pub(super) fn ready(&self) -> bool {
        self.done != self.placed_high && self.placed.get(self.done)
    }

    /// Moves over one packet that is in place and says whether it ends a message.
    pub(super) fn step(&mut self) -> Option<bool> {
        if self.done == self.placed_high || !self.placed.take(self.done) {
            return None;
        }
        let last = self.lasts.take(self.done);
        self.done = self.done.wrapping_add(1);
        Some(last)
    }
}
