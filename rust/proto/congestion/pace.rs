// SPDX-License-Identifier: GPL-2.0

//! Pacing: no more than a burst at once, the rest at the connection's rate.

#![forbid(unsafe_code)]

use crate::proto::api::Time;

/// Bytes that may go at once: what the rate carries in this time (ns), within limits. Many
/// senders with small shares must not burst together.
const BURST_TIME: u64 = 100_000;
const BURST_MIN: u64 = 16 << 10;
const BURST_MAX: u64 = 64 << 10;

/// A bucket that fills with time. Without a rate it is never empty.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    /// Bytes per 2^20 ns; 0 is unlimited.
    rate: u64,
    /// The bucket was full at this time, or will be.
    full_at: Time,
}

impl Pace {
    pub(crate) const fn new() -> Self {
        Self {
            rate: 0,
            full_at: 0,
        }
    }

    /// Sets the rate in kbit/s; 0 is unlimited. What is missing in the bucket now fills at the
    /// new rate.
    pub(crate) fn set_kbit(&mut self, now: Time, kbit: u32) {
        // kbit/s × 125 bytes/s, times 2^20 / 1e9
        let rate = (u64::from(kbit).saturating_mul(125) << 20) / 1_000_000_000;
        let missing = self.full_at.saturating_sub(now).saturating_mul(self.rate);
        if let Some(time) = missing.checked_div(rate) {
            self.full_at = now.saturating_add(time);
        }
        self.rate = rate;
    }

    /// When the next packet may go.
    pub(crate) fn next(&self) -> Time {
        let carried = self.rate.saturating_mul(BURST_TIME) >> 20;
        let burst = carried.clamp(BURST_MIN, BURST_MAX);
        match (burst << 20).checked_div(self.rate) {
            Some(time) => self.full_at.saturating_sub(time),
            None => 0,
        }
    }

    /// `bytes` go at `now`.
    pub(crate) fn spend(&mut self, now: Time, bytes: u32) {
        if let Some(time) = (u64::from(bytes) << 20).checked_div(self.rate) {
            self.full_at = self.full_at.max(now).saturating_add(time);
        }
    }
}
