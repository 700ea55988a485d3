// SPDX-License-Identifier: GPL-2.0

//! Additive increase, multiplicative decrease.
//!
//! A mark (CE) trims the path that saw it, in proportion to how many of its packets were
//! marked, once per round trip. A loss trims only while the round trip shows a queue:
//! loss on an empty path says nothing about load.

#![forbid(unsafe_code)]

use super::{ratio, Context, Delivery, Law, FLOOR};
use crate::proto::api::Time;

/// Marked share of a round, in 1/1024, that is assumed at first.
const ALPHA_START: u32 = 512;

/// Rounds over which losses are counted, and packets that prove a rate of them.
const LOSS_ROUNDS: u8 = 8;
const LOSS_PACKETS: u32 = 64;

/// See the top of the file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Aimd {
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

impl Aimd {
    /// Begins with `bytes`.
    pub(super) fn new(bytes: u32) -> Self {
        Self {
            bytes: bytes.max(FLOOR),
            slow_start: true,
            alpha: ALPHA_START,
            cut_until: 0,
            before_cut: 0,
            round: Round::default(),
            loss_rounds: 0,
            lost: 0,
            delivered: 0,
        }
    }
}

impl Law for Aimd {
    fn bytes(&self) -> u32 {
        self.bytes
    }

    fn acked(&mut self, bytes: u32, packets: u32, c: &Context) {
        self.round.packets = self.round.packets.saturating_add(packets);
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

    /// A queue is there, so exponential growth ends.
    fn queue(&mut self) {
        self.slow_start = false;
    }

    fn marked(&mut self, now: Time, marked: u32, sent: Time) -> bool {
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

    fn lost_in_queue(&mut self, now: Time, sent: Time, bdp: u32) -> bool {
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

    fn undo(&mut self) {
        if self.before_cut > self.bytes {
            self.bytes = self.before_cut;
        }
        self.before_cut = 0;
    }

    fn lost(&mut self, packets: u32) {
        self.lost = self.lost.saturating_add(packets);
    }

    /// Sets the cap, and cuts what loses much.
    fn round(&mut self, now: Time, rtt: Time, least: Time, delivery: &Delivery, c: &Context) {
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
            let cap = delivery.bdp(least).saturating_mul(5) / 4;
            let cap = cap.saturating_add(c.slack);
            if self.bytes > cap && !self.slow_start {
                self.bytes = cap;
            }
        }
        self.loss_rounds = self.loss_rounds.wrapping_add(1);
        if self.loss_rounds >= LOSS_ROUNDS {
            let all = self.lost.saturating_add(self.delivered);
            if all >= LOSS_PACKETS && self.lost.saturating_mul(100) > all.saturating_mul(15) {
                self.bytes = (self.bytes / 10).saturating_mul(9).max(FLOOR);
            }
            self.loss_rounds = 0;
            self.lost = 0;
            self.delivered = 0;
        }
    }
}
