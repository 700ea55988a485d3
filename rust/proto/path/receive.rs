// SPDX-License-Identifier: GPL-2.0

//! The receiving half of a path: which numbers of its epoch have arrived.

#![forbid(unsafe_code)]

use super::bits::Bits;
use super::send::STAMP_AGE;
use crate::proto::api::Time;
use crate::proto::wire::{Drop, PathBlock};

/// Numbers above the cumulative one that can be told.
const WINDOW: u32 = 256;

/// Epochs that a sender can have opened unseen. It opens one when it leaves a path, and the
/// next one only after that one has carried something.
const EPOCHS_AHEAD: u16 = 64;

/// What an arrival was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arrival {
    /// New; `gap` when numbers before it are missing that were not known to be missing.
    New { gap: bool },
    /// It had arrived before.
    Duplicate,
}

/// State for what the peer sends on a path.
#[derive(Debug, Default)]
pub(crate) struct ReceiveHalf {
    epoch: u16,
    /// Every number below has arrived.
    cumulative: u32,
    /// Bit i: `cumulative + 1 + i` has arrived.
    bits: Bits,
    /// Timestamp and arrival of the newest packet.
    echo: u32,
    echo_at: Time,
    received: u16,
    ce: u16,
    duplicates: u16,
}

impl ReceiveHalf {
    /// Starts anew in `epoch`.
    pub(crate) fn reset(&mut self, epoch: u16) {
        *self = Self {
            epoch,
            ..Self::default()
        };
    }

    /// Makes sure that `epoch` is the current one or opens it.
    pub(crate) fn enter(&mut self, epoch: u16) -> Result<(), Drop> {
        let ahead = epoch.wrapping_sub(self.epoch);
        if ahead == 0 {
            Ok(())
        } else if ahead <= EPOCHS_AHEAD {
            // The sender has moved what was outstanding in the old epoch before it opened
            // this one, so nothing of it is of use any more.
            self.reset(epoch);
            Ok(())
        } else {
            Err(Drop::Epoch)
        }
    }

    /// A packet with `sequence` of `epoch` arrived.
    pub(crate) fn arrive(
        &mut self,
        now: Time,
        epoch: u16,
        sequence: u32,
        timestamp: u32,
        ce: bool,
    ) -> Result<Arrival, Drop> {
        self.enter(epoch)?;
        let ahead = sequence.wrapping_sub(self.cumulative);
        let behind = ahead >= 1 << 31;
        if !behind && ahead >= WINDOW {
            return Err(Drop::PathSequence);
        }
        self.seen(now, timestamp, self.received == 0);
        self.received = self.received.wrapping_add(1);
        if ce {
            self.ce = self.ce.wrapping_add(1);
        }
        if behind || (ahead > 0 && self.bits.has(ahead.wrapping_sub(1))) {
            self.duplicates = self.duplicates.wrapping_add(1);
            return Ok(Arrival::Duplicate);
        }
        if ahead == 0 {
            // Bit 0 stands for the number after this one.
            let run = (!self.bits.0[0]).trailing_zeros();
            let run = if run == 64 { self.run() } else { run };
            let step = run.wrapping_add(1);
            self.cumulative = self.cumulative.wrapping_add(step);
            if !self.bits.is_empty() {
                self.bits = self.bits.shifted_down(step);
            }
            return Ok(Arrival::New { gap: false });
        }
        let end = self.bits.end();
        self.bits.set(ahead.wrapping_sub(1));
        Ok(Arrival::New {
            gap: ahead > end.wrapping_add(1) || (end == 0 && ahead > 0),
        })
    }

    /// Length of the run of set bits from bit 0 on.
    fn run(&self) -> u32 {
        let mut n = 0u32;
        for w in &self.bits.0 {
            let ones = (!w).trailing_zeros();
            n = n.wrapping_add(ones);
            if ones < 64 {
                break;
            }
        }
        n
    }

    /// Notes the newest timestamp; `first` takes it whatever it is.
    fn seen(&mut self, now: Time, timestamp: u32, first: bool) {
        if first
            || now.saturating_sub(self.echo_at) > STAMP_AGE
            || (timestamp.wrapping_sub(self.echo) as i32) > 0
        {
            self.echo = timestamp;
            self.echo_at = now;
        }
    }

    /// Whether every number below `next`, and any, has arrived.
    pub(crate) fn has_all(&self, next: u32) -> bool {
        self.cumulative == next && self.received != 0
    }

    /// What the peer is told.
    pub(crate) fn block(&self, now: Time, path: u8) -> PathBlock {
        PathBlock {
            path,
            epoch: self.epoch,
            cumulative: self.cumulative,
            bits: self.bits.0,
            echo: self.echo,
            delay: u16::try_from(now.saturating_sub(self.echo_at) >> 10).unwrap_or(u16::MAX),
            received: self.received,
            ce: self.ce,
            duplicates: self.duplicates,
        }
    }
}

#[cfg(any(test, CONFIG_KUNIT = "y"))]
pub(crate) mod tests {
    use super::*;

    #[cfg_attr(test, test)]
    pub(crate) fn gaps_and_duplicates() {
        let mut r = ReceiveHalf::default();
        let at = |r: &mut ReceiveHalf, s| r.arrive(0, 0, s, s, false);
        assert_eq!(at(&mut r, 0), Ok(Arrival::New { gap: false }));
        assert_eq!(at(&mut r, 2), Ok(Arrival::New { gap: true }));
        assert_eq!(at(&mut r, 3), Ok(Arrival::New { gap: false }));
        assert_eq!(at(&mut r, 5), Ok(Arrival::New { gap: true }));
        assert_eq!(at(&mut r, 2), Ok(Arrival::Duplicate));
        assert_eq!(at(&mut r, 0), Ok(Arrival::Duplicate));
        let b = r.block(0, 7);
        assert_eq!((b.cumulative, b.bits[0]), (1, 0b1011 & !1 | 0b1));
        assert_eq!(at(&mut r, 1), Ok(Arrival::New { gap: false }));
        assert_eq!(r.block(0, 7).cumulative, 4);
        assert_eq!(r.block(0, 7).bits[0], 1);
        assert_eq!(at(&mut r, 4 + 256), Err(Drop::PathSequence));
        assert_eq!(at(&mut r, 4 + 255), Ok(Arrival::New { gap: true }));
        for s in (4..259).rev() {
            let _ = at(&mut r, s);
        }
        assert_eq!(r.block(0, 7).cumulative, 260);
        assert_eq!(r.block(0, 7).bits, [0; 4]);
    }

    #[cfg_attr(test, test)]
    pub(crate) fn epochs() {
        let mut r = ReceiveHalf::default();
        assert!(r.arrive(0, 0xffff, 0, 0, false).is_err());
        assert!(r.arrive(0, 65, 0, 0, false).is_err());
        assert!(r.arrive(0, 3, 1, 0, false).is_ok());
        assert_eq!(r.arrive(0, 2, 1, 0, false), Err(Drop::Epoch));
        assert_eq!(r.block(0, 0).epoch, 3);
    }
}
