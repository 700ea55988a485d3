// SPDX-License-Identifier: GPL-2.0

//! Coming up: under loss, with strangers, with versions that do not meet; and packets that
//! nobody sent.

#![forbid(unsafe_code)]

mod common;

use common::{drain, hosts, pair, stream_writes, Nobody, BASE, RKEY};
use metaroce::proto::api::{ConnectionError, Event, RxInfo, Transmit};
use metaroce::proto::connection::{stateless_reply, Config, Connection, ConnectionState, Ids};
use metaroce::proto::stream::{State, Stream, StreamAttr};
use metaroce::proto::wire::{Body, HandshakeKey, Packet, CRC_OFFSET, HANDSHAKE_LEN};
use metaroce_sim::{gid, write, Link, QpSetup, Rng, MS, S, US};

fn end(me: usize, peer: usize) -> Connection {
    let mut cfg = Config::new(1500);
    cfg.secret = [me as u8; 16];
    cfg.instance = 100 + me as u64;
    let ids = Ids {
        local_cid: 0x1000 + me as u64,
        local_gid: gid(me),
        remote_gid: gid(peer),
        dscp: 0,
    };
    let mut c = Connection::new(&cfg, ids, S).expect("memory");
    let mut stream = Stream::new(16, 1).expect("memory");
    stream.set_attr(&StreamAttr {
        local_qpn: 10 + me as u32,
        remote_qpn: 10 + peer as u32,
        payload_mtu: 1024,
        window: 64,
        ..StreamAttr::default()
    });
    let Ok((id, _)) = c.attach(S, stream, Connection::spare(1).expect("memory")) else {
        panic!("refused")
    };
    c.set_state(S, id, State::Rtr);
    c
}

fn packet(c: &mut Connection, now: u64) -> Option<Vec<u8>> {
    let mut tx = Transmit::new();
    c.poll_transmit(now, &mut tx)
        .then(|| tx.header[..usize::from(tx.header_len)].to_vec())
}

fn give(c: &mut Connection, now: u64, bytes: &[u8]) -> bool {
    let p = Packet::parse(bytes).expect("well-formed");
    c.receive(now, &p, &RxInfo::default(), &mut Nobody).is_ok()
}

#[test]
fn handshake_under_loss() {
    for seed in 0..40 {
        let mut sim = hosts(seed, 16);
        let mut link = Link::new(1_000_000, 50 * US);
        link.loss = 300_000;
        link.duplicate = 100_000;
        sim.fabric.direct(0, 1, &link);
        let (q, _) = sim.connect(0, 1, &QpSetup::default());
        let now = sim.now;
        sim.hosts[0]
            .post(now, q, write(BASE, RKEY, 10_000), vec![1; 10_000])
            .unwrap();
        sim.pump(0);
        drain(&mut sim, &[q], 3 * S);
        for h in 0..2 {
            let c = sim.hosts[h].connection_at(0).unwrap();
            assert_eq!(c.state(), ConnectionState::Up);
            assert_eq!(c.counters().established, 1, "one life");
        }
    }
}

#[test]
fn no_answer_is_longer_than_its_cause_and_none_needs_state() {
    let mut a = end(0, 1);
    let secret = [7; 16];
    let seen = HandshakeKey {
        source: gid(0),
        destination: gid(1),
        dscp: 0,
    };
    let init = packet(&mut a, S).expect("an Init");
    assert_eq!(init.len(), HANDSHAKE_LEN);
    let mut tx = Transmit::new();
    let answer = |b: &[u8], seen: &HandshakeKey, tx: &mut Transmit| {
        let p = Packet::parse(b).expect("well-formed");
        stateless_reply(&p, seen, &secret, S, tx)
            .then(|| tx.header[..usize::from(tx.header_len)].to_vec())
    };
    // From another address than it names: no answer.
    let liar = HandshakeKey {
        source: gid(5),
        ..seen
    };
    assert_eq!(answer(&init, &liar, &mut tx), None);
    let cookie = answer(&init, &seen, &mut tx).expect("a cookie");
    assert!(cookie.len() <= init.len() && tx.always_checksum);
    assert!(give(&mut a, S, &cookie));
    let init = packet(&mut a, S).expect("an Init with the cookie");
    let refusal = answer(&init, &seen, &mut tx).expect("not yet");
    assert!(refusal.len() <= init.len());
    assert!(give(&mut a, S, &refusal));
    assert_eq!(a.state(), ConnectionState::Connecting);
    // The cookie of another address, or another attempt, is none.
    let mut stolen = init.clone();
    stolen[16 + 15] ^= 1;
    let thief = HandshakeKey {
        source: stolen[16..32].try_into().unwrap(),
        ..seen
    };
    let again = answer(&stolen, &thief, &mut tx).expect("a cookie, not a refusal");
    assert!(matches!(
        Packet::parse(&again).unwrap().body(),
        Body::Cookie(_)
    ));
    let p = Packet::parse(&init).unwrap();
    let late = stateless_reply(&p, &seen, &secret, S + 20 * S, &mut tx);
    assert!(late);
    let b = &tx.header[..usize::from(tx.header_len)];
    assert!(matches!(Packet::parse(b).unwrap().body(), Body::Cookie(_)));
}

#[test]
fn versions_that_do_not_meet() {
    // An Init from the future.
    let (mut a, mut b) = (end(0, 1), end(1, 0));
    let mut init = packet(&mut a, S).expect("an Init");
    init[49] = 3;
    init[50] = 5;
    assert!(give(&mut b, S, &init));
    let refusal = packet(&mut b, S).expect("a refusal");
    match Packet::parse(&refusal).unwrap().body() {
        Body::Refuse(r) => assert_eq!((r.lowest, r.highest), (0, 0)),
        other => panic!("{other:?}"),
    }
    // What it says in the other direction ends the attempt, and every QP.
    let mut refusal = refusal;
    let at = refusal.len() - 10;
    refusal[at] = 3;
    refusal[at + 1] = 5;
    assert!(give(&mut a, S, &refusal));
    assert_eq!(a.state(), ConnectionState::Failed);
    let mut events = Vec::new();
    while let Some(e) = a.poll_event(S) {
        events.push(e);
    }
    assert!(
        events.contains(&Event::ConnectionFailed(ConnectionError::Version {
            lowest: 3,
            highest: 5
        }))
    );
    assert!(events
        .iter()
        .any(|e| matches!(e, Event::StreamError { .. })));
    // A refusal with another nonce is nobody's.
    let mut c = end(0, 1);
    let _ = packet(&mut c, S);
    let last = refusal.len() - 1;
    refusal[last] ^= 1;
    let p = Packet::parse(&refusal).unwrap();
    assert!(c.receive(S, &p, &RxInfo::default(), &mut Nobody).is_err());
    assert_eq!(c.state(), ConnectionState::Connecting);
}

#[test]
fn a_forged_hint_changes_nothing() {
    let (mut sim, _, q) = pair(3, &Link::new(1_000_000, 20 * US));
    stream_writes(&mut sim, &[q], 8, 5 * MS);
    drain(&mut sim, &[q], S);
    // What a host that knows nothing would answer to our data.
    let now = sim.now;
    let mut tx = Transmit::new();
    sim.hosts[0]
        .post(now, q, write(BASE, RKEY, 10), vec![0; 10])
        .unwrap();
    assert!(sim.hosts[0].connection(q).poll_transmit(now, &mut tx));
    let data = tx.header[..usize::from(tx.header_len)].to_vec();
    let seen = HandshakeKey {
        source: gid(0),
        destination: gid(1),
        dscp: 0,
    };
    let p = Packet::parse(&data).unwrap();
    assert!(stateless_reply(&p, &seen, &[0; 16], now, &mut tx));
    let hint = tx.header[..usize::from(tx.header_len)].to_vec();
    assert!(hint.len() <= data.len());
    for _ in 0..10 {
        assert!(give(sim.hosts[0].connection(q), now, &hint));
    }
    let flow = stream_writes(&mut sim, &[q], 8, 50 * MS);
    assert!(flow.rate > 500.0);
    let c = sim.hosts[0].connection(q);
    assert_eq!(c.counters().established, 1);
    assert!(c.counters().handshakes_sent < 10);
}

/// Packets of a real conversation, changed at random: nothing panics, and the connection
/// works afterwards.
#[test]
fn hostile_packets() {
    for seed in 1..=12 {
        let mut rng = Rng::new(seed);
        println!("seed {seed}");
        let (mut a, mut b) = (end(0, 1), end(1, 0));
        let mut now = S;
        let mut seen: Vec<Vec<u8>> = Vec::new();
        for round in 0..1_500 {
            now += rng.below(200 * US);
            for (x, y) in [(0, 1), (1, 0)] {
                let (from, to) = if x < y {
                    (&mut a, &mut b)
                } else {
                    (&mut b, &mut a)
                };
                from.handle_timeout(now);
                for _ in 0..8 {
                    let Some(bytes) = packet(from, now) else {
                        break;
                    };
                    if let Ok(p) = Packet::parse(&bytes) {
                        let _ = to.receive(now, &p, &RxInfo::default(), &mut Nobody);
                    }
                    if seen.len() < 500 {
                        seen.push(bytes);
                    }
                }
                while from.poll_event(now).is_some() {}
            }
            if round < 1_000 && !seen.is_empty() {
                for _ in 0..4 {
                    let mut bytes = seen[rng.below(seen.len() as u64) as usize].clone();
                    for _ in 0..1 + rng.below(4) {
                        // Mostly behind the connection id, so that it gets somewhere.
                        let at = match rng.below(8) {
                            0 => rng.below(16),
                            _ => 16 + rng.below(bytes.len() as u64 - 16),
                        } as usize;
                        if !(CRC_OFFSET..CRC_OFFSET + 4).contains(&at) {
                            bytes[at] = match rng.below(3) {
                                0 => rng.next() as u8,
                                1 => bytes[at].wrapping_add(1),
                                _ => 0xff,
                            };
                        }
                    }
                    let Ok(p) = Packet::parse(&bytes) else {
                        continue;
                    };
                    let info = RxInfo {
                        ce: rng.chance(100_000),
                        plane: 0,
                        payload_len: [0, 1, 1344, rng.next() as u32][rng.below(4) as usize],
                    };
                    let to = if rng.chance(500_000) { &mut a } else { &mut b };
                    let _ = to.receive(now, &p, &info, &mut Nobody);
                    to.end_of_batch(now);
                }
            }
        }
    }
}
