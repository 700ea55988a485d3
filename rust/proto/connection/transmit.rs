// SPDX-License-Identifier: GPL-2.0

//! Packets out: what is sent next, and over which path.

#![forbid(unsafe_code)]

use super::streams::List;
use super::{Connection, ConnectionState, MtuSearch, Reply, LATENESS_SHIFT, PATHS_MAX};
use crate::proto::api::{Direction, Payload, StreamHeader, Time, Transmit, DATA_OVERHEAD};
use crate::proto::congestion::LINE_OVERHEAD;
use crate::proto::path::{Content, Health, Pending, OUTSTANDING_MAX};
use crate::proto::wire::{
    self, AckHeader, AckWriter, Body, Close, CloseKind, Packet, PathHeader, Probe, ProbeReply,
    Query, QueryWriter, Writer, PAYLOAD_PROBE,
};

/// Bytes that a stream may send before the next one's turn.
const QUANTUM: u32 = 16 << 10;

/// Bytes that go over one path before the next one's turn. Packets of a path that follow
/// each other pass the host's stack as one, which is where most of the time goes; and a
/// gap shows at once.
const RUN: u32 = 16 << 10;

/// Between two packets that ask for an acknowledgement because a window closed.
const REQUEST_PACKETS: u32 = 4;
const REQUEST_BYTES: u32 = 16 << 10;

/// Streams whose blocks an acknowledgement that is sent twice repeats.
const TOLD_TWICE: usize = 8;

/// After the local queue was full.
const BLOCKED: Time = 50_000;

/// A path that carries only acknowledgements is probed this often, while the peer's probes
/// hint at acknowledgements that got lost.
const KEEPALIVE: Time = 20_000_000;

impl Connection {
    /// The next packet to send, if there is one for now. Packets of a path are to be sent
    /// in the order in which they come out of here.
    pub fn poll_transmit(&mut self, now: Time, out: &mut Transmit) -> bool {
        if self.is_needed() {
            self.end_rest(now);
        }
        if self.poll_handshake(now, out) || self.poll_close(now, out) {
            return true;
        }
        if self.state != ConnectionState::Up && self.state != ConnectionState::Closing {
            return false;
        }
        if self.poll_reply(now, out) {
            return true;
        }
        if self.ack_is_due(now) && self.poll_ack(now, out) {
            return true;
        }
        if self.probe != 0 && self.poll_probe(now, out) {
            return true;
        }
        if self.home_probe != 0 && self.poll_home(now, out) {
            return true;
        }
        if self.poll_mtu(now, out) {
            return true;
        }
        if self.plane_timer <= now && self.poll_planes(now, out) {
            return true;
        }
        if self.streams.first(List::Query).is_some() && self.poll_query(now, out) {
            return true;
        }
        self.poll_data(now, out)
    }

    /// Clears what an earlier use of `out` left behind; the header stays, it is written.
    pub(super) fn blank(out: &mut Transmit) {
        out.header_len = 0;
        out.payload = Payload::None;
        out.resend = false;
        out.always_checksum = false;
        out.may_fragment = false;
    }

    fn poll_data(&mut self, now: Time, out: &mut Transmit) -> bool {
        let sent = self.next_data(now, out);
        if !sent && self.run_left != 0 {
            self.run_left = 0;
            self.rotor = self.run_path.wrapping_add(1) & (PATHS_MAX as u32 - 1);
        }
        sent
    }

    /// Paths on which lost packets are to be sent again.
    pub(super) fn losses(&self) -> u64 {
        self.lost & self.good & !self.emptied
    }

    fn next_data(&mut self, now: Time, out: &mut Transmit) -> bool {
        let lost = self.losses();
        if self.rescue.content.is_some() && !self.is_blocked(now) && self.send_copy(now, out) {
            return true;
        }
        if lost == 0 && self.donors == 0 && self.streams.first(List::Send).is_none() {
            self.limited = false;
            return false;
        }
        if !self.is_open(now) {
            return false;
        }
        let lost = lost & self.ready;
        if lost != 0 {
            // Whose turn it is, so that a path full of losses does not hold up the others.
            let i = first_from(lost, self.rotor);
            if self.send_again(now, i, out) {
                return true;
            }
        }
        if self.donors != 0 && self.send_moved(now, out) {
            return true;
        }
        self.send_new(now, out)
    }

    /// Whether some plane's window, pace and local queue let data go now, and which ones.
    fn is_open(&mut self, now: Time) -> bool {
        if self.several {
            self.ready = self.ready_paths(now);
            if self.ready == 0 || (self.inflight != 0 && self.inflight >= self.windows) {
                self.limited |= self.ready != 0 || self.planes_next(u64::MAX) == Time::MAX;
                return false;
            }
            return true;
        }
        let Some(home) = self.planes.first() else {
            return false;
        };
        if now < home.blocked_until || home.pace.next() > now || home.full {
            return false;
        }
        let window = self.windows.min(u64::from(home.share_window));
        if self.inflight != 0 && self.inflight >= window {
            self.limited = true;
            return false;
        }
        true
    }

    /// Whether the local queue was full a moment ago.
    fn is_blocked(&self, now: Time) -> bool {
        (self.planes.iter())
            .filter(|p| p.paths != 0)
            .all(|p| now < p.blocked_until)
    }

    /// Sends the first lost packet of path `i` again, under its number.
    fn send_again(&mut self, now: Time, i: u32, out: &mut Transmit) -> bool {
        let Some(path) = self.paths.get_mut(i as usize) else {
            return false;
        };
        let Some(sequence) = path.tx.first_lost() else {
            self.lost &= !(1u64 << (i & 63));
            return false;
        };
        let content = path.tx.record(sequence & 255).and_then(|r| r.content);
        let mut header = StreamHeader::default();
        let mut payload = Payload::None;
        let mut void = true;
        if let Some(c) = content {
            if let Some(s) = self.streams.stream_of(c.stream.0, c.generation) {
                void = !s.rebuild(c.packet, &mut header);
                if void {
                    s.released(now, c.packet);
                } else {
                    payload = s.payload(c.packet);
                }
            }
        }
        if void {
            header = StreamHeader::default();
            self.counters.voids = self.counters.voids.wrapping_add(1);
        }
        let len = wire_len(&payload);
        let Some(path) = self.paths.get_mut(i as usize) else {
            return false;
        };
        let timestamp = path.tx.resend(now, sequence, len, void);
        // With nothing else to send it goes over another path as well, rather than to wait
        // for the news of yet another loss.
        let idle = self.streams.first(List::Send).is_none();
        if idle && !void && self.rescue.content.is_none() {
            self.rescue.content = content;
            self.rescue.copies = 1;
            self.rescue.used = 1u64 << (i & 63);
        }
        path.stats.resent = path.stats.resent.wrapping_add(1);
        self.begin_resend(now, payload, out);
        if !self.paths.get(i as usize).is_some_and(|p| p.tx.has_lost()) {
            self.lost &= !(1u64 << (i & 63));
        }
        self.finish_data(now, i, sequence, timestamp, len, &header, out);
        if void {
            if let Some(c) = content {
                self.touch(now, c.stream.0);
            }
        }
        true
    }

    /// Begins a packet whose payload was sent before.
    fn begin_resend(&mut self, now: Time, payload: Payload, out: &mut Transmit) {
        self.counters.retransmits = self.counters.retransmits.wrapping_add(1);
        self.trouble = now;
        Self::blank(out);
        out.resend = true;
        out.may_fragment = self.is_too_large(&payload);
        out.payload = payload;
    }

    /// Sends a packet that a silent path has given up, under a number of another path.
    fn send_moved(&mut self, now: Time, out: &mut Transmit) -> bool {
        for _ in 0..OUTSTANDING_MAX {
            if self.donors == 0 {
                return false;
            }
            let d = self.donors.trailing_zeros();
            let picked = if self.rescue.running {
                self.pick_rescue(1u64 << (d & 63))
            } else {
                self.pick()
            };
            let Some(i) = picked else {
                self.rescue.running = false;
                self.limited = true;
                return false;
            };
            let Some(donor) = self.paths.get_mut(d as usize) else {
                return false;
            };
            let content = donor.tx.take_donation();
            if !donor.tx.has_donations() {
                self.donors &= !(1u64 << (d & 63));
                if donor.health != Health::Good {
                    // A failed path waits for this before it begins anew.
                    donor.deadline = donor.deadline.min(now);
                    self.path_timer = self.path_timer.min(donor.deadline);
                }
                if self.donors == 0 {
                    self.rescue.running = false;
                }
            }
            let Some(c) = content else {
                continue;
            };
            let mut header = StreamHeader::default();
            let Some(s) = self.streams.stream_of(c.stream.0, c.generation) else {
                continue;
            };
            if !s.rebuild(c.packet, &mut header) {
                s.released(now, c.packet);
                self.touch(now, c.stream.0);
                continue;
            }
            let payload = s.payload(c.packet);
            let len = wire_len(&payload);
            let Some(path) = self.paths.get_mut(i as usize) else {
                return false;
            };
            let (sequence, timestamp) = path.tx.push(now, Some(c), len);
            if self.rescue.copies != 0 && self.rescue.content.is_none() {
                self.rescue.content = Some(c);
                self.rescue.used |= 1u64 << (i & 63);
            }
            if let Some(donor) = self.paths.get_mut(d as usize) {
                donor.stats.moved = donor.stats.moved.wrapping_add(1);
            }
            self.counters.moved = self.counters.moved.wrapping_add(1);
            self.begin_resend(now, payload, out);
            self.finish_data(now, i, sequence, timestamp, len, &header, out);
            return true;
        }
        false
    }

    /// Sends a copy of a packet that another path is responsible for: under a number that
    /// carries nothing should it be sent again.
    fn send_copy(&mut self, now: Time, out: &mut Transmit) -> bool {
        let Some(c) = self.rescue.content else {
            return false;
        };
        let mut header = StreamHeader::default();
        let needed = match self.streams.stream_of(c.stream.0, c.generation) {
            Some(s) if s.rebuild(c.packet, &mut header) => Some(s.payload(c.packet)),
            _ => None,
        };
        let i = self.pick_rescue(self.rescue.used);
        let (Some(payload), Some(i)) = (needed, i) else {
            self.rescue.content = None;
            return false;
        };
        self.rescue.used |= 1u64 << (i & 63);
        self.rescue.copies = self.rescue.copies.saturating_sub(1);
        if self.rescue.copies == 0 {
            self.rescue.content = None;
        }
        let len = wire_len(&payload);
        let Some(path) = self.paths.get_mut(i as usize) else {
            return false;
        };
        let (sequence, timestamp) = path.tx.push(now, None, len);
        self.begin_resend(now, payload, out);
        self.finish_data(now, i, sequence, timestamp, len, &header, out);
        true
    }

    /// The most promising path for a packet that has to get through, besides `used`.
    fn pick_rescue(&self, used: u64) -> Option<u32> {
        let mut room = self.good & !used;
        let mut mask = room;
        while mask != 0 {
            let i = mask.trailing_zeros();
            mask &= mask.wrapping_sub(1);
            if !self.paths.get(i as usize).is_some_and(|p| p.tx.has_room()) {
                room &= !(1u64 << (i & 63));
            }
        }
        let calm = room & !self.silent;
        self.latest_proven(if calm != 0 { calm } else { room })
    }

    /// Sends a new packet of the stream whose turn it is.
    fn send_new(&mut self, now: Time, out: &mut Transmit) -> bool {
        for _ in 0..self.streams.bound().saturating_add(1) {
            let Some(id) = self.streams.first(List::Send) else {
                self.limited = false;
                return false;
            };
            let Some(i) = self.pick() else {
                self.limited = true;
                return false;
            };
            let Some(slot) = self.streams.slot_mut(id) else {
                return false;
            };
            let generation = slot.generation;
            let Some(s) = slot.stream.as_deref_mut() else {
                self.streams.delist(List::Send);
                continue;
            };
            if slot.deficit == 0 {
                slot.deficit = QUANTUM;
            }
            let mut header = StreamHeader::default();
            let Some(packet) = s.next_packet(now, u32::MAX, &mut header) else {
                // Should it still say that it can send, it is asked again after its next
                // event, not now and for ever.
                slot.deficit = 0;
                self.streams.delist(List::Send);
                continue;
            };
            s.sent(packet);
            let payload = s.payload(packet);
            let more = s.can_send(now);
            let len = wire_len(&payload);
            let content = Content {
                stream: crate::proto::api::StreamId(id),
                generation,
                packet,
            };
            slot.deficit = slot.deficit.saturating_sub(u32::from(len));
            if !more {
                slot.deficit = 0;
                self.streams.delist(List::Send);
                self.update(now, id);
            } else if slot.deficit == 0 && !self.streams.alone(List::Send) {
                self.streams.delist(List::Send);
                self.streams.enlist(List::Send, id);
            }
            let Some(path) = self.paths.get_mut(i as usize) else {
                return false;
            };
            let (sequence, timestamp) = path.tx.push(now, Some(content), len);
            path.stats.packets = path.stats.packets.wrapping_add(1);
            path.stats.bytes = path.stats.bytes.wrapping_add(u64::from(len));
            self.counters.sent_packets = self.counters.sent_packets.wrapping_add(1);
            self.counters.sent_bytes = self.counters.sent_bytes.wrapping_add(u64::from(len));
            Self::blank(out);
            out.may_fragment = self.is_too_large(&payload);
            out.payload = payload;
            self.finish_data(now, i, sequence, timestamp, len, &header, out);
            // The stream's timer may have begun.
            if packet.dir != Direction::Request || !self.streams.is_on(List::Timer, id) {
                self.update(now, id);
            }
            return true;
        }
        false
    }

    /// Whether a payload was cut for larger packets than pass now.
    fn is_too_large(&self, payload: &Payload) -> bool {
        match *payload {
            Payload::Send { len, .. } | Payload::Read { len, .. } => len > self.agreed.payload_mtu,
            _ => false,
        }
    }

    /// What all data packets have in common: windows, the request for an acknowledgement,
    /// the header.
    #[allow(clippy::too_many_arguments)] // the parts of one packet
    fn finish_data(
        &mut self,
        now: Time,
        i: u32,
        sequence: u32,
        timestamp: u32,
        len: u16,
        header: &StreamHeader,
        out: &mut Transmit,
    ) {
        let bytes = u32::from(len);
        self.inflight = self.inflight.saturating_add(u64::from(bytes));
        if self.run_path != i || self.run_left == 0 {
            self.run_path = i;
            self.run_left = RUN;
        }
        self.run_left = self.run_left.saturating_sub(bytes);
        self.rotor = if self.run_left == 0 {
            i.wrapping_add(1) & (PATHS_MAX as u32 - 1)
        } else {
            i
        };
        self.since_request_packets = self.since_request_packets.saturating_add(1);
        self.since_request_bytes = self.since_request_bytes.saturating_add(bytes);
        let pause = self.pause();
        let remote_cid = self.remote_cid;
        let idle =
            self.streams.first(List::Send).is_none() && self.losses() == 0 && self.donors == 0;
        let Some(path) = self.paths.get_mut(i as usize) else {
            return;
        };
        let Some(plane) = self.planes.get_mut(usize::from(path.plane)) else {
            return;
        };
        plane.pace.spend(now, bytes.saturating_add(LINE_OVERHEAD));
        let share_window = u64::from(plane.share_window);
        let window = self.windows.min(share_window);
        path.sent = now;
        // Should it have been emptied, it is not any more.
        self.emptied &= !(1u64 << (i & 63));
        let silence = now.saturating_add(path.silence(pause));
        if path.deadline > silence {
            path.deadline = silence;
            self.path_timer = self.path_timer.min(silence);
        }
        if self.overdue & (1u64 << (i & 63)) != 0 {
            self.overdue &= !(1u64 << (i & 63));
            path.nudged = true;
        }
        let on_plane = if self.several {
            plane.inflight.saturating_add(u64::from(bytes))
        } else {
            self.inflight
        };
        let closed = self.inflight >= self.windows
            || on_plane >= share_window
            || path.tx.inflight() >= path.window.bytes();
        // Half a window is enough for a small one; more often would be one for each packet.
        let due = self.since_request_packets >= REQUEST_PACKETS
            || self.since_request_bytes >= REQUEST_BYTES
            || u64::from(self.since_request_bytes).saturating_mul(2) >= window;
        let ack_request = idle || (closed && due) || path.nudged || self.rescue.running;
        if ack_request {
            self.since_request_packets = 0;
            self.since_request_bytes = 0;
        }
        let p = PathHeader {
            path: i as u8,
            epoch: path.tx.epoch,
            sequence,
            timestamp,
            ack_request,
        };
        let mut w = Writer::new(&mut out.header);
        wire::emit_data(&mut w, remote_cid, &p, header);
        out.header_len = w.finish();
        self.address(out, i);
        self.refresh(i as usize);
    }

    /// Paths with room for new packets. Those that do not answer get nothing while there are
    /// others, even if these are full.
    pub(super) fn usable(&self) -> u64 {
        if self.good & !self.silent != 0 {
            self.open & !self.silent
        } else {
            self.open
        }
    }

    /// The path for a new packet: one that needs to be heard of, else the one with the
    /// least in flight, and the least queue, among those with room.
    fn pick(&self) -> Option<u32> {
        let overdue = self.overdue & self.good & !self.silent & self.ready;
        if overdue != 0 {
            let i = overdue.trailing_zeros();
            // Its window may be closed, by what is lost: one packet more is what it takes.
            if self.paths.get(i as usize).is_some_and(|p| p.tx.has_room()) {
                return Some(i);
            }
        }
        let mut mask = self.usable() & self.ready;
        if self.run_left != 0 && mask & (1u64 << (self.run_path & 63)) != 0 {
            return Some(self.run_path);
        }
        if self.several {
            // An equal load for each plane.
            mask = self.lightest(mask);
        }
        // Begin where the last choice ended, so that equals take turns.
        let start = self.rotor & (PATHS_MAX as u32 - 1);
        let mut best: Option<(u32, u32)> = None;
        let mut idle = None;
        let mut upper = mask & (u64::MAX << start);
        mask &= !(u64::MAX << start);
        loop {
            if upper == 0 {
                if mask == 0 {
                    break;
                }
                upper = core::mem::take(&mut mask);
            }
            let i = upper.trailing_zeros();
            upper &= upper.wrapping_sub(1);
            let score = self.score.get(i as usize).copied().unwrap_or(u32::MAX);
            if score == 0 {
                if self.proven & 1u64 << (i & 63) != 0 {
                    return Some(i);
                }
                // Nobody knows whether it works.
                idle = idle.or(Some(i));
            } else if best.is_none_or(|(s, _)| score < s) {
                best = Some((score, i));
            }
        }
        idle.or(best.map(|(_, i)| i))
    }

    /// Path `i` may have got or lost room.
    pub(super) fn refresh(&mut self, i: usize) {
        let bit = 1u64 << (i & 63);
        let Some(p) = self.paths.get(i) else {
            return;
        };
        if self.homing & bit != 0 && !p.tx.is_outstanding() {
            self.go_home(i);
        }
        let Some(p) = self.paths.get(i) else {
            return;
        };
        let load = p.tx.inflight();
        let room = self.good & bit != 0
            && (self.homing | self.moving) & bit == 0
            && p.tx.has_room()
            && (load == 0 || load < p.window.bytes());
        if !p.tx.has_room() && load < p.window.bytes() && self.good & bit != 0 {
            self.short_of_records = true;
        }
        if let Some(s) = self.score.get_mut(i) {
            *s = p.score();
        }
        if let Some(l) = self.load.get_mut(i) {
            let before = core::mem::replace(l, load);
            if let Some(plane) = self.planes.get_mut(usize::from(p.plane)) {
                plane.inflight = plane
                    .inflight
                    .saturating_sub(u64::from(before))
                    .saturating_add(u64::from(load));
            }
        }
        if room {
            self.open |= bit;
        } else {
            self.open &= !bit;
        }
    }

    /// Path for a packet that belongs to none: the good ones in turn.
    pub(super) fn next_good(&mut self, now: Time, but: Option<u32>) -> u32 {
        // While nothing is heard nobody knows what works: then any may be the one, and every
        // other packet goes anywhere.
        let mut deaf = self.rescue.since != 0 || now < self.rescue.peer_until;
        if deaf && self.proven != 0 {
            self.rescue.anywhere = !self.rescue.anywhere;
            deaf = self.rescue.anywhere;
        }
        let mut mask = if deaf || self.good == 0 {
            self.path_mask()
        } else {
            self.good
        };
        let others = but.map_or(u64::MAX, |i| !(1u64 << (i & 63)));
        let better = [others, self.proven, !self.silent];
        for better in better.into_iter().take(if deaf { 1 } else { 3 }) {
            if mask & better != 0 {
                mask &= better;
            }
        }
        if mask == 0 {
            return 0;
        }
        // In turn; at random while nothing is heard, so that no pattern always meets the
        // dead ones.
        let start = if deaf {
            self.choice() as u32
        } else {
            self.ack.rotor
        };
        let i = first_from(mask, start);
        self.ack.rotor = i.wrapping_add(1) & (PATHS_MAX as u32 - 1);
        i
    }

    fn ack_header(&mut self) -> AckHeader {
        self.ack.number = self.ack.number.wrapping_add(1);
        let (share, plane) = self.grant_to_tell();
        AckHeader {
            number: self.ack.number,
            share,
            plane,
            lateness: u8::try_from(self.margin.lateness() >> LATENESS_SHIFT).unwrap_or(u8::MAX),
        }
    }

    fn poll_ack(&mut self, now: Time, out: &mut Transmit) -> bool {
        let anything = self.ack.dirty != 0
            || !self.ack.refused.is_empty()
            || self.streams.first(List::Dirty).is_some()
            || self.tombstones.iter().any(|t| t.announce != 0);
        if !anything {
            self.acked();
            return false;
        }
        let h = self.ack_header();
        let again = core::mem::take(&mut self.ack.twice);
        let told_paths = self.ack.dirty;
        let mut told_streams = [(0u32, [false; 2]); TOLD_TWICE];
        let mut told = 0;
        Self::blank(out);
        let mut w = Writer::new(&mut out.header);
        let mut a = AckWriter::new(&mut w, self.remote_cid, &h);
        let mut left = self.ack.dirty;
        while left != 0 {
            let i = left.trailing_zeros();
            let Some(p) = self.paths.get(i as usize) else {
                break;
            };
            // Some room is kept for streams: their blocks are what programs wait for.
            if a.room() < 200 || !a.path(&p.rx.block(now, i as u8)) {
                break;
            }
            left &= left.wrapping_sub(1);
        }
        self.ack.dirty = left;
        while a.has_room() {
            let Some(b) = self.ack.refused.pop() else {
                break;
            };
            a.stream(&b);
        }
        let mut tombs = false;
        for t in self.tombstones.iter_mut().filter(|t| t.announce != 0) {
            if !a.has_room_for(2) {
                tombs = true;
                break;
            }
            for b in &t.blocks {
                a.stream(b);
            }
            t.announce = t.announce.wrapping_sub(1);
            tombs |= t.announce != 0;
        }
        for _ in 0..self.streams.bound().saturating_add(1) {
            let Some(i) = self.streams.first(List::Dirty) else {
                break;
            };
            if !a.has_room_for(2) {
                break;
            }
            self.streams.delist(List::Dirty);
            let Some(slot) = self.streams.slot_mut(i) else {
                break;
            };
            let dirty = core::mem::take(&mut slot.dirty);
            let Some(s) = slot.stream.as_deref() else {
                continue;
            };
            if let Some(t) = told_streams.get_mut(told).filter(|_| again) {
                *t = (i, dirty);
                told = told.saturating_add(1);
            }
            for (d, dir) in dirty.iter().zip([Direction::Request, Direction::Response]) {
                if *d {
                    a.stream(&s.block(dir));
                }
            }
        }
        if again {
            self.ack.dirty = told_paths;
            for (i, dirty) in told_streams.iter().take(told) {
                if let Some(slot) = self.streams.slot_mut(*i) {
                    for (d, t) in slot.dirty.iter_mut().zip(dirty) {
                        *d |= *t;
                    }
                }
                self.streams.enlist(List::Dirty, *i);
            }
        }
        let more = self.ack.dirty != 0
            || tombs
            || !self.ack.refused.is_empty()
            || self.streams.first(List::Dirty).is_some();
        out.header_len = w.finish();
        let i = self.next_good(now, None);
        self.address(out, i);
        self.keep_alive(now, i);
        self.counters.acks_sent = self.counters.acks_sent.wrapping_add(1);
        if more {
            self.ack.at_once = true;
        } else {
            self.acked();
        }
        true
    }

    /// Everything has been acknowledged.
    fn acked(&mut self) {
        self.ack.packets = 0;
        self.ack.bytes = 0;
        self.ack.at_once = false;
        self.ack.deadline = Time::MAX;
        self.ack.placing = 0;
    }

    /// A path that carries nothing but acknowledgements shows no silence of its own. When
    /// the peer probes, acknowledgements may be what it misses: then such paths are asked.
    fn keep_alive(&mut self, now: Time, i: u32) {
        let pause = self.pause();
        let Some(p) = self.paths.get_mut(i as usize) else {
            return;
        };
        if p.deadline == Time::MAX
            && p.probe.is_none()
            && now.saturating_sub(p.alive) > KEEPALIVE
            && now < self.doubt_until
        {
            p.deadline = now.saturating_add(p.silence(pause));
            self.path_timer = self.path_timer.min(p.deadline);
            self.probe |= 1u64 << (i & 63);
        }
    }

    /// Answers a probe: over the path with its number, then over another one.
    fn poll_reply(&mut self, now: Time, out: &mut Transmit) -> bool {
        let Some(Reply { probe, own, left }) = self.ack.replies.last().copied() else {
            return false;
        };
        let h = self.ack_header();
        let Some(p) = self.paths.get(usize::from(probe.path)) else {
            return false;
        };
        Self::blank(out);
        let mut w = Writer::new(&mut out.header);
        let mut a = ProbeReply::begin(&mut w, self.remote_cid, &probe, &h);
        a.path(&p.rx.block(now, probe.path));
        out.header_len = w.finish();
        let number = u32::from(probe.path);
        let works = self.good & !self.silent & 1u64 << (number & 63) != 0;
        let i = if own && (works || self.agreed.paths == 1) {
            number
        } else {
            self.next_good(now, Some(number))
        };
        self.address(out, i);
        match self.ack.replies.last_mut() {
            Some(r) if left > 1 => {
                r.own = false;
                r.left = left.wrapping_sub(1);
            }
            _ => drop(self.ack.replies.pop()),
        }
        true
    }

    /// For how many times of silence nothing at all was heard.
    fn deafness(&self, now: Time) -> u8 {
        if self.rescue.since == 0 {
            return 0;
        }
        let unit = self.srtt.saturating_mul(2).max(self.pause());
        let n = now.saturating_sub(self.rescue.since).checked_div(unit);
        n.and_then(|n| u8::try_from(n).ok()).unwrap_or(u8::MAX)
    }

    fn poll_probe(&mut self, now: Time, out: &mut Transmit) -> bool {
        let i = self.probe.trailing_zeros();
        self.probe &= self.probe.wrapping_sub(1);
        let path = self.paths.get(i as usize);
        let padding = match path {
            Some(p) if p.health == Health::Failed => {
                self.agreed.payload_mtu.saturating_add(PAYLOAD_PROBE)
            }
            _ => 0,
        };
        // The same until it is answered: on a path that is longer than the time in which it is
        // asked again, the reply to any of the questions counts.
        let asked = path
            .and_then(|p| p.probe)
            .filter(|q| q.padding == padding)
            .map(|q| q.challenge);
        let fresh = self.draw();
        let challenge = asked.unwrap_or(fresh);
        let Some(stamp) = self.send_probe(now, i, challenge, padding, out) else {
            return false;
        };
        if let Some(p) = self.paths.get_mut(i as usize) {
            p.probe = Some(Pending {
                first: p.probe.map_or(now, |earlier| earlier.first),
                sent: now,
                stamp,
                challenge,
                padding,
            });
        }
        true
    }

    /// Asks over the first port of a path that has another one now.
    fn poll_home(&mut self, now: Time, out: &mut Transmit) -> bool {
        let i = self.home_probe.trailing_zeros();
        self.home_probe &= self.home_probe.wrapping_sub(1);
        let challenge = self.draw();
        let padding = self.agreed.payload_mtu.saturating_add(PAYLOAD_PROBE);
        let Some(p) = self.paths.get_mut(i as usize) else {
            return false;
        };
        p.home_challenge = challenge;
        let home = p.home;
        let sent = self.send_probe(now, i, challenge, padding, out).is_some();
        out.source_port = home;
        sent
    }

    /// Sends a probe over path `i`; its timestamp. `None`: there is no such path.
    pub(super) fn send_probe(
        &mut self,
        now: Time,
        i: u32,
        challenge: u64,
        padding: u32,
        out: &mut Transmit,
    ) -> Option<u32> {
        let deaf = self.deafness(now);
        let p = self.paths.get_mut(i as usize)?;
        let timestamp = p.tx.stamp(now);
        let probe = Probe {
            path: i as u8,
            deaf,
            epoch: p.tx.epoch,
            next: p.tx.next(),
            timestamp,
            challenge,
            padding,
        };
        Self::blank(out);
        let mut w = Writer::new(&mut out.header);
        probe.emit(&mut w, self.remote_cid);
        out.header_len = w.finish();
        if padding != 0 {
            out.payload = Payload::Pad { len: padding };
        }
        self.address(out, i);
        self.counters.probes_sent = self.counters.probes_sent.wrapping_add(1);
        Some(timestamp)
    }

    fn poll_query(&mut self, now: Time, out: &mut Transmit) -> bool {
        Self::blank(out);
        let mut w = Writer::new(&mut out.header);
        let mut q = QueryWriter::new(&mut w, self.remote_cid);
        let mut any = false;
        for _ in 0..self.streams.bound().saturating_add(1) {
            if !q.has_room_for(2) {
                break;
            }
            let Some(i) = self.streams.delist(List::Query) else {
                break;
            };
            let Some(slot) = self.streams.slot_mut(i) else {
                break;
            };
            let ask = core::mem::take(&mut slot.query);
            let Some(stream) = slot.stream.as_deref() else {
                continue;
            };
            for (a, dir) in ask.iter().zip([Direction::Request, Direction::Response]) {
                if *a {
                    any = true;
                    let (sseq, round) = stream.query(dir);
                    q.push(&Query {
                        dst_qpn: slot.remote_qpn,
                        src_qpn: slot.qpn,
                        dir,
                        sseq,
                        round,
                    });
                }
            }
        }
        if !any {
            return false;
        }
        out.header_len = w.finish();
        let i = self.next_good(now, None);
        self.address(out, i);
        self.counters.queries_sent = self.counters.queries_sent.wrapping_add(1);
        true
    }

    fn poll_close(&mut self, now: Time, out: &mut Transmit) -> bool {
        let (kind, number) = match self.closing.take() {
            Some(c) => c,
            None if self.state == ConnectionState::Closing && self.close_due <= now => {
                self.close_due = now.saturating_add(super::timers::CLOSE_RETRY);
                self.close_tries = self.close_tries.saturating_add(1);
                (CloseKind::Request, self.close_number)
            }
            None => return false,
        };
        if self.remote_cid == 0 {
            return false;
        }
        Self::blank(out);
        let mut w = Writer::new(&mut out.header);
        Close { kind, number }.emit(&mut w, self.remote_cid);
        out.header_len = w.finish();
        let i = self.next_good(now, None);
        self.address(out, i);
        true
    }

    fn poll_mtu(&mut self, now: Time, out: &mut Transmit) -> bool {
        let m = self.mtu;
        if m.probing == 0 || m.due > now {
            return false;
        }
        // The same for all tries of a size, as above.
        let fresh = self.draw() | 1;
        let challenge = match m.challenge {
            0 => fresh,
            c => c,
        };
        let i = self.next_good(now, None);
        let padding = m.probing.saturating_add(PAYLOAD_PROBE);
        if self.send_probe(now, i, challenge, padding, out).is_none() {
            return false;
        }
        self.mtu = MtuSearch {
            challenge,
            tries: m.tries.saturating_add(1),
            due: now.saturating_add(self.mtu_wait()),
            ..m
        };
        true
    }

    /// The local queue did not take `tx`: it never left, which says nothing about the
    /// network. Call it for each packet of a batch that was refused, in their order.
    pub fn transmit_failed(&mut self, now: Time, tx: &Transmit) {
        self.counters.unsent = self.counters.unsent.wrapping_add(1);
        let Some(bytes) = tx.header.get(..usize::from(tx.header_len)) else {
            return;
        };
        let Ok(packet) = Packet::parse(bytes) else {
            return;
        };
        match packet.body() {
            Body::Data(p, _) => {
                let i = usize::from(p.path);
                let Some(path) = self.paths.get_mut(i) else {
                    return;
                };
                if let Some(plane) = self.planes.get_mut(usize::from(path.plane)) {
                    plane.blocked_until = now.saturating_add(BLOCKED.max(self.srtt / 8));
                }
                if path.tx.epoch != p.epoch {
                    return;
                }
                let (bytes, n) = path.tx.unsent(p.sequence);
                if n != 0 {
                    self.inflight = self.inflight.saturating_sub(u64::from(bytes));
                    self.lost |= 1u64 << (i & 63);
                    self.refresh(i);
                }
            }
            Body::Ack(a) => {
                for b in a.blocks.paths() {
                    self.ack.dirty |= 1u64 << (b.path & 63);
                }
                for b in a.blocks.streams() {
                    // A block's sender is this end.
                    if let Some(i) = self.streams.find(b.src_qpn, b.dst_qpn) {
                        if let Some(slot) = self.streams.slot_mut(i) {
                            slot.dirty = [true; 2];
                        }
                        self.streams.enlist(List::Dirty, i);
                    }
                }
                self.ack.deadline = self
                    .ack
                    .deadline
                    .min(now.saturating_add(BLOCKED.max(self.srtt / 8)));
            }
            _ => {}
        }
    }

    /// The memory that `tx` was to be sent from is gone: its stream fails, its number
    /// becomes VOID.
    pub fn source_lost(&mut self, now: Time, tx: &Transmit) {
        let Some(bytes) = tx.header.get(..usize::from(tx.header_len)) else {
            return;
        };
        let Ok(packet) = Packet::parse(bytes) else {
            return;
        };
        let Body::Data(p, _) = packet.body() else {
            return;
        };
        let i = usize::from(p.path);
        let Some(path) = self.paths.get_mut(i) else {
            return;
        };
        if path.tx.epoch != p.epoch {
            return;
        }
        let (bytes, n) = path.tx.unsent(p.sequence);
        if n != 0 {
            self.inflight = self.inflight.saturating_sub(u64::from(bytes));
            self.lost |= 1u64 << (i & 63);
        }
        let content = path.tx.take(p.sequence);
        self.refresh(i);
        if let Some(c) = content {
            if let Some(s) = self.streams.stream_of(c.stream.0, c.generation) {
                s.released(now, c.packet);
                s.source_lost(c.packet);
                self.touch(now, c.stream.0);
            }
        }
    }
}

/// Bytes that a packet with `payload` counts in windows.
fn wire_len(payload: &Payload) -> u16 {
    let len = match *payload {
        Payload::None => 0,
        Payload::Send { len, .. } | Payload::Read { len, .. } | Payload::Pad { len } => len,
    };
    u16::try_from(len.saturating_add(DATA_OVERHEAD as u32)).unwrap_or(u16::MAX)
}

/// First member of a set that is not empty, at or after `start`, going round.
pub(super) fn first_from(mask: u64, start: u32) -> u32 {
    let upper = mask & (u64::MAX << (start & 63));
    if upper != 0 {
        upper.trailing_zeros()
    } else {
        mask.trailing_zeros()
    }
}
