// SPDX-License-Identifier: GPL-2.0

//! The rate at which a path delivers.

#![forbid(unsafe_code)]

use super::ratio;
use crate::proto::api::Time;

/// Packets that a measurement takes at least.
const PACKETS: u32 = 8;

/// Measures over a round trip or more, one measurement after the other.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Delivery {
    /// Delivered bytes per 2^20 ns, smoothed towards its peaks.
    rate: u64,
    /// The measurement that is going on.
    since: Time,
    bytes: u64,
    packets: u32,
}

impl Delivery {
    /// Bytes per second.
    pub(super) fn rate(&self) -> u64 {
        (self.rate.saturating_mul(1_000_000_000)) >> 20
    }

    /// Bytes in `time`.
    pub(super) fn bdp(&self, time: Time) -> u32 {
        u32::try_from((self.rate.saturating_mul(time)) >> 20).unwrap_or(u32::MAX)
    }

    /// `bytes` in `packets` packets were acknowledged.
    pub(super) fn acked(&mut self, bytes: u32, packets: u32) {
        self.bytes = self.bytes.saturating_add(u64::from(bytes));
        self.packets = self.packets.saturating_add(packets);
    }

    /// Ends the measurement when it has lasted for a round trip, or for longer when fewer than
    /// [`PACKETS`] packets came in: single packets at the ends of a short time would make the
    /// rate too high.
    pub(super) fn measure(&mut self, now: Time, rtt: Time) {
        let elapsed = now.saturating_sub(self.since);
        if elapsed < rtt || (self.packets < PACKETS && elapsed < rtt.saturating_mul(16)) {
            return;
        }
        let rate = ratio(self.bytes << 20, elapsed);
        // Silence in between says nothing.
        if elapsed < rtt.saturating_mul(32) {
            self.rate = if rate >= self.rate {
                rate
            } else {
                self.rate.saturating_sub(self.rate.saturating_sub(rate) / 8)
            };
        }
        self.since = now;
        self.bytes = 0;
        self.packets = 0;
    }
}
