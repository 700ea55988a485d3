// SPDX-License-Identifier: GPL-2.0

//! The format, byte by byte. A change here is a change of the wire version.

#![forbid(unsafe_code)]

use super::*;
use crate::proto::api::{Direction, Fault, Opcode, DATA_OVERHEAD, HEADER_MAX, MAX_MESSAGE};
use crate::proto::stream::{BlockStatus, StreamBlock};
use core::ops::{Deref, DerefMut};

const CID: u64 = 0x0102_0304_0506_0708;

/// A packet.
#[derive(Clone)]
struct Bytes {
    buf: [u8; HEADER_MAX],
    len: usize,
}

impl Bytes {
    fn push(&mut self, byte: u8) {
        self.buf[self.len] = byte;
        self.len += 1;
    }
}

impl Deref for Bytes {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.buf[..self.len]
    }
}

impl DerefMut for Bytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.buf[..self.len]
    }
}

fn bytes(f: impl FnOnce(&mut Writer<'_>)) -> Bytes {
    let mut buf = [0xee; HEADER_MAX];
    let mut w = Writer::new(&mut buf);
    f(&mut w);
    let len = usize::from(w.finish());
    Bytes { buf, len }
}

#[track_caller]
fn same(b: &[u8], golden: &str) {
    let digits = b.iter().flat_map(|x| [x >> 4, x & 15]);
    let golden = golden.chars().map(|c| c.to_digit(16).unwrap_or(16));
    assert!(digits.map(u32::from).eq(golden), "{b:02x?}");
}

fn path() -> PathHeader {
    PathHeader {
        path: 0x0b,
        epoch: 0x1234,
        sequence: 0x5566_7788,
        timestamp: 0x99aa_bbcc,
        ack_request: true,
    }
}

fn header(opcode: Opcode) -> StreamHeader {
    StreamHeader {
        opcode,
        last: true,
        solicited: false,
        dst_qpn: 0x11_2233,
        src_qpn: 0x44_5566,
        sseq: 0xa0a1_a2a3,
        msn: 0xb0b1_b2b3,
        total: 8,
        round: 7,
        ..StreamHeader::default()
    }
}

fn data(s: &StreamHeader) -> Bytes {
    bytes(|w| emit_data(w, CID, &path(), s))
}

#[track_caller]
fn same_data(s: &StreamHeader, golden: &str) {
    let b = data(s);
    same(&b, golden);
    let p = Packet::parse(&b).expect("parses");
    assert_eq!(p.header_len(), b.len());
    assert_eq!(p.connection_id(), Some(CID));
    assert_eq!(p.handshake_key(), None);
    match p.body() {
        Body::Data(h, t) => {
            assert_eq!(h, &path());
            assert_eq!(t, s);
        }
        other => panic!("{other:?}"),
    }
}

#[cfg_attr(test, test)]
pub(crate) fn void() {
    let s = StreamHeader::default();
    same_data(
        &s,
        "0001001c0000000001020304050607080b0012345566778899aabbcc",
    );
    assert_eq!(data(&s).len(), DATA_MIN);
}

#[cfg_attr(test, test)]
pub(crate) fn the_longest_data_header() {
    let s = StreamHeader {
        solicited: true,
        rmsn: 0xc0c1_c2c3,
        offset: 0,
        va: 0xd0d1_d2d3_d4d5_d6d7,
        rkey: 0xe0e1_e2e3,
        imm: 0xf0f1_f2f3,
        after: Some(0x0a0b_0c0d),
        ..header(Opcode::WriteImm)
    };
    same_data(
        &s,
        "000f004c0000000001020304050607080b0212345566778899aabbcc\
         0711223300445566a0a1a2a3b0b1b2b3c0c1c2c30000000000000008\
         d0d1d2d3d4d5d6d7e0e1e2e3f0f1f2f30a0b0c0d",
    );
    assert_eq!(data(&s).len(), DATA_OVERHEAD);
}

#[cfg_attr(test, test)]
pub(crate) fn requests_and_responses() {
    let read = StreamHeader {
        request: 0x21,
        oldest: 0x20,
        va: 0x1000,
        rkey: 0x99,
        ..header(Opcode::ReadRequest)
    };
    same_data(
        &read,
        "000300480000000001020304050607080b0612345566778899aabbcc\
         0711223300445566a0a1a2a3b0b1b2b3000000210000000000000008\
         00000000000010000000009900000020",
    );
    let cas = StreamHeader {
        opcode: Opcode::CompareSwap,
        compare_add: 0x0102_0304_0506_0708,
        swap: 0x1112_1314_1516_1718,
        ..read
    };
    same_data(
        &cas,
        "000300580000000001020304050607080b0712345566778899aabbcc\
         0711223300445566a0a1a2a3b0b1b2b3000000210000000000000008\
         00000000000010000000009900000020\
         01020304050607081112131415161718",
    );
    let answer = StreamHeader {
        request: 0x21,
        compare_add: 5,
        ..header(Opcode::AtomicResponse)
    };
    same_data(
        &answer,
        "000300400000000001020304050607080b0a12345566778899aabbcc\
         0711223300445566a0a1a2a3b0b1b2b3000000210000000000000008\
         0000000000000005",
    );
    // Round trips of the rest.
    for op in [
        Opcode::Write,
        Opcode::Send,
        Opcode::SendImm,
        Opcode::SendInv,
        Opcode::FetchAdd,
        Opcode::ReadResponse,
    ] {
        for last in [false, true] {
            let mut s = header(op);
            s.last = last;
            let b = data(&s);
            match Packet::parse(&b).expect("parses").body() {
                Body::Data(_, t) => assert_eq!(t, &s),
                other => panic!("{other:?}"),
            }
        }
    }
}

#[cfg_attr(test, test)]
pub(crate) fn acknowledgements() {
    let mut block = PathBlock {
        path: 3,
        epoch: 0x0102,
        cumulative: 0x1020_3040,
        bits: [0x8000_0000_0000_0001, 2, 0, 0],
        echo: 0x5060_7080,
        delay: 0x0a0b,
        received: 0x0c0d,
        ce: 0x0e0f,
        duplicates: 0x1011,
    };
    let streams = [
        StreamBlock {
            dst_qpn: 0x01_0203,
            src_qpn: 0x04_0506,
            dir: Direction::Request,
            cumulative: 0x0708_090a,
            msn_done: 0x0b0c_0d0e,
            receive_limit: Some(0x0f10_1112),
            status: BlockStatus::Rnr {
                rmsn: 0x1314_1516,
                timer_us: 0x17_1819,
                round: 0x1a,
            },
        },
        StreamBlock {
            dst_qpn: 1,
            src_qpn: 2,
            dir: Direction::Response,
            cumulative: 3,
            msn_done: 4,
            receive_limit: None,
            status: BlockStatus::Ok,
        },
        StreamBlock {
            dst_qpn: 1,
            src_qpn: 2,
            dir: Direction::Request,
            cumulative: 3,
            msn_done: 4,
            receive_limit: None,
            status: BlockStatus::Fatal {
                msn: 9,
                fault: Fault::Access,
            },
        },
    ];
    let h = AckHeader {
        number: 0x2122_2324,
        share: 0x2526_2728,
        plane: 1,
        lateness: 0x29,
    };
    let b = bytes(|w| {
        let mut a = AckWriter::new(w, CID, &h);
        assert!(a.path(&block));
        for s in &streams {
            assert!(a.stream(s));
        }
    });
    same(
        &b,
        "0100008c000000000102030405060708\
         212223242526272801030129\
         0302010210203040506070800a0b0c0d0e0f1011\
         80000000000000010000000000000002\
         02010203010405060708090a0b0c0d0e0f101112131415161a171819\
         0100000100000002000000030000000400000000\
         0000000104000002000000030000000400000000\
         0000000900000002",
    );
    match Packet::parse(&b).expect("parses").body() {
        Body::Ack(a) => {
            assert_eq!(a.header, h);
            assert!(a.blocks.paths().eq([block]));
            assert!(a.blocks.streams().eq(streams));
        }
        other => panic!("{other:?}"),
    }
    // As many blocks as fit, never more.
    block.bits = [u64::MAX; 4];
    let mut n = 0;
    let b = bytes(|w| {
        let mut a = AckWriter::new(w, CID, &h);
        while a.path(&block) {
            n += 1;
        }
    });
    assert_eq!((n, b.len()), (9, 28 + 9 * 52));
    assert!(Packet::parse(&b).is_ok());
}

#[cfg_attr(test, test)]
pub(crate) fn probes_queries_and_ends() {
    let probe = Probe {
        path: 5,
        deaf: 0x17,
        epoch: 6,
        next: 7,
        timestamp: 8,
        challenge: 0x0910_1112_1314_1516,
        padding: 4096,
    };
    let b = bytes(|w| probe.emit(w, CID));
    same(
        &b,
        "02000028000000000102030405060708\
         051700060000000700000008091011121314151600001000",
    );
    let p = Packet::parse(&b).expect("parses");
    assert!(p.check_payload(4096).is_ok());
    assert_eq!(p.check_payload(4095), Err(Drop::Length));
    let b = bytes(|w| {
        let mut a = ProbeReply::begin(w, CID, &probe, &AckHeader::default());
        a.path(&PathBlock::default());
    });
    assert_eq!(b.len(), 16 + 24 + 12 + 20);
    match Packet::parse(&b).expect("parses").body() {
        Body::ProbeReply(r) => {
            assert_eq!(r.probe, probe);
            assert_eq!(r.ack.blocks.paths().count(), 1);
        }
        other => panic!("{other:?}"),
    }
    let query = Query {
        dst_qpn: 0x12_3456,
        src_qpn: 0x65_4321,
        dir: Direction::Response,
        sseq: 0x0102_0304,
        round: 9,
    };
    let b = bytes(|w| {
        let mut q = QueryWriter::new(w, CID);
        while q.has_room_for(1) {
            assert!(q.push(&query));
        }
        assert!(!q.push(&query));
    });
    same(
        &b[..32],
        "040001f400000000010203040506070828000000011234560965432101020304",
    );
    match Packet::parse(&b).expect("parses").body() {
        Body::Query(q) => {
            assert_eq!(q.iter().count(), QUERIES_MAX);
            assert!(q.iter().all(|x| x == query));
        }
        other => panic!("{other:?}"),
    }
    let close = Close {
        kind: CloseKind::Agree,
        number: 3,
    };
    let b = bytes(|w| close.emit(w, CID));
    same(&b, "050000180000000001020304050607080000000100000003");
}

fn key() -> HandshakeKey {
    HandshakeKey {
        source: [0xa1; 16],
        destination: [0xb2; 16],
        dscp: 26,
    }
}

#[cfg_attr(test, test)]
pub(crate) fn planes() {
    let gid = |last| {
        let mut g = [0; 16];
        (g[10], g[11], g[12], g[15]) = (0xff, 0xff, 10, last);
        g
    };
    let list = [
        PlaneAddress {
            id: 1,
            draining: false,
            gid: gid(2),
        },
        PlaneAddress {
            id: 7,
            draining: true,
            gid: [0xfd; 16],
        },
    ];
    let b = bytes(|w| Planes::emit(w, CID, (3, 4, 0x0506), &list));
    same(
        &b,
        "060000440000000001020304050607080000000300000004\
         05060200\
         0100000000000000000000000000ffff0a000002\
         07010000fdfdfdfdfdfdfdfdfdfdfdfdfdfdfdfd",
    );
    match Packet::parse(&b).expect("parses").body() {
        Body::Planes(p) => {
            assert_eq!((p.number, p.known, p.epoch), (3, 4, 0x0506));
            assert!(p.iter().eq(list));
        }
        other => panic!("{other:?}"),
    }
    let none = bytes(|w| Planes::emit(w, CID, (0, 4, 1), &[]));
    assert_eq!(none.len(), 28);
    assert!(Packet::parse(&none).is_ok());
    // What no sender may say.
    let with = |at: usize, v: u8| {
        let mut b = b.clone();
        b[at] = v;
        Packet::parse(&b).err()
    };
    for (at, v) in [
        (19, 0), // planes and no number
        (26, 9),
        (27, 1),
        (28, 7), // the same twice
        (48, 8), // too great an id
        (48, 0), // not in order
        (29, 2),
        (30, 1),
        (44, 0), // 0.0.0.2
        (44, 127),
        (44, 224),
        (44, 255),
        (52, 0xff),
    ] {
        assert_eq!(with(at, v), Some(Drop::Field), "{v} at {at}");
    }
    assert_eq!(with(26, 1), Some(Drop::Length));
    assert_eq!(with(26, 3), Some(Drop::Short));
    let nine = [list[0]; 9];
    let b = bytes(|w| Planes::emit(w, CID, (1, 0, 0), &nine));
    assert_eq!(Packet::parse(&b).err(), Some(Drop::Field));
    for (gid, good) in [([0; 16], false), (gid(0), true), ([0xff; 16], false)] {
        let p = PlaneAddress { gid, ..list[0] };
        assert_eq!(p.is_unicast(), good);
    }
}

#[cfg_attr(test, test)]
pub(crate) fn handshakes() {
    let h = Handshake {
        key: key(),
        lowest: 0,
        highest: 3,
        paths: 16,
        features: 1,
        payload_mtu: 4096,
        connection_id: CID,
        peer_connection_id: 2,
        nonce: 3,
        instance: 4,
        cookie: 5,
        cookie_time: 6,
        timestamp: 7,
        epoch: 0x0809,
    };
    let b = bytes(|w| h.emit(w, Type::Init));
    assert_eq!(b.len(), HANDSHAKE_LEN);
    same(
        &b,
        "0800007c000000000000000000000000\
         a1a1a1a1a1a1a1a1a1a1a1a1a1a1a1a1b2b2b2b2b2b2b2b2b2b2b2b2b2b2b2b21a\
         000310000000010000100001020304050607080000000000000002\
         0000000000000003000000000000000400000000000000050000000600000007\
         08090000000000000000000000000000",
    );
    let p = Packet::parse(&b).expect("parses");
    assert_eq!(p.connection_id(), None);
    assert_eq!(p.handshake_key(), Some(key()));
    assert!(p.always_checksum());
    for kind in [Type::Init, Type::Cookie, Type::Accept] {
        let b = bytes(|w| h.emit(w, kind));
        match (kind, Packet::parse(&b).expect("parses").body()) {
            (Type::Init, Body::Init(x))
            | (Type::Cookie, Body::Cookie(x))
            | (Type::Accept, Body::Accept(x)) => assert_eq!(x, &h),
            other => panic!("{other:?}"),
        }
    }
    let r = Refusal {
        key: key(),
        reason: RefuseReason::Version,
        lowest: 1,
        highest: 2,
        nonce: 3,
    };
    let b = bytes(|w| r.emit(w));
    assert!(b.len() <= HANDSHAKE_LEN);
    match Packet::parse(&b).expect("parses").body() {
        Body::Refuse(x) => assert_eq!(x, &r),
        other => panic!("{other:?}"),
    }
    let u = Unknown {
        key: key(),
        connection_id: CID,
    };
    let b = bytes(|w| u.emit(w));
    match Packet::parse(&b).expect("parses").body() {
        Body::Unknown(x) => assert_eq!(x, &u),
        other => panic!("{other:?}"),
    }
}

#[cfg_attr(test, test)]
pub(crate) fn what_is_refused() {
    let good = data(&header(Opcode::Write));
    assert!(Packet::parse(&good).is_ok());
    for len in 0..good.len() {
        assert!(Packet::parse(&good[..len]).is_err(), "{len} bytes");
    }
    let with = |at: usize, v: u8| {
        let mut b = good.clone();
        b[at] = v;
        Packet::parse(&b).err()
    };
    assert_eq!(with(0, 0x10), Some(Drop::Version));
    assert_eq!(with(0, 0x07), Some(Drop::Type));
    assert_eq!(with(1, 0x80), Some(Drop::Field));
    assert_eq!(with(3, good.len() as u8 - 1), Some(Drop::Short));
    assert_eq!(with(3, 15), Some(Drop::Length));
    assert_eq!(with(17, 11), Some(Drop::Field));
    assert_eq!(with(32, 1), Some(Drop::Field));
    let mut longer = good.clone();
    longer.push(0);
    longer[3] += 1;
    assert_eq!(Packet::parse(&longer).err(), Some(Drop::Length));
    let mut s = header(Opcode::Write);
    s.total = MAX_MESSAGE + 1;
    assert_eq!(Packet::parse(&data(&s)).err(), Some(Drop::Field));
    s.total = 100;
    s.offset = 101;
    assert_eq!(Packet::parse(&data(&s)).err(), Some(Drop::Field));
}

#[cfg_attr(test, test)]
pub(crate) fn payload_lengths() {
    let check = |s: &StreamHeader, len| {
        let b = data(s);
        Packet::parse(&b).expect("parses").check_payload(len)
    };
    let mut s = header(Opcode::Write);
    s.total = 1000;
    s.offset = 600;
    assert!(check(&s, 400).is_ok());
    assert!(check(&s, 399).is_err());
    assert!(check(&s, 401).is_err());
    s.last = false;
    assert!(check(&s, 399).is_ok());
    assert!(check(&s, 400).is_err());
    assert!(check(&s, 0).is_err());
    assert!(check(&s, u32::MAX).is_err());
    s = header(Opcode::Send);
    s.total = 0;
    assert!(check(&s, 0).is_ok());
    assert!(check(&s, 1).is_err());
    s = header(Opcode::ReadRequest);
    assert!(check(&s, 0).is_ok());
    assert!(check(&s, 8).is_err());
    assert!(check(&StreamHeader::default(), 1).is_err());
}

#[cfg_attr(test, test)]
pub(crate) fn random_bytes_never_panic() {
    let mut x = 0x2545_f491_4f6c_dd1du64;
    let mut next = move || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        x
    };
    let seeds = [
        data(&header(Opcode::Void)),
        data(&header(Opcode::WriteImm)),
        data(&header(Opcode::CompareSwap)),
        bytes(|w| {
            let mut a = AckWriter::new(w, CID, &AckHeader::default());
            a.path(&PathBlock::default());
            a.path(&PathBlock {
                bits: [1; 4],
                ..PathBlock::default()
            });
        }),
        bytes(|w| {
            let mut q = QueryWriter::new(w, CID);
            q.push(&Query {
                dst_qpn: 1,
                src_qpn: 2,
                dir: Direction::Request,
                sseq: 0,
                round: 0,
            });
        }),
    ];
    for _ in 0..200_000 {
        let mut b = seeds[next() as usize % seeds.len()].clone();
        for _ in 0..next() % 4 {
            let at = next() as usize % b.len();
            b[at] = next() as u8;
        }
        if next() % 8 == 0 {
            b.len = next() as usize % (b.len + 1);
        }
        if let Ok(p) = Packet::parse(&b) {
            let _ = p.check_payload(next() as u32);
            match p.body() {
                Body::Ack(a) => {
                    a.blocks.paths().count();
                    a.blocks.streams().count();
                }
                Body::Query(q) => {
                    q.iter().count();
                }
                _ => {}
            }
        }
    }
}
