// SPDX-License-Identifier: GPL-2.0

//! Bytes to headers and back: the only place that knows the format (version 0,
//! experimental). PROTOCOL.md describes it; here is its executable form.
//!
//! Every integer is big-endian. A packet is a base header of [`BASE_LEN`] bytes, what its
//! type adds, and, for data and padded probes, payload. Parsing copies every field once
//! and checks it; nothing behind this module looks at bytes.

#![forbid(unsafe_code)]

mod ack;
mod bytes;
mod data;
#[cfg(test)]
mod dissector;
mod handshake;
mod planes;
mod probe;
#[cfg(any(test, CONFIG_KUNIT = "y"))]
pub(crate) mod tests;

pub(crate) use self::ack::AckWriter;
pub use self::ack::{Ack, AckHeader, Blocks, PathBlock, BITS_WORDS};
pub use self::bytes::Writer;
pub(crate) use self::data::emit as emit_data;
pub use self::data::{PathHeader, DATA_MIN};
pub use self::handshake::{Handshake, HandshakeKey, Refusal, RefuseReason, Unknown, HANDSHAKE_LEN};
pub use self::planes::{PlaneAddress, Planes, PLANES_MAX};
pub use self::probe::{Close, CloseKind, Probe, ProbeReply, Queries, Query, QUERIES_MAX};
pub(crate) use self::probe::{QueryWriter, PAYLOAD_PROBE};

use self::bytes::Reader;
use super::api::{StreamHeader, HEADER_MAX};

/// Version of the format. Version 0 is experimental and interoperates with nothing else.
pub const VERSION: u8 = 0;

/// Length of the header that every packet begins with.
pub const BASE_LEN: usize = 16;

/// Where the CRC32C stands in the header, 4 bytes, big-endian. It covers everything from
/// the first byte of the header to the end of the payload, with 0 in its own place.
pub const CRC_OFFSET: usize = 4;

/// Why a packet was not used. Each has a counter ([`Counters`](super::connection::Counters)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Drop {
    /// Fewer bytes than its header needs.
    Short = 0,
    /// Another version of the format.
    Version,
    /// A type that this version does not have.
    Type,
    /// The header length does not fit the type, or the payload does not fit the header.
    Length,
    /// A field has a value that no sender may put there.
    Field,
    /// The CRC is wrong (counted by the driver).
    Crc,
    /// No connection has this id, or it had it earlier.
    NoConnection,
    /// The connection is not in a state for this packet.
    State,
    /// A path number that was not agreed on.
    Path,
    /// An epoch that has ended.
    Epoch,
    /// A path sequence that cannot be outstanding.
    PathSequence,
    /// Arrived before on its path.
    PathDuplicate,
    /// Acknowledges what was never sent.
    AckInvalid,
    /// Older than what arrived before it (acknowledgements).
    Old,
    /// A cookie that is not ours or too old.
    Cookie,
    /// No stream is connected between these QPs.
    UnknownStream,
    /// The content arrived before on its stream.
    StreamDuplicate,
    /// Outside the stream's window.
    StreamWindow,
    /// The stream cannot take it now and has said so (RNR, no room, not ready).
    Refused,
    /// It contradicts what the stream received before, or no requester may ask for it.
    StreamInvalid,
    /// The stream is in error; what it carries is no longer wanted.
    StreamState,
}

impl Drop {
    /// Number of reasons.
    pub const COUNT: usize = 21;
}

/// Kinds of packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Type {
    /// Part of a message, numbered on its path.
    Data = 0,
    /// Path and stream blocks.
    Ack = 1,
    /// Asks what has arrived on a path, how large packets pass, whether the address answers.
    Probe = 2,
    /// Answer to it.
    ProbeReply = 3,
    /// Asks for the blocks of streams.
    Query = 4,
    /// End of a connection.
    Close = 5,
    /// Addresses of the sender's planes.
    Planes = 6,
    /// First and, with the cookie, third packet of the handshake.
    Init = 8,
    /// Answer to an Init without cookie.
    Cookie = 9,
    /// Answer to an Init with a good cookie.
    Accept = 10,
    /// The other answer to an Init.
    Refuse = 11,
    /// Answer to a packet with an unknown connection id.
    Unknown = 12,
}

impl Type {
    fn from_bits(bits: u8) -> Option<Self> {
        Some(match bits {
            0 => Self::Data,
            1 => Self::Ack,
            2 => Self::Probe,
            3 => Self::ProbeReply,
            4 => Self::Query,
            5 => Self::Close,
            6 => Self::Planes,
            8 => Self::Init,
            9 => Self::Cookie,
            10 => Self::Accept,
            11 => Self::Refuse,
            12 => Self::Unknown,
            _ => return None,
        })
    }
}

/// Type and connection id of a packet whose id names a connection, unchecked: enough to sort
/// packets before they are read. `None` for those of a handshake, and for what is no packet.
pub fn peek(bytes: &[u8]) -> Option<(Type, u64)> {
    let mut base = Reader::new(bytes.get(..BASE_LEN)?);
    let kind = base.u8().ok().filter(|k| k >> 4 == VERSION)?;
    let kind = Type::from_bits(kind & 0xf).filter(|k| (*k as u8) < Type::Init as u8)?;
    base.u8().ok()?;
    base.u16().ok()?;
    base.u32().ok()?;
    Some((kind, base.u64().ok()?))
}

/// The CRC that a packet says it has; `None` when it is too short for one.
pub fn crc_of(bytes: &[u8]) -> Option<u32> {
    let field = bytes.get(CRC_OFFSET..)?.first_chunk()?;
    Some(u32::from_be_bytes(*field))
}

/// A parsed packet.
#[derive(Clone, Debug)]
pub struct Packet<'a> {
    connection_id: Option<u64>,
    header_len: u16,
    crc: u32,
    body: Body<'a>,
}

/// What a packet holds.
#[derive(Clone, Debug)]
#[allow(missing_docs)] // each variant is what its type documents
pub enum Body<'a> {
    Data(PathHeader, StreamHeader),
    Ack(Ack<'a>),
    Probe(Probe),
    ProbeReply(ProbeReply<'a>),
    Query(Queries<'a>),
    Close(Close),
    Planes(Planes<'a>),
    Init(Handshake),
    Cookie(Handshake),
    Accept(Handshake),
    Refuse(Refusal),
    Unknown(Unknown),
}

/// Base flags: an acknowledgement is wanted at once.
pub(crate) const FLAG_ACK_REQUEST: u8 = 1 << 0;
/// Base flags: final packet of its message.
pub(crate) const FLAG_LAST: u8 = 1 << 1;
/// Base flags: solicited event.
pub(crate) const FLAG_SOLICITED: u8 = 1 << 2;
/// Base flags: the `after` extension is present.
pub(crate) const FLAG_AFTER: u8 = 1 << 3;

impl<'a> Packet<'a> {
    /// Reads a packet from the bytes at its begin. `bytes` needs to hold the header; it may
    /// hold payload, too, or a part of it.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, Drop> {
        let mut base = Reader::new(bytes);
        let kind = base.u8()?;
        let flags = base.u8()?;
        let header_len = base.u16()?;
        let crc = base.u32()?;
        let id = base.u64()?;
        if kind >> 4 != VERSION {
            return Err(Drop::Version);
        }
        let kind = Type::from_bits(kind & 0xf).ok_or(Drop::Type)?;
        if usize::from(header_len) > HEADER_MAX {
            return Err(Drop::Length);
        }
        let header = bytes.get(..usize::from(header_len)).ok_or(Drop::Short)?;
        let mut r = Reader::new(header.get(BASE_LEN..).ok_or(Drop::Length)?);
        if !matches!(kind, Type::Data) && flags != 0 {
            return Err(Drop::Field);
        }
        let body = match kind {
            Type::Data => {
                let (path, stream) = data::parse(flags, &mut r)?;
                Body::Data(path, stream)
            }
            Type::Ack => Body::Ack(Ack::parse(&mut r)?),
            Type::Probe => Body::Probe(Probe::parse(&mut r)?),
            Type::ProbeReply => Body::ProbeReply(ProbeReply::parse(&mut r)?),
            Type::Query => Body::Query(Queries::parse(&mut r)?),
            Type::Close => Body::Close(Close::parse(&mut r)?),
            Type::Planes => Body::Planes(Planes::parse(&mut r)?),
            Type::Init => Body::Init(Handshake::parse(&mut r)?),
            Type::Cookie => Body::Cookie(Handshake::parse(&mut r)?),
            Type::Accept => Body::Accept(Handshake::parse(&mut r)?),
            Type::Refuse => Body::Refuse(Refusal::parse(&mut r)?),
            Type::Unknown => Body::Unknown(Unknown::parse(&mut r)?),
        };
        r.end()?;
        let keyed = kind as u8 >= Type::Init as u8;
        if keyed && id != 0 {
            return Err(Drop::Field);
        }
        Ok(Self {
            connection_id: (!keyed).then_some(id),
            header_len,
            crc,
            body,
        })
    }

    /// Bytes in front of the payload.
    pub fn header_len(&self) -> usize {
        usize::from(self.header_len)
    }

    /// The receiver's connection id; `None` for packets that belong to a handshake, which
    /// are found by [`Packet::handshake_key`].
    pub fn connection_id(&self) -> Option<u64> {
        self.connection_id
    }

    /// HandshakeKey that a packet of a handshake names, or `None` for all others.
    pub fn handshake_key(&self) -> Option<HandshakeKey> {
        match &self.body {
            Body::Init(h) | Body::Cookie(h) | Body::Accept(h) => Some(h.key),
            Body::Refuse(r) => Some(r.key),
            Body::Unknown(u) => Some(u.key),
            _ => None,
        }
    }

    /// The CRC that the packet carries.
    pub fn crc(&self) -> u32 {
        self.crc
    }

    /// Whether the packet carries both CRC and UDP checksum whatever was negotiated.
    pub fn always_checksum(&self) -> bool {
        self.connection_id.is_none()
    }

    /// Whether its payload goes to memory (else it has none, or padding that nobody reads).
    pub fn has_data(&self) -> bool {
        matches!(self.body, Body::Data(..))
    }

    /// What it holds.
    pub fn body(&self) -> &Body<'a> {
        &self.body
    }

    /// Checks the payload's length against the header. Everything but data and probes
    /// comes without payload.
    pub fn check_payload(&self, len: u32) -> Result<(), Drop> {
        let ok = match &self.body {
            Body::Data(_, s) => data::payload_fits(s, len),
            Body::Probe(p) => p.padding == len,
            _ => len == 0,
        };
        if ok {
            Ok(())
        } else {
            Err(Drop::Length)
        }
    }
}

/// Begins a packet: writes the base header, with the CRC and the header length still 0.
pub(crate) fn begin(w: &mut Writer<'_>, kind: Type, flags: u8, connection_id: u64) {
    w.u8(VERSION << 4 | kind as u8);
    w.u8(flags);
    w.u16(0);
    w.u32(0);
    w.u64(connection_id);
}
