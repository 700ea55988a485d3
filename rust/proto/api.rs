// SPDX-License-Identifier: GPL-2.0

//! The seam between the protocol core and whoever drives it (kernel module, simulator,
//! tests): what goes in, what comes out.
//!
//! # How a driver works
//!
//! All calls on one [`Connection`](super::connection::Connection) are made by one caller
//! at a time (the driver holds the connection's lock). A round is:
//!
//! 1. feed input: `receive` for each packet, `placed` for each finished copy, `post_send`,
//!    `handle_timeout`, `read_ready`, `atomic_done`;
//! 2. drain events: `poll_event` until `None`;
//! 3. drain packets: `poll_transmit` until `None` or the driver's batch is full;
//! 4. read `poll_timeout` and arm one timer.
//!
//! Copies, CRCs, skb building and sending happen outside the lock, between rounds.

#![forbid(unsafe_code)]

/// Nanoseconds of a monotonic clock. The core never reads one.
pub type Time = u64;

/// A QP's place in its connection: index of its stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct StreamId(pub u32);

/// Longest header that [`Transmit`] carries, in bytes; bounds an acknowledgement.
pub const HEADER_MAX: usize = 512;

/// Bytes of a data packet that are not payload at the most (all extensions present): the
/// payload MTU is the path MTU without IP and UDP headers and without these.
pub const DATA_OVERHEAD: usize = 76;

/// Greatest message, in bytes.
pub const MAX_MESSAGE: u32 = 1 << 31;

/// Which half of a QP's traffic a packet belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Requests: Sends, Writes, READ and atomic requests.
    Request,
    /// What answers them: READ data and atomic results.
    Response,
}

/// Opcode of a data packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
#[allow(missing_docs)]
pub enum Opcode {
    /// Holds a path number whose content is no longer needed.
    #[default]
    Void = 0,
    Write = 1,
    WriteImm = 2,
    Send = 3,
    SendImm = 4,
    SendInv = 5,
    ReadRequest = 6,
    CompareSwap = 7,
    FetchAdd = 8,
    ReadResponse = 9,
    AtomicResponse = 10,
}

impl Opcode {
    /// The half of the QP's traffic that carries this opcode.
    pub const fn direction(self) -> Direction {
        match self {
            Self::ReadResponse | Self::AtomicResponse => Direction::Response,
            _ => Direction::Request,
        }
    }

    /// Whether the message takes a receive buffer.
    pub const fn takes_receive(self) -> bool {
        matches!(
            self,
            Self::WriteImm | Self::Send | Self::SendImm | Self::SendInv
        )
    }
}

/// The part of a data packet's header that gives it meaning. Fields that an opcode does
/// not use are 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamHeader {
    /// What the packet is part of.
    pub opcode: Opcode,
    /// Final packet of its message.
    pub last: bool,
    /// The receiver's completion raises a solicited event.
    pub solicited: bool,
    /// QP numbers, 24 bits.
    pub dst_qpn: u32,
    /// QP numbers, 24 bits.
    pub src_qpn: u32,
    /// Stream sequence; one per packet. The first one is the PSN attribute.
    pub sseq: u32,
    /// Message number in its stream, from 0.
    pub msn: u32,
    /// Number among the messages that take a receive, from 0. Meaningful when
    /// [`Opcode::takes_receive`].
    pub rmsn: u32,
    /// Bytes from the start of the message to this packet's payload.
    pub offset: u32,
    /// Length of the whole message in bytes.
    pub total: u32,
    /// Base address of the message (Write), address to read, address of the atomic.
    pub va: u64,
    /// Remote key that goes with `va`.
    pub rkey: u32,
    /// Immediate data (host order) or the key to invalidate; in the last packet only.
    pub imm: u32,
    /// The packet may be copied only when everything up to this sequence is in place.
    pub after: Option<u32>,
    /// Number of the READ or atomic request, from 0; in requests and responses.
    pub request: u32,
    /// Oldest request number that is unfinished at the requester; in requests.
    pub oldest: u32,
    /// Counts the rewinds of the requester's stream after RNR, so that all packets refused
    /// in one go count as one retry; in requests.
    pub round: u8,
    /// Compare or add operand; in an atomic response the original value.
    pub compare_add: u64,
    /// Swap operand.
    pub swap: u64,
}

/// A completion status, with the meaning and the value of `enum ibv_wc_status`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[allow(missing_docs)]
pub enum Status {
    Success = 0,
    LocalLength = 1,
    LocalQpOperation = 2,
    LocalProtection = 4,
    Flushed = 5,
    MwBind = 6,
    BadResponse = 7,
    LocalAccess = 8,
    RemoteInvalidRequest = 9,
    RemoteAccess = 10,
    RemoteOperation = 11,
    RetryExceeded = 12,
    RnrRetryExceeded = 13,
    Fatal = 19,
    General = 21,
}

/// Why a responder refuses a message for good; decides the requester's status and the
/// responder's asynchronous event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Fault {
    /// Requester: REM_INV_REQ_ERR. Responder: IBV_EVENT_QP_REQ_ERR (Send longer than the
    /// buffer, too many READs, misaligned atomic, unsupported request).
    InvalidRequest = 1,
    /// Requester: REM_ACCESS_ERR. Responder: IBV_EVENT_QP_ACCESS_ERR (key, range, rights).
    Access = 2,
    /// Requester: REM_OP_ERR. Responder: IBV_EVENT_QP_FATAL (its own memory failed).
    Operation = 3,
}

/// A work request of the send queue. WRs are numbered from 0 in posting order, wrapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SendWr {
    /// What to do. Only request opcodes.
    pub op: WrOp,
    /// Wait for earlier READs and atomics.
    pub fence: bool,
    /// Raise a solicited event at the receiver.
    pub solicited: bool,
    /// Ask for an acknowledgement as soon as it is done (the program waits for it).
    pub signaled: bool,
    /// Message length in bytes, at most [`MAX_MESSAGE`]; 8 for atomics.
    pub length: u32,
    /// An error found in the WR when it was copied: it completes in its turn with this
    /// status, nothing of it is sent, and the QP goes to ERR.
    pub error: Option<Status>,
}

/// Operation of a [`SendWr`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum WrOp {
    Write {
        va: u64,
        rkey: u32,
    },
    WriteImm {
        va: u64,
        rkey: u32,
        imm: u32,
    },
    Send,
    SendImm {
        imm: u32,
    },
    SendInv {
        rkey: u32,
    },
    Read {
        va: u64,
        rkey: u32,
    },
    CompareSwap {
        va: u64,
        rkey: u32,
        compare: u64,
        swap: u64,
    },
    FetchAdd {
        va: u64,
        rkey: u32,
        add: u64,
    },
    /// Done by the driver when all earlier WRs are accepted: see [`Event::Local`].
    Local,
}

/// Names one arrived packet until its bytes are in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Token {
    /// Stream it belongs to.
    pub stream: StreamId,
    /// Generation of the stream's slot; a token of an earlier one is ignored.
    pub generation: u32,
    /// Half of the QP's traffic.
    pub direction: Direction,
    /// Its stream sequence.
    pub sseq: u32,
    /// Its message (a request number for responses).
    pub msn: u32,
    /// Final packet of its message.
    pub last: bool,
    /// Record of a held packet; the stream's own.
    pub slot: u16,
}

/// Where the payload of an arrived packet belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Registered memory of the responder: the whole message covers
    /// `[va, va + Placement::total)` under `rkey`.
    Remote {
        /// Base address of the message.
        va: u64,
        /// Its key.
        rkey: u32,
    },
    /// The receive that was bound to this receive message number.
    Receive {
        /// Number given to [`Host::bind_receive`].
        rmsn: u32,
    },
    /// The scatter list of the READ or atomic WR with this number.
    Request {
        /// WR number.
        wr: u32,
    },
}

/// "Copy `len` payload bytes of this packet to `target` + `offset`, then call `placed`."
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Goes back with `placed`.
    pub token: Token,
    /// Where to.
    pub target: Target,
    /// Bytes from the start of the message.
    pub offset: u32,
    /// Bytes of payload; may be 0 (still to be reported).
    pub len: u32,
    /// Length of the whole message.
    pub total: u32,
    /// Final packet of a Write: copy up to its last aligned 8 bytes, then a release
    /// barrier, then those as one store.
    pub last: bool,
    /// Eight result bytes of an atomic, to be stored instead of payload.
    pub value: Option<u64>,
}

/// What became of a received packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Receive {
    /// Nothing is left to do with its payload (control packet, duplicate, refused).
    Done,
    /// Copy it now (outside the lock) and report with `placed`.
    Place(Placement),
    /// Keep the packet; [`Event::Release`] or [`Event::Discard`] names it later. Only
    /// returned while the driver's budget for held packets allows (see [`Host::may_hold`]).
    Hold(Placement),
}

/// How a copy ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placed {
    /// Every byte is in place.
    Ok,
    /// The key, range or rights do not allow it, or memory failed; for a target of
    /// `Request` or `Receive` it is a local protection error.
    Fault(Fault),
}

/// Source of a packet's payload; resolved by the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Payload {
    /// No payload.
    None,
    /// Bytes `[offset, offset + len)` of the gather list of send WR `wr`.
    Send {
        /// Stream of the WR.
        stream: StreamId,
        /// WR number.
        wr: u32,
        /// Bytes from the start of the message.
        offset: u32,
        /// Bytes.
        len: u32,
    },
    /// Bytes `[offset, offset + len)` of what READ request `request` asked for (accepted
    /// by the driver with `read_ready`). To be copied before the CRC is taken.
    Read {
        /// Stream that answers.
        stream: StreamId,
        /// Request number.
        request: u32,
        /// Bytes from the start of the message.
        offset: u32,
        /// Bytes.
        len: u32,
    },
    /// `len` zero bytes (probes of the path MTU).
    Pad {
        /// Bytes.
        len: u32,
    },
}

/// A packet to send. The CRC field of the header is 0: the driver fills it (see
/// [`wire::CRC_OFFSET`](super::wire::CRC_OFFSET)) once it has the payload.
#[derive(Clone)]
pub struct Transmit {
    /// Header bytes.
    pub header: [u8; HEADER_MAX],
    /// How many of them count.
    pub header_len: u16,
    /// What follows the header.
    pub payload: Payload,
    /// Path index; packets of a path are sent in the order in which they came out.
    pub path: u8,
    /// Plane of the path: chooses netdev and addresses
    /// ([`Connection::plane`](super::connection::Connection::plane)). 0 is that of the
    /// addresses that name the connection, for many the only one.
    pub plane: u8,
    /// UDP source port (the path's entropy).
    pub source_port: u16,
    /// IPv6 flow label, 20 bits.
    pub flow_label: u32,
    /// The packet has been sent before: its payload must be copied, not referenced.
    pub resend: bool,
    /// Carries both the CRC and a UDP checksum (handshake); else the negotiated one.
    pub always_checksum: bool,
    /// The packet may be fragmented by IP (numbered under a larger MTU).
    pub may_fragment: bool,
}

impl Transmit {
    /// An empty packet.
    pub const fn new() -> Self {
        Self {
            header: [0; HEADER_MAX],
            header_len: 0,
            payload: Payload::None,
            path: 0,
            plane: 0,
            source_port: 0,
            flow_label: 0,
            resend: false,
            always_checksum: false,
            may_fragment: false,
        }
    }
}

impl Default for Transmit {
    fn default() -> Self {
        Self::new()
    }
}

/// What arrived beside the bytes.
#[derive(Clone, Copy, Debug, Default)]
pub struct RxInfo {
    /// The packet carries the ECN mark CE.
    pub ce: bool,
    /// Plane of the device on which it came in; 0 when it has one.
    pub plane: u8,
    /// Payload bytes behind the header.
    pub payload_len: u32,
}

/// Something for the driver to do. Events of one stream come in stream order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// WR `wr` is finished; every WR is reported once, in order, signaled or not.
    SendDone {
        /// Stream of the WR.
        stream: StreamId,
        /// WR number.
        wr: u32,
        /// Its status.
        status: Status,
    },
    /// A receive is finished: message `rmsn` is complete and everything before it is.
    RecvDone {
        /// Stream that received.
        stream: StreamId,
        /// Number given to [`Host::bind_receive`].
        rmsn: u32,
        /// Kind of message ([`Opcode::takes_receive`]).
        opcode: Opcode,
        /// Bytes of the message.
        length: u32,
        /// Immediate data (host order) or the invalidated key, by opcode.
        imm: u32,
        /// Raise a solicited event.
        solicited: bool,
        /// Its status; LocalLength when the buffer was too short.
        status: Status,
    },
    /// Invalidate `rkey` for this stream's QP, then call `invalidated`. Comes before the
    /// `RecvDone` of its message, which waits for the answer.
    Invalidate {
        /// Stream that received.
        stream: StreamId,
        /// Key to invalidate.
        rkey: u32,
    },
    /// Check and pin the source of a READ, then call `read_ready`.
    Read {
        /// Stream that answers.
        stream: StreamId,
        /// Request number.
        request: u32,
        /// Address.
        va: u64,
        /// Key.
        rkey: u32,
        /// Bytes; 0 skips the key check.
        length: u32,
    },
    /// The source of READ `request` is no longer needed.
    ReadReleased {
        /// Stream that answered.
        stream: StreamId,
        /// Request number.
        request: u32,
    },
    /// Do the atomic now, exactly once, then call `atomic_done`.
    Atomic {
        /// Stream that answers.
        stream: StreamId,
        /// Request number.
        request: u32,
        /// CompareSwap or FetchAdd.
        opcode: Opcode,
        /// Address, to be a multiple of 8.
        va: u64,
        /// Key.
        rkey: u32,
        /// Compare or add operand.
        compare_add: u64,
        /// Swap operand.
        swap: u64,
    },
    /// All WRs before the local WR `wr` are accepted: do it, then call `local_done`.
    Local {
        /// Stream of the WR.
        stream: StreamId,
        /// WR number.
        wr: u32,
    },
    /// Copy a held packet now and report with `placed`.
    Release(Placement),
    /// Drop a held packet.
    Discard(Token),
    /// The stream is in error: move the QP to ERR, flush its receives, raise the event
    /// that `fault` names (none: the error is the requester's own, already in a WR).
    StreamError {
        /// The stream.
        stream: StreamId,
        /// Fault found as responder.
        fault: Option<Fault>,
    },
    /// First packet of the peer arrived: IBV_EVENT_COMM_EST.
    Established {
        /// The stream.
        stream: StreamId,
    },
    /// Nothing of the stream's send queue is outstanding after `drain`: IBV_EVENT_SQ_DRAINED.
    Drained {
        /// The stream.
        stream: StreamId,
    },
    /// The connection is up.
    ConnectionUp,
    /// The peer refuses or cannot speak our version: all streams have been failed.
    ConnectionFailed(ConnectionError),
    /// The connection is closed on both sides and may be dropped.
    ConnectionClosed,
    /// A path or plane changed its state (for telemetry and, later, events to programs).
    PathChanged {
        /// Path index.
        path: u8,
    },
}

/// Why there is no connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectionError {
    /// The peer speaks other versions: lowest and highest that it offers.
    Version {
        /// Lowest version the peer offers.
        lowest: u8,
        /// Highest one.
        highest: u8,
    },
    /// The peer is another instance than the one these streams were connected to (reboot).
    PeerRestarted,
    /// The peer did not answer within the retry limit of every stream.
    Unreachable,
}

/// What the core asks its driver while it handles a packet. Called under the connection's
/// lock, so implementations only take locks that order after it, and never sleep.
pub trait Host {
    /// Binds the next posted receive to receive message `rmsn` of `stream` and returns the
    /// length of its buffer in bytes, or `None` when nothing is posted. Called once per
    /// number, in order of numbers.
    fn bind_receive(&mut self, stream: StreamId, rmsn: u32) -> Option<u64>;

    /// Receives posted and not yet bound, as far as known (advice for credits); `None` is
    /// "unknown".
    fn receives_posted(&mut self, stream: StreamId) -> Option<u32>;

    /// Whether one more packet of `bytes` may be held in the driver's memory.
    fn may_hold(&mut self, bytes: u32) -> bool;
}
