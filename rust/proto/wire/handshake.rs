// SPDX-License-Identifier: GPL-2.0

//! Packets of the handshake. They have no connection id; endpoints are named inside.

#![forbid(unsafe_code)]

use super::bytes::Reader;
use super::{begin, Drop, Type, Writer, BASE_LEN};

/// Length of Init, Cookie and Accept.
pub const HANDSHAKE_LEN: usize = BASE_LEN + 108;

/// Room for what a later version has to say, so that no answer outgrows its cause.
const RESERVED: usize = 14;

/// Who speaks to whom; names a connection before it has ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct HandshakeKey {
    /// GID of the packet's sender.
    pub source: [u8; 16],
    /// GID of the one it is for.
    pub destination: [u8; 16],
    /// Traffic class of the connection, without its ECN bits: the DSCP, 6 bits.
    pub dscp: u8,
}

impl HandshakeKey {
    /// The key of an answer.
    pub const fn reversed(&self) -> Self {
        Self {
            source: self.destination,
            destination: self.source,
            dscp: self.dscp,
        }
    }

    fn parse(r: &mut Reader<'_>) -> Result<Self, Drop> {
        let source = r.gid()?;
        let destination = r.gid()?;
        let dscp = r.u8()?;
        if dscp > 63 {
            return Err(Drop::Field);
        }
        Ok(Self {
            source,
            destination,
            dscp,
        })
    }

    fn emit(&self, w: &mut Writer<'_>) {
        w.gid(&self.source);
        w.gid(&self.destination);
        w.u8(self.dscp);
    }
}

/// Init, Cookie and Accept have one layout; a Cookie repeats what the Init said and adds
/// the cookie, so that it needs no state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handshake {
    /// Who.
    pub key: HandshakeKey,
    /// Lowest version the sender speaks.
    pub lowest: u8,
    /// Highest one.
    pub highest: u8,
    /// Paths it wants; in an Accept the ones that will be.
    pub paths: u8,
    /// Feature bits ([`super::super::connection::features`]).
    pub features: u32,
    /// Payload bytes of a packet at the most.
    pub payload_mtu: u32,
    /// Sender's connection id: what packets to it carry.
    pub connection_id: u64,
    /// In an Accept, the receiver's connection id from its Init, else 0.
    pub peer_connection_id: u64,
    /// Random number of the attempt, chosen by the initiator and repeated to it.
    pub nonce: u64,
    /// Names the sender's device and its life; another one after a restart.
    pub instance: u64,
    /// Proof that the initiator receives at its address, 0 in the first Init.
    pub cookie: u64,
    /// Clock of the one who made the cookie, in units of 2^30 ns.
    pub cookie_time: u32,
    /// Send time, in units of 64 ns, of the Init; repeated in the answers.
    pub timestamp: u32,
    /// Epoch in which the sender's paths begin.
    pub epoch: u16,
}

impl Handshake {
    pub(super) fn parse(r: &mut Reader<'_>) -> Result<Self, Drop> {
        let key = HandshakeKey::parse(r)?;
        let h = Self {
            key,
            lowest: r.u8()?,
            highest: r.u8()?,
            paths: r.u8()?,
            features: r.u32()?,
            payload_mtu: r.u32()?,
            connection_id: r.u64()?,
            peer_connection_id: r.u64()?,
            nonce: r.u64()?,
            instance: r.u64()?,
            cookie: r.u64()?,
            cookie_time: r.u32()?,
            timestamp: r.u32()?,
            epoch: r.u16()?,
        };
        let _reserved = r.bytes(RESERVED)?;
        if h.lowest > h.highest || h.paths == 0 || h.paths > 64 {
            return Err(Drop::Field);
        }
        Ok(h)
    }

    /// Writes the packet; `kind` is Init, Cookie or Accept.
    pub(crate) fn emit(&self, w: &mut Writer<'_>, kind: Type) {
        begin(w, kind, 0, 0);
        self.key.emit(w);
        w.u8(self.lowest);
        w.u8(self.highest);
        w.u8(self.paths);
        w.u32(self.features);
        w.u32(self.payload_mtu);
        w.u64(self.connection_id);
        w.u64(self.peer_connection_id);
        w.u64(self.nonce);
        w.u64(self.instance);
        w.u64(self.cookie);
        w.u32(self.cookie_time);
        w.u32(self.timestamp);
        w.u16(self.epoch);
        w.zeros(RESERVED);
    }
}

/// Why an Init is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefuseReason {
    /// No QP here is connected to the initiator yet: try again.
    NotYet,
    /// No version in common.
    Version,
}

/// Answer to an Init that opens nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Who.
    pub key: HandshakeKey,
    /// Why.
    pub reason: RefuseReason,
    /// Lowest version spoken here.
    pub lowest: u8,
    /// Highest one.
    pub highest: u8,
    /// The Init's nonce.
    pub nonce: u64,
}

impl Refusal {
    pub(super) fn parse(r: &mut Reader<'_>) -> Result<Self, Drop> {
        let key = HandshakeKey::parse(r)?;
        let reason = match r.u8()? {
            0 => RefuseReason::NotYet,
            1 => RefuseReason::Version,
            _ => return Err(Drop::Field),
        };
        Ok(Self {
            key,
            reason,
            lowest: r.u8()?,
            highest: r.u8()?,
            nonce: r.u64()?,
        })
    }

    pub(crate) fn emit(&self, w: &mut Writer<'_>) {
        begin(w, Type::Refuse, 0, 0);
        self.key.emit(w);
        w.u8(match self.reason {
            RefuseReason::NotYet => 0,
            RefuseReason::Version => 1,
        });
        w.u8(self.lowest);
        w.u8(self.highest);
        w.u64(self.nonce);
    }
}

/// Says that a connection id names nothing here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unknown {
    /// Who.
    pub key: HandshakeKey,
    /// The id that was in the packet.
    pub connection_id: u64,
}

impl Unknown {
    pub(super) fn parse(r: &mut Reader<'_>) -> Result<Self, Drop> {
        let key = HandshakeKey::parse(r)?;
        let _padding = r.bytes(3)?;
        Ok(Self {
            key,
            connection_id: r.u64()?,
        })
    }

    pub(crate) fn emit(&self, w: &mut Writer<'_>) {
        begin(w, Type::Unknown, 0, 0);
        self.key.emit(w);
        w.u8(0);
        w.u16(0);
        w.u64(self.connection_id);
    }
}
