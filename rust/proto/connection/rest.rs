// SPDX-License-Identifier: GPL-2.0

//! Idle connections: both ends agree to close, and keep what names the connection, where its
//! numbers stand and its streams. Whatever comes next opens it again: a program that posts, or a
//! packet of the peer. Nobody above notices.
//!
//! Idleness is looked for by a slow timer that compares counters, so that packets do not pay
//! for it.

#![forbid(unsafe_code)]

use super::handshake::Attempt;
use super::streams::List;
use super::timers::{CLOSE_RETRY, CLOSE_TRIES};
use super::{Connection, ConnectionState};
use crate::proto::api::{Receive, Time};
use crate::proto::wire::{Body, CloseKind, Drop, Packet};

/// Looks without any news after which a connection is idle: so many halves of the idle time.
const LOOKS: u8 = 2;

/// Whether a connection is idle.
pub(super) struct Rest {
    /// When to look next; `Time::MAX` is never.
    pub(super) due: Time,
    /// Data packets, both ways, at the last look.
    seen: u64,
    /// Looks in a row without news.
    looks: u8,
    /// Times that the peer was asked to close; 0 is not asked.
    tries: u8,
}

impl Rest {
    pub(super) const fn new() -> Self {
        Self {
            due: Time::MAX,
            seen: 0,
            looks: 0,
            tries: 0,
        }
    }
}

impl Connection {
    /// The connection is up: begins to look whether it is used.
    pub(super) fn watch_idleness(&mut self, now: Time) {
        self.rest.looks = 0;
        self.rest.tries = 0;
        self.look_later(now);
    }

    fn look_later(&mut self, now: Time) {
        self.rest.due = if self.cfg.idle == 0 {
            Time::MAX
        } else {
            now.saturating_add((self.cfg.idle / u64::from(LOOKS)).max(1))
        };
    }

    fn traffic(&self) -> u64 {
        let c = &self.counters;
        c.sent_packets
            .wrapping_add(c.rcvd_packets)
            .wrapping_add(c.retransmits)
    }

    /// Whether nothing is left to be said to the peer, and it owes nothing. A stream that is still
    /// listed for a timer does not count: only its time takes it off.
    pub(super) fn is_at_rest(&self) -> bool {
        self.inflight == 0
            && self.ack.dirty == 0
            && self.ack.placing == 0
            && self.ack.refused.is_empty()
            && self.ack.replies.is_empty()
            && !self.has_streams_to_serve()
            && self.tombstones.iter().all(|t| t.announce == 0)
            && self.paths.iter().all(|p| !p.tx.is_outstanding())
            && (0..self.streams.used() as u32)
                .filter_map(|i| self.streams.slot(i)?.stream.as_deref())
                .all(|s| s.is_at_rest())
    }

    /// Looks whether the connection is idle, and asks the peer to close when it is.
    pub(super) fn look_for_idleness(&mut self, now: Time) {
        if !self.is_at_rest() {
            return self.watch_idleness(now);
        }
        let traffic = self.traffic();
        if core::mem::replace(&mut self.rest.seen, traffic) != traffic {
            return self.watch_idleness(now);
        }
        self.unused = true;
        if self.loopback || self.rest.tries >= CLOSE_TRIES {
            // There is no peer, or nobody answers. It stays as it is: it closes by agreement alone.
            return self.watch_idleness(now);
        }
        if self.rest.tries == 0 {
            self.rest.looks = self.rest.looks.saturating_add(1);
            if self.rest.looks < LOOKS {
                return self.look_later(now);
            }
            self.close_number = self.close_number.wrapping_add(1);
        }
        self.rest.tries = self.rest.tries.saturating_add(1);
        self.rest.due = now.saturating_add(CLOSE_RETRY);
        self.closing = Some((CloseKind::Request, self.close_number));
    }

    /// Whether this end agrees to close: nothing has come or gone since it looked last.
    pub(super) fn agrees_to_rest(&self) -> bool {
        self.state == ConnectionState::Resting
            || self.state == ConnectionState::Up
                && self.cfg.idle != 0
                && self.rest.seen == self.traffic()
                && self.is_at_rest()
    }

    /// Whether the peer's word is the answer to the question whether to close.
    pub(super) fn asked_to_rest(&self, number: u32) -> bool {
        self.rest.tries != 0 && number == self.close_number
    }

    /// Both ends have agreed. Numbers and epochs stay: should the peer not know of the agreement,
    /// they go on where they are.
    pub(super) fn begin_rest(&mut self) {
        if self.state != ConnectionState::Resting {
            self.next_first_epoch();
            self.state = ConnectionState::Resting;
            self.reattempt = false;
            self.unused = true;
            self.counters.rests = self.counters.rests.wrapping_add(1);
        }
    }

    /// A packet of the peer, which does not know that this end has agreed to close, or has sent it
    /// before it knew. It opens the connection when there is something that waits for an answer.
    pub(super) fn receive_resting(
        &mut self,
        now: Time,
        packet: &Packet<'_>,
    ) -> Result<Receive, Drop> {
        match packet.body() {
            Body::Close(c) => {
                self.receive_close(now, c);
                Ok(Receive::Done)
            }
            Body::Data(..) | Body::Query(_) => {
                self.end_rest(now);
                Err(Drop::State)
            }
            // It would go on asking.
            Body::Probe(_) => {
                self.closing = Some((CloseKind::Agree, self.close_number));
                Err(Drop::State)
            }
            _ => Err(Drop::State),
        }
    }

    /// Whether there is something to tell the peer while the connection rests.
    pub(super) fn is_needed(&self) -> bool {
        self.state == ConnectionState::Resting && self.has_streams_to_serve()
    }

    /// Whether a stream has something to send, to ask or to tell.
    fn has_streams_to_serve(&self) -> bool {
        [List::Send, List::Query, List::Dirty]
            .iter()
            .any(|l| self.streams.first(*l).is_some())
    }

    /// The connection is needed again: opens it.
    pub(super) fn end_rest(&mut self, now: Time) {
        let nonce = self.draw();
        self.attempt = Attempt::new(nonce, now);
        self.not_yet = 0;
        self.state = ConnectionState::Connecting;
    }

    /// The peer has never left: everything goes on where it was.
    pub(super) fn go_on(&mut self, now: Time) {
        self.state = ConnectionState::Up;
        self.reattempt = false;
        self.not_yet = 0;
        self.watch_idleness(now);
        self.excuse_streams(now, Time::MAX);
    }
}
