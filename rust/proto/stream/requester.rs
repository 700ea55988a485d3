// SPDX-License-Identifier: GPL-2.0

//! The requester's half: packets out of work requests, and their completion.
//!
//! WRs live in a ring. Four numbers walk over it, none overtaking the one before it:
//!
//! | number | meaning |
//! | --- | --- |
//! | `tail` | next to be posted |
//! | `cur` | sends its packets; goes back to `acc` on a rewind |
//! | `acc` | first that the peer has not accepted entirely |
//! | `head` | next to complete; leaves the ring then |
//!
//! A WR gets its numbers (stream sequences, message, request) when its first packet is
//! sent and keeps them through every rewind.

#![forbid(unsafe_code)]

use super::inbound::{Arrival, Inbound};
use super::outbound::{Outbound, Progress};
use super::overlap::Overlaps;
use super::{before, status_of, BlockStatus, Common, PacketRef, PostError, State, StreamBlock};
use super::{MTU_MAX, MTU_MIN, RD_ATOMIC_MAX};
use crate::os::{AllocError, Vec};
use crate::proto::api::{
    Direction, Event, Opcode, Payload, Placed, Placement, Receive, SendWr, Status, StreamHeader,
    Target, Time, Token, WrOp, MAX_MESSAGE,
};
use crate::proto::wire::Drop;
use core::mem::size_of;

/// Deepest send queue.
const SEND_WR_MAX: u32 = 1 << 20;

/// Longest wait after NOT_READY when the QP has no timeout, in ns.
const NOT_READY_MAX: Time = 1_000_000_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// No packet was sent; of a local one: not begun.
    Queued,
    /// Has its numbers.
    Started,
    /// A local one that the driver is doing.
    Told,
    /// A local one that is done.
    Finished(Status),
}

#[derive(Clone, Copy)]
struct Wr {
    wr: SendWr,
    phase: Phase,
    /// First stream sequence and how many.
    first: u32,
    count: u32,
    msn: u32,
    /// Receive message number, when the message takes a receive.
    rmsn: u32,
    /// Request number of a READ or an atomic.
    request: u32,
    /// What must be in place before this Write's packets are copied.
    after: Option<u32>,
    /// Payload of each packet but the last.
    mtu: u32,
}

impl Wr {
    fn is_request(&self) -> bool {
        is_request(&self.wr.op)
    }

    fn opcode(&self) -> Opcode {
        match self.wr.op {
            WrOp::Write { .. } => Opcode::Write,
            WrOp::WriteImm { .. } => Opcode::WriteImm,
            WrOp::Send => Opcode::Send,
            WrOp::SendImm { .. } => Opcode::SendImm,
            WrOp::SendInv { .. } => Opcode::SendInv,
            WrOp::Read { .. } => Opcode::ReadRequest,
            WrOp::CompareSwap { .. } => Opcode::CompareSwap,
            WrOp::FetchAdd { .. } => Opcode::FetchAdd,
            WrOp::Local => Opcode::Void,
        }
    }

    /// Offset and length of the payload of packet `index`.
    fn part(&self, index: u32) -> (u32, u32) {
        if self.is_request() {
            return (0, 0);
        }
        let offset = index.saturating_mul(self.mtu).min(self.wr.length);
        (offset, (self.wr.length - offset).min(self.mtu))
    }

    fn end(&self) -> u32 {
        self.first.wrapping_add(self.count)
    }
}

fn is_request(op: &WrOp) -> bool {
    matches!(
        op,
        WrOp::Read { .. } | WrOp::CompareSwap { .. } | WrOp::FetchAdd { .. }
    )
}

fn takes_receive(op: &WrOp) -> bool {
    matches!(
        op,
        WrOp::WriteImm { .. } | WrOp::Send | WrOp::SendImm { .. } | WrOp::SendInv { .. }
    )
}

/// A READ or atomic whose answer is awaited.
#[derive(Clone, Copy, Default)]
struct Request {
    wr: u32,
    /// Bytes that have arrived.
    got: u32,
    /// Bytes that must.
    total: u32,
    atomic: bool,
    /// Sequence of the final packet of the answer, once it has arrived.
    last: Option<u32>,
}

pub(super) struct Requester {
    ring: Vec<Wr>,
    depth: u32,
    head: u32,
    acc: u32,
    cur: u32,
    /// Packet of `cur` that is next.
    packet: u32,
    tail: u32,
    next_msn: u32,
    next_rmsn: u32,
    next_request: u32,
    oldest_request: u32,
    requests: Vec<Request>,
    pub(super) out: Outbound,
    /// Answers to READs and atomics.
    inb: Inbound,
    overlaps: Overlaps,
    /// Receives exist at the peer for receive messages below this.
    limit: Option<u32>,
    rnr_count: u8,
    /// Round of the newest answer.
    peer_round: u8,
    /// When the stream last got on.
    progress: Time,
    /// The first WR that fails and how.
    fail: Option<(u32, Status)>,
    flushing: bool,
    drain: bool,
    /// Answers that are being copied.
    pub(super) copying: u32,
}

const QUEUED: Wr = Wr {
    wr: SendWr {
        op: WrOp::Local,
        fence: false,
        solicited: false,
        signaled: false,
        length: 0,
        error: None,
    },
    phase: Phase::Queued,
    first: 0,
    count: 0,
    msn: 0,
    rmsn: 0,
    request: 0,
    after: None,
    mtu: 0,
};

impl Requester {
    /// WRs that the ring has room for: their number wraps, so it is a power of two.
    const fn ring_size(max_send_wr: u32) -> usize {
        let depth = match max_send_wr {
            0 => 1,
            1..=SEND_WR_MAX => max_send_wr,
            _ => SEND_WR_MAX,
        };
        depth.next_power_of_two() as usize
    }

    pub(super) const fn memory(max_send_wr: u32) -> usize {
        Self::ring_size(max_send_wr) * size_of::<Wr>()
            + RD_ATOMIC_MAX as usize * size_of::<Request>()
            + Inbound::MEMORY
            + Overlaps::MEMORY
    }

    pub(super) fn new(max_send_wr: u32) -> Result<Self, AllocError> {
        Ok(Self {
            ring: Vec::from_fn(Self::ring_size(max_send_wr), |_| QUEUED)?,
            depth: max_send_wr.clamp(1, SEND_WR_MAX),
            head: 0,
            acc: 0,
            cur: 0,
            packet: 0,
            tail: 0,
            next_msn: 0,
            next_rmsn: 0,
            next_request: 0,
            oldest_request: 0,
            requests: Vec::from_fn(RD_ATOMIC_MAX as usize, |_| Request::default())?,
            out: Outbound::default(),
            inb: Inbound::new()?,
            overlaps: Overlaps::new()?,
            limit: None,
            rnr_count: 0,
            peer_round: 0,
            progress: 0,
            fail: None,
            flushing: false,
            drain: false,
            copying: 0,
        })
    }

    pub(super) fn reset(&mut self) {
        self.head = 0;
        self.acc = 0;
        self.cur = 0;
        self.packet = 0;
        self.tail = 0;
        self.next_msn = 0;
        self.next_rmsn = 0;
        self.next_request = 0;
        self.oldest_request = 0;
        self.overlaps.reset();
        self.limit = None;
        self.rnr_count = 0;
        self.peer_round = 0;
        self.fail = None;
        self.flushing = false;
        self.drain = false;
        self.copying = 0;
    }

    /// Fixes the first sequences.
    pub(super) fn start(&mut self, c: &Common) {
        self.out.start(c.attr.sq_psn, c.attr.window);
        // Answers are numbered from where their request stream starts.
        self.inb.start(c.attr.sq_psn, c.attr.window);
    }

    fn get(&self, wr: u32) -> Option<&Wr> {
        self.ring.get(wr as usize & (self.ring.len() - 1))
    }

    fn get_mut(&mut self, wr: u32) -> Option<&mut Wr> {
        let mask = self.ring.len() - 1;
        self.ring.get_mut(wr as usize & mask)
    }

    fn request(&mut self, number: u32) -> Option<&mut Request> {
        self.requests.get_mut((number % RD_ATOMIC_MAX) as usize)
    }

    /// WR `wr` while it is in the ring.
    fn live(&self, wr: u32) -> Option<&Wr> {
        let age = wr.wrapping_sub(self.head);
        if age < self.tail.wrapping_sub(self.head) {
            self.get(wr)
        } else {
            None
        }
    }

    pub(super) fn post(&mut self, c: &Common, now: Time, wr: SendWr) -> Result<u32, PostError> {
        if matches!(c.state, State::Reset | State::Init | State::Rtr) {
            return Err(PostError::State);
        }
        if self.tail.wrapping_sub(self.head) >= self.depth {
            return Err(PostError::Full);
        }
        let number = self.tail;
        let mut wr = wr;
        if wr.error.is_none() {
            if wr.length > MAX_MESSAGE {
                wr.error = Some(Status::LocalLength);
            } else if is_request(&wr.op) && c.attr.max_rd_atomic == 0 {
                wr.error = Some(Status::LocalQpOperation);
            }
        }
        if let Some(slot) = self.get_mut(number) {
            *slot = Wr { wr, ..QUEUED };
        }
        if self.head == self.tail {
            self.progress = now;
        }
        self.tail = number.wrapping_add(1);
        Ok(number)
    }

    /// Whether every WR is complete.
    pub(super) fn is_empty(&self) -> bool {
        self.head == self.tail
    }

    /// The answers outstanding.
    fn unanswered(&self) -> u32 {
        self.next_request.wrapping_sub(self.oldest_request)
    }

    fn credit(&self, rmsn: u32) -> bool {
        // One message beyond the limit is always allowed: the limit is advice, and its
        // refusal or acceptance brings news.
        self.limit.is_none_or(|limit| !before(limit, rmsn))
    }

    /// Which packet is next: sequence, payload bytes, whether its WR has to be started.
    fn candidate(&self, c: &Common, now: Time) -> Option<(u32, u32, bool)> {
        let begins = match c.state {
            State::Rts => true,
            State::Sqd => false,
            _ => return None,
        };
        if self.cur == self.tail
            || self.out.waits(now)
            || self.fail.is_some_and(|(wr, _)| !before(self.cur, wr))
        {
            return None;
        }
        let w = self.get(self.cur)?;
        let op = &w.wr.op;
        let (sseq, len, start) = match w.phase {
            Phase::Started => {
                if self.packet == 0 && takes_receive(op) && !self.credit(w.rmsn) {
                    return None;
                }
                let (_, len) = w.part(self.packet);
                (w.first.wrapping_add(self.packet), len, false)
            }
            Phase::Queued if begins && w.wr.error.is_none() && *op != WrOp::Local => {
                let request = is_request(op);
                if (w.wr.fence && self.unanswered() != 0)
                    || (request && self.unanswered() >= c.attr.max_rd_atomic.min(RD_ATOMIC_MAX))
                    || (takes_receive(op) && !self.credit(self.next_rmsn))
                {
                    return None;
                }
                let len = match request {
                    true => 0,
                    false => w.wr.length.min(mtu(c)),
                };
                (self.out.end(), len, true)
            }
            _ => return None,
        };
        self.out.admits(sseq).then_some((sseq, len, start))
    }

    pub(super) fn can_send(&self, c: &Common, now: Time) -> bool {
        self.candidate(c, now).is_some()
    }

    /// Gives the WR at `cur` its numbers.
    fn begin(&mut self, c: &Common) {
        let Some(mut w) = self.get(self.cur).copied() else {
            return;
        };
        let request = w.is_request();
        w.mtu = mtu(c);
        w.count = match request {
            true => 1,
            false => w.wr.length.div_ceil(w.mtu).max(1),
        };
        w.first = self.out.assign(w.count);
        w.msn = self.next_msn;
        self.next_msn = w.msn.wrapping_add(1);
        if takes_receive(&w.wr.op) {
            w.rmsn = self.next_rmsn;
            self.next_rmsn = w.rmsn.wrapping_add(1);
        }
        if request {
            w.request = self.next_request;
            self.next_request = w.request.wrapping_add(1);
            let (wr, total) = (self.cur, w.wr.length);
            let atomic = !matches!(w.wr.op, WrOp::Read { .. });
            if let Some(r) = self.request(w.request) {
                *r = Request {
                    wr,
                    got: 0,
                    total: if atomic { 8 } else { total },
                    atomic,
                    last: None,
                };
            }
        }
        if let WrOp::Write { va, .. } | WrOp::WriteImm { va, .. } = w.wr.op {
            if w.wr.length != 0 {
                let cum = self.out.cum();
                let end = va.saturating_add(u64::from(w.wr.length));
                w.after = self.overlaps.last_overlap(cum, va, end);
                self.overlaps.push(cum, va, end, w.end().wrapping_sub(1));
            }
        }
        w.phase = Phase::Started;
        if let Some(slot) = self.get_mut(self.cur) {
            *slot = w;
        }
    }

    pub(super) fn next_packet(
        &mut self,
        c: &Common,
        now: Time,
        budget: u32,
        h: &mut StreamHeader,
    ) -> Option<PacketRef> {
        let (sseq, len, start) = self.candidate(c, now)?;
        if len > budget {
            return None;
        }
        if start {
            self.begin(c);
        }
        let wr = self.cur;
        let w = self.get(wr)?;
        let (index, count) = (self.packet, w.count);
        self.fill(c, w, index, h);
        if index.wrapping_add(1) == count {
            self.cur = wr.wrapping_add(1);
            self.packet = 0;
        } else {
            self.packet = index.wrapping_add(1);
        }
        self.out.advance(sseq);
        Some(PacketRef {
            sseq,
            index: wr,
            generation: c.generation,
            len: len as u16,
            round: self.out.round(),
            dir: Direction::Request,
        })
    }

    fn fill(&self, c: &Common, w: &Wr, index: u32, h: &mut StreamHeader) {
        let (offset, _) = w.part(index);
        let last = index.wrapping_add(1) == w.count;
        *h = StreamHeader {
            opcode: w.opcode(),
            last,
            solicited: w.wr.solicited && last,
            dst_qpn: c.attr.remote_qpn,
            src_qpn: c.attr.local_qpn,
            sseq: w.first.wrapping_add(index),
            msn: w.msn,
            rmsn: w.rmsn,
            offset,
            total: w.wr.length,
            after: w.after,
            round: self.out.round(),
            ..StreamHeader::default()
        };
        match w.wr.op {
            WrOp::Write { va, rkey } => {
                h.va = va;
                h.rkey = rkey;
            }
            WrOp::WriteImm { va, rkey, imm } => {
                h.va = va;
                h.rkey = rkey;
                h.imm = if last { imm } else { 0 };
            }
            WrOp::SendImm { imm } => h.imm = if last { imm } else { 0 },
            WrOp::SendInv { rkey } => h.imm = if last { rkey } else { 0 },
            WrOp::Read { va, rkey } => {
                h.va = va;
                h.rkey = rkey;
            }
            WrOp::CompareSwap {
                va,
                rkey,
                compare,
                swap,
            } => {
                h.va = va;
                h.rkey = rkey;
                h.compare_add = compare;
                h.swap = swap;
            }
            WrOp::FetchAdd { va, rkey, add } => {
                h.va = va;
                h.rkey = rkey;
                h.compare_add = add;
            }
            WrOp::Send | WrOp::Local => {}
        }
        if w.is_request() {
            h.request = w.request;
            h.oldest = self.oldest_request;
            if !matches!(w.wr.op, WrOp::Read { .. }) {
                h.total = 8;
            }
        }
    }

    /// The WR and the packet index that `p` names while it is unaccepted.
    fn find(&self, p: &PacketRef) -> Option<(&Wr, u32)> {
        let w = self.live(p.index)?;
        let index = p.sseq.wrapping_sub(w.first);
        (w.phase == Phase::Started && index < w.count && !before(p.sseq, self.out.cum()))
            .then_some((w, index))
    }

    pub(super) fn rebuild(&self, c: &Common, p: &PacketRef, h: &mut StreamHeader) -> bool {
        if p.round != self.out.round() || !matches!(c.state, State::Rts | State::Sqd) {
            return false;
        }
        match self.find(p) {
            Some((w, index)) => {
                self.fill(c, w, index, h);
                true
            }
            None => false,
        }
    }

    pub(super) fn payload(&self, c: &Common, p: &PacketRef) -> Payload {
        match self.find(p) {
            Some((w, index)) if p.len != 0 => Payload::Send {
                stream: c.id,
                wr: p.index,
                offset: w.part(index).0,
                len: u32::from(p.len),
            },
            _ => Payload::None,
        }
    }

    fn put_cursor_at_acceptance(&mut self) {
        self.cur = self.acc;
        self.packet = 0;
        if self.acc != self.tail {
            if let Some(w) = self.get(self.acc) {
                if w.phase == Phase::Started {
                    self.packet = self.out.cum().wrapping_sub(w.first);
                }
            }
        }
    }

    fn set_fail(&mut self, wr: u32, status: Status) {
        if self.fail.is_none_or(|(other, _)| before(wr, other)) {
            self.fail = Some((wr, status));
        }
    }

    /// The memory of a WR is gone.
    pub(super) fn source_lost(&mut self, wr: u32) {
        let unfinished = !before(wr, self.head) && before(wr, self.tail) && !self.is_done(wr);
        if unfinished {
            self.set_fail(wr, Status::LocalProtection);
        }
    }

    /// The peer's block about the requests.
    pub(super) fn on_block(&mut self, c: &Common, now: Time, b: &StreamBlock) {
        if !matches!(c.state, State::Rts | State::Sqd) {
            return;
        }
        if let BlockStatus::NotReady { round } = b.status {
            // Its number may be nobody's: only the last word of a QP that was connected to
            // this one counts, and that is not lower than what it said before.
            if self.out.accept(b.cumulative) == Progress::Advanced {
                self.advanced(now);
            }
            if self.out.is_not_ready(round) {
                let limit = match c.attr.timeout {
                    0 => NOT_READY_MAX,
                    t => t,
                };
                self.out.rewind_not_ready(now, limit);
                self.put_cursor_at_acceptance();
            }
            return;
        }
        match self.out.accept(b.cumulative) {
            Progress::Old => return,
            Progress::Same => {}
            Progress::Advanced => self.advanced(now),
        }
        self.out.on_ready();
        self.limit = b.receive_limit;
        match b.status {
            BlockStatus::Ok | BlockStatus::NotReady { .. } => {}
            BlockStatus::Rnr {
                timer_us, round, ..
            } => {
                if self.out.is_refusal(round) {
                    self.on_rnr(c, now, timer_us);
                }
            }
            BlockStatus::NoRoom { round } => {
                if self.out.is_refusal(round) {
                    self.out.rewind_no_room(now);
                    self.put_cursor_at_acceptance();
                }
            }
            BlockStatus::Fatal { msn, fault } => {
                // All earlier messages are accepted, so it is the first that is not.
                if self.acc != self.tail
                    && self
                        .get(self.acc)
                        .is_some_and(|w| w.phase == Phase::Started && w.msn == msn)
                {
                    self.set_fail(self.acc, status_of(fault));
                }
            }
        }
    }

    fn on_rnr(&mut self, c: &Common, now: Time, timer_us: u32) {
        let until = now.saturating_add(Time::from(timer_us).saturating_mul(1000));
        if c.attr.rnr_retry < 7 && self.rnr_count >= c.attr.rnr_retry {
            self.set_fail(self.acc, Status::RnrRetryExceeded);
            return;
        }
        self.rnr_count = self.rnr_count.saturating_add(1);
        self.progress = until;
        self.out.rewind(Some(until));
        self.put_cursor_at_acceptance();
    }

    /// The accepted number has risen.
    fn advanced(&mut self, now: Time) {
        self.progress = self.progress.max(now);
        self.rnr_count = 0;
        let cum = self.out.cum();
        while self.acc != self.tail {
            match self.get(self.acc) {
                Some(w) if w.phase == Phase::Started && !before(cum, w.end()) => {
                    self.acc = self.acc.wrapping_add(1);
                }
                _ => break,
            }
        }
        // Accepted beyond where a rewind went back to.
        let behind = before(self.cur, self.acc)
            || (self.cur == self.acc
                && self.cur != self.tail
                && self.get(self.cur).is_some_and(|w| {
                    w.phase == Phase::Started && before(w.first.wrapping_add(self.packet), cum)
                }));
        if behind {
            self.put_cursor_at_acceptance();
        }
    }

    /// An answer to a READ or an atomic.
    pub(super) fn receive(
        &mut self,
        c: &mut Common,
        now: Time,
        h: &StreamHeader,
        len: u32,
    ) -> Result<Receive, Drop> {
        self.peer_round = h.round;
        if !matches!(c.state, State::Rts | State::Sqd) {
            return Err(Drop::UnknownStream);
        }
        match self.inb.arrival(h.sseq) {
            Arrival::New => {}
            Arrival::Duplicate => {
                c.dirty[Direction::Response as usize] = true;
                return Err(Drop::StreamDuplicate);
            }
            Arrival::Outside => return Err(Drop::StreamWindow),
        }
        if h.request.wrapping_sub(self.oldest_request) >= self.unanswered() {
            return Err(Drop::StreamInvalid);
        }
        let atomic = h.opcode == Opcode::AtomicResponse;
        let request = self.request(h.request).ok_or(Drop::StreamInvalid)?;
        let fits = match h.offset.checked_add(len) {
            _ if atomic => len == 0 && h.offset == 0 && h.last,
            Some(end) => end <= h.total && (end == h.total) == h.last && (len != 0 || h.total == 0),
            None => false,
        };
        if !fits
            || request.atomic != atomic
            || h.total != request.total
            || request.last.is_some() && h.last
        {
            return Err(Drop::StreamInvalid);
        }
        request.got = request.got.saturating_add(if atomic { 8 } else { len });
        if h.last {
            request.last = Some(h.sseq);
        }
        let wr = request.wr;
        self.inb.receive(h.sseq);
        self.progress = self.progress.max(now);
        if h.total == 0 {
            self.in_place(c, now, h.sseq);
            return Ok(Receive::Done);
        }
        self.copying = self.copying.saturating_add(1);
        Ok(Receive::Place(Placement {
            token: Token {
                stream: c.id,
                generation: c.generation,
                direction: Direction::Response,
                sseq: h.sseq,
                msn: h.request,
                last: h.last,
                slot: u16::MAX,
            },
            target: Target::Request { wr },
            offset: h.offset,
            len: if atomic { 8 } else { len },
            total: h.total,
            last: false,
            value: atomic.then_some(h.compare_add),
        }))
    }

    /// The copy of an answer has ended.
    pub(super) fn placed(&mut self, c: &mut Common, now: Time, token: &Token, result: Placed) {
        self.copying = self.copying.saturating_sub(1);
        if !matches!(c.state, State::Rts | State::Sqd) {
            return;
        }
        match result {
            Placed::Ok => self.in_place(c, now, token.sseq),
            Placed::Fault(_) => {
                if token.msn.wrapping_sub(self.oldest_request) < self.unanswered() {
                    if let Some(wr) = self.request(token.msn).map(|r| r.wr) {
                        self.set_fail(wr, Status::LocalProtection);
                    }
                }
            }
        }
    }

    fn in_place(&mut self, c: &mut Common, now: Time, sseq: u32) {
        if !self.inb.place_in_order(sseq) {
            if !self.inb.place(sseq, false) {
                return;
            }
            let before_it = self.inb.done();
            while self.inb.step().is_some() {}
            if self.inb.done() == before_it {
                return;
            }
        }
        c.dirty[Direction::Response as usize] = true;
        self.progress = self.progress.max(now);
        let done = self.inb.done();
        while self.oldest_request != self.next_request {
            let number = self.oldest_request;
            let Some(r) = self.request(number).map(|r| *r) else {
                return;
            };
            if !r.last.is_some_and(|last| before(last, done)) {
                return;
            }
            if r.got != r.total {
                // The peer's answer ended without all of its bytes.
                self.set_fail(r.wr, Status::BadResponse);
            }
            self.oldest_request = number.wrapping_add(1);
        }
    }

    pub(super) fn local_done(&mut self, now: Time, wr: u32, status: Status) {
        if self.live(wr).is_none_or(|w| w.phase != Phase::Told) {
            return;
        }
        if let Some(w) = self.get_mut(wr) {
            w.phase = Phase::Finished(status);
        }
        self.progress = self.progress.max(now);
        // It was told when everything ahead of it was complete: both numbers stand on it.
        if status == Status::Success && self.acc == wr && self.cur == wr {
            self.acc = wr.wrapping_add(1);
            self.cur = self.acc;
            self.packet = 0;
        }
    }

    pub(super) fn block(&self, c: &Common) -> StreamBlock {
        StreamBlock {
            dst_qpn: c.attr.remote_qpn,
            src_qpn: c.attr.local_qpn,
            dir: Direction::Response,
            cumulative: self.inb.done(),
            msn_done: self.oldest_request,
            receive_limit: None,
            status: match c.state {
                State::Rts | State::Sqd => BlockStatus::Ok,
                _ => BlockStatus::NotReady {
                    round: self.peer_round,
                },
            },
        }
    }

    pub(super) fn set_state(&mut self, now: Time, state: State) {
        if matches!(state, State::Rts) {
            self.progress = self.progress.max(now);
        }
        self.drain = state == State::Sqd;
    }

    /// Sends again whatever is not accepted.
    pub(super) fn resume(&mut self, now: Time) {
        self.out.forget_paths(now);
        self.out.rewind(None);
        self.put_cursor_at_acceptance();
    }

    /// The first unfinished WR fails. False when there is none.
    pub(super) fn fail_first(&mut self, status: Status) -> bool {
        let mut wr = self.head;
        while wr != self.tail {
            if !self.is_done(wr) {
                self.set_fail(wr, status);
                return true;
            }
            wr = wr.wrapping_add(1);
        }
        false
    }

    /// Whether the WR has succeeded.
    fn is_done(&self, wr: u32) -> bool {
        let Some(w) = self.get(wr) else { return false };
        match w.phase {
            Phase::Queued | Phase::Told => false,
            Phase::Finished(status) => status == Status::Success,
            Phase::Started => {
                before(wr, self.acc) && (!w.is_request() || before(w.request, self.oldest_request))
            }
        }
    }

    /// The last `by` are no silence of the peer.
    pub(super) fn excuse(&mut self, now: Time, by: Time) {
        if self.progress < now {
            self.progress = self.progress.saturating_add(by).min(now);
        }
    }

    /// When the WR at the head has waited too long for the peer.
    pub(super) fn deadline(&self, c: &Common) -> Option<Time> {
        let fails = self.fail.is_some_and(|(wr, _)| wr == self.head);
        if c.attr.timeout == 0 || self.head == self.tail || fails {
            return None;
        }
        let w = self.get(self.head)?;
        let waits = match (c.state, w.phase) {
            (State::Rts | State::Sqd, Phase::Started) => !self.is_done(self.head),
            (State::Rts, Phase::Queued) => w.wr.op != WrOp::Local && w.wr.error.is_none(),
            _ => false,
        };
        waits.then(|| {
            self.progress.saturating_add(
                c.attr
                    .timeout
                    .saturating_mul(Time::from(c.attr.retry_cnt) + 1),
            )
        })
    }

    /// The next completion: successes and the first failure in any state.
    pub(super) fn poll(&mut self, c: &mut Common) -> Option<Event> {
        if self.head == self.tail {
            return self.poll_drained(c);
        }
        let wr = self.head;
        let w = *self.get(wr)?;
        if self.flushing {
            return None;
        }
        let done = |status| Event::SendDone {
            stream: c.id,
            wr,
            status,
        };
        let failure = match (self.fail, w.phase, w.wr.error) {
            (Some((failed, status)), _, _) if failed == wr => Some(status),
            (_, Phase::Finished(status), _) if status != Status::Success => Some(status),
            (_, Phase::Queued, Some(status)) if c.state == State::Rts => Some(status),
            _ => None,
        };
        if let Some(status) = failure {
            // Its buffers must not change any more; the driver is to answer a local one.
            if self.copying != 0 || w.phase == Phase::Told {
                return None;
            }
            let event = done(status);
            self.pop();
            self.flushing = true;
            self.fail = None;
            c.enter_error(None);
            return Some(event);
        }
        if self.is_done(wr) {
            let event = done(Status::Success);
            self.pop();
            return Some(event);
        }
        if w.wr.op == WrOp::Local && w.phase == Phase::Queued && c.state == State::Rts {
            if let Some(w) = self.get_mut(wr) {
                w.phase = Phase::Told;
            }
            return Some(Event::Local { stream: c.id, wr });
        }
        self.poll_drained(c)
    }

    fn poll_drained(&mut self, c: &Common) -> Option<Event> {
        let idle = self.head == self.tail
            || self
                .get(self.head)
                .is_some_and(|w| w.phase == Phase::Queued);
        if self.drain && idle && c.state == State::Sqd {
            self.drain = false;
            return Some(Event::Drained { stream: c.id });
        }
        None
    }

    /// The next flushed WR.
    pub(super) fn poll_flush(&mut self, c: &Common) -> Option<Event> {
        let wr = self.head;
        if c.state != State::Err || wr == self.tail || self.copying != 0 {
            return None;
        }
        if self.get(wr)?.phase == Phase::Told {
            return None;
        }
        self.flushing = true;
        self.pop();
        Some(Event::SendDone {
            stream: c.id,
            wr,
            status: Status::Flushed,
        })
    }

    /// The WR at the head leaves the ring.
    fn pop(&mut self) {
        let next = self.head.wrapping_add(1);
        if before(self.acc, next) {
            self.acc = next;
        }
        if before(self.cur, next) {
            self.cur = next;
            self.packet = 0;
        }
        self.head = next;
    }
}

fn mtu(c: &Common) -> u32 {
    c.attr.payload_mtu.clamp(MTU_MIN, MTU_MAX)
}
