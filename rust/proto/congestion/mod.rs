// SPDX-License-Identifier: GPL-2.0

//! Congestion control of the sender: a window per path and the sum of them for the
//! connection; and the receiver's part, the shares of its bandwidth.
//!
//! A mark (CE) trims the path that saw it, in proportion to how many of its packets were
//! marked, once per round trip. A loss trims only while the round trip shows a queue:
//! loss on an empty path says nothing about load. All numbers are integers.

#![forbid(unsafe_code)]

mod pace;
mod share;
#[cfg(any(test, CONFIG_KUNIT = "y"))]
pub(crate) mod tests;

pub(crate) use self::pace::Pace;
pub use self::share::{Shares, Ticket};

use crate::proto::api::Time;

/// Packets that all paths together may have in flight at first.
pub(crate) const INITIAL_PACKETS: u32 = 64;

/// What UDP, IPv4 and Ethernet (with preamble and gap) add to a packet on the line, in bytes:
/// rates are those of lines.
pub(crate) const LINE_OVERHEAD: u32 = 8 + 20 + 38;

/// More lateness than this is not made up for by longer queues.
const LATENESS_MAX: Time = 10_000_000;

/// A window never gets lower. It is less than a packet: a path with an empty network may
/// send one anyway, the sum of the windows limits the connection.
pub(crate) const FLOOR: u32 = 256;

/// Packets that a measurement of the rate takes at least.
const RATE_PACKETS: u32 = 8;

/// Round trips after a signal in which all paths together grow as one.
const CAUTION: u32 = 16;

/// Marked share of a round, in 1/1024, that is assumed at first.
const ALPHA_START: u32 = 512;

/// What growth needs to know about the connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Context {
    /// Bytes of a full packet.
    pub(crate) mtu: u32,
    /// Paths over which the connection sprays.
    pub(crate) paths: u32,
    /// Something is waiting to be sent: the windows are what limits.
    pub(crate) limited: bool,
    /// Within [`CAUTION`] round trips of a congestion signal of any path.
    pub(crate) cautious: bool,
    /// The signal was a loss.
    pub(crate) lossy: bool,
    /// Room that the path's window has above its bandwidth-delay product.
    pub(crate) slack: u32,
}

/// The room for one of `paths` paths of a connection to which `rate` bytes per second are
/// delivered: a part of [`INITIAL_PACKETS`], and what passes while a host is late. Round
/// trips that are long because a machine stood still must not look like a queue: the rate
/// that they allow would shrink the windows, and these the rate.
pub(crate) fn slack(rate: u64, paths: u32, mtu: u32, lateness: Time) -> u32 {
    let paths = u64::from(paths);
    let fixed = ratio(u64::from(mtu.saturating_mul(INITIAL_PACKETS)), paths);
    let late = ratio(
        rate.saturating_mul(lateness.min(LATENESS_MAX)) / 1_000_000_000,
        paths,
    );
    u32::try_from(fixed.max(u64::from(mtu)).saturating_add(late)).unwrap_or(u32::MAX)
}

/// Congestion state of a path.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Window {
    bytes: u32,
    slow_start: bool,
    /// Marked share of the packets, smoothed, in 1/1024.
    alpha: u32,
    /// A signal about something sent before this time belongs to a cut that was made.
    cut_until: Time,
    /// Window before the latest cut that was due to loss.
    before_cut: u32,
    /// The round that is being counted.
    round: Round,
    /// Delivered bytes per 2^20 ns, smoothed towards its peaks.
    rate: u64,
    /// The measurement that is going on.
    rate_since: Time,
    rate_bytes: u64,
    rate_packets: u32,
    /// Rounds in which losses are counted.
    loss_rounds: u8,
    lost: u32,
    delivered: u32,
}

#[derive(Clone, Copy, Debug, Default)]
struct Round {
    since: Time,
    packets: u32,
    marked: u32,
    limited: bool,
}

impl Window {
    pub(crate) fn new(bytes: u32) -> Self {
        Self {
            bytes: bytes.max(FLOOR),
            slow_start: true,
            alpha: ALPHA_START,
            cut_until: 0,
            before_cut: 0,
            round: Round::default(),
            rate: 0,
            rate_since: 0,
            rate_bytes: 0,
            rate_packets: 0,
            loss_rounds: 0,
            lost: 0,
            delivered: 0,
        }
    }

    /// The window in bytes.
    pub(crate) fn bytes(&self) -> u32 {
        self.bytes
    }

    /// Delivered bytes per second.
    pub(crate) fn rate(&self) -> u64 {
        (self.rate.saturating_mul(1_000_000_000)) >> 20
    }

    /// `bytes` in `packets` packets were acknowledged.
    pub(crate) fn acked(&mut self, bytes: u32, packets: u32, c: &Context) {
        self.round.packets = self.round.packets.saturating_add(packets);
        self.rate_bytes = self.rate_bytes.saturating_add(u64::from(bytes));
        self.rate_packets = self.rate_packets.saturating_add(packets);
        self.round.limited |= c.limited;
        self.delivered = self.delivered.saturating_add(packets);
        if !c.limited {
            return;
        }
        if self.slow_start {
            self.bytes = self.bytes.saturating_add(bytes);
            return;
        }
        // An eighth of the window per round trip at the most, or many paths would burst.
        // One packet per window of acknowledgements; shared among the paths for a while
        // after a signal, so that sixteen paths do not push like sixteen connections.
        let all = if c.cautious { c.paths.max(1) } else { 1 };
        let window = u64::from(self.bytes.max(ratio(c.mtu.into(), all.into()) as u32));
        let step = u64::from(bytes).saturating_mul(u64::from(c.mtu));
        // A loss cuts one of the paths only: as many times slower must all grow, or a small
        // queue would be full of one connection's attempts.
        let parts = u64::from(all).saturating_mul(u64::from(if c.lossy { all } else { 1 }));
        let step = ratio(step, window.saturating_mul(parts));
        self.bytes = self
            .bytes
            .saturating_add(step.min(u64::from(bytes / 8)) as u32);
    }

    /// The round trip grew: a queue is there, so exponential growth ends.
    pub(crate) fn leave_slow_start(&mut self) {
        self.slow_start = false;
    }

    /// `marked` of the packets that an acknowledgement newly counts were marked; the newest
    /// of them was sent at `sent`. True when the window was cut.
    pub(crate) fn marked(&mut self, now: Time, marked: u32, sent: Time) -> bool {
        self.round.marked = self.round.marked.saturating_add(marked);
        self.slow_start = false;
        if sent < self.cut_until {
            return false;
        }
        self.cut_until = now;
        // At the first mark of a round its share is not known yet: the smoothed one of the
        // rounds before counts, but never less than what one mark in a window means.
        let alpha = self.alpha.max(64);
        let cut = (u64::from(self.bytes).saturating_mul(u64::from(alpha)) >> 11) as u32;
        self.bytes = self.bytes.saturating_sub(cut).max(FLOOR);
        true
    }

    /// A packet that was sent at `sent` is lost while a queue stands. `bdp` is what the
    /// path delivers in its least round-trip time. True when the window was cut.
    pub(crate) fn lost_in_queue(&mut self, now: Time, sent: Time, bdp: u32) -> bool {
        self.slow_start = false;
        if sent < self.cut_until {
            return false;
        }
        self.cut_until = now;
        self.before_cut = self.bytes;
        // Down to 7/10, but not below what drains the queue and keeps the path busy.
        let cut = (u64::from(self.bytes).saturating_mul(7) / 10) as u32;
        self.bytes = cut.max(bdp.min(self.bytes)).max(FLOOR);
        true
    }

    /// The latest loss was none.
    pub(crate) fn undo(&mut self) {
        if self.before_cut > self.bytes {
            self.bytes = self.before_cut;
        }
        self.before_cut = 0;
    }

    /// Losses, whatever their cause.
    pub(crate) fn lost(&mut self, packets: u32) {
        self.lost = self.lost.saturating_add(packets);
    }

    /// Ends the round if it has lasted for `rtt`: measures the rate, sets the cap.
    pub(crate) fn round(&mut self, now: Time, rtt: Time, least: Time, c: &Context) {
        self.measure(now, rtt);
        let elapsed = now.saturating_sub(self.round.since);
        if elapsed < rtt {
            return;
        }
        let r = self.round;
        self.round = Round {
            since: now,
            ..Round::default()
        };
        if r.packets == 0 {
            return;
        }
        let share = ratio(u64::from(r.marked.min(r.packets)) << 10, r.packets.into()) as u32;
        // Gain 1/4: a few rounds of marks make the cut what they ask for.
        self.alpha = self.alpha.saturating_mul(3).saturating_add(share) / 4;
        if r.limited {
            let cap = self.bdp(least).saturating_mul(5) / 4;
            let cap = cap.saturating_add(c.slack);
            if self.bytes > cap && !self.slow_start {
                self.bytes = cap;
            }
        }
        self.loss_rounds = self.loss_rounds.wrapping_add(1);
        if self.loss_rounds >= 8 {
            let all = self.lost.saturating_add(self.delivered);
            // Fewer than 64 packets prove no rate.
            if all >= 64 && self.lost.saturating_mul(100) > all.saturating_mul(15) {
                self.bytes = (self.bytes / 10).saturating_mul(9).max(FLOOR);
            }
            self.loss_rounds = 0;
            self.lost = 0;
            self.delivered = 0;
        }
    }

    /// Measures the delivered rate over a round trip, or longer when fewer than
    /// [`RATE_PACKETS`] packets came in: single packets at the ends of a short time would
    /// make it too high.
    fn measure(&mut self, now: Time, rtt: Time) {
        let elapsed = now.saturating_sub(self.rate_since);
        if elapsed < rtt || (self.rate_packets < RATE_PACKETS && elapsed < rtt.saturating_mul(16)) {
            return;
        }
        let rate = ratio(self.rate_bytes << 20, elapsed);
        // Silence in between says nothing.
        if elapsed < rtt.saturating_mul(32) {
            self.rate = if rate >= self.rate {
                rate
            } else {
                self.rate.saturating_sub(self.rate.saturating_sub(rate) / 8)
            };
        }
        self.rate_since = now;
        self.rate_bytes = 0;
        self.rate_packets = 0;
    }

    /// Bytes that the path delivers in `least`.
    pub(crate) fn bdp(&self, least: Time) -> u32 {
        u32::try_from((self.rate.saturating_mul(least)) >> 20).unwrap_or(u32::MAX)
    }
}

/// A quotient; 0 when the divisor is.
pub(crate) fn ratio(a: u64, b: u64) -> u64 {
    a.checked_div(b).unwrap_or(0)
}

/// For how long growth is cautious after a signal.
pub(crate) fn caution(rtt: Time) -> Time {
    rtt.saturating_mul(u64::from(CAUTION))
}

/// Greatest connection window that a share of `kbit` allows, in bytes: what it delivers in
/// 1.25 round trips and a time that hosts need for batching; 0 kbit is no limit.
pub(crate) fn share_window(kbit: u32, least: Time, batching: Time) -> u32 {
    if kbit == 0 {
        return u32::MAX;
    }
    let time = (least.saturating_mul(5) / 4).saturating_add(batching);
    // kbit/s × ns / 8e6 = bytes
    u32::try_from(u64::from(kbit).saturating_mul(time) / 8_000_000).unwrap_or(u32::MAX)
}
