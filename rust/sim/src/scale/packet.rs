// SPDX-License-Identifier: GPL-2.0

//! Packets on their way, in places that are used again.

#![forbid(unsafe_code)]

use metaroce::proto::api::HEADER_MAX;

/// What a packet of a model is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A packet of the real protocol, with its header.
    #[default]
    Real,
    Data,
    Ack,
    Nak,
    Cnp,
}

/// A packet. Payload has a length and no bytes.
#[derive(Clone)]
pub(crate) struct Packet {
    pub(crate) src: u32,
    pub(crate) dst: u32,
    pub(crate) plane: u16,
    pub(crate) ce: bool,
    /// Bytes on the line.
    pub(crate) size: u32,
    /// Over addresses and ports: what ECMP goes by.
    pub(crate) hash: u64,
    /// Port over which it came, for PFC.
    pub(crate) ingress: u32,
    pub(crate) payload: u32,
    pub(crate) kind: Kind,
    /// Models: flow, number, and a second number.
    pub(crate) flow: u32,
    pub(crate) psn: u64,
    pub(crate) other: u64,
    pub(crate) header_len: u16,
    pub(crate) header: [u8; HEADER_MAX],
}

/// No port.
pub(crate) const NONE: u32 = u32::MAX;

pub(crate) struct Packets {
    all: Vec<Packet>,
    free: Vec<u32>,
}

impl Packets {
    pub(crate) fn new() -> Self {
        Self {
            all: Vec::with_capacity(1 << 12),
            free: Vec::with_capacity(1 << 12),
        }
    }

    /// A place for a packet. What a former one left in it is overwritten by the caller.
    pub(crate) fn take(&mut self) -> u32 {
        if let Some(id) = self.free.pop() {
            return id;
        }
        self.all.push(Packet {
            src: 0,
            dst: 0,
            plane: 0,
            ce: false,
            size: 0,
            hash: 0,
            ingress: NONE,
            payload: 0,
            kind: Kind::Real,
            flow: 0,
            psn: 0,
            other: 0,
            header_len: 0,
            header: [0; HEADER_MAX],
        });
        (self.all.len() - 1) as u32
    }

    pub(crate) fn free(&mut self, id: u32) {
        self.free.push(id);
    }

    pub(crate) fn get(&self, id: u32) -> &Packet {
        &self.all[id as usize]
    }

    pub(crate) fn get_mut(&mut self, id: u32) -> &mut Packet {
        &mut self.all[id as usize]
    }

    /// Packets that are on their way.
    pub(crate) fn used(&self) -> usize {
        self.all.len() - self.free.len()
    }
}
