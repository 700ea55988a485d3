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
//! Nothing here knows paths. PROTOCOL-STREAM.md beside this file has the rules.

#![forbid(unsafe_code)]

use crate::os::{AllocError, Box};
use crate::proto::api::{
    Direction, Event, Fault, Host, Payload, Placed, Receive, SendWr, Status, StreamHeader,
    StreamId, Time, Token,
};
use crate::proto::wire::Drop;

/// Greatest window of a stream in packets; rule 9. The bitmaps have this size.
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

/// What the receiver of a stream says about it; absolute, rule 1.
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

/// A queue pair's traffic.
pub struct Stream {
    id: StreamId,
    generation: u32,
    attr: StreamAttr,
    state: State,
}

impl Stream {
    /// A stream in state `Reset` with all the memory it will ever have. `max_send_wr` is
    /// the depth of the send queue, `max_dest_rd_atomic` the READs and atomics that it can
    /// keep as responder.
    pub fn new(max_send_wr: u32, max_dest_rd_atomic: u32) -> Result<Box<Self>, AllocError> {
        let _ = (max_send_wr, max_dest_rd_atomic);
        crate::os::try_box(Self {
            id: StreamId(0),
            generation: 0,
            attr: StreamAttr::default(),
            state: State::Reset,
        })
    }

    /// Says which slot of which generation the stream is in; events and tokens carry it.
    pub fn set_identity(&mut self, id: StreamId, generation: u32) {
        self.id = id;
        self.generation = generation;
    }

    /// Sets the attributes. QP numbers and PSNs count until `Rtr`, the others at any time.
    pub fn set_attr(&mut self, attr: &StreamAttr) {
        self.attr = *attr;
    }

    /// The attributes.
    pub fn attr(&self) -> &StreamAttr {
        &self.attr
    }

    /// Back to state `Reset`, everything forgotten.
    pub fn reset(&mut self) {}

    /// The state.
    pub fn state(&self) -> State {
        self.state
    }

    /// The QP was moved to `state` (`Rtr`, `Rts`, `Sqd`, `Err`).
    pub fn set_state(&mut self, now: Time, state: State) {
        let _ = now;
        self.state = state;
    }

    /// Payload MTU of the connection changed; counts for messages that have not begun.
    pub fn set_payload_mtu(&mut self, mtu: u32) {
        self.attr.payload_mtu = mtu;
    }

    /// Takes a WR and returns its number. In state `Err` it completes as flushed.
    pub fn post(&mut self, now: Time, wr: SendWr) -> Result<u32, PostError> {
        let _ = (now, wr);
        Err(PostError::State)
    }

    /// Whether [`Stream::next_packet`] has something.
    pub fn can_send(&self, now: Time) -> bool {
        let _ = now;
        false
    }

    /// The next packet that gets a path number for the first time, `None` when there is
    /// none or its payload is longer than `payload_budget`.
    pub fn next_packet(
        &mut self,
        now: Time,
        payload_budget: u32,
        header: &mut StreamHeader,
    ) -> Option<PacketRef> {
        let _ = (now, payload_budget, header);
        None
    }

    /// The header of a packet that has to be sent again under its old path number; false
    /// when its content is not needed any more (send VOID).
    pub fn rebuild(&self, packet: PacketRef, header: &mut StreamHeader) -> bool {
        let _ = (packet, header);
        false
    }

    /// Where the payload of a packet comes from.
    pub fn payload(&self, packet: PacketRef) -> Payload {
        let _ = packet;
        Payload::None
    }

    /// A path has taken the packet: it is outstanding until [`Stream::released`].
    pub fn sent(&mut self, packet: PacketRef) {
        let _ = packet;
    }

    /// The path has an acknowledgement for the packet or has given it up.
    pub fn released(&mut self, now: Time, packet: PacketRef) {
        let _ = (now, packet);
    }

    /// Since when the stream of direction `dir` has unaccepted packets, none of which is
    /// outstanding on any path; rule 1's query follows after 2 SRTT.
    pub fn quiet_since(&self, dir: Direction) -> Option<Time> {
        let _ = dir;
        None
    }

    /// Whether one of the directions is quiet ([`Stream::quiet_since`]).
    pub fn wants_query(&self) -> bool {
        self.quiet_since(Direction::Request).is_some()
            || self.quiet_since(Direction::Response).is_some()
    }

    /// A data packet for this QP. `Err(UnknownStream)`: answer with a block NOT_READY that
    /// echoes the packet's round.
    pub fn receive(
        &mut self,
        now: Time,
        header: &StreamHeader,
        payload_len: u32,
        host: &mut dyn Host,
    ) -> Result<Receive, Drop> {
        let _ = (now, header, payload_len, host);
        Err(Drop::UnknownStream)
    }

    /// A copy has ended.
    pub fn placed(&mut self, now: Time, token: Token, result: Placed, host: &mut dyn Host) {
        let _ = (now, token, result, host);
    }

    /// Answer to [`Event::Read`].
    pub fn read_ready(&mut self, now: Time, request: u32, result: Result<(), Fault>) {
        let _ = (now, request, result);
    }

    /// Answer to [`Event::Atomic`]: the original value.
    pub fn atomic_done(&mut self, now: Time, request: u32, result: Result<u64, Fault>) {
        let _ = (now, request, result);
    }

    /// Answer to [`Event::Invalidate`].
    pub fn invalidated(&mut self, now: Time, result: Result<(), Fault>) {
        let _ = (now, result);
    }

    /// Answer to [`Event::Local`].
    pub fn local_done(&mut self, now: Time, wr: u32, status: Status) {
        let _ = (now, wr, status);
    }

    /// Receives were posted: `posted` of them are not bound, `None` when unknown.
    pub fn receives_changed(&mut self, now: Time, posted: Option<u32>) {
        let _ = (now, posted);
    }

    /// The block that acknowledges what this end receives in direction `dir`.
    pub fn block(&self, dir: Direction) -> StreamBlock {
        StreamBlock {
            dst_qpn: self.attr.remote_qpn,
            src_qpn: self.attr.local_qpn,
            dir,
            cumulative: 0,
            msn_done: 0,
            receive_limit: None,
            status: BlockStatus::Ok,
        }
    }

    /// Which blocks have changed since they were taken last: requests, responses.
    pub fn take_dirty(&mut self) -> [bool; 2] {
        [false; 2]
    }

    /// The peer's block arrived.
    pub fn on_block(&mut self, now: Time, block: &StreamBlock) {
        let _ = (now, block);
    }

    /// The connection was made anew with the same peer: what was outstanding is sent again.
    pub fn resume(&mut self, now: Time) {
        let _ = now;
    }

    /// The connection is gone for good: the first unfinished WR ends in RETRY_EXC_ERR.
    pub fn connection_lost(&mut self, now: Time) {
        let _ = now;
    }

    /// The next thing for the driver to do.
    pub fn poll_event(&mut self) -> Option<Event> {
        None
    }

    /// When [`Stream::on_timeout`] is due.
    pub fn poll_timeout(&self) -> Option<Time> {
        None
    }

    /// Time has passed.
    pub fn on_timeout(&mut self, now: Time) {
        let _ = now;
    }
}
