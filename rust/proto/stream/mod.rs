// SPDX-License-Identifier: GPL-2.0

//! Streams: what a queue pair's packets mean, in which order they take effect and when a
//! work request is done. One [`Stream`] belongs to each QP. It has two halves, each with
//! two directions:
//!
//! | module | what |
//! | --- | --- |
//! | `requester` | send queue: packets out of WRs, completion, RNR, retry |
//! | `responder` | requests of the peer: receives, ordering, READ and atomics |
//! | `outbound` | numbers of a stream that this end sends: window, rewinding |
//! | `inbound` | numbers of a stream that this end receives: duplicates, in place |
//! | `held` | packets that wait for what is ahead of them |
//! | `overlap` | which earlier Write a Write must not overtake |
//!
//! Nothing here knows paths. Section 11 of PROTOCOL.md has the rules.

#![forbid(unsafe_code)]

mod bitmap;
mod held;
mod inbound;
mod outbound;
mod overlap;
mod requester;
mod responder;

use self::outbound::Outbound;
use self::requester::Requester;
use self::responder::Responder;
use crate::os::{AllocError, Box};
use crate::proto::api::{
    Direction, Event, Fault, Host, Payload, Placed, Receive, SendWr, Status, StreamHeader,
    StreamId, Time, Token,
};
use crate::proto::wire::Drop;

/// Greatest window of a stream in packets ("Window"). The bitmaps have this size.
pub const WINDOW_MAX: u32 = 4096;

/// Greatest number of READs and atomics outstanding as requester or kept as responder.
pub const RD_ATOMIC_MAX: u32 = 128;

/// States of a QP, as far as its stream is concerned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum State {
    /// Not in use; refuses everything as NOT_READY.
    #[default]
    Reset,
    /// Like `Reset`, receives may be posted at the driver.
    Init,
    /// Responds.
    Rtr,
    /// Responds and sends.
    Rts,
    /// Responds; finishes the WRs that have begun and begins no other.
    Sqd,
    /// Completes everything as flushed.
    Err,
}

/// Why a WR was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PostError {
    /// The send queue is full.
    Full,
    /// The QP's state does not allow it.
    State,
    /// There is no such stream.
    NoStream,
}

/// What a stream is told about its QP and connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamAttr {
    /// Number of the own QP, 24 bits.
    pub local_qpn: u32,
    /// Number of the peer's QP, 24 bits.
    pub remote_qpn: u32,
    /// First sequence of the request stream that this end sends.
    pub sq_psn: u32,
    /// First sequence of the request stream that the peer sends.
    pub rq_psn: u32,
    /// READs and atomics outstanding as requester, at most [`RD_ATOMIC_MAX`].
    pub max_rd_atomic: u32,
    /// READs and atomics kept as responder, at most the number given to [`Stream::new`].
    pub max_dest_rd_atomic: u32,
    /// Local ACK timeout in ns; 0 is never.
    pub timeout: Time,
    /// Retries, 0 to 7.
    pub retry_cnt: u8,
    /// RNR retries, 0 to 6; 7 is forever.
    pub rnr_retry: u8,
    /// What the peer has to wait after RNR, in microseconds.
    pub min_rnr_timer_us: u32,
    /// Payload bytes of a packet of the connection; at least 64.
    pub payload_mtu: u32,
    /// Packets above the cumulative number that may be sent; at most [`WINDOW_MAX`].
    pub window: u32,
}

/// Names a packet that was sent, for as long as a path may have to send it again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PacketRef {
    /// Stream sequence.
    pub sseq: u32,
    /// WR number (requests) or request number (responses).
    index: u32,
    /// The stream's generation.
    generation: u32,
    /// Bytes of payload.
    pub len: u16,
    /// Round in which it was numbered.
    round: u8,
    /// Half of the traffic.
    pub dir: Direction,
}

/// What the receiver of a stream says about it; absolute ("Blocks").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamBlock {
    /// QP of the one who gets the block.
    pub dst_qpn: u32,
    /// QP of the one who sends it.
    pub src_qpn: u32,
    /// Which stream: the requests or the responses that the sender of the block receives.
    pub dir: Direction,
    /// Everything below is in place.
    pub cumulative: u32,
    /// Messages that are entirely in place.
    pub msn_done: u32,
    /// Receives exist for receive messages below this number; `None` is unknown.
    pub receive_limit: Option<u32>,
    /// Whether something was refused.
    pub status: BlockStatus,
}

/// State of a stream in its block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockStatus {
    /// Nothing was refused.
    Ok,
    /// No receive for message `rmsn`.
    Rnr {
        /// Receive message number.
        rmsn: u32,
        /// The responder's timer in microseconds, 24 bits.
        timer_us: u32,
        /// Round of the refused packets.
        round: u8,
    },
    /// The QP is not (or no longer) connected to the sender of the packet.
    NotReady {
        /// Round of the refused packet.
        round: u8,
    },
    /// No memory to hold a packet.
    NoRoom {
        /// Round of the refused packets.
        round: u8,
    },
    /// Message `msn` failed for good, all earlier ones are done.
    Fatal {
        /// Message number.
        msn: u32,
        /// Why.
        fault: Fault,
    },
}

/// Smallest and greatest payload MTU that is used.
const MTU_MIN: u32 = 64;
const MTU_MAX: u32 = 65_472;

/// Whether sequence (message, request, WR number) `a` comes before `b`.
const fn before(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) as i32) < 0
}

/// The requester's status for what the responder found.
const fn status_of(fault: Fault) -> Status {
    match fault {
        Fault::InvalidRequest => Status::RemoteInvalidRequest,
        Fault::Access => Status::RemoteAccess,
        Fault::Operation => Status::RemoteOperation,
    }
}

impl StreamBlock {
    /// The answer to a data packet for which there is no stream: the sender keeps what it
    /// has, waits and tries again.
    pub fn not_ready(h: &StreamHeader) -> Self {
        Self {
            dst_qpn: h.src_qpn,
            src_qpn: h.dst_qpn,
            dir: h.opcode.direction(),
            // Below anything that the sender can still learn from.
            cumulative: h.sseq.wrapping_sub(WINDOW_MAX),
            msn_done: 0,
            receive_limit: None,
            status: BlockStatus::NotReady { round: h.round },
        }
    }
}

/// What both halves share.
struct Common {
    id: StreamId,
    generation: u32,
    attr: StreamAttr,
    state: State,
    /// Blocks to be sent: requests, responses.
    dirty: [bool; 2],
    /// An entry into ERR that the driver does not know of, with the responder's fault.
    error: Option<Option<Fault>>,
}

impl Common {
    fn responds(&self) -> bool {
        matches!(self.state, State::Rtr | State::Rts | State::Sqd)
    }

    fn enter_error(&mut self, fault: Option<Fault>) {
        if self.state != State::Err {
            self.state = State::Err;
            self.error = Some(fault);
            self.dirty = [true; 2];
        }
    }
}

/// A queue pair's traffic.
pub struct Stream {
    c: Common,
    requester: Requester,
    responder: Responder,
    /// Requests have had the last turn to send.
    turn: bool,
    /// The sequences are fixed.
    started: bool,
}

impl Stream {
    /// A stream in state `Reset` with all the memory it will ever have. `max_send_wr` is
    /// the depth of the send queue, `max_dest_rd_atomic` the READs and atomics that it can
    /// keep as responder (at most [`RD_ATOMIC_MAX`]).
    pub fn new(max_send_wr: u32, max_dest_rd_atomic: u32) -> Result<Box<Self>, AllocError> {
        crate::os::try_box(Self {
            c: Common {
                id: StreamId(0),
                generation: 0,
                attr: StreamAttr::default(),
                state: State::Reset,
                dirty: [false; 2],
                error: None,
            },
            requester: Requester::new(max_send_wr)?,
            responder: Responder::new(max_dest_rd_atomic)?,
            turn: false,
            started: false,
        })
    }

    /// Bytes of a stream made with these arguments to [`Stream::new`].
    pub const fn memory(max_send_wr: u32, max_dest_rd_atomic: u32) -> usize {
        core::mem::size_of::<Self>()
            + Requester::memory(max_send_wr)
            + Responder::memory(max_dest_rd_atomic)
    }

    /// Says which slot of which generation the stream is in; events and tokens carry it.
    pub fn set_identity(&mut self, id: StreamId, generation: u32) {
        self.c.id = id;
        self.c.generation = generation;
    }

    /// Sets the attributes. QP numbers count until `Rtr`, `rq_psn` until `Rtr`, `sq_psn`
    /// until `Rts`, the others at any time.
    pub fn set_attr(&mut self, attr: &StreamAttr) {
        self.c.attr = *attr;
    }

    /// The attributes.
    pub fn attr(&self) -> &StreamAttr {
        &self.c.attr
    }

    /// Back to state `Reset`, everything forgotten, also what the driver has not asked for
    /// yet. Tokens that are out are to be dropped: the caller changes the generation.
    pub fn reset(&mut self) {
        self.c.state = State::Reset;
        self.c.dirty = [false; 2];
        self.c.error = None;
        self.requester.reset();
        self.responder.reset();
        self.started = false;
    }

    /// The state.
    pub fn state(&self) -> State {
        self.c.state
    }

    /// The QP was moved to `state` (`Rtr`, `Rts`, `Sqd`, `Err`).
    pub fn set_state(&mut self, now: Time, state: State) {
        // Out of ERR nothing leads but RESET, also when the driver does not know of it yet.
        let failed = self.c.state == State::Err && !matches!(state, State::Reset | State::Init);
        if state == self.c.state || failed {
            return;
        }
        match state {
            State::Reset | State::Init => self.reset(),
            State::Rtr => {
                self.responder.start(&self.c);
                // Somebody may be waiting for this.
                self.c.dirty[Direction::Request as usize] = true;
            }
            State::Rts | State::Sqd => {
                if !self.started {
                    self.started = true;
                    self.requester.start(&self.c);
                }
                self.requester.set_state(now, state);
            }
            State::Err => {
                self.c.enter_error(None);
                self.responder.stop();
            }
        }
        self.c.state = state;
    }

    /// Payload MTU of the connection changed; counts for messages that have not begun.
    pub fn set_payload_mtu(&mut self, mtu: u32) {
        self.c.attr.payload_mtu = mtu;
    }

    /// Takes a WR and returns its number. In state `Err` it completes as flushed.
    pub fn post(&mut self, now: Time, wr: SendWr) -> Result<u32, PostError> {
        self.requester.post(&self.c, now, wr)
    }

    /// Whether [`Stream::next_packet`] has something.
    pub fn can_send(&self, now: Time) -> bool {
        self.responder.can_send(&self.c, now) || self.requester.can_send(&self.c, now)
    }

    /// The next packet that gets a path number for the first time, `None` when there is
    /// none or its payload is longer than `payload_budget`.
    pub fn next_packet(
        &mut self,
        now: Time,
        payload_budget: u32,
        header: &mut StreamHeader,
    ) -> Option<PacketRef> {
        let (c, rq, rs) = (&self.c, &mut self.requester, &mut self.responder);
        // The two halves take turns.
        let packet = if self.turn {
            rs.next_packet(c, now, payload_budget, header)
                .or_else(|| rq.next_packet(c, now, payload_budget, header))
        } else {
            rq.next_packet(c, now, payload_budget, header)
                .or_else(|| rs.next_packet(c, now, payload_budget, header))
        };
        if let Some(p) = packet {
            self.turn = p.dir == Direction::Request;
        }
        packet
    }

    /// The header of a packet that has to be sent again under its old path number; false
    /// when its content is not needed any more (send VOID).
    pub fn rebuild(&self, packet: PacketRef, header: &mut StreamHeader) -> bool {
        packet.generation == self.c.generation
            && match packet.dir {
                Direction::Request => self.requester.rebuild(&self.c, &packet, header),
                Direction::Response => self.responder.rebuild(&self.c, &packet, header),
            }
    }

    /// Where the payload of a packet comes from.
    pub fn payload(&self, packet: PacketRef) -> Payload {
        match packet.dir {
            _ if packet.generation != self.c.generation => Payload::None,
            Direction::Request => self.requester.payload(&self.c, &packet),
            Direction::Response => self.responder.payload(&self.c, &packet),
        }
    }

    /// The memory that a packet was to be sent from is gone. A WR fails in its turn; as
    /// responder the QP fails, since the READ was accepted already.
    pub fn source_lost(&mut self, packet: PacketRef) {
        if packet.generation != self.c.generation || !self.c.responds() {
            return;
        }
        match packet.dir {
            Direction::Request => self.requester.source_lost(packet.index),
            Direction::Response => {
                self.c.enter_error(Some(Fault::Operation));
                self.responder.stop();
            }
        }
    }

    /// What a query for direction `dir` tells beside the QP numbers: a sequence that is not
    /// accepted yet, and the round.
    pub fn query(&self, dir: Direction) -> (u32, u8) {
        let out = match dir {
            Direction::Request => &self.requester.out,
            Direction::Response => &self.responder.out,
        };
        (out.cum(), out.round())
    }

    fn out(&mut self, packet: &PacketRef) -> Option<&mut Outbound> {
        match packet.dir {
            _ if packet.generation != self.c.generation => None,
            Direction::Request => Some(&mut self.requester.out),
            Direction::Response => Some(&mut self.responder.out),
        }
    }

    /// A path has taken the packet: it is outstanding until [`Stream::released`].
    pub fn sent(&mut self, packet: PacketRef) {
        if let Some(out) = self.out(&packet) {
            out.sent();
        }
    }

    /// The path has an acknowledgement for the packet or has given it up.
    pub fn released(&mut self, now: Time, packet: PacketRef) {
        if let Some(out) = self.out(&packet) {
            out.released(now);
        }
    }

    /// Since when the stream of direction `dir` has unaccepted packets, none of which is
    /// outstanding on any path; a query follows after 2 SRTT.
    pub fn quiet_since(&self, dir: Direction) -> Option<Time> {
        match dir {
            _ if !self.c.responds() => None,
            Direction::Request => self.requester.out.quiet_since(),
            Direction::Response => self.responder.out.quiet_since(),
        }
    }

    /// Whether one of the directions is quiet ([`Stream::quiet_since`]).
    pub fn wants_query(&self) -> bool {
        self.quiet_since(Direction::Request).is_some()
            || self.quiet_since(Direction::Response).is_some()
    }

    /// Whether nothing of it waits for the peer, or is being copied: whatever happens to the
    /// connection now, nothing is lost.
    pub fn is_at_rest(&self) -> bool {
        let (rq, rs) = (&self.requester, &self.responder);
        rq.is_empty() && rq.out.is_done() && rs.out.is_done() && rq.copying == 0 && rs.copying == 0
    }

    /// A data packet for this QP. `Err(UnknownStream)`: answer with
    /// [`StreamBlock::not_ready`].
    pub fn receive(
        &mut self,
        now: Time,
        header: &StreamHeader,
        payload_len: u32,
        host: &mut dyn Host,
    ) -> Result<Receive, Drop> {
        if header.src_qpn != self.c.attr.remote_qpn || header.dst_qpn != self.c.attr.local_qpn {
            return Err(Drop::UnknownStream);
        }
        match header.opcode.direction() {
            Direction::Request => self
                .responder
                .receive(&mut self.c, header, payload_len, host),
            Direction::Response => self
                .requester
                .receive(&mut self.c, now, header, payload_len),
        }
    }

    /// A copy has ended.
    pub fn placed(&mut self, now: Time, token: Token, result: Placed, host: &mut dyn Host) {
        let _ = host;
        if token.generation != self.c.generation {
            return;
        }
        match token.direction {
            Direction::Request => self.responder.placed(&mut self.c, &token, result),
            Direction::Response => self.requester.placed(&mut self.c, now, &token, result),
        }
    }

    /// Answer to [`Event::Read`].
    pub fn read_ready(&mut self, _now: Time, request: u32, result: Result<(), Fault>) {
        self.responder
            .executed(&mut self.c, request, result.map(|()| 0));
    }

    /// Answer to [`Event::Atomic`]: the original value.
    pub fn atomic_done(&mut self, _now: Time, request: u32, result: Result<u64, Fault>) {
        self.responder.executed(&mut self.c, request, result);
    }

    /// Answer to [`Event::Invalidate`].
    pub fn invalidated(&mut self, _now: Time, result: Result<(), Fault>) {
        self.responder.invalidated(&mut self.c, result);
    }

    /// Answer to [`Event::Local`].
    pub fn local_done(&mut self, now: Time, wr: u32, status: Status) {
        self.requester.local_done(now, wr, status);
    }

    /// Receives were posted: `posted` of them are not bound, `None` when unknown.
    pub fn receives_changed(&mut self, _now: Time, posted: Option<u32>) {
        self.responder.receives_changed(&mut self.c, posted);
    }

    /// The block that acknowledges what this end receives in direction `dir`.
    pub fn block(&self, dir: Direction) -> StreamBlock {
        match dir {
            Direction::Request => self.responder.block(&self.c),
            Direction::Response => self.requester.block(&self.c),
        }
    }

    /// Which blocks have changed since they were taken last: requests, responses.
    pub fn take_dirty(&mut self) -> [bool; 2] {
        let dirty = core::mem::take(&mut self.c.dirty);
        if dirty[Direction::Request as usize] {
            self.responder.block_taken();
        }
        dirty
    }

    /// The peer's block arrived.
    pub fn on_block(&mut self, now: Time, block: &StreamBlock) {
        if block.src_qpn != self.c.attr.remote_qpn || block.dst_qpn != self.c.attr.local_qpn {
            return;
        }
        match block.dir {
            Direction::Request => self.requester.on_block(&self.c, now, block),
            Direction::Response => self.responder.on_block(&mut self.c, now, block),
        }
    }

    /// The connection was made anew with the same peer: what was outstanding is sent again.
    /// The caller has forgotten all packets, and releases none of them any more.
    pub fn resume(&mut self, now: Time) {
        self.requester.resume(now);
        self.responder.resume(now);
    }

    /// The connection is gone for good: the first unfinished WR ends in RETRY_EXC_ERR and
    /// the QP goes to ERR.
    pub fn connection_lost(&mut self, _now: Time) {
        if self.c.responds() && !self.requester.fail_first(Status::RetryExceeded) {
            self.c.enter_error(None);
            self.responder.stop();
        }
    }

    /// The next thing for the driver to do.
    pub fn poll_event(&mut self) -> Option<Event> {
        let c = &mut self.c;
        let was = c.state;
        let event = self.responder.poll(c).or_else(|| self.requester.poll(c));
        if c.state != was {
            self.responder.stop();
        }
        if event.is_some() {
            return event;
        }
        if self.responder.copying == 0 && self.requester.copying == 0 {
            if let Some(fault) = c.error.take() {
                return Some(Event::StreamError {
                    stream: c.id,
                    fault,
                });
            }
        }
        self.requester.poll_flush(c)
    }

    /// Time that does not count as silence of the peer: this machine stood still for `by`, or
    /// the connection has just come up (all of it).
    pub fn excuse(&mut self, now: Time, by: Time) {
        self.requester.excuse(now, by);
    }

    /// When [`Stream::on_timeout`] is due.
    pub fn poll_timeout(&self) -> Option<Time> {
        if !self.c.responds() {
            return None;
        }
        let deadline = self.requester.deadline(&self.c);
        self.poll_wait().into_iter().chain(deadline).min()
    }

    /// The part of [`Stream::poll_timeout`] that is no verdict on the peer's silence: when
    /// what the receiver was not ready for is sent again.
    pub fn poll_wait(&self) -> Option<Time> {
        if !self.c.responds() {
            return None;
        }
        let (a, b) = (self.requester.out.wait(), self.responder.out.wait());
        a.into_iter().chain(b).min()
    }

    /// Time has passed.
    pub fn on_timeout(&mut self, now: Time) {
        if !self.c.responds() {
            return;
        }
        self.requester.out.on_timeout(now);
        self.responder.out.on_timeout(now);
        if self.requester.deadline(&self.c).is_some_and(|t| t <= now) {
            self.requester.fail_first(Status::RetryExceeded);
        }
    }
}
