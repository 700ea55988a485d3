// SPDX-License-Identifier: GPL-2.0

//! What an end tells about its planes.

#![forbid(unsafe_code)]

use super::bytes::Reader;
use super::{begin, Drop, Type, Writer};

/// Planes of a device at the most; their ids are below this.
pub const PLANES_MAX: usize = 8;

/// Nothing new is to be sent to the plane.
const FLAG_DRAINING: u8 = 1 << 0;

/// A plane of a device: a netdev of it, with an address of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PlaneAddress {
    /// Its number on the device, below [`PLANES_MAX`]. Planes of two ends that have the same
    /// number are taken to be one fabric.
    pub id: u8,
    /// It is about to go: nothing new is to be sent there.
    pub draining: bool,
    /// Its address.
    pub gid: [u8; 16],
}

impl PlaneAddress {
    /// Whether it is the address of one host: not of nobody, of everybody, of a group or of
    /// the one who asks.
    pub fn is_unicast(&self) -> bool {
        match self.gid {
            // IPv4
            [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, first, ..] => {
                !matches!(first, 0 | 127 | 224..=255)
            }
            // ::, ::1 and other forms of IPv4
            [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, ..] => false,
            [first, ..] => first != 0xff,
        }
    }

    /// Whether it is an IPv4 address.
    pub fn is_ipv4(&self) -> bool {
        matches!(self.gid, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, ..])
    }
}

/// Announces the planes of the sender, and says which announcement of the receiver is known.
#[derive(Clone, Debug)]
pub struct Planes<'a> {
    /// Number of the announcement, from 1; 0: there is none in this packet.
    pub number: u32,
    /// Number of the receiver's newest announcement that has arrived; 0 is none.
    pub known: u32,
    /// Epoch in which the sender's paths began, as the handshake has told: what is left of
    /// an earlier life of the connection differs.
    pub epoch: u16,
    count: u8,
    r: Reader<'a>,
}

impl<'a> Planes<'a> {
    pub(super) fn parse(r: &mut Reader<'a>) -> Result<Self, Drop> {
        let (number, known, epoch) = (r.u32()?, r.u32()?, r.u16()?);
        let count = r.u8()?;
        if r.u8()? != 0 || usize::from(count) > PLANES_MAX || (number == 0) != (count == 0) {
            return Err(Drop::Field);
        }
        let start = r.clone();
        let mut least = 0;
        for _ in 0..count {
            let p = Self::plane(r)?;
            // In the order of their ids, each once.
            if p.id < least || usize::from(p.id) >= PLANES_MAX || !p.is_unicast() {
                return Err(Drop::Field);
            }
            least = p.id.wrapping_add(1);
        }
        Ok(Self {
            number,
            known,
            epoch,
            count,
            r: start,
        })
    }

    fn plane(r: &mut Reader<'_>) -> Result<PlaneAddress, Drop> {
        let (id, flags, zero) = (r.u8()?, r.u8()?, r.u16()?);
        if flags & !FLAG_DRAINING != 0 || zero != 0 {
            return Err(Drop::Field);
        }
        Ok(PlaneAddress {
            id,
            draining: flags & FLAG_DRAINING != 0,
            gid: r.gid()?,
        })
    }

    /// The planes of the sender, in the order of their ids.
    pub fn iter(&self) -> impl Iterator<Item = PlaneAddress> + 'a {
        let mut r = self.r.clone();
        (0..self.count).map_while(move |_| Self::plane(&mut r).ok())
    }

    /// Writes a packet that announces `planes`, which are in the order of their ids.
    pub(crate) fn emit(
        w: &mut Writer<'_>,
        connection_id: u64,
        (number, known, epoch): (u32, u32, u16),
        planes: &[PlaneAddress],
    ) {
        begin(w, Type::Planes, 0, connection_id);
        w.u32(number);
        w.u32(known);
        w.u16(epoch);
        w.u8(planes.len() as u8);
        w.u8(0);
        for p in planes {
            w.u8(p.id);
            w.u8(if p.draining { FLAG_DRAINING } else { 0 });
            w.u16(0);
            w.gid(&p.gid);
        }
    }
}
