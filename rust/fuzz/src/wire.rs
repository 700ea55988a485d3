// SPDX-License-Identifier: GPL-2.0

//! Target `wire`: any bytes as a packet. What is parsed is consistent in itself, and what
//! the core can write again is the same packet.

#![forbid(unsafe_code)]

use metaroce::proto::api::{Opcode, HEADER_MAX, MAX_MESSAGE};
use metaroce::proto::wire::{self, Body, Packet, Type};

/// Parses `bytes` and checks what comes of it.
pub fn run(bytes: &[u8]) {
    let peeked = wire::peek(bytes);
    let crc = wire::crc_of(bytes);
    let parsed = Packet::parse(bytes);
    let Ok(packet) = parsed else {
        return;
    };
    let len = packet.header_len();
    assert!((wire::BASE_LEN..=bytes.len().min(HEADER_MAX)).contains(&len));
    assert_eq!(crc, Some(packet.crc()));
    // What is sorted before it is read is sorted rightly.
    match packet.connection_id() {
        Some(id) => {
            let (kind, peeked) = peeked.expect("a packet of a connection");
            assert_eq!(peeked, id);
            assert_eq!(kind, kind_of(packet.body()));
            assert!(packet.handshake_key().is_none());
        }
        None => {
            assert!(peeked.is_none());
            assert!(packet.handshake_key().is_some_and(|k| k.dscp < 64));
            assert!(packet.always_checksum());
        }
    }
    // Nothing behind the header counts, and nothing of the header may be missing.
    assert!(Packet::parse(&bytes[..len]).is_ok());
    assert!(Packet::parse(&bytes[..len - 1]).is_err());
    let payload = (bytes.len() - len) as u32;
    for n in [0, 1, 8, payload, 65_535, u32::MAX] {
        let _ = packet.check_payload(n);
    }
    match packet.body() {
        Body::Data(_, s) => {
            assert!(packet.has_data());
            assert!(s.dst_qpn < 1 << 24 && s.src_qpn < 1 << 24);
            assert!(s.total <= MAX_MESSAGE);
            if packet.check_payload(payload).is_ok() && s.opcode != Opcode::Void {
                // READs and atomics name bytes that they do not carry.
                let carries = matches!(
                    s.opcode,
                    Opcode::Write
                        | Opcode::WriteImm
                        | Opcode::Send
                        | Opcode::SendImm
                        | Opcode::SendInv
                        | Opcode::ReadResponse
                );
                if carries {
                    let end = u64::from(s.offset) + u64::from(payload);
                    assert!(end <= u64::from(s.total));
                    assert_eq!(s.last, end == u64::from(s.total));
                } else {
                    assert_eq!(payload, 0);
                }
            }
        }
        Body::Ack(a) => blocks(&a.blocks, len),
        Body::ProbeReply(r) => blocks(&r.ack.blocks, len),
        Body::Query(q) => {
            let mut n = 0;
            for query in q.iter() {
                assert!(query.dst_qpn < 1 << 24 && query.src_qpn < 1 << 24);
                n += 1;
            }
            assert!(n <= wire::QUERIES_MAX);
        }
        Body::Init(h) | Body::Cookie(h) | Body::Accept(h) => {
            assert!(h.lowest <= h.highest && (1..=64).contains(&h.paths));
            assert_eq!(len, wire::HANDSHAKE_LEN);
        }
        Body::Probe(p) => assert!(packet.check_payload(p.padding).is_ok()),
        Body::Planes(p) => {
            let mut least = 0;
            for plane in p.iter() {
                assert!(plane.id >= least && usize::from(plane.id) < wire::PLANES_MAX);
                assert!(plane.is_unicast());
                least = plane.id + 1;
            }
            assert_eq!(p.iter().count() == 0, p.number == 0);
        }
        Body::Close(_) | Body::Refuse(_) | Body::Unknown(_) => {}
    }
}

fn blocks(blocks: &wire::Blocks<'_>, len: usize) {
    let (mut paths, mut streams) = (0, 0);
    for b in blocks.paths() {
        let _ = b.bits;
        paths += 1;
    }
    for b in blocks.streams() {
        assert!(b.dst_qpn < 1 << 24 && b.src_qpn < 1 << 24);
        streams += 1;
    }
    assert!(paths * 20 + streams * 20 <= len);
    // A second look sees the same.
    assert_eq!(blocks.paths().count(), paths);
    assert_eq!(blocks.streams().count(), streams);
}

fn kind_of(body: &Body<'_>) -> Type {
    match body {
        Body::Data(..) => Type::Data,
        Body::Ack(_) => Type::Ack,
        Body::Probe(_) => Type::Probe,
        Body::ProbeReply(_) => Type::ProbeReply,
        Body::Query(_) => Type::Query,
        Body::Close(_) => Type::Close,
        Body::Planes(_) => Type::Planes,
        Body::Init(_) => Type::Init,
        Body::Cookie(_) => Type::Cookie,
        Body::Accept(_) => Type::Accept,
        Body::Refuse(_) => Type::Refuse,
        Body::Unknown(_) => Type::Unknown,
    }
}
