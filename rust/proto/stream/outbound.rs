// SPDX-License-Identifier: GPL-2.0

//! Numbers of a stream that this end sends: what was accepted, what may be sent, and going
//! back to the accepted number when the receiver refused something ("Refusals").

#![forbid(unsafe_code)]

use super::{before, WINDOW_MAX};
use crate::proto::api::Time;

/// The first wait after NOT_READY, in ns; doubles up to a limit.
const NOT_READY_FIRST: Time = 1_000_000;

/// The first wait after a second NO_ROOM without progress, in ns; doubles. The status
/// comes when everything ahead of the refused packet is in place, so that there is room
/// again: the first retry needs no wait.
const NO_ROOM_FIRST: Time = 50_000;

/// Greatest exponent of a doubling wait.
const DOUBLINGS: u32 = 7;

/// The window never falls below this many packets.
const ROOM_MIN: u32 = 16;

/// What a cumulative number says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// An older block, or one that this stream cannot get.
    Old,
    /// Nothing new.
    Same,
    /// More than before is accepted.
    Advanced,
}

#[derive(Default)]
pub(super) struct Outbound {
    /// Everything below is accepted.
    cum: u32,
    /// The next packet to be sent.
    next: u32,
    /// Nothing at or above was ever sent.
    sent_end: u32,
    /// Nothing at or above belongs to a message that has begun.
    end: u32,
    /// Packets above `cum` that may be sent.
    window: u32,
    /// The same after NO_ROOM; grows back.
    room: u32,
    /// Counts rewinds; what was sent in an earlier round is sent again in this one.
    round: u8,
    wait: Option<Time>,
    wait_not_ready: bool,
    /// Refusals since the last progress.
    misses: u32,
    /// Packets that paths have taken and not released.
    outstanding: u32,
    /// When the last of them was released.
    since: Time,
}

impl Outbound {
    /// Starts at `psn` with nothing sent.
    pub(super) fn start(&mut self, psn: u32, window: u32) {
        let window = window.clamp(1, WINDOW_MAX);
        *self = Self {
            cum: psn,
            next: psn,
            sent_end: psn,
            end: psn,
            window,
            room: window,
            ..Self::default()
        };
    }

    pub(super) fn cum(&self) -> u32 {
        self.cum
    }

    pub(super) fn end(&self) -> u32 {
        self.end
    }

    pub(super) fn round(&self) -> u8 {
        self.round
    }

    pub(super) fn waits(&self, now: Time) -> bool {
        self.wait.is_some_and(|t| now < t)
    }

    pub(super) fn wait(&self) -> Option<Time> {
        self.wait
    }

    /// Ends a wait that is over.
    pub(super) fn on_timeout(&mut self, now: Time) {
        if !self.waits(now) {
            self.wait = None;
        }
    }

    /// Whether the window has room for packet `sseq`.
    pub(super) fn admits(&self, sseq: u32) -> bool {
        sseq.wrapping_sub(self.cum) < self.room
    }

    /// Numbers a message of `count` packets and returns the first number.
    pub(super) fn assign(&mut self, count: u32) -> u32 {
        let first = self.end;
        self.end = first.wrapping_add(count);
        first
    }

    /// Packet `sseq` was handed out.
    pub(super) fn advance(&mut self, sseq: u32) {
        self.next = sseq.wrapping_add(1);
        self.wait = None;
        if before(self.sent_end, self.next) {
            self.sent_end = self.next;
        }
    }

    /// Everything below `cum` is accepted.
    pub(super) fn accept(&mut self, cum: u32) -> Progress {
        if before(cum, self.cum) || before(self.sent_end, cum) {
            return Progress::Old;
        }
        if cum == self.cum {
            return Progress::Same;
        }
        let advance = cum.wrapping_sub(self.cum);
        self.cum = cum;
        if before(self.next, cum) {
            self.next = cum;
        }
        self.misses = 0;
        if self.wait_not_ready {
            self.wait = None;
            self.wait_not_ready = false;
        }
        if self.room < self.window {
            self.room = (self.room + 1 + advance / 4).min(self.window);
        }
        Progress::Advanced
    }

    /// Whether packets are refused that were sent in round `round`: counts each round once.
    pub(super) fn is_refusal(&self, round: u8) -> bool {
        round == self.round && self.cum != self.next
    }

    /// The same for NOT_READY. Who is gone may answer a query with a round of his own time:
    /// when no path carries anything any more, any round counts.
    pub(super) fn is_not_ready(&self, round: u8) -> bool {
        self.is_refusal(round) || self.quiet_since().is_some()
    }

    /// Goes back to the accepted number; nothing is sent before `wait`.
    pub(super) fn rewind(&mut self, wait: Option<Time>) {
        self.next = self.cum;
        self.round = self.round.wrapping_add(1);
        self.wait = wait;
        self.wait_not_ready = false;
        self.misses = self.misses.saturating_add(1);
    }

    /// Goes back after NOT_READY; the wait is at most `limit` ns.
    pub(super) fn rewind_not_ready(&mut self, now: Time, limit: Time) {
        let wait = (NOT_READY_FIRST << self.misses.min(DOUBLINGS)).min(limit.max(NOT_READY_FIRST));
        self.rewind(Some(now.saturating_add(wait)));
        self.wait_not_ready = true;
    }

    /// The receiver turned ready by itself.
    pub(super) fn on_ready(&mut self) {
        if self.wait_not_ready {
            self.wait = None;
            self.wait_not_ready = false;
        }
    }

    /// Goes back after NO_ROOM with half the window.
    pub(super) fn rewind_no_room(&mut self, now: Time) {
        self.room = (self.sent_end.wrapping_sub(self.cum) / 2)
            .max(ROOM_MIN)
            .min(self.window);
        let wait = match self.misses {
            0 => None,
            n => Some(now.saturating_add(NO_ROOM_FIRST << (n - 1).min(DOUBLINGS))),
        };
        self.rewind(wait);
    }

    pub(super) fn sent(&mut self) {
        self.outstanding = self.outstanding.saturating_add(1);
    }

    pub(super) fn released(&mut self, now: Time) {
        self.outstanding = self.outstanding.saturating_sub(1);
        self.since = now;
    }

    /// The paths have forgotten everything.
    pub(super) fn forget_paths(&mut self, now: Time) {
        self.outstanding = 0;
        self.since = now;
    }

    /// Whether everything that was begun is accepted, and no path has any of it.
    pub(super) fn is_done(&self) -> bool {
        self.outstanding == 0 && self.cum == self.next && self.cum == self.end
    }

    /// Since when packets are unaccepted without being on any path.
    pub(super) fn quiet_since(&self) -> Option<Time> {
        (self.outstanding == 0 && self.cum != self.next && self.wait.is_none())
            .then_some(self.since)
    }
}
