// SPDX-License-Identifier: GPL-2.0

//! How a connection comes up: Init, Cookie, Init with the cookie, Accept.
//!
//! The answer to the first Init needs no state and is not longer than its cause; only one
//! who receives at the address he names gets the cookie. Each end has one id in a
//! connection, so that attempts of both ends at once lead to the same result, whichever
//! packet arrives first.

#![forbid(unsafe_code)]

use super::{Connection, ConnectionState, Negotiated};
use crate::proto::api::{ConnectionError, Time, Transmit};
use crate::proto::wire::{
    self, Body, Drop, Handshake, HandshakeKey, Packet, Refusal, RefuseReason, Type, Unknown, Writer,
};

/// Cookies are good for this many units of 2^30 ns (about a second each).
const COOKIE_LIFE: u32 = 8;

/// First and greatest time between two Inits.
const RETRY_FIRST: Time = 2_000_000;
const RETRY_MAX: Time = 200_000_000;
/// Inits without an answer after which the time between them doubles.
const RETRY_EAGER: u8 = 8;
/// Of these, so many go alone, later ones over several paths at once: of those that live in
/// both directions there may be few.
const RETRY_ALONE: u8 = 2;
const RETRY_COPIES: u8 = 4;
/// The peer is up, as its packets show: the next Init goes this soon.
const RETRY_KNOWN: Time = 1_000_000;
/// How long a cookie is used: half of its life.
const COOKIE_KEPT: Time = 4_000_000_000;
/// Greatest time between two Inits when the peer is there but not ready, or nothing waits.
const NOT_YET_FIRST: Time = 1_000_000;
const NOT_YET_MAX: Time = 100_000_000;
const IDLE_MAX: Time = 1_000_000_000;

/// Features of this build.
pub mod features {
    /// CRC32C in every packet.
    pub const CRC: u32 = 1 << 0;
    /// UDP checksum 0 is accepted on IPv6.
    pub const ZERO_CHECKSUM6: u32 = 1 << 1;
}

/// SipHash-2-4 of words, keyed with 16 bytes.
pub(in crate::proto) fn keyed_hash(key: &[u8; 16], words: &[u64]) -> u64 {
    let (a, b) = key.split_at(8);
    let read = |s: &[u8]| s.iter().rev().fold(0u64, |v, x| v << 8 | u64::from(*x));
    let (k0, k1) = (read(a), read(b));
    let mut v = [
        k0 ^ 0x736f_6d65_7073_6575,
        k1 ^ 0x646f_7261_6e64_6f6d,
        k0 ^ 0x6c79_6765_6e65_7261,
        k1 ^ 0x7465_6462_7974_6573,
    ];
    let round = |v: &mut [u64; 4]| {
        let [a, b, c, d] = v;
        *a = a.wrapping_add(*b);
        *b = b.rotate_left(13) ^ *a;
        *a = a.rotate_left(32);
        *c = c.wrapping_add(*d);
        *d = d.rotate_left(16) ^ *c;
        *a = a.wrapping_add(*d);
        *d = d.rotate_left(21) ^ *a;
        *c = c.wrapping_add(*b);
        *b = b.rotate_left(17) ^ *c;
        *c = c.rotate_left(32);
    };
    let absorb = |v: &mut [u64; 4], m: u64| {
        let [_, _, _, d] = v;
        *d ^= m;
        round(v);
        round(v);
        let [a, ..] = v;
        *a ^= m;
    };
    for m in words {
        absorb(&mut v, *m);
    }
    absorb(&mut v, (words.len() as u64 * 8) << 56);
    let [_, _, c, _] = &mut v;
    *c ^= 0xff;
    for _ in 0..4 {
        round(&mut v);
    }
    v.iter().fold(0, |x, y| x ^ y)
}

/// A GID as words for [`keyed_hash`].
pub(in crate::proto) fn gid_words(g: &[u8; 16]) -> [u64; 2] {
    let (a, b) = g.split_at(8);
    let read = |s: &[u8]| s.iter().fold(0u64, |v, x| v << 8 | u64::from(*x));
    [read(a), read(b)]
}

fn cookie_clock(now: Time) -> u32 {
    (now >> 30) as u32
}

/// The cookie for an Init of `key.source`.
fn cookie(secret: &[u8; 16], key: &HandshakeKey, h: &Handshake, time: u32) -> u64 {
    let [s0, s1] = gid_words(&key.source);
    let [d0, d1] = gid_words(&key.destination);
    let words = [
        s0,
        s1,
        d0,
        d1,
        u64::from(key.dscp) << 32 | u64::from(time),
        h.nonce,
        h.connection_id,
        h.instance,
    ];
    // 0 means "no cookie".
    keyed_hash(secret, &words) | 1
}

fn cookie_is_good(secret: &[u8; 16], h: &Handshake, now: Time) -> bool {
    let age = cookie_clock(now).wrapping_sub(h.cookie_time);
    h.cookie != 0 && age <= COOKIE_LIFE && cookie(secret, &h.key, h, h.cookie_time) == h.cookie
}

fn emit_cookie(secret: &[u8; 16], h: &Handshake, now: Time, out: &mut Transmit) {
    let time = cookie_clock(now);
    let answer = Handshake {
        key: h.key.reversed(),
        lowest: wire::VERSION,
        highest: wire::VERSION,
        cookie: cookie(secret, &h.key, h, time),
        cookie_time: time,
        ..*h
    };
    let mut w = Writer::new(&mut out.header);
    answer.emit(&mut w, Type::Cookie);
    out.header_len = w.finish();
}

fn emit_refusal(h: &Handshake, reason: RefuseReason, out: &mut Transmit) {
    let answer = Refusal {
        key: h.key.reversed(),
        reason,
        lowest: wire::VERSION,
        highest: wire::VERSION,
        nonce: h.nonce,
    };
    let mut w = Writer::new(&mut out.header);
    answer.emit(&mut w);
    out.header_len = w.finish();
}

fn blank(out: &mut Transmit) {
    *out = Transmit {
        header: out.header,
        always_checksum: true,
        ..Transmit::new()
    };
}

/// Answers a packet for which the driver has no connection, without keeping anything.
/// `seen` is who sent it to whom by its addresses: the answer goes to `seen.source`, and a
/// handshake packet that names others is not answered. The driver limits the rate and
/// answers from the source port that it was asked from, which changes with each attempt.
/// False: no answer.
pub fn stateless_reply(
    packet: &Packet<'_>,
    seen: &HandshakeKey,
    secret: &[u8; 16],
    now: Time,
    out: &mut Transmit,
) -> bool {
    blank(out);
    match packet.body() {
        Body::Init(h) if h.key == *seen => {
            if h.lowest > wire::VERSION {
                emit_refusal(h, RefuseReason::Version, out);
            } else if cookie_is_good(secret, h, now) {
                emit_refusal(h, RefuseReason::NotYet, out);
            } else {
                emit_cookie(secret, h, now, out);
            }
            true
        }
        Body::Data(..) | Body::Ack(_) | Body::Probe(_) | Body::Query(_) => {
            let Some(connection_id) = packet.connection_id() else {
                return false;
            };
            let answer = Unknown {
                key: seen.reversed(),
                connection_id,
            };
            let mut w = Writer::new(&mut out.header);
            answer.emit(&mut w);
            let len = w.finish();
            // Never longer than what caused it: short packets get none.
            out.header_len = len;
            usize::from(len) <= packet.header_len()
        }
        _ => false,
    }
}

/// The own attempt to connect.
#[derive(Clone, Copy, Debug)]
pub(super) struct Attempt {
    pub(super) nonce: u64,
    pub(super) cookie: u64,
    pub(super) cookie_time: u32,
    /// When the cookie came.
    pub(super) cookie_at: Time,
    /// Next Init; `Time::MAX` is none.
    pub(super) due: Time,
    pub(super) interval: Time,
    /// Path of the next Init: each goes over another one, since some may be dead.
    pub(super) path: u32,
    /// Inits, counting those that go at once as one, since something was heard.
    pub(super) tries: u8,
    /// Copies of the one that is being sent that are still to go.
    pub(super) copies: u8,
}

impl Attempt {
    pub(super) fn new(nonce: u64, now: Time) -> Self {
        Self {
            nonce,
            cookie: 0,
            cookie_time: 0,
            cookie_at: 0,
            due: now,
            interval: RETRY_FIRST,
            path: 0,
            tries: 0,
            copies: 0,
        }
    }
}

/// An answer that waits to be sent.
#[derive(Clone, Copy, Debug)]
pub(super) enum Answer {
    Cookie(Handshake),
    Accept(Handshake),
    Version(Handshake),
    NotYet(Handshake),
}

impl Connection {
    fn key_out(&self) -> HandshakeKey {
        HandshakeKey {
            source: self.ids.local_gid,
            destination: self.ids.remote_gid,
            dscp: self.ids.dscp,
        }
    }

    fn own_handshake(&self, now: Time) -> Handshake {
        Handshake {
            key: self.key_out(),
            lowest: wire::VERSION,
            highest: wire::VERSION,
            paths: self.cfg.paths,
            features: self.cfg.features(),
            payload_mtu: self.cfg.payload_mtu(),
            connection_id: self.ids.local_cid,
            peer_connection_id: 0,
            nonce: 0,
            instance: self.cfg.instance,
            cookie: 0,
            cookie_time: 0,
            timestamp: (now >> 6) as u32,
            epoch: self.first_epoch,
        }
    }

    fn is_attempting(&self) -> bool {
        self.state == ConnectionState::Connecting || self.reattempt
    }

    /// When the handshake has something to send.
    pub(super) fn handshake_due(&self) -> Option<Time> {
        if self.answer.is_some() || self.is_needed() {
            Some(0)
        } else {
            (self.is_attempting() && self.attempt.due != Time::MAX).then_some(self.attempt.due)
        }
    }

    /// Sends what the handshake has to send, if anything.
    pub(super) fn poll_handshake(&mut self, now: Time, out: &mut Transmit) -> bool {
        if let Some(answer) = self.answer.take() {
            blank(out);
            match answer {
                Answer::Cookie(h) => emit_cookie(&self.cfg.secret, &h, now, out),
                Answer::Version(h) => emit_refusal(&h, RefuseReason::Version, out),
                Answer::NotYet(h) => emit_refusal(&h, RefuseReason::NotYet, out),
                Answer::Accept(h) => {
                    let accept = Handshake {
                        paths: self.agreed.paths,
                        features: self.agreed.features,
                        payload_mtu: self.agreed.payload_mtu,
                        peer_connection_id: h.connection_id,
                        nonce: h.nonce,
                        timestamp: h.timestamp,
                        epoch: self.opened_epoch,
                        ..self.own_handshake(now)
                    };
                    let mut w = Writer::new(&mut out.header);
                    accept.emit(&mut w, Type::Accept);
                    out.header_len = w.finish();
                }
            }
            let i = self.next_good(now, None);
            self.address(out, i);
            // Handshakes go between the addresses that they name.
            out.plane = 0;
            if self.proven == 0 && self.counters.handshakes_sent >= self.paths.len() as u64 {
                out.source_port = self.any_port();
            }
            self.counters.handshakes_sent = self.counters.handshakes_sent.wrapping_add(1);
            return true;
        }
        if !self.is_attempting() || self.attempt.due > now {
            return false;
        }
        blank(out);
        let init = Handshake {
            nonce: self.attempt.nonce,
            cookie: self.attempt.cookie,
            cookie_time: self.attempt.cookie_time,
            ..self.own_handshake(now)
        };
        let mut w = Writer::new(&mut out.header);
        init.emit(&mut w, Type::Init);
        out.header_len = w.finish();
        let paths = self.paths.len() as u32;
        let i = self.attempt.path.checked_rem(paths).unwrap_or(0);
        self.address(out, i);
        out.plane = 0;
        if self.attempt.path >= paths {
            // None of the own ports has led to a connection: others may.
            out.source_port = self.any_port();
        }
        self.attempt.path = self.attempt.path.wrapping_add(1);
        self.counters.handshakes_sent = self.counters.handshakes_sent.wrapping_add(1);
        // Beside a connection that is up there is no hurry.
        let hurry = self.state == ConnectionState::Connecting;
        if self.attempt.copies == 0 {
            self.attempt.tries = self.attempt.tries.saturating_add(1);
            if self.attempt.tries > RETRY_ALONE && hurry {
                self.attempt.copies = RETRY_COPIES;
            }
        }
        self.attempt.copies = self.attempt.copies.saturating_sub(1);
        if self.attempt.copies == 0 {
            self.attempt.due = now.saturating_add(self.attempt.interval);
            if self.attempt.tries >= RETRY_EAGER || !hurry {
                let most = if self.has_work() { RETRY_MAX } else { IDLE_MAX };
                self.attempt.interval = self.attempt.interval.saturating_mul(2).min(most);
            }
        }
        // A cookie that has become too old is asked for anew.
        if now.saturating_sub(self.attempt.cookie_at) > COOKIE_KEPT {
            self.attempt.cookie = 0;
        }
        true
    }

    /// The peer has sent something for this connection: it is up there, and what would have
    /// made it so here got lost.
    pub(super) fn peer_is_up(&mut self, now: Time) {
        if self.state == ConnectionState::Connecting {
            self.attempt.tries = self.attempt.tries.min(RETRY_ALONE);
            self.attempt.interval = RETRY_FIRST;
            let soon = now.saturating_add(RETRY_KNOWN);
            self.attempt.due = self.attempt.due.min(soon);
        }
    }

    /// A packet of the handshake arrived.
    pub(super) fn receive_handshake(&mut self, now: Time, packet: &Packet<'_>) -> Result<(), Drop> {
        let expected = self.key_out().reversed();
        if packet.handshake_key() != Some(expected) {
            return Err(Drop::Field);
        }
        match packet.body() {
            Body::Init(h) => self.on_init(now, h),
            Body::Cookie(h) => {
                if !self.is_attempting() || h.nonce != self.attempt.nonce {
                    return Err(Drop::State);
                }
                self.attempt.cookie = h.cookie;
                self.attempt.cookie_time = h.cookie_time;
                self.attempt.cookie_at = now;
                self.attempt.due = now;
                // Over the paths of which one has just worked.
                let sent = if self.attempt.tries > RETRY_ALONE {
                    u32::from(RETRY_COPIES)
                } else {
                    1
                };
                self.attempt.path = self.attempt.path.saturating_sub(sent);
                self.attempt.interval = RETRY_FIRST;
                self.attempt.copies = 0;
                Ok(())
            }
            Body::Accept(h) => {
                if !self.is_attempting()
                    || h.nonce != self.attempt.nonce
                    || h.peer_connection_id != self.ids.local_cid
                {
                    return Err(Drop::State);
                }
                if h.lowest > wire::VERSION {
                    return Err(Drop::Version);
                }
                if self.is_life(h) {
                    // The peer still knows us: somebody else said that it did not, or it has not
                    // heard that we have agreed to close.
                    if self.state == ConnectionState::Up {
                        self.reattempt = false;
                    } else {
                        self.go_on(now);
                    }
                    return Ok(());
                }
                self.come_up(now, h)?;
                let rtt = ((now >> 6) as u32).wrapping_sub(h.timestamp);
                if rtt < 1 << 28 {
                    self.first_rtt(now, Time::from(rtt) << 6);
                }
                Ok(())
            }
            Body::Refuse(r) => {
                if !self.is_attempting() || r.nonce != self.attempt.nonce {
                    return Err(Drop::State);
                }
                match r.reason {
                    RefuseReason::NotYet => {
                        // The peer is there: its QP will be, soon.
                        if self.reattempt {
                            self.go_down(now);
                        }
                        let most = if self.has_work() {
                            NOT_YET_MAX
                        } else {
                            IDLE_MAX
                        };
                        let wait = self.not_yet.saturating_mul(2).clamp(NOT_YET_FIRST, most);
                        self.not_yet = wait;
                        self.attempt.due = now.saturating_add(wait);
                        self.attempt.interval = RETRY_FIRST;
                    }
                    RefuseReason::Version => {
                        self.fail(
                            now,
                            ConnectionError::Version {
                                lowest: r.lowest,
                                highest: r.highest,
                            },
                        );
                    }
                }
                Ok(())
            }
            Body::Unknown(u) => {
                // Only a hint: anybody could have sent it. It makes us ask, no more.
                if self.state != ConnectionState::Up || u.connection_id != self.remote_cid {
                    return Err(Drop::State);
                }
                self.suspect_peer(now);
                Ok(())
            }
            _ => Err(Drop::Type),
        }
    }

    fn on_init(&mut self, now: Time, h: &Handshake) -> Result<(), Drop> {
        if h.lowest > wire::VERSION {
            self.answer = Some(Answer::Version(*h));
            return Ok(());
        }
        if !cookie_is_good(&self.cfg.secret, h, now) {
            self.answer = Some(Answer::Cookie(*h));
            return Ok(());
        }
        if matches!(
            self.state,
            ConnectionState::Failed | ConnectionState::Closed | ConnectionState::Closing
        ) || self.streams.len() == 0
        {
            self.answer = Some(Answer::NotYet(*h));
            return Ok(());
        }
        let same = self.state == ConnectionState::Up && h.connection_id == self.remote_cid;
        if !same {
            self.come_up(now, h)?;
        }
        self.answer = Some(Answer::Accept(*h));
        Ok(())
    }

    /// Whether the answer comes from the life of the peer that this end knows.
    fn is_life(&self, h: &Handshake) -> bool {
        h.connection_id == self.remote_cid
            && h.epoch == self.peer_epoch()
            && self.peer_instance == Some(h.instance)
    }

    fn come_up(&mut self, now: Time, h: &Handshake) -> Result<(), Drop> {
        let agreed = Negotiated {
            paths: h.paths.min(self.cfg.paths),
            features: h.features & self.cfg.features(),
            payload_mtu: h.payload_mtu.min(self.cfg.payload_mtu()),
        };
        if agreed.paths == 0 || agreed.payload_mtu < super::PAYLOAD_MTU_MIN {
            return Err(Drop::Field);
        }
        if self.peer_instance.is_some_and(|i| i != h.instance) {
            // Another life of the peer: what the streams had there is gone.
            self.peer_instance = Some(h.instance);
            self.restart(now);
        } else {
            self.peer_instance = Some(h.instance);
        }
        self.up(now, agreed, h.connection_id, h.epoch);
        self.excuse_streams(now, Time::MAX);
        Ok(())
    }
}
