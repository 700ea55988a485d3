// SPDX-License-Identifier: GPL-2.0

//! Probes, queries and the end of a connection.

#![forbid(unsafe_code)]

use super::ack::{Ack, AckHeader, AckWriter};
use super::bytes::Reader;
use super::{begin, Drop, Type, Writer};
use crate::proto::api::Direction;

/// Queries that one packet can hold.
pub const QUERIES_MAX: usize = 40;

const QPN_MASK: u32 = 0xff_ffff;

/// Header bytes of a probe.
pub(crate) const PROBE_LEN: usize = super::BASE_LEN + 24;

/// Padding beyond the payload of a full packet that makes a probe as long as it is.
pub(crate) const PAYLOAD_PROBE: u32 = (crate::proto::api::DATA_OVERHEAD - PROBE_LEN) as u32;

/// Asks what has arrived on a path. Not numbered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Probe {
    /// Path index.
    pub path: u8,
    /// For how many times the time of silence the sender has heard nothing at all although
    /// it asked; saturating.
    pub deaf: u8,
    /// Epoch of the path.
    pub epoch: u16,
    /// Next path sequence of that epoch: everything below has been sent.
    pub next: u32,
    /// Send time, as in data packets.
    pub timestamp: u32,
    /// Random; comes back in the reply and proves that the address answers.
    pub challenge: u64,
    /// Padding behind the header, in bytes.
    pub padding: u32,
}

impl Probe {
    pub(super) fn parse(r: &mut Reader<'_>) -> Result<Self, Drop> {
        let path = r.u8()?;
        let deaf = r.u8()?;
        Ok(Self {
            path,
            deaf,
            epoch: r.u16()?,
            next: r.u32()?,
            timestamp: r.u32()?,
            challenge: r.u64()?,
            padding: r.u32()?,
        })
    }

    pub(crate) fn emit(&self, w: &mut Writer<'_>, connection_id: u64) {
        begin(w, Type::Probe, 0, connection_id);
        w.u8(self.path);
        w.u8(self.deaf);
        w.u16(self.epoch);
        w.u32(self.next);
        w.u32(self.timestamp);
        w.u64(self.challenge);
        w.u32(self.padding);
    }
}

/// Answer to a [`Probe`]: what it said, and the blocks of an acknowledgement with that
/// path first.
#[derive(Clone, Debug)]
pub struct ProbeReply<'a> {
    /// What the probe said.
    pub probe: Probe,
    /// What has arrived.
    pub ack: Ack<'a>,
}

impl<'a> ProbeReply<'a> {
    pub(super) fn parse(r: &mut Reader<'a>) -> Result<Self, Drop> {
        Ok(Self {
            probe: Probe::parse(r)?,
            ack: Ack::parse(r)?,
        })
    }

    /// Begins a reply; the path's block comes next.
    pub(crate) fn begin<'w, 'b>(
        w: &'w mut Writer<'b>,
        connection_id: u64,
        p: &Probe,
        h: &AckHeader,
    ) -> AckWriter<'w, 'b> {
        begin(w, Type::ProbeReply, 0, connection_id);
        w.u8(p.path);
        w.u8(p.deaf);
        w.u16(p.epoch);
        w.u32(p.next);
        w.u32(p.timestamp);
        w.u64(p.challenge);
        w.u32(p.padding);
        AckWriter::body(w, h)
    }
}

/// Names a stream that one would like to hear of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Query {
    /// QP that is to answer.
    pub dst_qpn: u32,
    /// QP that asks.
    pub src_qpn: u32,
    /// Which stream that arrives at `dst_qpn`.
    pub dir: Direction,
    /// A stream sequence of the one who asks, for the answer NOT_READY.
    pub sseq: u32,
    /// Round, echoed when the answer is NOT_READY.
    pub round: u8,
}

/// The queries of a packet.
#[derive(Clone, Debug)]
pub struct Queries<'a> {
    r: Reader<'a>,
    count: u8,
}

impl<'a> Queries<'a> {
    pub(super) fn parse(r: &mut Reader<'a>) -> Result<Self, Drop> {
        let count = r.u8()?;
        let reserved = r.bytes(3)?;
        if usize::from(count) > QUERIES_MAX || reserved != [0; 3] {
            return Err(Drop::Field);
        }
        let start = r.clone();
        for _ in 0..count {
            // There are two directions.
            if r.u8()? > 1 {
                return Err(Drop::Field);
            }
            r.bytes(11)?;
        }
        Ok(Self { r: start, count })
    }

    /// Each query.
    pub fn iter(&self) -> impl Iterator<Item = Query> + 'a {
        let mut r = self.r.clone();
        (0..self.count).map_while(move |_| {
            let dst = r.u32().ok()?;
            let src = r.u32().ok()?;
            let sseq = r.u32().ok()?;
            Some(Query {
                dst_qpn: dst & QPN_MASK,
                src_qpn: src & QPN_MASK,
                sseq,
                round: (src >> 24) as u8,
                dir: if dst >> 24 == 0 {
                    Direction::Request
                } else {
                    Direction::Response
                },
            })
        })
    }
}

/// Writes a query packet.
pub(crate) struct QueryWriter<'a, 'b> {
    w: &'a mut Writer<'b>,
    at: usize,
    count: u8,
}

impl<'a, 'b> QueryWriter<'a, 'b> {
    /// Begins a packet.
    pub(crate) fn new(w: &'a mut Writer<'b>, connection_id: u64) -> Self {
        begin(w, Type::Query, 0, connection_id);
        let at = w.len();
        w.u8(0);
        w.u8(0);
        w.u16(0);
        Self { w, at, count: 0 }
    }

    /// Whether `n` more fit.
    pub(crate) fn has_room_for(&self, n: usize) -> bool {
        usize::from(self.count).saturating_add(n) <= QUERIES_MAX
    }

    /// Adds a query; false when the packet is full.
    pub(crate) fn push(&mut self, q: &Query) -> bool {
        if usize::from(self.count) >= QUERIES_MAX {
            return false;
        }
        let dir = match q.dir {
            Direction::Request => 0,
            Direction::Response => 1 << 24,
        };
        self.w.u32(dir | q.dst_qpn & QPN_MASK);
        self.w.u32(u32::from(q.round) << 24 | q.src_qpn & QPN_MASK);
        self.w.u32(q.sseq);
        self.count = self.count.wrapping_add(1);
        self.w.patch_u8(self.at, self.count);
        true
    }
}

/// What a [`Close`] says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CloseKind {
    /// Nothing is unaccepted on this side: close, if it is so on yours.
    Request,
    /// Agreed, and done.
    Agree,
    /// No, there is something to do.
    Refuse,
}

/// End of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Close {
    /// Step.
    pub kind: CloseKind,
    /// Number of the request, repeated in the answer.
    pub number: u32,
}

impl Close {
    pub(super) fn parse(r: &mut Reader<'_>) -> Result<Self, Drop> {
        let kind = match r.u32()? {
            0 => CloseKind::Request,
            1 => CloseKind::Agree,
            2 => CloseKind::Refuse,
            _ => return Err(Drop::Field),
        };
        Ok(Self {
            kind,
            number: r.u32()?,
        })
    }

    pub(crate) fn emit(&self, w: &mut Writer<'_>, connection_id: u64) {
        begin(w, Type::Close, 0, connection_id);
        w.u32(match self.kind {
            CloseKind::Request => 0,
            CloseKind::Agree => 1,
            CloseKind::Refuse => 2,
        });
        w.u32(self.number);
    }
}
