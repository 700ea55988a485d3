// SPDX-License-Identifier: GPL-2.0

//! Packets in.

#![forbid(unsafe_code)]

use super::streams::List;
use super::{Connection, ConnectionState, Reply, LATENESS_SHIFT, TOMBSTONE_LIFE};
use crate::proto::api::{
    Direction, Host, Opcode, Receive, RxInfo, StreamHeader, Time, DATA_OVERHEAD,
};
use crate::proto::congestion::{
    caution, share_window, slack, Context, LATENESS_MAX, LINE_OVERHEAD,
};
use crate::proto::path::{Acked, Arrival, Health, SendHalf, THRESHOLD_MAX};
use crate::proto::stream::{BlockStatus, StreamBlock};
use crate::proto::wire::{
    AckHeader, Blocks, Body, Close, CloseKind, Drop, Packet, PathBlock, PathHeader, Probe, Queries,
};

/// Packets or bytes after which an acknowledgement is sent at the end of the batch.
const ACK_PACKETS: u32 = 4;
const ACK_BYTES: u32 = 16 << 10;
/// An acknowledgement waits no longer than this, or a quarter of the round trip.
const ACK_DELAY_MAX: Time = 1_000_000;
const ACK_DELAY_MIN: Time = 20_000;

/// Packets acknowledged without a spurious resend after which the gap threshold falls.
const CALM: u32 = 512;

/// A probe of the peer casts doubt on own paths for this long.
const DOUBT: Time = 100_000_000;

/// Times in a row that probes of a path were answered and its packets were lost, before
/// packets are suspected to be too large for it.
const MTU_DOUBT: u8 = 3;

/// A probe is answered so often; and when its sender hears nothing.
const REPLIES: u8 = 2;
const REPLIES_DEAF: u8 = 4;

/// The least round-trip time of the connection is taken anew this often.
const LEAST_AGE: Time = 10_000_000_000;

impl Connection {
    /// A packet arrived whose checksum, where it was agreed on one, is right. Handshake
    /// packets must have come from the address they name (the driver compares). An error
    /// says why the packet was not used; it is counted here already.
    pub fn receive(
        &mut self,
        now: Time,
        packet: &Packet<'_>,
        info: &RxInfo,
        host: &mut dyn Host,
    ) -> Result<Receive, Drop> {
        let r = self.dispatch(now, packet, info, host);
        if let Err(why) = r {
            self.counters.count_drop(why);
        }
        r
    }

    fn dispatch(
        &mut self,
        now: Time,
        packet: &Packet<'_>,
        info: &RxInfo,
        host: &mut dyn Host,
    ) -> Result<Receive, Drop> {
        packet.check_payload(info.payload_len)?;
        match packet.connection_id() {
            None => {
                self.receive_handshake(now, packet)?;
                return Ok(Receive::Done);
            }
            Some(id) if id != self.ids.local_cid => return Err(Drop::NoConnection),
            Some(_) => {}
        }
        if !matches!(self.state, ConnectionState::Up | ConnectionState::Closing) {
            if self.state == ConnectionState::Resting {
                return self.receive_resting(now, packet);
            }
            self.peer_is_up(now);
            return Err(Drop::State);
        }
        match packet.body() {
            Body::Data(p, s) => return self.receive_data(now, p, s, info, host),
            Body::Ack(a) => {
                self.counters.acks_rcvd = self.counters.acks_rcvd.wrapping_add(1);
                self.receive_blocks(now, &a.header, &a.blocks, false)?;
            }
            Body::Probe(p) => self.receive_probe(now, p)?,
            Body::ProbeReply(r) => {
                self.receive_blocks(now, &r.ack.header, &r.ack.blocks, true)?;
                self.receive_probe_reply(now, &r.probe)?;
            }
            Body::Query(q) => self.receive_queries(now, q),
            Body::Close(c) => self.receive_close(now, c),
            Body::Planes(p) => self.receive_planes(now, p)?,
            _ => return Err(Drop::Type),
        }
        Ok(Receive::Done)
    }

    fn receive_data(
        &mut self,
        now: Time,
        p: &PathHeader,
        s: &StreamHeader,
        info: &RxInfo,
        host: &mut dyn Host,
    ) -> Result<Receive, Drop> {
        if p.path >= self.agreed.paths {
            return Err(Drop::Path);
        }
        let path = self.paths.get_mut(usize::from(p.path)).ok_or(Drop::Path)?;
        let arrival = path
            .rx
            .arrive(now, p.epoch, p.sequence, p.timestamp, info.ce)?;
        path.stats.received = path.stats.received.wrapping_add(1);
        self.counters.rcvd_packets = self.counters.rcvd_packets.wrapping_add(1);
        self.counters.rcvd_bytes = self
            .counters
            .rcvd_bytes
            .wrapping_add(u64::from(info.payload_len));
        let overhead = LINE_OVERHEAD.saturating_add(DATA_OVERHEAD as u32);
        let on_line = u64::from(info.payload_len.saturating_add(overhead));
        let inbound = match self.inbound.len() {
            1 => self.inbound.first_mut(),
            _ => self.inbound.get_mut(usize::from(info.plane)),
        };
        if let Some(p) = inbound {
            p.bytes = p.bytes.wrapping_add(on_line);
        }
        self.ack.dirty |= 1u64 << (p.path & 63);
        self.ack.packets = self.ack.packets.saturating_add(1);
        self.ack.bytes = self.ack.bytes.saturating_add(info.payload_len);
        self.ack.batch_over = false;
        self.ack_later(now);
        if info.ce {
            self.counters.ce_rcvd = self.counters.ce_rcvd.wrapping_add(1);
            if !core::mem::replace(&mut self.ack.ce_in_batch, true) {
                self.ack.at_once = true;
            }
        }
        if p.ack_request {
            self.ack.at_once = true;
        }
        match arrival {
            Arrival::Duplicate => {
                self.counters.duplicate_request = self.counters.duplicate_request.wrapping_add(1);
                self.ack.twice = true;
                return Err(Drop::PathDuplicate);
            }
            Arrival::New { gap: true } => {
                self.counters.out_of_sequence = self.counters.out_of_sequence.wrapping_add(1);
                self.ack.at_once = true;
            }
            Arrival::New { gap: false } => {}
        }
        if s.opcode == Opcode::Void {
            return Ok(Receive::Done);
        }
        let Some(i) = self.streams.find(s.dst_qpn, s.src_qpn) else {
            self.unknown_stream(now, s);
            return Err(Drop::UnknownStream);
        };
        let Some(slot) = self.streams.slot_mut(i) else {
            return Err(Drop::UnknownStream);
        };
        slot.heard = true;
        let Some(stream) = slot.stream.as_deref_mut() else {
            return Err(Drop::UnknownStream);
        };
        let r = stream.receive(now, s, info.payload_len, host);
        match r {
            // What said that it was here has not arrived.
            Err(Drop::StreamDuplicate) => self.ack.twice = true,
            Ok(Receive::Place(_)) => self.ack.placing = self.ack.placing.saturating_add(1),
            Err(Drop::UnknownStream) => self.refuse(now, StreamBlock::not_ready(s)),
            _ => {}
        }
        self.touch(now, i);
        r
    }

    /// An acknowledgement is to be sent, though not at once.
    pub(super) fn ack_later(&mut self, now: Time) {
        if self.ack.deadline == Time::MAX {
            let delay = (self.srtt / 4).clamp(ACK_DELAY_MIN, ACK_DELAY_MAX);
            self.ack.deadline = now.saturating_add(delay);
        }
    }

    /// Whether an acknowledgement is to be sent now.
    pub(super) fn ack_is_due(&self, now: Time) -> bool {
        let enough = self.ack.packets >= ACK_PACKETS || self.ack.bytes >= ACK_BYTES;
        // Bytes that are still being copied are not in place: the acknowledgement that
        // waits for them saves a second one.
        (self.ack.placing == 0 && (self.ack.at_once || (enough && self.ack.batch_over)))
            || self.ack.deadline <= now
    }

    /// No more received packets are waiting at the driver: acknowledgements may go.
    pub fn end_of_batch(&mut self, now: Time) {
        let _ = now;
        self.ack.batch_over = true;
        self.ack.ce_in_batch = false;
    }

    /// Answers a packet for a stream that is not there: with its last words, if it was, so
    /// that what it had accepted completes.
    fn unknown_stream(&mut self, now: Time, s: &StreamHeader) {
        let dir = s.opcode.direction();
        let gone = self
            .tombstones
            .iter_mut()
            .find(|t| t.qpn == s.dst_qpn && t.remote_qpn == s.src_qpn && t.until > now);
        let Some(t) = gone else {
            self.refuse(now, StreamBlock::not_ready(s));
            return;
        };
        t.announce = t.announce.max(1);
        for b in t.blocks.iter_mut().filter(|b| b.dir == dir) {
            if matches!(b.status, BlockStatus::Ok | BlockStatus::NotReady { .. }) {
                b.status = BlockStatus::NotReady { round: s.round };
            }
        }
        self.ack_later(now);
    }

    /// Answers a packet for a stream that never was.
    fn refuse(&mut self, now: Time, block: StreamBlock) {
        self.ack_later(now);
        let same = |r: &&mut StreamBlock| {
            (r.dst_qpn, r.src_qpn, r.dir) == (block.dst_qpn, block.src_qpn, block.dir)
        };
        match self.ack.refused.iter_mut().find(same) {
            Some(r) => *r = block,
            None => drop(self.ack.refused.push(block)),
        }
        // What does not fit is asked for again.
    }

    /// Takes the blocks of an acknowledgement or a reply.
    fn receive_blocks(
        &mut self,
        now: Time,
        h: &AckHeader,
        blocks: &Blocks<'_>,
        is_reply: bool,
    ) -> Result<(), Drop> {
        for b in blocks.paths() {
            let path = self.paths.get(usize::from(b.path)).ok_or(Drop::Path)?;
            if b.path >= self.agreed.paths {
                return Err(Drop::Path);
            }
            if path.tx.examine(&b) == Acked::Invalid {
                return Err(Drop::AckInvalid);
            }
        }
        self.margin
            .peer_late(now, Time::from(h.lateness) << LATENESS_SHIFT);
        for b in blocks.paths() {
            self.receive_path_block(now, h.number, &b, is_reply);
        }
        for b in blocks.streams() {
            let Some(i) = self.streams.find(b.dst_qpn, b.src_qpn) else {
                continue;
            };
            let dir = match b.dir {
                Direction::Request => 0,
                Direction::Response => 1,
            };
            let Some(slot) = self.streams.slot_mut(i) else {
                continue;
            };
            if let Some(n) = slot.ack_number.get_mut(dir) {
                if (h.number.wrapping_sub(*n) as i32) < 0 {
                    continue;
                }
                *n = h.number;
            }
            if let Some(q) = slot.query.get_mut(dir) {
                *q = false;
            }
            if !matches!(b.status, BlockStatus::NotReady { .. }) {
                slot.heard = true;
            }
            if b.status != BlockStatus::Ok {
                self.counters.refusals_rcvd = self.counters.refusals_rcvd.wrapping_add(1);
            }
            if let Some(s) = slot.stream.as_deref_mut() {
                s.on_block(now, &b);
            }
            self.touch(now, i);
        }
        self.receive_share(now, h.plane, h.share);
        self.scan_overdue(now);
        Ok(())
    }

    /// The share of plane `i` is `kbit`, or its least round trip has changed.
    pub(super) fn set_share(&mut self, now: Time, i: usize, kbit: u32) {
        let (srtt, batching, packet) = (self.srtt, self.cfg.batching, self.packet_bytes());
        let Some(p) = self.planes.get_mut(i) else {
            return;
        };
        p.share = kbit;
        p.pace.set_kbit(now, kbit);
        let least = if p.least_rtt == Time::MAX {
            srtt
        } else {
            p.least_rtt
        };
        p.share_window = share_window(kbit, least, batching).saturating_add(packet);
    }

    fn receive_path_block(&mut self, now: Time, number: u32, b: &PathBlock, is_reply: bool) {
        let i = usize::from(b.path);
        let bit = 1u64 << (b.path & 63);
        let packet = self.packet_bytes();
        let pause = self.pause();
        let Some(path) = self.paths.get_mut(i) else {
            return;
        };
        let Some(plane) = self.planes.get_mut(usize::from(path.plane)) else {
            return;
        };
        let Acked::New(mut newly) = path.tx.examine(b) else {
            return;
        };
        if !path.tx.is_news(number) {
            return;
        }
        let news = b.received != path.peer_received;
        let marked = u32::from(b.ce.wrapping_sub(path.peer_ce));
        let marked = if marked < 0x8000 { marked } else { 0 };
        let duplicates = b.duplicates.wrapping_sub(path.peer_duplicates);
        path.peer_received = b.received;
        path.peer_ce = b.ce;
        path.peer_duplicates = b.duplicates;

        // What it measures.
        let sent = SendHalf::time_of(now, b.echo);
        let mut echo = None;
        if news && (!path.has_echo || (b.echo.wrapping_sub(path.echo) as i32) > 0) {
            path.has_echo = true;
            path.echo = b.echo;
            if b.delay != u16::MAX {
                let delay = Time::from(b.delay) << 10;
                let rtt = now.saturating_sub(sent).saturating_sub(delay);
                path.rtt.sample(now, rtt);
                if !is_reply {
                    // In a reply it is the time since the path's last packet.
                    self.margin.ack_delay(now, delay);
                }
                self.srtt = (self.srtt.saturating_mul(15).saturating_add(rtt)) / 16;
                self.srtt = self.srtt.max(1);
                self.long_rtt.sample(now, rtt, self.srtt);
                if rtt < plane.least_rtt {
                    plane.least_rtt = rtt.max(1);
                    self.least_since = now;
                }
                path.weigh(plane.least_rtt);
            }
        }
        if path.has_echo {
            echo = Some(path.echo);
        }
        if news {
            self.newest = self.newest.max(sent);
        }

        // What it acknowledges.
        let flying_before = path.tx.inflight();
        let threshold = path.threshold;
        let (mut bytes, mut packets, mut spurious, mut extent) = (0u32, 0u32, 0u32, 0u32);
        let any = !newly.is_empty();
        path.tx.advance(b);
        let mut last: Option<u32> = None;
        while let Some(n) = newly.take_lowest() {
            let lag = path.tx.lag(n);
            let Some((record, _)) = path.tx.release(n) else {
                continue;
            };
            if echo.is_some_and(|e| path.tx.was_spurious(&record, e)) {
                spurious = spurious.wrapping_add(1);
                extent = extent.max(lag);
            }
            bytes = bytes.saturating_add(u32::from(record.len));
            packets = packets.wrapping_add(1);
            if let Some(c) = record.content {
                if let Some(s) = self.streams.stream_of(c.stream.0, c.generation) {
                    s.released(now, c.packet);
                }
                if last != Some(c.stream.0) {
                    if let Some(l) = last.replace(c.stream.0) {
                        self.streams.enlist(List::Event, l);
                    }
                }
            }
        }
        let path_window_before = path.window.bytes();

        // Spurious resends raise the gap threshold, calm lowers it.
        if spurious > 0 {
            self.counters.spurious = self.counters.spurious.wrapping_add(u64::from(spurious));
        }
        // What was resent without a gap says nothing about gaps.
        if spurious > 0 && extent >= threshold {
            path.threshold = extent.max(threshold).saturating_add(1).min(THRESHOLD_MAX);
            path.calm = 0;
            path.window.undo();
        } else if duplicates != 0 && duplicates < 0x8000 && path.tx.was_resending() {
            path.threshold = threshold.saturating_add(1).min(THRESHOLD_MAX);
            path.calm = 0;
        } else if threshold > 1 {
            path.calm = path.calm.saturating_add(packets);
            if path.calm >= CALM {
                path.calm = 0;
                path.threshold = threshold.saturating_sub(threshold.div_ceil(4)).max(1);
            }
        }

        // Loss.
        let mut lost = 0;
        if let Some(echo) = echo {
            let reorder = path.threshold.saturating_sub(1);
            // A resend that others overtake on a reordering path is not lost either.
            let slack = (path.rtt.smoothed() >> 9).saturating_mul(u64::from(reorder.min(8))) as u32;
            let (_, n) = path.tx.detect(path.threshold, echo, slack);
            lost = n;
        }

        // Congestion.
        // A path that never was without a queue does not know its least; twice that of the
        // best one is what paths of one plane may differ by.
        let least = path
            .rtt
            .least()
            .unwrap_or(path.rtt.smoothed())
            .min(plane.least_rtt.saturating_mul(2));
        let paths = plane.paths.count_ones().max(1);
        let rate = path.window.rate();
        let lateness = self.margin.both();
        let context = Context {
            mtu: packet,
            paths,
            limited: self.limited || flying_before >= path.window.bytes(),
            cautious: now < plane.cautious_until,
            lossy: now < plane.lossy_until,
            slack: slack(
                rate.saturating_mul(u64::from(paths)),
                paths,
                packet,
                lateness,
            ),
        };
        // Loss or a long round trip mean a queue when they exceed what batching explains.
        let plane_rate = rate.saturating_mul(u64::from(paths));
        let batch = u64::from(packet)
            .saturating_mul(4_000_000_000)
            .checked_div(plane_rate)
            .unwrap_or(0)
            .min(1_000_000);
        // One long halt excuses queues for seconds, until it is forgotten: then nothing but the
        // links' losses would hold the windows back.
        let excused = lateness.min(LATENESS_MAX);
        let tolerance = (least / 4).max(excused).max(batch);
        let queue = path.rtt.latest() > least.saturating_add(tolerance);
        path.window.acked(bytes, packets, &context);
        if queue {
            path.window.queue();
        }
        let mut cut = false;
        if marked > 0 {
            path.stats.ce = path.stats.ce.wrapping_add(u64::from(marked));
            self.counters.ce_echoed = self.counters.ce_echoed.wrapping_add(u64::from(marked));
            cut |= path.window.marked(now, marked, sent);
        }
        if lost > 0 {
            path.window.lost(lost);
            if queue {
                let bdp = path.window.bdp(least);
                if path.window.lost_in_queue(now, sent, bdp) {
                    cut = true;
                    plane.lossy_until = now.saturating_add(caution(self.srtt));
                }
            }
        }
        path.window.round(now, path.rtt.smoothed(), least, &context);
        if cut {
            self.counters.window_cuts = self.counters.window_cuts.wrapping_add(1);
            plane.cautious_until = now.saturating_add(caution(self.srtt));
        }

        // Silence is counted from here. A path that was left has its own timer.
        if path.health != Health::Failed && (news || any) {
            path.alive = now;
            path.unanswered = 0;
            path.probe = None;
            path.nudged = false;
            if any {
                path.stalls = 0;
            }
            self.overdue &= !bit;
            self.probe &= !bit;
            path.deadline = if path.tx.is_outstanding() {
                now.saturating_add(path.silence(pause))
            } else {
                Time::MAX
            };
            self.path_timer = self.path_timer.min(path.deadline);
        }
        let window = path.window.bytes();
        let health = path.health;
        let flying = path.tx.inflight();
        let has_lost = path.tx.has_lost();
        self.inflight = self
            .inflight
            .saturating_sub(u64::from(flying_before))
            .saturating_add(u64::from(flying));
        if self.good & bit != 0 {
            self.windows = self
                .windows
                .saturating_sub(u64::from(path_window_before))
                .saturating_add(u64::from(window));
        }
        if has_lost {
            self.lost |= bit;
        } else {
            self.lost &= !bit;
        }
        if news || any {
            match health {
                Health::Good => self.heard(now, i),
                Health::Suspect => self.revive(now, i),
                Health::Failed => {}
            }
        }
        self.refresh(i);
        if self.moving & bit != 0 && self.paths.get(i).is_some_and(|p| !p.tx.is_outstanding()) {
            self.move_path(now, i);
        }
        if let Some(l) = last {
            self.touch(now, l);
        }
        if now.saturating_sub(self.least_since) > LEAST_AGE {
            self.least_since = now;
            for p in self.paths.iter_mut() {
                p.patience /= 2;
            }
            for k in 0..self.planes.len() {
                let least = (self.paths.iter())
                    .filter(|p| usize::from(p.plane) == k)
                    .filter_map(|p| p.rtt.least())
                    .min();
                if let Some(plane) = self.planes.get_mut(k) {
                    plane.least_rtt = least.unwrap_or(Time::MAX);
                    let share = plane.share;
                    self.set_share(now, k, share);
                }
            }
        }
    }

    /// Finds paths that should have been heard of: something that was sent later on
    /// another path has arrived.
    fn scan_overdue(&mut self, now: Time) {
        if now < self.next_scan {
            return;
        }
        self.next_scan = now.saturating_add(self.srtt / 4);
        let pause = self.pause();
        let idle = self.streams.first(List::Send).is_none() && self.losses() == 0;
        let mut mask = self.good & !self.silent;
        if !idle {
            mask &= !self.overdue;
        }
        while mask != 0 {
            let i = mask.trailing_zeros();
            mask &= mask.wrapping_sub(1);
            let Some(p) = self.paths.get_mut(i as usize) else {
                break;
            };
            let passed = p.sent.saturating_add(p.rtt.smoothed() / 4) < self.newest;
            if !passed || !p.tx.is_outstanding() {
                continue;
            }
            if idle {
                // No new packet will break the silence: it ends here.
                if p.sent.saturating_add(p.answer_time(0).max(pause)) < now && p.probe.is_none() {
                    p.deadline = p.deadline.min(now);
                    self.path_timer = self.path_timer.min(now);
                }
            } else if !p.nudged && p.sent.saturating_add(p.rtt.smoothed()) < now {
                self.overdue |= 1u64 << (i & 63);
            }
        }
    }

    fn receive_probe(&mut self, now: Time, p: &Probe) -> Result<(), Drop> {
        if p.path >= self.agreed.paths {
            return Err(Drop::Path);
        }
        let path = self.paths.get_mut(usize::from(p.path)).ok_or(Drop::Path)?;
        path.rx.enter(p.epoch)?;
        // Everything is here and was acknowledged: so it was the acknowledgement that got lost.
        let acknowledged = self.ack.dirty & 1u64 << (p.path & 63) == 0;
        if p.padding == 0 && acknowledged && path.rx.has_all(p.next) {
            self.doubt_until = now.saturating_add(DOUBT);
            self.ack.twice = true;
        }
        // The newest probe of a path takes the place of an older one; what does not fit is
        // asked again.
        let left = match (self.agreed.paths, p.deaf) {
            (1, _) => 1,
            (_, 0) => REPLIES,
            _ => REPLIES_DEAF,
        };
        let reply = Reply {
            probe: *p,
            own: true,
            left,
        };
        let same = |r: &&mut Reply| r.probe.path == p.path && r.probe.padding == p.padding;
        match self.ack.replies.iter_mut().find(same) {
            Some(r) => *r = reply,
            None => drop(self.ack.replies.push(reply)),
        }
        if p.deaf > 0 {
            // It is the way back that fails, or it may be.
            self.ack.twice = true;
            let silence = self.srtt.saturating_mul(2).max(self.pause());
            self.rescue.peer_until = now.saturating_add(silence.saturating_mul(2));
            self.ask_doubted(now);
        }
        Ok(())
    }

    fn receive_probe_reply(&mut self, now: Time, p: &Probe) -> Result<(), Drop> {
        if self.mtu_reply(now, p) || self.home_reply(now, p) {
            return Ok(());
        }
        if self.several && self.plane_reply(now, p) {
            return Ok(());
        }
        let i = usize::from(p.path);
        let bit = 1u64 << (p.path & 63);
        let full = self.packet_bytes();
        let pause = self.pause();
        let path = self.paths.get_mut(i).ok_or(Drop::Path)?;
        let Some(pending) = path.probe.filter(|q| q.challenge == p.challenge) else {
            // Replies come twice.
            return if path.answered == p.challenge {
                Ok(())
            } else {
                Err(Drop::Old)
            };
        };
        if p.epoch != path.tx.epoch {
            return Err(Drop::Epoch);
        }
        // It may be the reply to an earlier one of the questions, never to a later one.
        if (pending.stamp.wrapping_sub(p.timestamp) as i32) < 0 {
            return Err(Drop::Field);
        }
        let sent = SendHalf::time_of(now, p.timestamp);
        self.counters.probe_replies = self.counters.probe_replies.wrapping_add(1);
        path.probe = None;
        path.answered = p.challenge;
        path.alive = now;
        path.unanswered = 0;
        path.nudged = false;
        path.rtt.sample(now, now.saturating_sub(sent));
        self.newest = self.newest.max(sent);
        self.probe &= !bit;
        self.overdue &= !bit;
        let before = path.tx.inflight();
        let (_, lost) = path.tx.detect_by_probe(p.next, p.timestamp);
        let mut too_large = false;
        if lost > 0 {
            // Probes arrive and packets do not: the next ones wait longer.
            path.stalls = path.stalls.saturating_add(1);
            too_large = path.stalls == MTU_DOUBT;
        }
        path.window.lost(lost);
        let after = path.tx.inflight();
        self.inflight = self
            .inflight
            .saturating_sub(u64::from(before.saturating_sub(after)));
        if path.tx.has_lost() {
            self.lost |= bit;
        }
        path.deadline = if path.tx.is_outstanding() {
            now.saturating_add(path.silence(pause))
        } else {
            Time::MAX
        };
        self.path_timer = self.path_timer.min(path.deadline);
        match path.health {
            Health::Good => self.heard(now, i),
            Health::Suspect => self.revive(now, i),
            Health::Failed => {
                self.rescue.over(now);
                // Small packets never make a path good.
                path.replies = if pending.padding.saturating_add(64) >= full.saturating_sub(64) {
                    path.replies.saturating_add(1)
                } else {
                    0
                };
                // With nothing better one is enough.
                let needed = if self.good & !self.silent == 0 { 1 } else { 2 };
                if path.replies >= needed {
                    self.revive(now, i);
                } else {
                    path.deadline = now.saturating_add(path.silence(pause));
                    self.path_timer = self.path_timer.min(path.deadline);
                    self.probe |= bit;
                }
            }
        }
        self.refresh(i);
        if too_large && self.mtu.probing == 0 {
            self.begin_mtu_search(now);
        }
        Ok(())
    }

    fn receive_queries(&mut self, now: Time, queries: &Queries<'_>) {
        self.ack.at_once = true;
        self.ack.twice = true;
        self.ack_later(now);
        for q in queries.iter() {
            let dir = match q.dir {
                Direction::Request => 0usize,
                Direction::Response => 1,
            };
            if let Some(i) = self.streams.find(q.dst_qpn, q.src_qpn) {
                if let Some(d) = self.streams.slot_mut(i).and_then(|s| s.dirty.get_mut(dir)) {
                    *d = true;
                }
                self.streams.enlist(List::Dirty, i);
                continue;
            }
            let s = StreamHeader {
                opcode: match q.dir {
                    Direction::Request => Opcode::Write,
                    Direction::Response => Opcode::ReadResponse,
                },
                dst_qpn: q.dst_qpn,
                src_qpn: q.src_qpn,
                round: q.round,
                sseq: q.sseq,
                ..StreamHeader::default()
            };
            self.unknown_stream(now, &s);
        }
    }

    pub(super) fn receive_close(&mut self, now: Time, c: &Close) {
        match c.kind {
            CloseKind::Request => {
                // With QPs attached it is the question of an idle end.
                let kind = if self.streams.len() == 0 || self.agrees_to_rest() {
                    CloseKind::Agree
                } else {
                    CloseKind::Refuse
                };
                self.closing = Some((kind, c.number));
                if kind == CloseKind::Agree && self.streams.len() != 0 {
                    self.begin_rest();
                } else if kind == CloseKind::Agree {
                    self.state = ConnectionState::Closed;
                    self.event_closed = true;
                }
            }
            CloseKind::Agree => {
                if self.streams.len() == 0 {
                    self.state = ConnectionState::Closed;
                    self.event_closed = true;
                } else if self.is_at_rest() {
                    // The peer may be gone for good. That shows when there is something to send.
                    self.begin_rest();
                } else {
                    // The peer is gone from here; it comes back when its QPs do.
                    self.next_first_epoch();
                    self.go_down(now);
                }
            }
            CloseKind::Refuse => {
                if self.state == ConnectionState::Closing && c.number == self.close_number {
                    self.state = ConnectionState::Up;
                    self.close_tries = 0;
                    self.close_due = now.saturating_add(TOMBSTONE_LIFE);
                } else if self.asked_to_rest(c.number) {
                    self.watch_idleness(now);
                }
            }
        }
    }
}
