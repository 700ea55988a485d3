// SPDX-License-Identifier: GPL-2.0

//! Acknowledgements: path blocks and stream blocks.

#![forbid(unsafe_code)]

use super::bytes::Reader;
use super::{begin, Drop, Type, Writer};
use crate::proto::api::{Direction, Fault};
use crate::proto::stream::{BlockStatus, StreamBlock};

/// 64-bit words of the selective acknowledgement.
pub const BITS_WORDS: usize = 4;

/// Bytes of a path block without its words.
pub(crate) const PATH_BLOCK: usize = 20;
/// Bytes of the longest stream block.
pub(crate) const STREAM_BLOCK_MAX: usize = 28;
const STREAM_BLOCK: usize = 20;
const QPN_MASK: u32 = 0xff_ffff;

const STREAM_RESPONSE: u32 = 1 << 24;
const STREAM_LIMIT: u32 = 1 << 25;

/// What arrived on a path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PathBlock {
    /// Path index.
    pub path: u8,
    /// Epoch that this is about.
    pub epoch: u16,
    /// Every number before this one has arrived.
    pub cumulative: u32,
    /// Bit i (of word i/64, lowest first) is number `cumulative + 1 + i`.
    pub bits: [u64; BITS_WORDS],
    /// Timestamp of the newest arrival (the greatest one seen in this epoch).
    pub echo: u32,
    /// Time from its arrival to this block, in units of 1024 ns; 65535 is "longer".
    pub delay: u16,
    /// Packets that arrived on the path in this epoch, modulo 2^16.
    pub received: u16,
    /// How many of them were marked CE.
    pub ce: u16,
    /// How many of them had arrived before.
    pub duplicates: u16,
}

impl PathBlock {
    fn words(&self) -> usize {
        self.bits
            .iter()
            .rposition(|w| *w != 0)
            .map_or(0, |i| i.wrapping_add(1))
    }

    /// Bytes that it takes.
    pub(crate) fn wire_len(&self) -> usize {
        PATH_BLOCK.wrapping_add(self.words().wrapping_mul(8))
    }

    pub(super) fn emit(&self, w: &mut Writer<'_>) {
        let words = self.words();
        w.u8(self.path);
        w.u8(words as u8);
        w.u16(self.epoch);
        w.u32(self.cumulative);
        w.u32(self.echo);
        w.u16(self.delay);
        w.u16(self.received);
        w.u16(self.ce);
        w.u16(self.duplicates);
        for word in self.bits.iter().take(words) {
            w.u64(*word);
        }
    }

    fn parse(r: &mut Reader<'_>) -> Result<Self, Drop> {
        let path = r.u8()?;
        let words = usize::from(r.u8()?);
        if words > BITS_WORDS {
            return Err(Drop::Field);
        }
        let mut b = Self {
            path,
            epoch: r.u16()?,
            cumulative: r.u32()?,
            echo: r.u32()?,
            delay: r.u16()?,
            received: r.u16()?,
            ce: r.u16()?,
            duplicates: r.u16()?,
            bits: [0; BITS_WORDS],
        };
        for word in b.bits.iter_mut().take(words) {
            *word = r.u64()?;
        }
        Ok(b)
    }

    /// Passes over one, and checks all that [`PathBlock::parse`] would refuse.
    fn skip(r: &mut Reader<'_>) -> Result<(), Drop> {
        r.u8()?;
        let words = usize::from(r.u8()?);
        if words > BITS_WORDS {
            return Err(Drop::Field);
        }
        r.bytes(words.wrapping_mul(8).wrapping_add(PATH_BLOCK - 2))?;
        Ok(())
    }
}

impl StreamBlock {
    /// Bytes that it takes.
    pub(crate) fn wire_len(&self) -> usize {
        match self.status {
            BlockStatus::Ok => STREAM_BLOCK,
            _ => STREAM_BLOCK_MAX,
        }
    }

    pub(super) fn emit(&self, w: &mut Writer<'_>) {
        let mut head = self.dst_qpn & QPN_MASK;
        if self.dir == Direction::Response {
            head |= STREAM_RESPONSE;
        }
        if self.receive_limit.is_some() {
            head |= STREAM_LIMIT;
        }
        let (status, arguments) = match self.status {
            BlockStatus::Ok => (0, None),
            BlockStatus::Rnr {
                rmsn,
                timer_us,
                round,
            } => (
                1,
                Some((rmsn, u32::from(round) << 24 | timer_us.min(0xff_ffff))),
            ),
            BlockStatus::NotReady { round } => (2, Some((0, u32::from(round) << 24))),
            BlockStatus::NoRoom { round } => (3, Some((0, u32::from(round) << 24))),
            BlockStatus::Fatal { msn, fault } => (4, Some((msn, fault as u32))),
        };
        w.u32(head);
        w.u32(status << 24 | self.src_qpn & QPN_MASK);
        w.u32(self.cumulative);
        w.u32(self.msn_done);
        w.u32(self.receive_limit.unwrap_or(0));
        if let Some((a, b)) = arguments {
            w.u32(a);
            w.u32(b);
        }
    }

    fn parse(r: &mut Reader<'_>) -> Result<Self, Drop> {
        let head = r.u32()?;
        let second = r.u32()?;
        if head & !(QPN_MASK | STREAM_RESPONSE | STREAM_LIMIT) != 0 {
            return Err(Drop::Field);
        }
        let cumulative = r.u32()?;
        let msn_done = r.u32()?;
        let limit = r.u32()?;
        let code = second >> 24;
        let (a, b) = if code == 0 {
            (0, 0)
        } else {
            (r.u32()?, r.u32()?)
        };
        let round = (b >> 24) as u8;
        let status = match code {
            0 => BlockStatus::Ok,
            1 => BlockStatus::Rnr {
                rmsn: a,
                timer_us: b & 0xff_ffff,
                round,
            },
            2 => BlockStatus::NotReady { round },
            3 => BlockStatus::NoRoom { round },
            4 => BlockStatus::Fatal {
                msn: a,
                fault: match b {
                    1 => Fault::InvalidRequest,
                    2 => Fault::Access,
                    3 => Fault::Operation,
                    _ => return Err(Drop::Field),
                },
            },
            _ => return Err(Drop::Field),
        };
        Ok(Self {
            dst_qpn: head & QPN_MASK,
            src_qpn: second & QPN_MASK,
            dir: if head & STREAM_RESPONSE != 0 {
                Direction::Response
            } else {
                Direction::Request
            },
            cumulative,
            msn_done,
            receive_limit: (head & STREAM_LIMIT != 0).then_some(limit),
            status,
        })
    }
}

/// Fixed part of an acknowledgement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AckHeader {
    /// Number of this acknowledgement in its connection; blocks of a lower one are older.
    pub number: u32,
    /// Share of its inbound bandwidth that the sender of this grants, kbit/s; 0 = no limit.
    pub share: u32,
    /// Plane that `share` is about.
    pub plane: u8,
    /// How late things happen on the machine that sends this, in units of 2^16 ns; 255 is
    /// that or more.
    pub lateness: u8,
}

/// Path blocks and stream blocks of a packet; both were checked.
#[derive(Clone, Debug)]
pub struct Blocks<'a> {
    paths: u8,
    streams: u8,
    /// Where the path blocks begin, and where the stream blocks do.
    r: Reader<'a>,
    after: Reader<'a>,
}

impl<'a> Blocks<'a> {
    fn parse(r: &mut Reader<'a>, paths: u8, streams: u8) -> Result<Self, Drop> {
        let begin = r.clone();
        for _ in 0..paths {
            PathBlock::skip(r)?;
        }
        let after = r.clone();
        for _ in 0..streams {
            StreamBlock::parse(r)?;
        }
        Ok(Self {
            paths,
            streams,
            r: begin,
            after,
        })
    }

    /// The path blocks.
    pub fn paths(&self) -> impl Iterator<Item = PathBlock> + 'a {
        let mut r = self.r.clone();
        (0..self.paths).map_while(move |_| PathBlock::parse(&mut r).ok())
    }

    /// The stream blocks.
    pub fn streams(&self) -> impl Iterator<Item = StreamBlock> + 'a {
        let mut r = self.after.clone();
        (0..self.streams).map_while(move |_| StreamBlock::parse(&mut r).ok())
    }
}

/// A parsed acknowledgement.
#[derive(Clone, Debug)]
pub struct Ack<'a> {
    /// Fixed part.
    pub header: AckHeader,
    /// The rest.
    pub blocks: Blocks<'a>,
}

impl<'a> Ack<'a> {
    pub(super) fn parse(r: &mut Reader<'a>) -> Result<Self, Drop> {
        let number = r.u32()?;
        let share = r.u32()?;
        let paths = r.u8()?;
        let streams = r.u8()?;
        let plane = r.u8()?;
        let lateness = r.u8()?;
        Ok(Self {
            header: AckHeader {
                number,
                share,
                plane,
                lateness,
            },
            blocks: Blocks::parse(r, paths, streams)?,
        })
    }
}

/// Writes an acknowledgement block by block.
pub(crate) struct AckWriter<'a, 'b> {
    w: &'a mut Writer<'b>,
    counts: usize,
    paths: u8,
    streams: u8,
}

impl<'a, 'b> AckWriter<'a, 'b> {
    /// Begins an acknowledgement.
    pub(crate) fn new(w: &'a mut Writer<'b>, connection_id: u64, h: &AckHeader) -> Self {
        begin(w, Type::Ack, 0, connection_id);
        Self::body(w, h)
    }

    /// Begins the same body in a packet of another type.
    pub(super) fn body(w: &'a mut Writer<'b>, h: &AckHeader) -> Self {
        w.u32(h.number);
        w.u32(h.share);
        let counts = w.len();
        w.u8(0);
        w.u8(0);
        w.u8(h.plane);
        w.u8(h.lateness);
        Self {
            w,
            counts,
            paths: 0,
            streams: 0,
        }
    }

    /// Adds a path block, before all stream blocks; false when it does not fit.
    pub(crate) fn path(&mut self, b: &PathBlock) -> bool {
        if b.wire_len() > self.w.room() || self.streams != 0 {
            return false;
        }
        b.emit(self.w);
        self.paths = self.paths.wrapping_add(1);
        self.w.patch_u8(self.counts, self.paths);
        true
    }

    /// Bytes that still fit.
    pub(crate) fn room(&self) -> usize {
        self.w.room()
    }

    /// Whether one more stream block of any kind fits.
    pub(crate) fn has_room(&self) -> bool {
        self.has_room_for(1)
    }

    /// Whether `n` more stream blocks of any kind fit.
    pub(crate) fn has_room_for(&self, n: usize) -> bool {
        self.w.room() >= STREAM_BLOCK_MAX.saturating_mul(n)
    }

    /// Adds a stream block; false when it does not fit.
    pub(crate) fn stream(&mut self, b: &StreamBlock) -> bool {
        if b.wire_len() > self.w.room() {
            return false;
        }
        b.emit(self.w);
        self.streams = self.streams.wrapping_add(1);
        self.w.patch_u8(self.counts.wrapping_add(1), self.streams);
        true
    }
}
