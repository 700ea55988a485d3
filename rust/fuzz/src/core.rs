// SPDX-License-Identifier: GPL-2.0

//! Target `core`: two connections, a network between them that does anything, programs that
//! post anything, and somebody who sends packets of his own. The input says in which order.
//!
//! Whatever is sent, by whom ever, what a connection tells its driver holds together: no
//! byte goes beyond the message that it belongs to, or to a request or receive that is done;
//! requests and receives end once and in order; packets are read only from memory that is
//! still lent; nothing goes on for ever. Who does not know a connection's id and nonces
//! changes nothing at all, and gets no more bytes than he sent.

#![forbid(unsafe_code)]

use crate::pick::Pick;
use metaroce::proto::api::{
    Event, Fault, Host, Opcode, Payload, Placed, Placement, Receive, RxInfo, SendWr, Status,
    StreamId, Target, Time, Token, Transmit, WrOp, HEADER_MAX, MAX_MESSAGE,
};
use metaroce::proto::congestion::{Controller, Shares};
use metaroce::proto::connection::{
    stateless_reply, Config, Connection, ConnectionState, Ids, PlaneState, PAYLOAD_MTU_MIN,
};
use metaroce::proto::stream::{State, Stream, StreamAttr};
use metaroce::proto::wire::{HandshakeKey, Packet, PlaneAddress, Type, HANDSHAKE_LEN};
use std::collections::VecDeque;
use std::rc::Rc;

/// Packets of a direction that are under way or remembered.
const QUEUE: usize = 512;
const MEMORY: usize = 32;
/// After so many packets of a host a run ends, whatever is left of its input, except one in eight:
/// most of what a longer one does it has done before, and that time is better spent on others.
const PACKETS: u32 = 200;
/// What one round of a driver does at the most; the core has to come to rest within it.
const ROUND: usize = 50_000;
/// Packets that a driver holds for a connection.
const HELD: usize = 32;
/// Questions in a row without a packet after which a driver rests: what one stream may not send
/// now, another one may.
const ASKED: usize = 2;
/// After so many there is nothing to send at this time: one that finds nothing although there is
/// something has taken a path out of those with losses, or 256 stale packets out of those that a
/// path (of 8 at the most) has given up, or ended a rescue.
const ASKED_OUT: usize = 32;

/// A packet under way: the payload's bytes do not matter here, only how many.
#[derive(Clone)]
struct Sent {
    header: Rc<[u8]>,
    payload: u32,
}

/// A send WR that is not done.
struct Request {
    wr: u32,
    op: WrOp,
    length: u32,
}

/// What the driver keeps of a QP.
#[derive(Default)]
struct Qp {
    /// WRs in order.
    requests: VecDeque<Request>,
    next_wr: u32,
    /// Receives: lengths of those that are not bound, number of the next, and those that are
    /// bound and not done.
    posted: VecDeque<u64>,
    next_rmsn: u32,
    bound: VecDeque<(u32, u64)>,
    /// READs whose source may be sent.
    reads: Vec<(u32, u32)>,
    /// In ERR.
    failed: bool,
    /// The core has said so.
    told: bool,
}

impl Host for Qp {
    fn bind_receive(&mut self, _: StreamId, rmsn: u32) -> Option<u64> {
        assert_eq!(rmsn, self.next_rmsn, "receives are bound in order");
        let length = self.posted.pop_front()?;
        self.next_rmsn = self.next_rmsn.wrapping_add(1);
        self.bound.push_back((rmsn, length));
        Some(length)
    }

    fn receives_posted(&mut self, _: StreamId) -> Option<u32> {
        Some(self.posted.len() as u32)
    }

    fn may_hold(&mut self, bytes: u32) -> bool {
        // The driver's budget depends on more than this connection.
        bytes % 97 != 96
    }
}

/// One host: a connection with one QP.
struct End {
    index: usize,
    config: Config,
    core: Connection,
    stream: Option<StreamId>,
    qp: Qp,
    /// Copies that run, in the order in which they began.
    copies: VecDeque<Placement>,
    held: Vec<Token>,
    shares: Shares,
    /// The stateless answers' secret.
    secret: [u8; 16],
    lives: u64,
    /// Packets sent, in this life.
    packets: u32,
}

/// Attributes that both ends share.
struct Setup {
    attr: StreamAttr,
    send_wr: u32,
}

fn gid(i: usize) -> [u8; 16] {
    [i as u8 + 1; 16]
}

fn cid(i: usize, life: u64) -> u64 {
    0x1111_2222_3333_4444 + i as u64 * 0x0101 + (life << 32)
}

impl End {
    fn new(index: usize, config: Config, life: u64, now: Time) -> Self {
        let mut config = config;
        config.instance = 77 + index as u64 + (life << 8);
        config.secret = [index as u8 + 3; 16];
        let ids = Ids {
            local_cid: cid(index, life),
            local_gid: gid(index),
            remote_gid: gid(1 - index),
            dscp: 0,
        };
        Self {
            index,
            config,
            core: Connection::new(&config, ids, now).expect("memory"),
            stream: None,
            qp: Qp::default(),
            copies: VecDeque::new(),
            held: Vec::new(),
            shares: Shares::new(0, 4).expect("memory"),
            secret: config.secret,
            lives: life,
            packets: 0,
        }
    }

    fn attach(&mut self, setup: &Setup, now: Time) {
        if self.stream.is_some() {
            return;
        }
        let rd = setup.attr.max_dest_rd_atomic;
        let mut stream = Stream::new(setup.send_wr, rd).expect("memory");
        let (local, remote) = (0x11 + self.index as u32, 0x12 - self.index as u32);
        let (a, b) = (setup.attr.sq_psn, setup.attr.rq_psn);
        stream.set_attr(&StreamAttr {
            local_qpn: local,
            remote_qpn: remote,
            sq_psn: if self.index == 0 { a } else { b },
            rq_psn: if self.index == 0 { b } else { a },
            ..setup.attr
        });
        let spare = Connection::spare(self.core.wanted_slots()).expect("memory");
        if let Ok((id, _)) = self.core.attach(now, stream, spare) {
            self.core.set_state(now, id, State::Rtr);
            self.core.set_state(now, id, State::Rts);
            self.stream = Some(id);
            self.qp = Qp::default();
        }
    }

    /// Names those planes of the device that `which` has bits for; the lowest drains with bit
    /// 7. Some may be somebody else's.
    fn set_planes(&mut self, now: Time, which: u8, wrong: bool) {
        let mut planes = [PlaneAddress::default(); 7];
        let mut n = 0;
        for id in (0..7).filter(|id| which & 1 << id != 0) {
            let mut gid = gid(self.index);
            gid[15] ^= id << 3;
            gid[1] ^= u8::from(wrong && id % 3 == 1);
            planes[n] = PlaneAddress {
                id,
                draining: n == 0 && which & 0x80 != 0,
                gid,
            };
            n += 1;
        }
        let memory = Connection::plane_memory().expect("memory");
        drop(self.core.allow_planes(memory));
        self.core.set_planes(now, &planes[..n]);
    }

    fn detach(&mut self, now: Time) {
        let Some(id) = self.stream.take() else {
            return;
        };
        assert!(self.core.detach(now, id).is_some());
        // What the driver held for the QP goes with it, and its copies are waited for.
        self.held.retain(|t| t.stream != id);
        self.copies.retain(|p| p.token.stream != id);
    }

    fn post(&mut self, now: Time, op: WrOp, length: u32, flags: u8) {
        let Some(id) = self.stream else { return };
        let atomic = matches!(op, WrOp::CompareSwap { .. } | WrOp::FetchAdd { .. });
        let wr = SendWr {
            op,
            fence: flags & 1 != 0,
            solicited: flags & 2 != 0,
            signaled: flags & 4 != 0,
            length: if atomic { 8 } else { length },
            error: (flags & 0xf8 == 0xf8).then_some(Status::LocalProtection),
        };
        if let Ok(n) = self.core.post_send(now, id, wr) {
            assert_eq!(n, self.qp.next_wr, "WRs are numbered in order");
            self.qp.next_wr = n.wrapping_add(1);
            self.qp.requests.push_back(Request {
                wr: n,
                op,
                length: wr.length,
            });
        }
    }

    fn post_receive(&mut self, now: Time, length: u64) {
        if let Some(id) = self.stream.filter(|_| self.qp.posted.len() < 64) {
            self.qp.posted.push_back(length);
            let posted = Some(self.qp.posted.len() as u32);
            self.core.receives_changed(now, id, posted);
        }
    }

    /// Gives a packet to the connection, as the driver does. An answer without state goes to
    /// `out`.
    fn receive(&mut self, now: Time, sent: &Sent, ce: bool, out: &mut VecDeque<Sent>) {
        let Ok(packet) = Packet::parse(&sent.header) else {
            return;
        };
        let seen = HandshakeKey {
            source: gid(1 - self.index),
            destination: gid(self.index),
            dscp: packet.handshake_key().map_or(0, |k| k.dscp),
        };
        let ours = match packet.connection_id() {
            Some(id) => id == self.core.ids().local_cid,
            None => packet.handshake_key() == Some(seen) && seen.dscp == 0,
        };
        if !ours {
            let mut tx = Transmit::new();
            if stateless_reply(&packet, &seen, &self.secret, now, &mut tx) {
                let len = usize::from(tx.header_len);
                assert!(len <= sent.header.len() + sent.payload as usize);
                push(out, tx.header[..len].into(), 0);
            }
            return;
        }
        let info = RxInfo {
            ce,
            plane: (sent.header.len() % 10) as u8,
            payload_len: sent.payload + (sent.header.len() - packet.header_len()) as u32,
        };
        match self.core.receive(now, &packet, &info, &mut self.qp) {
            Ok(Receive::Place(p)) => self.begin_copy(p, info.payload_len),
            Ok(Receive::Hold(p)) => {
                self.check(&p);
                assert!(p.value.is_some() || p.len <= info.payload_len);
                if self.held.len() < HELD {
                    assert!(!self.held.contains(&p.token), "held twice");
                    self.held.push(p.token);
                } else {
                    // No memory for it after all: the copy fails.
                    let fault = Placed::Fault(Fault::Operation);
                    self.core.placed(now, p.token, fault, &mut self.qp);
                }
            }
            Ok(Receive::Done) | Err(_) => {}
        }
    }

    fn begin_copy(&mut self, p: Placement, payload: u32) {
        self.check(&p);
        assert!(
            p.value.is_some() || p.len <= payload,
            "copies more than there is"
        );
        self.copies.push_back(p);
        assert!(self.copies.len() < 100_000);
    }

    /// A placement stays within its message, and its target is still open.
    fn check(&self, p: &Placement) {
        assert_eq!(Some(p.token.stream), self.stream, "the stream is gone");
        assert!(p.total <= MAX_MESSAGE);
        assert!(u64::from(p.offset) + u64::from(p.len) <= u64::from(p.total));
        match p.target {
            Target::Remote { .. } => assert!(p.value.is_none()),
            Target::Receive { rmsn } => {
                let bound = self.qp.bound.iter().find(|b| b.0 == rmsn);
                let (_, length) = bound.expect("the receive is bound and not done");
                assert!(u64::from(p.offset) + u64::from(p.len) <= *length);
            }
            Target::Request { wr } => {
                let request = self.qp.requests.iter().find(|r| r.wr == wr);
                let r = request.expect("the request is not done");
                let reads = matches!(
                    r.op,
                    WrOp::Read { .. } | WrOp::CompareSwap { .. } | WrOp::FetchAdd { .. }
                );
                assert!(reads, "only these have an answer");
                assert!(u64::from(p.offset) + u64::from(p.len) <= u64::from(r.length));
            }
        }
    }

    fn end_copy(&mut self, now: Time, which: u8, result: Placed) {
        if self.copies.is_empty() {
            return;
        }
        let i = usize::from(which) % self.copies.len();
        if let Some(p) = self.copies.remove(i) {
            self.core.placed(now, p.token, result, &mut self.qp);
        }
    }

    /// Does what the core wants, as a driver does in one round; packets go to `out`.
    /// Ends after `asked` questions for a packet in a row without one; whether there is more room
    /// for packets now than there was then.
    fn drain(
        &mut self,
        now: Time,
        asked: usize,
        out: &mut VecDeque<Sent>,
        memory: &mut VecDeque<Sent>,
    ) -> bool {
        let mut tx = Transmit::new();
        for round in 0.. {
            assert!(round < ROUND, "it never comes to rest");
            if let Some(e) = self.core.poll_event(now) {
                self.event(now, e);
                continue;
            }
            if !self.has_packet(now, asked, &mut tx) {
                break;
            }
            self.packets += 1;
            let sent = self.sent(&tx);
            if memory.len() == MEMORY {
                memory.pop_front();
            }
            memory.push_back(sent.clone());
            push(out, sent.header, sent.payload);
        }
        let wanted = self.core.wants_records();
        if let Some(n) = wanted {
            let more = Connection::record_memory(self.core.path_count(), n).expect("memory");
            drop(self.core.use_records(more));
        }
        wanted.is_some()
    }

    /// Asks for a packet up to `asked` times.
    fn has_packet(&mut self, now: Time, asked: usize, tx: &mut Transmit) -> bool {
        (0..asked).any(|_| self.core.poll_transmit(now, tx))
    }

    fn sent(&self, tx: &Transmit) -> Sent {
        let len = usize::from(tx.header_len);
        // An address that nobody has proved gets nothing but questions.
        let plane = self.core.plane(tx.plane).expect("a plane that is there");
        let probe = tx.header[0] & 0xf == 2;
        assert!(
            plane.state != PlaneState::Tried || probe || tx.plane == 0,
            "sprayed"
        );
        assert!((16..=HEADER_MAX).contains(&len));
        let header: Rc<[u8]> = tx.header[..len].into();
        let payload = match tx.payload {
            Payload::None => 0,
            Payload::Pad { len } => len,
            Payload::Send {
                stream,
                wr,
                offset,
                len,
            } => {
                assert_eq!(Some(stream), self.stream);
                let request = self.qp.requests.iter().find(|r| r.wr == wr);
                let r = request.expect("memory of a request that is done");
                assert!(u64::from(offset) + u64::from(len) <= u64::from(r.length));
                len
            }
            Payload::Read {
                stream,
                request,
                offset,
                len,
            } => {
                assert_eq!(Some(stream), self.stream);
                let read = self.qp.reads.iter().find(|r| r.0 == request);
                let (_, length) = read.expect("memory of a READ that nobody asks for");
                assert!(u64::from(offset) + u64::from(len) <= u64::from(*length));
                len
            }
        };
        let parsed = Packet::parse(&header).expect("own packets are well-formed");
        assert_eq!(parsed.header_len(), len);
        assert!(parsed.check_payload(payload).is_ok());
        Sent { header, payload }
    }

    fn event(&mut self, now: Time, e: Event) {
        let ours = |s: StreamId| Some(s) == self.stream;
        match e {
            Event::SendDone { stream, wr, .. } => {
                assert!(ours(stream));
                let r = self.qp.requests.pop_front().expect("one that is open");
                assert_eq!(r.wr, wr, "requests end in order");
            }
            Event::RecvDone {
                stream,
                rmsn,
                length,
                status,
                ..
            } => {
                assert!(ours(stream));
                let (n, room) = self.qp.bound.pop_front().expect("one that is bound");
                assert_eq!(n, rmsn, "receives end in order");
                if status == Status::Success {
                    assert!(u64::from(length) <= room || length == 0 || is_write(&e));
                }
            }
            Event::Invalidate { stream, rkey } => {
                let r = if rkey & 7 == 7 {
                    Err(Fault::Access)
                } else {
                    Ok(())
                };
                self.core.invalidated(now, stream, r);
            }
            Event::Read {
                stream,
                request,
                rkey,
                length,
                ..
            } => {
                let r = if rkey & 7 == 7 {
                    Err(Fault::Access)
                } else {
                    Ok(())
                };
                if r.is_ok() {
                    let known = self.qp.reads.iter().any(|r| r.0 == request);
                    assert!(!known, "a READ runs once");
                    self.qp.reads.push((request, length));
                    assert!(self.qp.reads.len() <= 256);
                }
                self.core.read_ready(now, stream, request, r);
            }
            Event::ReadReleased { request, .. } => self.qp.reads.retain(|r| r.0 != request),
            Event::Atomic {
                stream,
                request,
                opcode,
                va,
                rkey,
                ..
            } => {
                assert!(matches!(opcode, Opcode::CompareSwap | Opcode::FetchAdd));
                let r = if rkey & 7 == 7 {
                    Err(Fault::Access)
                } else {
                    Ok(va)
                };
                self.core.atomic_done(now, stream, request, r);
            }
            Event::Local { stream, wr } => {
                self.core.local_done(now, stream, wr, Status::Success);
            }
            Event::Release(p) => {
                let i = self.held.iter().position(|t| *t == p.token);
                self.held
                    .swap_remove(i.expect("released without being held"));
                self.check(&p);
                self.copies.push_back(p);
            }
            Event::Discard(token) => self.held.retain(|t| *t != token),
            Event::StreamError { stream, .. } => {
                assert!(ours(stream));
                assert!(!self.qp.told, "one error for each QP");
                (self.qp.failed, self.qp.told) = (true, true);
                self.core.set_state(now, stream, State::Err);
            }
            Event::ConnectionClosed => {
                assert!(self.stream.is_none(), "closed under a stream");
            }
            Event::Established { .. }
            | Event::Drained { .. }
            | Event::ConnectionUp
            | Event::ConnectionFailed(_)
            | Event::PathChanged { .. } => {}
        }
    }

    /// What somebody who knows nothing of the connection must not change.
    fn standing(&self) -> (ConnectionState, [usize; 5], u32, Option<u64>, bool) {
        (
            self.core.state(),
            [
                self.core.streams(),
                self.qp.requests.len(),
                self.qp.bound.len(),
                self.copies.len(),
                self.held.len(),
            ],
            self.qp.next_rmsn,
            self.core.peer_instance(),
            self.qp.failed,
        )
    }
}

fn is_write(e: &Event) -> bool {
    matches!(
        e,
        Event::RecvDone {
            opcode: Opcode::WriteImm,
            ..
        }
    )
}

fn push(queue: &mut VecDeque<Sent>, header: Rc<[u8]>, payload: u32) {
    if queue.len() == QUEUE {
        queue.pop_front();
    }
    queue.push_back(Sent { header, payload });
}

/// Two hosts and the packets between them: `wire[i]` goes to host `i`.
struct World {
    now: Time,
    ends: [End; 2],
    wire: [VecDeque<Sent>; 2],
    memory: [VecDeque<Sent>; 2],
    setup: Setup,
}

impl World {
    fn new(pick: &mut Pick<'_>) -> Self {
        let now = 1_000_000_000;
        let mut config = Config::new(pick.one(&[1500, 4200, 9000, 700]));
        config.paths = pick.one(&[1, 2, 4, 8]);
        config.path_records = pick.one(&[16, 16, 64]);
        let flags = pick.u8();
        config.crc = flags & 1 == 0;
        config.planes = if flags & 2 == 0 { u8::MAX } else { flags >> 2 };
        config.controller = Controller::ALL[usize::from(flags >> 7)];
        config.margin = 200_000;
        let rd = pick.one(&[0, 1, 4, 16]);
        let setup = Setup {
            attr: StreamAttr {
                sq_psn: pick.one(&[0, 1000, 0xffff_fff0, 0x7fff_fffe]),
                rq_psn: pick.one(&[7, 0xffff_ff00, 0x8000_0000]),
                max_rd_atomic: rd,
                max_dest_rd_atomic: pick.one(&[rd, 1, 16]),
                timeout: pick.one(&[0, 4_000_000, 500_000_000]),
                retry_cnt: pick.u8() & 7,
                rnr_retry: pick.u8() & 7,
                min_rnr_timer_us: pick.one(&[10, 1000, 100_000]),
                payload_mtu: PAYLOAD_MTU_MIN,
                window: pick.one(&[16, 256, 4096]),
                ..StreamAttr::default()
            },
            send_wr: pick.one(&[1, 4, 32]),
        };
        let mut ends = [0, 1].map(|i| End::new(i, config, 0, now));
        for e in &mut ends {
            e.attach(&setup, now);
        }
        Self {
            now,
            ends,
            wire: [VecDeque::new(), VecDeque::new()],
            memory: [VecDeque::new(), VecDeque::new()],
            setup,
        }
    }

    fn drain(&mut self, i: usize) {
        self.drain_asking(i, ASKED);
    }

    fn drain_asking(&mut self, i: usize, asked: usize) -> bool {
        let [a, b] = &mut self.wire;
        let out = if i == 0 { b } else { a };
        self.ends[i].drain(self.now, asked, out, &mut self.memory[i])
    }

    fn deliver(&mut self, i: usize, ce: bool) {
        if let Some(sent) = self.wire[i].pop_front() {
            self.give(i, &sent, ce);
        }
    }

    fn give(&mut self, i: usize, sent: &Sent, ce: bool) {
        let [a, b] = &mut self.wire;
        let out = if i == 0 { b } else { a };
        self.ends[i].receive(self.now, sent, ce, out);
    }

    /// Time goes on, and every timer fires when it is due; the network carries packets
    /// meanwhile when it is `honest`.
    fn pass(&mut self, by: Time, honest: bool) {
        let end = self.now.saturating_add(by);
        for _ in 0..48 {
            for i in 0..2 {
                self.drain(i);
                while honest && !self.wire[i].is_empty() {
                    self.deliver(i, false);
                }
                while honest && !self.ends[i].copies.is_empty() {
                    self.ends[i].end_copy(self.now, 0, Placed::Ok);
                }
                self.ends[i].core.end_of_batch(self.now);
            }
            let next = self.ends.iter().filter_map(|e| e.core.poll_timeout()).min();
            let idle = !honest || self.wire.iter().all(VecDeque::is_empty);
            let next = if idle {
                next.unwrap_or(Time::MAX)
            } else {
                self.now + 10_000
            };
            self.now = next.clamp(self.now + 1, end.max(self.now + 1));
            for e in &mut self.ends {
                if e.core.poll_timeout().is_some_and(|t| t <= self.now) {
                    e.core.handle_timeout(self.now);
                }
            }
            if self.now >= end {
                break;
            }
        }
        self.now = self.now.max(end);
    }

    /// Somebody elsewhere sends to host `i`: he knows addresses, QP numbers and keys, but
    /// neither ids nor nonces, which he has to guess.
    fn off_path(&mut self, i: usize, header: &mut Vec<u8>, payload: u32) {
        header.resize(header.len().max(60), 0);
        let kind = header[0] & 0xf;
        header[0] = kind;
        if kind >= 8 {
            header.resize(if kind <= 10 { HANDSHAKE_LEN } else { 60 }, 0);
            header[8..16].fill(0);
            header[16..32].copy_from_slice(&gid(1 - i));
            header[32..48].copy_from_slice(&gid(i));
            header[48] = 0;
        }
        let len = header.len() as u16;
        header[1] = 0;
        header[2..4].copy_from_slice(&len.to_be_bytes());
        let own = self.ends[i].core.ids().local_cid;
        if kind < 8 && header[8..16] == own.to_be_bytes() {
            return;
        }
        while self.drain_asking(i, ASKED_OUT) {}
        let before = self.ends[i].standing();
        let sent = Sent {
            header: header.as_slice().into(),
            payload,
        };
        let mut answers = VecDeque::new();
        self.ends[i].receive(self.now, &sent, false, &mut answers);
        assert_eq!(
            self.ends[i].standing(),
            before,
            "an off-path packet has changed it"
        );
        // It makes the host send a Cookie or a refusal, once and not longer than what came, and
        // nothing else: all the rest has gone before.
        let mut tx = Transmit::new();
        if self.ends[i].has_packet(self.now, ASKED_OUT, &mut tx) {
            answers.push_back(self.ends[i].sent(&tx));
            let more = self.ends[i].has_packet(self.now, ASKED_OUT, &mut tx);
            assert!(!more, "type {} as well answers type {kind}", tx.header[0]);
        }
        assert!(answers.len() <= 1, "two answers to type {kind}");
        for answer in &answers {
            let (out, came) = (answer.header.len(), sent.header.len());
            let answer_is = answer.header[0] & 0xf;
            // An Init gets a Cookie or a refusal; what needs an id, Unknown (PROTOCOL.md, section 7).
            let due: &[Type] = if kind == Type::Init as u8 {
                &[Type::Cookie, Type::Refuse]
            } else if kind <= Type::Query as u8 {
                &[Type::Unknown]
            } else {
                &[]
            };
            assert!(
                due.iter().any(|t| *t as u8 == answer_is) && answer.payload == 0,
                "type {answer_is} answers type {kind}"
            );
            if answer_is == Type::Unknown as u8 {
                assert_eq!(answer.header[52..60], sent.header[8..16], "another id");
            }
            assert!(
                out <= came + sent.payload as usize,
                "{out} bytes of type {answer_is} answer {came} of type {kind}",
            );
        }
        self.wire[1 - i].extend(answers);
    }

    fn step(&mut self, pick: &mut Pick<'_>) {
        let code = pick.u8();
        let (i, now) = (usize::from(code >> 7), self.now);
        match code & 0x1f {
            0..=3 => {
                let (va, rkey) = (u64::from(pick.u16()), u32::from(pick.u8()));
                let op = match pick.u8() % 10 {
                    0 | 1 => WrOp::Write { va, rkey },
                    2 => WrOp::WriteImm { va, rkey, imm: 5 },
                    3 | 4 => WrOp::Send,
                    5 => WrOp::SendImm { imm: 6 },
                    6 => WrOp::SendInv { rkey },
                    7 => WrOp::Read { va, rkey },
                    8 => WrOp::CompareSwap {
                        va,
                        rkey,
                        compare: 1,
                        swap: 2,
                    },
                    _ if rkey & 1 == 0 => WrOp::FetchAdd { va, rkey, add: 1 },
                    _ => WrOp::Local,
                };
                let length = pick.one(&[0, 1, 8, 100, 1000, 1424, 5000, 70_000, 300_000]);
                self.ends[i].post(now, op, length, pick.u8());
                self.drain(i);
            }
            4 | 5 => {
                let length = pick.one(&[0, 8, 1000, 70_000, 400_000]);
                self.ends[i].post_receive(now, length);
                self.drain(i);
            }
            6 | 7 => {
                let byte = pick.u8();
                self.pass(1 << (8 + u32::from(byte & 0x1f) % 26), byte & 0x80 != 0);
            }
            8 | 9 => {
                for _ in 0..pick.u8() & 0x1f {
                    self.deliver(i, code & 0x20 != 0);
                }
                self.drain(i);
            }
            10 => {
                for _ in 0..pick.u8() & 0x1f {
                    self.wire[i].pop_front();
                }
            }
            11 => {
                let at = usize::from(pick.u8());
                if let Some(p) = self.wire[i].get(at).cloned() {
                    self.wire[i].push_back(p);
                }
            }
            12 => {
                let at = usize::from(pick.u8());
                if let Some(p) = self.wire[i].remove(at) {
                    self.wire[i].push_front(p);
                }
            }
            13 | 14 => {
                // Somebody on the path changes a field of the next packet.
                let (at, with) = (usize::from(pick.u8()), pick.u8());
                if let Some(p) = self.wire[i].front_mut() {
                    let at = at % p.header.len();
                    Rc::make_mut(&mut p.header)[at] ^= with;
                }
                self.deliver(i, false);
                self.drain(i);
            }
            15 => {
                // Of one that has been sent before.
                let which = usize::from(pick.u8());
                let (at, with) = (usize::from(pick.u8()), pick.u8());
                let memory = &self.memory[1 - i];
                if let Some(p) = memory.get(which % memory.len().max(1)) {
                    let mut p = p.clone();
                    let len = p.header.len();
                    Rc::make_mut(&mut p.header)[at % len] ^= with;
                    if code & 0x20 != 0 {
                        p.payload = p.payload.wrapping_add(u32::from(with)) & 0xffff;
                    }
                    self.give(i, &p, code & 0x40 != 0);
                    self.drain(i);
                }
            }
            16 => {
                let which = usize::from(pick.u8());
                let n = usize::from(pick.u8());
                let memory = &self.memory[1 - i];
                if let Some(p) = memory.get(which % memory.len().max(1)) {
                    let mut p = p.clone();
                    p.header = p.header[..n.min(p.header.len())].into();
                    self.give(i, &p, false);
                    self.drain(i);
                }
            }
            17 | 18 => {
                // Made up, with the right id.
                let n = usize::from(pick.u8());
                let mut header = pick.bytes(n).to_vec();
                if header.len() >= 16 {
                    let len = header.len() as u16;
                    header[0] &= 0xf;
                    header[2..4].copy_from_slice(&len.to_be_bytes());
                    if header[0] < 8 {
                        let id = self.ends[i].core.ids().local_cid;
                        header[8..16].copy_from_slice(&id.to_be_bytes());
                    } else {
                        header[8..16].fill(0);
                    }
                }
                let payload = u32::from(pick.u16());
                let header = header.into();
                self.give(i, &Sent { header, payload }, false);
                self.drain(i);
            }
            19 | 20 => {
                let n = usize::from(pick.u8());
                let mut header = pick.bytes(n).to_vec();
                let payload = u32::from(pick.u16());
                self.off_path(i, &mut header, payload);
                self.drain(i);
            }
            21 | 22 => {
                let result = match pick.u8() {
                    0xff => Placed::Fault(Fault::Access),
                    0xfe => Placed::Fault(Fault::Operation),
                    _ => Placed::Ok,
                };
                for _ in 0..1 + (code >> 5 & 3) * 8 {
                    self.ends[i].end_copy(now, code, result);
                }
                self.drain(i);
            }
            23 => {
                self.ends[i].core.end_of_batch(now);
                let e = &mut self.ends[i];
                if e.core.report_is_due(now) {
                    e.shares.set_kbit(u32::from(pick.u16()) * 1000);
                    for plane in e.core.planes().map(|p| p.local).collect::<Vec<_>>() {
                        e.core.report_on(now, plane, &mut e.shares);
                    }
                }
                self.drain(i);
            }
            24 => {
                let state = pick.one(&[State::Err, State::Sqd, State::Rts]);
                // What modify_qp allows: nothing but RESET leads out of ERR.
                let e = &mut self.ends[i];
                if let Some(id) = e.stream.filter(|_| !e.qp.failed) {
                    e.qp.failed = state == State::Err;
                    e.core.set_state(now, id, state);
                }
                self.drain(i);
            }
            25 => {
                self.ends[i].detach(now);
                if code & 0x40 != 0 {
                    self.ends[i].attach(&self.setup, now);
                }
                self.drain(i);
            }
            26 => {
                self.ends[i].attach(&self.setup, now);
                self.drain(i);
            }
            27 => {
                // The local queue is full, or memory of a WR has been deregistered.
                let mut tx = Transmit::new();
                for _ in 0..1 + (pick.u8() & 7) {
                    if !self.ends[i].core.poll_transmit(now, &mut tx) {
                        break;
                    }
                    self.ends[i].sent(&tx);
                    if code & 0x40 != 0 && tx.payload != Payload::None {
                        self.ends[i].core.source_lost(now, &tx);
                    } else {
                        self.ends[i].core.transmit_failed(now, &tx);
                    }
                    self.settle(i);
                }
                self.drain(i);
            }
            28 => {
                // Another life of the machine, or the connection alone is made anew.
                let config = self.ends[i].config;
                let life = self.ends[i].lives + 1;
                if life < 4 {
                    if code & 0x40 != 0 {
                        self.ends[i].detach(now);
                        self.ends[i].core.close(now);
                        self.drain(i);
                    }
                    self.ends[i] = End::new(i, config, life, now);
                    self.ends[i].attach(&self.setup, now);
                    self.drain(i);
                }
            }
            29 => {
                let which = pick.u8();
                let e = &mut self.ends[i];
                if code & 0x20 != 0 && which & 0x40 != 0 {
                    e.core.plane_full(which & 7, which & 8 != 0);
                } else {
                    e.set_planes(now, which, code & 0x40 != 0);
                }
                self.drain(i);
            }
            _ => self.pass(1 << (10 + u32::from(pick.u8()) % 20), true),
        }
    }

    /// Handles events without taking packets.
    fn settle(&mut self, i: usize) {
        for round in 0.. {
            assert!(round < ROUND, "events never end");
            let Some(e) = self.ends[i].core.poll_event(self.now) else {
                return;
            };
            self.ends[i].event(self.now, e);
        }
    }
}

/// Runs the decisions in `bytes`.
pub fn run(bytes: &[u8]) {
    let mut pick = Pick::new(bytes);
    let mut world = World::new(&mut pick);
    for i in 0..2 {
        world.drain(i);
    }
    let most = if bytes.len() % 8 == 0 {
        u32::MAX
    } else {
        PACKETS
    };
    while !pick.is_empty() && world.ends.iter().all(|e| e.packets < most) {
        world.step(&mut pick);
    }
    for e in &world.ends {
        assert!(e.core.paths().count() <= usize::from(e.config.paths));
    }
}
