// SPDX-License-Identifier: GPL-2.0

//! The responder's half: what arrives from the peer's send queue.
//!
//! Packets are placed as they come. What has to happen in order hangs on one cursor, the
//! lowest sequence that is not in place: receives complete when it has passed their final
//! packet; READs, atomics and remote invalidation act when it stands on theirs; held
//! packets are released when it reaches what they wait for; a refusal or a fault is
//! reported when it reaches the refused packet or the failed message.

#![forbid(unsafe_code)]

use super::held::{Held, Record};
use super::inbound::{Arrival, Inbound};
use super::outbound::{Outbound, Progress};
use super::{before, BlockStatus, Common, PacketRef, State, StreamBlock};
use super::{MTU_MAX, MTU_MIN, RD_ATOMIC_MAX};
use crate::os::{AllocError, Vec};
use crate::proto::api::{
    Direction, Event, Fault, Host, Opcode, Payload, Placed, Placement, Receive, Status,
    StreamHeader, Target, Time, Token,
};
use crate::proto::wire::Drop;
use core::mem::size_of;

/// Receives that are bound and not yet complete, at the most.
const RECEIVES: u32 = 256;

/// Longest wait of the answers after NOT_READY, in ns.
const NOT_READY_MAX: Time = 1_000_000_000;

/// Token of a packet that goes to registered memory and is not held.
const SLOT_NONE: u16 = u16::MAX;

/// Token of a packet that goes to a receive.
const SLOT_RECEIVE: u16 = u16::MAX - 1;

/// A bound receive.
#[derive(Clone, Copy, Default)]
struct Bound {
    /// Bytes of its buffer, as far as a message can need them.
    room: u32,
    msn: u32,
    total: u32,
    imm: u32,
    /// Sequence of the message's final packet, when `ended`.
    last: u32,
    opcode: Opcode,
    /// A packet of the message has arrived.
    begun: bool,
    /// Its final packet has arrived.
    ended: bool,
    solicited: bool,
    /// The driver was asked to invalidate.
    told: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Phase {
    #[default]
    Free,
    /// Waits for its turn.
    Pending,
    /// The driver is doing it.
    Told,
    /// The answer can be sent.
    Ready,
    /// The answer has its sequences.
    Answering,
}

/// A READ or an atomic of the peer.
#[derive(Clone, Copy, Default)]
struct Slot {
    number: u32,
    phase: Phase,
    opcode: Opcode,
    /// Sequence and message number of the request.
    sseq: u32,
    msn: u32,
    va: u64,
    rkey: u32,
    length: u32,
    /// Operand, then the result.
    compare_add: u64,
    swap: u64,
    /// Sequences of the answer.
    first: u32,
    count: u32,
    mtu: u32,
    /// The driver keeps the source. Of the request before this one in the same slot until
    /// that was released.
    pinned: bool,
}

impl Slot {
    fn end(&self) -> u32 {
        self.first.wrapping_add(self.count)
    }

    fn atomic(&self) -> bool {
        self.opcode != Opcode::ReadRequest
    }

    fn part(&self, index: u32) -> (u32, u32) {
        if self.atomic() {
            return (0, 0);
        }
        let offset = index.saturating_mul(self.mtu).min(self.length);
        (offset, (self.length - offset).min(self.mtu))
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Why {
    NoReceive { rmsn: u32 },
    NoRoom,
}

/// The lowest packet that was refused in a round.
#[derive(Clone, Copy)]
struct Refusal {
    sseq: u32,
    round: u8,
    why: Why,
}

/// The lowest message that failed.
#[derive(Clone, Copy)]
struct Failure {
    msn: u32,
    fault: Fault,
    /// The receive that completes with an error of its own.
    receive: Option<(u32, Status)>,
}

pub(super) struct Responder {
    inb: Inbound,
    /// Messages that are entirely in place.
    msn: u32,
    held: Held,
    bound: Vec<Bound>,
    /// Next to complete.
    next_receive: u32,
    /// Next to bind.
    next_bound: u32,
    /// Receives at the driver that are not bound, as far as known.
    posted: Option<u32>,
    /// Limit that the peer was told last.
    told_limit: Option<u32>,
    /// SendInv messages that have ended and not acted.
    invalidations: u32,
    /// Final packet of the first of them: the cursor does not pass it.
    stop: Option<u32>,
    slots: Vec<Slot>,
    /// Lowest request that the peer may still wait for.
    oldest: u32,
    /// Next request to be done.
    next_exec: u32,
    /// First request whose answer is not accepted entirely.
    acc: u32,
    /// Request whose answer is sent, and its packet.
    cur: u32,
    packet: u32,
    /// Requests below were answered entirely at least once.
    answered: u32,
    /// Next request whose source is released.
    next_release: u32,
    pub(super) out: Outbound,
    refusal: Option<Refusal>,
    /// Newest round of the peer.
    round: u8,
    failure: Option<Failure>,
    /// The failure is reported.
    fatal: bool,
    established: bool,
    established_told: bool,
    /// Packets that are being copied to receives.
    pub(super) copying: u32,
}

impl Responder {
    /// Slots: request numbers wrap, so it is a power of two.
    const fn slots(max_dest_rd_atomic: u32) -> usize {
        let slots = match max_dest_rd_atomic {
            0 => 1,
            1..=RD_ATOMIC_MAX => max_dest_rd_atomic,
            _ => RD_ATOMIC_MAX,
        };
        slots.next_power_of_two() as usize
    }

    pub(super) const fn memory(max_dest_rd_atomic: u32) -> usize {
        Self::slots(max_dest_rd_atomic) * size_of::<Slot>()
            + RECEIVES as usize * size_of::<Bound>()
            + Inbound::MEMORY
            + Held::MEMORY
    }

    pub(super) fn new(max_dest_rd_atomic: u32) -> Result<Self, AllocError> {
        let slots = Self::slots(max_dest_rd_atomic);
        Ok(Self {
            inb: Inbound::new()?,
            msn: 0,
            held: Held::new()?,
            bound: Vec::from_fn(RECEIVES as usize, |_| Bound::default())?,
            next_receive: 0,
            next_bound: 0,
            posted: None,
            told_limit: None,
            invalidations: 0,
            stop: None,
            slots: Vec::from_fn(slots, |_| Slot::default())?,
            oldest: 0,
            next_exec: 0,
            acc: 0,
            cur: 0,
            packet: 0,
            answered: 0,
            next_release: 0,
            out: Outbound::default(),
            refusal: None,
            round: 0,
            failure: None,
            fatal: false,
            established: false,
            established_told: false,
            copying: 0,
        })
    }

    pub(super) fn reset(&mut self) {
        self.msn = 0;
        self.held.reset();
        self.next_receive = 0;
        self.next_bound = 0;
        self.posted = None;
        self.told_limit = None;
        self.invalidations = 0;
        self.stop = None;
        self.slots.fill(Slot::default());
        self.oldest = 0;
        self.next_exec = 0;
        self.acc = 0;
        self.cur = 0;
        self.packet = 0;
        self.answered = 0;
        self.next_release = 0;
        self.refusal = None;
        self.round = 0;
        self.failure = None;
        self.fatal = false;
        self.established = false;
        self.established_told = false;
        self.copying = 0;
    }

    /// Fixes the first sequences.
    pub(super) fn start(&mut self, c: &Common) {
        self.inb.start(c.attr.rq_psn, c.attr.window);
        self.out.start(c.attr.rq_psn, c.attr.window);
    }

    fn bound(&mut self, rmsn: u32) -> Option<&mut Bound> {
        self.bound.get_mut((rmsn % RECEIVES) as usize)
    }

    fn slot(&self, number: u32) -> Option<&Slot> {
        self.slots.get(number as usize & (self.slots.len() - 1))
    }

    fn slot_mut(&mut self, number: u32) -> Option<&mut Slot> {
        let mask = self.slots.len() - 1;
        self.slots.get_mut(number as usize & mask)
    }

    /// A request packet.
    pub(super) fn receive(
        &mut self,
        c: &mut Common,
        h: &StreamHeader,
        len: u32,
        host: &mut dyn Host,
    ) -> Result<Receive, Drop> {
        if !c.responds() {
            self.round = h.round;
            if self.fatal {
                // Said again to whoever asks.
                c.dirty[Direction::Request as usize] = true;
                return Ok(Receive::Done);
            }
            return Err(Drop::UnknownStream);
        }
        let sseq = h.sseq;
        match self.inb.arrival(sseq) {
            Arrival::New => {}
            Arrival::Duplicate => {
                c.dirty[Direction::Request as usize] = true;
                return Err(Drop::StreamDuplicate);
            }
            Arrival::Outside => return Err(Drop::StreamWindow),
        }
        // Message numbers cannot run ahead of the packets.
        let ahead = sseq.wrapping_sub(self.inb.done());
        if h.msn.wrapping_sub(self.msn) > ahead || !well_formed(h, len) {
            return Err(Drop::StreamInvalid);
        }
        if h.round != self.round {
            self.on_round(h.round);
        }
        if !self.established && c.state == State::Rtr {
            self.established = true;
        }
        if let Some(failure) = self.failure {
            if !before(h.msn, failure.msn) {
                c.dirty[Direction::Request as usize] = true;
                return Ok(Receive::Done);
            }
        }
        match h.opcode {
            Opcode::Write => self.write(c, h, len, host),
            Opcode::WriteImm if !h.last => self.write(c, h, len, host),
            Opcode::WriteImm => {
                self.bind(c, h, host)?;
                self.write(c, h, len, host)
            }
            Opcode::Send | Opcode::SendImm | Opcode::SendInv => self.send(c, h, len, host),
            Opcode::ReadRequest | Opcode::CompareSwap | Opcode::FetchAdd => self.request(c, h),
            Opcode::Void | Opcode::ReadResponse | Opcode::AtomicResponse => {
                Err(Drop::StreamInvalid)
            }
        }
    }

    /// A packet of another round: what was refused in earlier ones comes again.
    fn on_round(&mut self, round: u8) {
        if (round.wrapping_sub(self.round) as i8) < 0 {
            return;
        }
        self.round = round;
        self.refusal = None;
    }

    /// Notes a refusal; the status follows when everything ahead of it is in place.
    fn refuse<T>(&mut self, c: &mut Common, h: &StreamHeader, why: Why) -> Result<T, Drop> {
        if h.round == self.round {
            if self.refusal.is_none_or(|r| before(h.sseq, r.sseq)) {
                self.refusal = Some(Refusal {
                    sseq: h.sseq,
                    round: h.round,
                    why,
                });
            }
            c.dirty[Direction::Request as usize] = true;
        }
        Err(Drop::Refused)
    }

    /// Binds receives for every message up to this packet's.
    fn bind(&mut self, c: &mut Common, h: &StreamHeader, host: &mut dyn Host) -> Result<(), Drop> {
        let ahead = h.rmsn.wrapping_sub(self.next_receive);
        if ahead > u32::MAX / 2 {
            return Err(Drop::StreamInvalid);
        }
        if ahead >= RECEIVES {
            return self.refuse(c, h, Why::NoRoom);
        }
        let first = self.next_bound;
        while !before(h.rmsn, self.next_bound) {
            let Some(room) = host.bind_receive(c.id, self.next_bound) else {
                self.posted = host.receives_posted(c.id);
                return self.refuse(c, h, Why::NoReceive { rmsn: h.rmsn });
            };
            let number = self.next_bound;
            if let Some(b) = self.bound(number) {
                *b = Bound {
                    room: u32::try_from(room).unwrap_or(u32::MAX),
                    ..Bound::default()
                };
            }
            self.next_bound = number.wrapping_add(1);
        }
        if first != self.next_bound {
            self.posted = host.receives_posted(c.id);
        }
        let b = self.bound(h.rmsn).ok_or(Drop::StreamInvalid)?;
        if b.begun && (b.msn != h.msn || b.total != h.total || b.ended && h.last) {
            return Err(Drop::StreamInvalid);
        }
        b.begun = true;
        b.msn = h.msn;
        b.total = h.total;
        Ok(())
    }

    /// The final packet of a message that takes a receive was taken.
    fn end_receive(&mut self, h: &StreamHeader) {
        if let Some(b) = self.bound(h.rmsn) {
            b.ended = true;
            b.last = h.sseq;
            b.opcode = h.opcode;
            b.imm = h.imm;
            b.solicited = h.solicited;
        }
        if h.opcode == Opcode::SendInv {
            self.invalidations = self.invalidations.saturating_add(1);
            if self.stop.is_none_or(|stop| before(h.sseq, stop)) {
                self.stop = Some(h.sseq);
            }
        }
    }

    fn token(&self, c: &Common, h: &StreamHeader, slot: u16) -> Token {
        Token {
            stream: c.id,
            generation: c.generation,
            direction: Direction::Request,
            sseq: h.sseq,
            msn: h.msn,
            last: h.last,
            slot,
        }
    }

    fn write(
        &mut self,
        c: &mut Common,
        h: &StreamHeader,
        len: u32,
        host: &mut dyn Host,
    ) -> Result<Receive, Drop> {
        let done = self.inb.done();
        if len == 0 {
            // Nothing to copy, so nothing to keep in order.
            self.inb.receive(h.sseq);
            if h.opcode == Opcode::WriteImm {
                self.end_receive(h);
            }
            self.in_place(c, h.sseq, h.last);
            return Ok(Receive::Done);
        }
        let release_at = if h.last && h.sseq != done {
            Some(h.sseq)
        } else {
            h.after
                .filter(|&after| !before(after, done))
                .map(|after| after.wrapping_add(1))
        };
        let mut slot = SLOT_NONE;
        if let Some(release_at) = release_at {
            if !self.held.has_room() || !host.may_hold(len) {
                return self.refuse(c, h, Why::NoRoom);
            }
            let record = Record {
                sseq: h.sseq,
                msn: h.msn,
                va: h.va,
                rkey: h.rkey,
                offset: h.offset,
                len,
                total: h.total,
                last: h.last,
                release_at,
            };
            match self.held.insert(record) {
                Some(s) => slot = s,
                None => return self.refuse(c, h, Why::NoRoom),
            }
        }
        self.inb.receive(h.sseq);
        if h.opcode == Opcode::WriteImm && h.last {
            self.end_receive(h);
        }
        let placement = Placement {
            token: self.token(c, h, slot),
            target: Target::Remote {
                va: h.va,
                rkey: h.rkey,
            },
            offset: h.offset,
            len,
            total: h.total,
            last: h.last,
            value: None,
        };
        Ok(match release_at {
            None => Receive::Place(placement),
            Some(_) => Receive::Hold(placement),
        })
    }

    fn send(
        &mut self,
        c: &mut Common,
        h: &StreamHeader,
        len: u32,
        host: &mut dyn Host,
    ) -> Result<Receive, Drop> {
        self.bind(c, h, host)?;
        if self.bound(h.rmsn).is_none_or(|b| h.total > b.room) {
            let receive = Some((h.rmsn, Status::LocalLength));
            self.fail(c, h.msn, Fault::InvalidRequest, receive);
            return Ok(Receive::Done);
        }
        self.inb.receive(h.sseq);
        if h.last {
            self.end_receive(h);
        }
        if len == 0 {
            self.in_place(c, h.sseq, h.last);
            return Ok(Receive::Done);
        }
        self.copying = self.copying.saturating_add(1);
        Ok(Receive::Place(Placement {
            token: self.token(c, h, SLOT_RECEIVE),
            target: Target::Receive { rmsn: h.rmsn },
            offset: h.offset,
            len,
            total: h.total,
            last: false,
            value: None,
        }))
    }

    fn request(&mut self, c: &mut Common, h: &StreamHeader) -> Result<Receive, Drop> {
        let limit = c.attr.max_dest_rd_atomic.min(self.slots.len() as u32);
        // The peer has finished what is older; it can only have what was sent.
        if before(self.oldest, h.oldest) {
            if before(self.answered, h.oldest) {
                return Err(Drop::StreamInvalid);
            }
            self.finish_below(h.oldest);
        }
        let age = h.request.wrapping_sub(self.oldest);
        if age > u32::MAX / 2 {
            return Err(Drop::StreamInvalid);
        }
        if age >= limit {
            self.fail(c, h.msn, Fault::InvalidRequest, None);
            return Ok(Receive::Done);
        }
        let slot = self.slot_mut(h.request).ok_or(Drop::StreamInvalid)?;
        if slot.phase != Phase::Free && slot.number == h.request {
            return Err(Drop::StreamInvalid);
        }
        *slot = Slot {
            number: h.request,
            phase: Phase::Pending,
            opcode: h.opcode,
            sseq: h.sseq,
            msn: h.msn,
            va: h.va,
            rkey: h.rkey,
            length: h.total,
            compare_add: h.compare_add,
            swap: h.swap,
            pinned: slot.pinned,
            ..Slot::default()
        };
        self.inb.receive(h.sseq);
        Ok(Receive::Done)
    }

    /// The peer has the answers of all requests below `oldest`.
    fn finish_below(&mut self, oldest: u32) {
        self.oldest = oldest;
        if let Some(end) = self
            .slot(oldest.wrapping_sub(1))
            .filter(|s| s.number == oldest.wrapping_sub(1))
            .map(Slot::end)
        {
            if self.out.accept(end) == Progress::Advanced {
                self.answers_accepted();
            }
        }
    }

    /// The accepted number of the answers has risen.
    fn answers_accepted(&mut self) {
        let cum = self.out.cum();
        while self.acc != self.next_exec {
            match self.slot(self.acc) {
                Some(s) if s.phase == Phase::Answering && !before(cum, s.end()) => {
                    self.acc = self.acc.wrapping_add(1);
                }
                _ => break,
            }
        }
        let behind = before(self.cur, self.acc)
            || (self.cur == self.acc
                && self.slot(self.cur).is_some_and(|s| {
                    s.number == self.cur
                        && s.phase == Phase::Answering
                        && before(s.first.wrapping_add(self.packet), cum)
                }));
        if behind {
            self.put_cursor_at_acceptance();
        }
    }

    fn put_cursor_at_acceptance(&mut self) {
        self.cur = self.acc;
        self.packet = match self.slot(self.acc) {
            Some(s) if s.number == self.acc && s.phase == Phase::Answering => {
                self.out.cum().wrapping_sub(s.first)
            }
            _ => 0,
        };
    }

    /// Message `msn` fails; the lowest one counts.
    fn fail(&mut self, c: &mut Common, msn: u32, fault: Fault, receive: Option<(u32, Status)>) {
        if self.failure.is_some_and(|f| !before(msn, f.msn)) {
            return;
        }
        self.failure = Some(Failure {
            msn,
            fault,
            receive,
        });
        self.held.discard_from(msn);
        self.settle(c);
    }

    /// Reports a failure once everything ahead of it is done and answered.
    fn settle(&mut self, c: &mut Common) {
        let Some(failure) = self.failure else { return };
        if self.fatal
            || !c.responds()
            || before(self.msn, failure.msn)
            || self.acc != self.next_exec
        {
            return;
        }
        self.fatal = true;
        self.held.discard_all();
        c.dirty[Direction::Request as usize] = true;
        c.enter_error(Some(failure.fault));
    }

    /// The bytes of a received packet are where they belong.
    fn in_place(&mut self, c: &mut Common, sseq: u32, last: bool) {
        if self.stop.is_none() && self.inb.place_in_order(sseq) {
            if last {
                self.msn = self.msn.wrapping_add(1);
            }
            if !self.held.none_waiting() {
                self.held.release(self.inb.done());
            }
        } else {
            if !self.inb.place(sseq, last) {
                return;
            }
            if !self.advance() {
                return;
            }
        }
        c.dirty[Direction::Request as usize] = true;
        if self.failure.is_some() {
            self.settle(c);
        }
    }

    /// Moves the cursor over what is in place. False when it stays.
    fn advance(&mut self) -> bool {
        let mut moved = false;
        while self.stop != Some(self.inb.done()) {
            let Some(last) = self.inb.step() else { break };
            moved = true;
            if last {
                self.msn = self.msn.wrapping_add(1);
            }
            if !self.held.none_waiting() {
                self.held.release(self.inb.done());
            }
        }
        moved
    }

    /// A copy has ended.
    pub(super) fn placed(&mut self, c: &mut Common, token: &Token, result: Placed) {
        match token.slot {
            SLOT_NONE => {}
            SLOT_RECEIVE => self.copying = self.copying.saturating_sub(1),
            // Copied without waiting, when it is still there.
            slot => self.held.remove(slot, token.sseq),
        }
        if !c.responds() {
            return;
        }
        match result {
            Placed::Ok => self.in_place(c, token.sseq, token.last),
            Placed::Fault(fault) => {
                // A receive that cannot be written to fails at both ends.
                let mut receive = None;
                let mut rmsn = self.next_receive;
                while rmsn != self.next_bound {
                    if self.bound(rmsn).is_some_and(|b| {
                        b.begun && b.msn == token.msn && b.opcode != Opcode::WriteImm
                    }) {
                        receive = Some((rmsn, Status::LocalProtection));
                        break;
                    }
                    rmsn = rmsn.wrapping_add(1);
                }
                let fault = match receive {
                    Some(_) => Fault::Operation,
                    None => fault,
                };
                self.fail(c, token.msn, fault, receive);
            }
        }
    }

    /// The driver's answer about the READ or atomic at the cursor.
    pub(super) fn executed(&mut self, c: &mut Common, request: u32, result: Result<u64, Fault>) {
        let number = self.next_exec;
        let responds = c.responds();
        let Some(slot) = self.slot_mut(number) else {
            return;
        };
        if request != number || slot.number != number || slot.phase != Phase::Told {
            return;
        }
        let (sseq, msn) = (slot.sseq, slot.msn);
        match result {
            Ok(value) => {
                if slot.atomic() {
                    slot.compare_add = value;
                } else {
                    slot.pinned = true;
                }
                slot.phase = Phase::Ready;
                self.next_exec = number.wrapping_add(1);
                if responds {
                    self.in_place(c, sseq, true);
                }
            }
            Err(fault) => {
                if responds {
                    self.fail(c, msn, fault, None);
                } else {
                    slot.phase = Phase::Free;
                }
            }
        }
    }

    /// The driver's answer about a remote invalidation.
    pub(super) fn invalidated(&mut self, c: &mut Common, result: Result<(), Fault>) {
        let rmsn = self.next_receive;
        let Some(b) = self.bound(rmsn).map(|b| *b) else {
            return;
        };
        if rmsn == self.next_bound || !b.told || !c.responds() {
            return;
        }
        if let Err(fault) = result {
            return self.fail(c, b.msn, fault, None);
        }
        if self.stop != Some(b.last) {
            return;
        }
        self.invalidations = self.invalidations.saturating_sub(1);
        self.stop = None;
        // The next one stands behind this one; whatever is passed here is not looked at
        // again.
        let mut next = rmsn.wrapping_add(1);
        while self.invalidations != 0 && next != self.next_bound {
            if let Some(b) = self.bound(next) {
                if b.ended && b.opcode == Opcode::SendInv {
                    self.stop = Some(b.last);
                    break;
                }
            }
            next = next.wrapping_add(1);
        }
        if self.advance() {
            c.dirty[Direction::Request as usize] = true;
        }
        self.settle(c);
    }

    /// Receives below this number exist.
    fn limit(&self) -> Option<u32> {
        let posted = self.posted?;
        let limit = self.next_bound.wrapping_add(posted.min(RECEIVES));
        let most = self.next_receive.wrapping_add(RECEIVES);
        Some(if before(most, limit) { most } else { limit })
    }

    pub(super) fn receives_changed(&mut self, c: &mut Common, posted: Option<u32>) {
        self.posted = posted;
        // Worth a word only when the peer may be waiting.
        let exhausted = self
            .told_limit
            .is_some_and(|told| !before(self.next_bound, told));
        if exhausted && self.limit() != self.told_limit && c.responds() {
            c.dirty[Direction::Request as usize] = true;
        }
    }

    pub(super) fn block_taken(&mut self) {
        self.told_limit = self.limit();
    }

    pub(super) fn block(&self, c: &Common) -> StreamBlock {
        let done = self.inb.done();
        let status = match (self.failure, c.responds()) {
            (Some(f), _) if self.fatal => BlockStatus::Fatal {
                msn: f.msn,
                fault: f.fault,
            },
            (_, false) => BlockStatus::NotReady { round: self.round },
            _ => match self.refusal {
                Some(r) if !before(done, r.sseq) => match r.why {
                    Why::NoReceive { rmsn } => BlockStatus::Rnr {
                        rmsn,
                        timer_us: c.attr.min_rnr_timer_us,
                        round: r.round,
                    },
                    Why::NoRoom => BlockStatus::NoRoom { round: r.round },
                },
                _ => BlockStatus::Ok,
            },
        };
        StreamBlock {
            dst_qpn: c.attr.remote_qpn,
            src_qpn: c.attr.local_qpn,
            dir: Direction::Request,
            cumulative: done,
            msn_done: self.msn,
            receive_limit: self.limit(),
            status,
        }
    }

    /// Which packet of which answer is next: sequence and payload bytes.
    fn candidate(&self, c: &Common, now: Time) -> Option<(u32, u32)> {
        if !c.responds() || self.cur == self.next_exec || self.out.waits(now) {
            return None;
        }
        let s = self.slot(self.cur)?;
        let (sseq, len) = match s.phase {
            Phase::Answering => (s.first.wrapping_add(self.packet), s.part(self.packet).1),
            Phase::Ready if s.atomic() => (self.out.end(), 0),
            Phase::Ready => (self.out.end(), s.length.min(mtu(c))),
            _ => return None,
        };
        self.out.admits(sseq).then_some((sseq, len))
    }

    pub(super) fn can_send(&self, c: &Common, now: Time) -> bool {
        self.candidate(c, now).is_some()
    }

    pub(super) fn next_packet(
        &mut self,
        c: &Common,
        now: Time,
        budget: u32,
        h: &mut StreamHeader,
    ) -> Option<PacketRef> {
        let (sseq, len) = self.candidate(c, now)?;
        if len > budget {
            return None;
        }
        let number = self.cur;
        let mut s = *self.slot(number)?;
        if s.phase == Phase::Ready {
            s.mtu = mtu(c);
            s.count = match s.atomic() {
                true => 1,
                false => s.length.div_ceil(s.mtu).max(1),
            };
            s.first = self.out.assign(s.count);
            s.phase = Phase::Answering;
            if let Some(slot) = self.slot_mut(number) {
                *slot = s;
            }
        }
        self.fill(c, &s, self.packet, h);
        self.packet = self.packet.wrapping_add(1);
        if self.packet == s.count {
            self.cur = number.wrapping_add(1);
            self.packet = 0;
            if before(self.answered, self.cur) {
                self.answered = self.cur;
            }
        }
        self.out.advance(sseq);
        Some(PacketRef {
            sseq,
            index: number,
            generation: c.generation,
            len: len as u16,
            round: self.out.round(),
            dir: Direction::Response,
        })
    }

    fn fill(&self, c: &Common, s: &Slot, index: u32, h: &mut StreamHeader) {
        let atomic = s.atomic();
        *h = StreamHeader {
            opcode: match atomic {
                true => Opcode::AtomicResponse,
                false => Opcode::ReadResponse,
            },
            last: index.wrapping_add(1) == s.count,
            dst_qpn: c.attr.remote_qpn,
            src_qpn: c.attr.local_qpn,
            sseq: s.first.wrapping_add(index),
            msn: s.number,
            offset: s.part(index).0,
            total: if atomic { 8 } else { s.length },
            request: s.number,
            round: self.out.round(),
            compare_add: if atomic { s.compare_add } else { 0 },
            ..StreamHeader::default()
        };
    }

    /// The answer and the packet index that `p` names while it is unaccepted.
    fn find(&self, p: &PacketRef) -> Option<(&Slot, u32)> {
        let s = self.slot(p.index)?;
        let index = p.sseq.wrapping_sub(s.first);
        (s.number == p.index
            && s.phase == Phase::Answering
            && index < s.count
            && !before(p.sseq, self.out.cum()))
        .then_some((s, index))
    }

    pub(super) fn rebuild(&self, c: &Common, p: &PacketRef, h: &mut StreamHeader) -> bool {
        if p.round != self.out.round() || !c.responds() {
            return false;
        }
        match self.find(p) {
            Some((s, index)) => {
                self.fill(c, s, index, h);
                true
            }
            None => false,
        }
    }

    pub(super) fn payload(&self, c: &Common, p: &PacketRef) -> Payload {
        match self.find(p) {
            Some((s, index)) if p.len != 0 => Payload::Read {
                stream: c.id,
                request: p.index,
                offset: s.part(index).0,
                len: u32::from(p.len),
            },
            _ => Payload::None,
        }
    }

    /// The peer's block about the answers.
    pub(super) fn on_block(&mut self, c: &mut Common, now: Time, b: &StreamBlock) {
        if !c.responds() {
            return;
        }
        if self.out.accept(b.cumulative) == Progress::Advanced {
            self.answers_accepted();
        }
        match b.status {
            BlockStatus::NotReady { round } => {
                self.shed(c);
                if self.out.is_not_ready(round) {
                    self.out.rewind_not_ready(now, NOT_READY_MAX);
                    self.put_cursor_at_acceptance();
                }
            }
            BlockStatus::NoRoom { round } => {
                if self.out.is_refusal(round) {
                    self.out.rewind_no_room(now);
                    self.put_cursor_at_acceptance();
                }
            }
            BlockStatus::Ok => self.out.on_ready(),
            BlockStatus::Rnr { .. } | BlockStatus::Fatal { .. } => {}
        }
        self.settle(c);
    }

    /// The peer's QP sends no more, by its own word: what is held here would wait for ever
    /// and keep the driver's memory from others. It is given up as if it had been refused,
    /// which a peer that lives after all understands.
    fn shed(&mut self, c: &mut Common) {
        let mut lowest: Option<u32> = None;
        let inb = &mut self.inb;
        self.held.discard_each(|r| {
            inb.unreceive(r.sseq);
            if lowest.is_none_or(|sseq| before(r.sseq, sseq)) {
                lowest = Some(r.sseq);
            }
        });
        let Some(sseq) = lowest else { return };
        if self.refusal.is_none_or(|r| before(sseq, r.sseq)) {
            self.refusal = Some(Refusal {
                sseq,
                round: self.round,
                why: Why::NoRoom,
            });
        }
        c.dirty[Direction::Request as usize] = true;
    }

    /// Sends again whatever is not accepted.
    pub(super) fn resume(&mut self, now: Time) {
        self.out.forget_paths(now);
        self.out.rewind(None);
        self.put_cursor_at_acceptance();
    }

    /// The QP is in ERR: nothing is copied or done any more.
    pub(super) fn stop(&mut self) {
        self.held.discard_all();
    }

    fn placement(&self, c: &Common, slot: u16, r: &Record) -> Placement {
        Placement {
            token: Token {
                stream: c.id,
                generation: c.generation,
                direction: Direction::Request,
                sseq: r.sseq,
                msn: r.msn,
                last: r.last,
                slot,
            },
            target: Target::Remote {
                va: r.va,
                rkey: r.rkey,
            },
            offset: r.offset,
            len: r.len,
            total: r.total,
            last: r.last,
            value: None,
        }
    }

    pub(super) fn poll(&mut self, c: &mut Common) -> Option<Event> {
        if let Some((slot, r)) = self.held.pop_discard() {
            return Some(Event::Discard(self.placement(c, slot, &r).token));
        }
        if let Some((slot, r)) = self.held.pop_ready() {
            return Some(Event::Release(self.placement(c, slot, &r)));
        }
        if self.established && !self.established_told {
            self.established_told = true;
            return Some(Event::Established { stream: c.id });
        }
        self.poll_release(c)
            .or_else(|| self.poll_receive(c))
            .or_else(|| self.poll_request(c))
    }

    /// Sources that are not needed any more.
    fn poll_release(&mut self, c: &Common) -> Option<Event> {
        let until = if c.responds() {
            self.acc
        } else {
            self.next_exec
        };
        while self.next_release != until {
            let request = self.next_release;
            self.next_release = request.wrapping_add(1);
            let pinned = match self.slot_mut(request) {
                Some(s) => core::mem::take(&mut s.pinned),
                None => false,
            };
            if pinned {
                return Some(Event::ReadReleased {
                    stream: c.id,
                    request,
                });
            }
        }
        None
    }

    fn poll_receive(&mut self, c: &Common) -> Option<Event> {
        let rmsn = self.next_receive;
        if rmsn == self.next_bound {
            return None;
        }
        let done = self.inb.done();
        let fatal = match self.failure {
            Some(Failure {
                receive: Some((r, status)),
                ..
            }) if self.fatal && r == rmsn => Some(status),
            _ => None,
        };
        let copying = self.copying;
        let ready = self.inb.ready();
        let responds = c.responds();
        let b = self.bound(rmsn)?;
        if let Some(status) = fatal {
            if copying != 0 {
                return None;
            }
            let b = *b;
            self.next_receive = rmsn.wrapping_add(1);
            return Some(Event::RecvDone {
                stream: c.id,
                rmsn,
                opcode: Opcode::Send,
                length: b.total,
                imm: 0,
                solicited: true,
                status,
            });
        }
        if !b.ended {
            return None;
        }
        if before(b.last, done) {
            let b = *b;
            self.next_receive = rmsn.wrapping_add(1);
            return Some(Event::RecvDone {
                stream: c.id,
                rmsn,
                opcode: b.opcode,
                length: b.total,
                imm: b.imm,
                solicited: b.solicited,
                status: Status::Success,
            });
        }
        if responds && b.opcode == Opcode::SendInv && b.last == done && ready && !b.told {
            b.told = true;
            return Some(Event::Invalidate {
                stream: c.id,
                rkey: b.imm,
            });
        }
        None
    }

    fn poll_request(&mut self, c: &Common) -> Option<Event> {
        let number = self.next_exec;
        let done = self.inb.done();
        let failed = self.failure.map(|f| f.msn);
        if !c.responds() {
            return None;
        }
        let s = self.slot_mut(number)?;
        if s.phase != Phase::Pending
            || s.number != number
            || s.sseq != done
            || s.pinned
            || failed.is_some_and(|msn| !before(s.msn, msn))
        {
            return None;
        }
        s.phase = Phase::Told;
        Some(match s.opcode {
            Opcode::ReadRequest => Event::Read {
                stream: c.id,
                request: number,
                va: s.va,
                rkey: s.rkey,
                length: s.length,
            },
            opcode => Event::Atomic {
                stream: c.id,
                request: number,
                opcode,
                va: s.va,
                rkey: s.rkey,
                compare_add: s.compare_add,
                swap: s.swap,
            },
        })
    }
}

fn mtu(c: &Common) -> u32 {
    c.attr.payload_mtu.clamp(MTU_MIN, MTU_MAX)
}

/// Whether the fields of a request packet fit together and its payload.
fn well_formed(h: &StreamHeader, len: u32) -> bool {
    match h.opcode {
        Opcode::ReadRequest => len == 0 && h.last && h.offset == 0,
        Opcode::CompareSwap | Opcode::FetchAdd => {
            len == 0 && h.last && h.offset == 0 && h.total == 8
        }
        _ => {
            // What a Write waits for lies ahead of it.
            h.after.is_none_or(|after| before(after, h.sseq))
                && match h.offset.checked_add(len) {
                    Some(end) => {
                        end <= h.total && (end == h.total) == h.last && (len != 0 || h.total == 0)
                    }
                    None => false,
                }
        }
    }
}
