// SPDX-License-Identifier: GPL-2.0
//! What a hostile host sends. Each attack gives the number of its packets, and the counters
//! by which they must rise.

#![forbid(unsafe_code)]

use crate::packet::{self, kind, seal, Data, Handshake, Packet, Route};
use selftests::ktap::Outcome;
use selftests::rng::Rng;
use selftests::sys::Frames;
use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

/// What somebody on the path has seen of a connection.
pub struct Spy {
    listening: Frames,
    /// Addresses of true packets to the victim.
    pub route: Option<Route>,
    /// Id in packets to the victim, and in those from it.
    pub to: u64,
    pub from: u64,
    /// The newest data packet of a Send or Write to the victim.
    request: Data,
    /// The newest data packet from it on each path.
    theirs: HashMap<u8, Data>,
    /// Packets to the victim as they were, with their source ports.
    pub kept: VecDeque<(u16, Vec<u8>)>,
    /// UDP bytes that came from the victim, by the address that they went to.
    pub received: HashMap<[u8; 4], u64>,
    own: [u8; 4],
    victim: [u8; 4],
    /// Of the connection: others are not looked at.
    dscp: u8,
    /// Payload of a packet at the most.
    most: usize,
}

/// Packets that the spy keeps.
const KEPT: usize = 4000;

impl Spy {
    /// Listens to the connection with this DSCP.
    pub fn new(netdev: &str, own: [u8; 4], victim: [u8; 4], dscp: u8) -> Outcome<Self> {
        let listening = Frames::open(netdev, true).map_err(|e| format!("a socket for frames: {e}"))?;
        let mtu =
            std::fs::read_to_string(format!("/sys/class/net/{netdev}/mtu")).map_err(|e| e.to_string())?;
        Ok(Spy {
            listening,
            route: None,
            to: 0,
            from: 0,
            request: Data::default(),
            theirs: HashMap::new(),
            kept: VecDeque::new(),
            received: HashMap::new(),
            own,
            victim,
            dscp,
            most: mtu.trim().parse::<usize>().map_err(|e| e.to_string())?.saturating_sub(28),
        })
    }

    /// Reads what has passed for `time`.
    pub fn look(&mut self, time: Duration) -> Outcome {
        let end = Instant::now() + time;
        let mut room = vec![0; 65536];
        loop {
            match self.listening.recv(&mut room) {
                Ok(Some(frame)) => {
                    if let Some(seen) = packet::read(frame) {
                        let (route, payload, port) = (seen.route, seen.payload.to_vec(), seen.to_port);
                        self.note(route, payload, port);
                    }
                }
                Ok(None) => {
                    if Instant::now() >= end {
                        return Ok(());
                    }
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(e) => return Err(format!("reading frames: {e}").into()),
            }
        }
    }

    fn note(&mut self, route: Route, payload: Vec<u8>, to_port: u16) {
        if route.from == self.victim && to_port == packet::PORT {
            *self.received.entry(route.to).or_default() += payload.len() as u64 + 28;
        }
        if route.tos >> 2 != self.dscp {
            return;
        }
        let Some(id) = payload.get(8..16).and_then(|b| b.try_into().ok()).map(u64::from_be_bytes) else {
            return;
        };
        if route.from == self.victim && route.to == self.own && id != 0 {
            self.from = id;
            if payload[0] & 0xf == kind::DATA {
                if let Some((_, data)) = Data::read(&payload) {
                    self.theirs.insert(data.path, data);
                }
            }
        }
        if route.to != self.victim || route.from != self.own {
            return;
        }
        if id != 0 {
            self.to = id;
            self.route = Some(route);
            if payload[0] & 0xf == kind::DATA {
                if let Some((op, data)) = Data::read(&payload) {
                    if (1..=5).contains(&op) && data.time > self.request.time {
                        self.request = data;
                    }
                }
            }
        }
        // Several in one are no packet that could be sent.
        if payload.len() > self.most {
            return;
        }
        if self.kept.len() == KEPT {
            self.kept.pop_front();
        }
        self.kept.push_back((route.from_port, payload));
    }

    /// The newest data packet to the victim that moves bytes of a Send or Write.
    pub fn last(&self) -> Data {
        self.request
    }
}

/// Who sends.
pub struct Sender {
    frames: Frames,
    pub rng: Rng,
    /// UDP bytes sent, by the address in them.
    pub sent: HashMap<[u8; 4], u64>,
    pub packets: u64,
}

impl Sender {
    pub fn new(netdev: &str, seed: u64) -> Outcome<Self> {
        let frames = Frames::open(netdev, false).map_err(|e| format!("a socket for frames: {e}"))?;
        Ok(Sender { frames, rng: Rng::of(&[seed, 7]), sent: HashMap::new(), packets: 0 })
    }

    /// Sends `payload` with these addresses. The interface's queue may be full for a moment.
    pub fn send(&mut self, route: &Route, payload: &[u8]) -> Outcome {
        let frame = route.frame(payload);
        for _ in 0..1000 {
            match self.frames.send(&frame) {
                Ok(()) => {
                    self.packets += 1;
                    *self.sent.entry(route.from).or_default() += payload.len() as u64 + 28;
                    return Ok(());
                }
                Err(e) if e.raw_os_error() == Some(105) => std::thread::sleep(Duration::from_micros(200)),
                Err(e) => return Err(format!("sending a frame: {e}").into()),
            }
        }
        Err("the interface takes no frame".into())
    }
}

/// Counters that must rise at least by so much.
pub type Expected = Vec<(&'static str, u64)>;

/// So many of the `templates`, the first ones, carry an id.
const WITH_ID: usize = 11;

/// One packet of each kind, well-formed, for the connection `id`. The payload's length says
/// where the header ends.
pub fn templates(spy: &Spy, id: u64) -> Vec<(&'static str, Packet, usize)> {
    let d = Data { number: 3, total: 64, ..spy.last() };
    let body = |p: Packet| p.u32(1).u32(0).u8(1).u8(1).u8(0).u8(0);
    let blocks = |p: Packet| {
        p.u8(0)
            .u8(1)
            .u16(d.epoch)
            .u32(d.sequence)
            .u32(0)
            .u16(1)
            .u16(1)
            .u16(0)
            .u16(0)
            .u64(5)
            .u32(d.src)
            .u32(4 << 24 | d.dst)
            .u32(d.sseq)
            .u32(1)
            .u32(0)
            .u32(1)
            .u32(2)
    };
    let probe = |kind| Packet::new(kind, 0, id).u8(0).u8(0).u16(d.epoch).u32(d.sequence).u32(d.time).u64(77);
    let mut all = vec![
        ("data", d.packet(id, 2, 1).u64(4096).u32(9).header(), 64),
        ("write-imm", d.packet(id, 2 | 8, 2).u64(4096).u32(9).u32(7).u32(1).header(), 64),
        ("read request", d.packet(id, 2, 6).u64(4096).u32(9).u32(0).header(), 0),
        ("atomic", Data { total: 8, ..d }.packet(id, 2, 7).u64(4096).u32(9).u32(0).u64(1).u64(2).header(), 0),
        ("atomic response", Data { total: 8, ..d }.packet(id, 2, 10).u64(5).header(), 0),
        ("ack", blocks(body(Packet::new(kind::ACK, 0, id))).header(), 0),
        ("probe", probe(kind::PROBE).u32(32).header(), 32),
        ("probe reply", blocks(body(probe(kind::REPLY).u32(0))).header(), 0),
        (
            "query",
            Packet::new(kind::QUERY, 0, id).u8(1).u8(0).u16(0).u32(d.dst).u32(d.src).u32(d.sseq).header(),
            0,
        ),
        ("close", Packet::new(kind::CLOSE, 0, id).u32(0).u32(1).header(), 0),
        ("planes", planes(spy, id, d.epoch), 0),
    ];
    debug_assert_eq!(all.len(), WITH_ID);
    let h = handshake(spy, 0x77, 0x99);
    all.push(("init", h.packet(kind::INIT), 0));
    all.push(("cookie", h.packet(kind::COOKIE), 0));
    all.push(("accept", h.packet(kind::ACCEPT), 0));
    all.push(("refuse", refuse(&h, 0), 0));
    all.push(("unknown", unknown(&h, 0x1234_5678), 0));
    all
}

/// An announcement of one plane, with an address of somebody else.
fn planes(spy: &Spy, id: u64, epoch: u16) -> Packet {
    let elsewhere = gid([spy.own[0], spy.own[1], spy.own[2], 99]);
    let p = Packet::new(kind::PLANES, 0, id).u32(1).u32(0).u16(epoch).u8(1).u8(0);
    p.u8(1).u8(0).u16(0).bytes(&elsewhere).header()
}

fn refuse(h: &Handshake, reason: u8) -> Packet {
    Packet::new(kind::REFUSE, 0, 0)
        .bytes(&h.source)
        .bytes(&h.destination)
        .u8(0)
        .u8(reason)
        .u8(0)
        .u8(0)
        .u64(h.nonce)
        .header()
}

fn unknown(h: &Handshake, id: u64) -> Packet {
    Packet::new(kind::UNKNOWN, 0, 0)
        .bytes(&h.source)
        .bytes(&h.destination)
        .u8(0)
        .bytes(&[0; 3])
        .u64(id)
        .header()
}

fn gid(address: [u8; 4]) -> [u8; 16] {
    let mut g = [0; 16];
    g[10..12].fill(0xff);
    g[12..].copy_from_slice(&address);
    g
}

fn handshake(spy: &Spy, id: u64, nonce: u64) -> Handshake {
    Handshake {
        source: gid(spy.own),
        destination: gid(spy.victim),
        lowest: 0,
        paths: 16,
        id,
        peer_id: spy.to,
        nonce,
        cookie: 0,
    }
}

fn with_payload(header: &Packet, len: usize) -> Vec<u8> {
    let mut p = header.0.clone();
    p.resize(p.len() + len, 0xee);
    p
}

/// Each kind cut off at each length, with the CRC of what is left.
pub fn truncated(spy: &Spy, to: &mut Sender) -> Outcome<Expected> {
    let route = spy.route.ok_or("nothing was seen")?;
    let before = to.packets;
    for (_, header, _) in templates(spy, spy.to) {
        // Without any byte it is the UDP socket's.
        for n in 1..header.0.len() {
            let mut p = header.0[..n].to_vec();
            seal(&mut p);
            to.send(&route, &p)?;
        }
    }
    Ok(vec![("drop_malformed", to.packets - before)])
}

/// Each field at values that it must not have.
pub fn fields(spy: &Spy, to: &mut Sender) -> Outcome<Expected> {
    let route = spy.route.ok_or("nothing was seen")?;
    let (mut malformed, mut version, mut path) = (0, 0, 0);
    let send = |to: &mut Sender, count: &mut u64, mut p: Vec<u8>| {
        seal(&mut p);
        *count += 1;
        to.send(&route, &p)
    };
    for (name, header, payload) in templates(spy, spy.to) {
        let good = with_payload(&header, payload);
        let put = |at: usize, with: &[u8]| {
            let mut p = good.clone();
            p[at..at + with.len()].copy_from_slice(with);
            p
        };
        for v in 1..16u8 {
            send(to, &mut version, put(0, &[v << 4 | good[0] & 0xf]))?;
        }
        for k in [kind::PLANES, 7, 13, 14, 15] {
            if k != good[0] {
                send(to, &mut malformed, put(0, &[k]))?;
            }
        }
        for bit in 0..8 {
            // Data has four flags; others none.
            let flag = 1u8 << bit;
            if good[0] != kind::DATA || flag > 8 {
                send(to, &mut malformed, put(1, &[good[1] | flag]))?;
            }
        }
        let len = header.0.len() as u16;
        for l in [0, 1, 15, 16, len - 1, len + 1, len + 4, 511, 512, 513, 0x7fff, 0xffff] {
            if l != len {
                let mut p = put(2, &l.to_be_bytes());
                p.resize(p.len().max(usize::from(len) + 1), 0);
                send(to, &mut malformed, p)?;
            }
        }
        // More or less payload than the header says.
        let mut longer = good.clone();
        longer.push(1);
        send(to, &mut malformed, longer)?;
        if payload != 0 {
            send(to, &mut malformed, good[..good.len() - 1].to_vec())?;
            send(to, &mut malformed, header.0.clone())?;
        }
        match name {
            "data" | "write-imm" => {
                for op in [11u8, 0x7f, 0xff] {
                    send(to, &mut malformed, put(17, &[op]))?;
                }
                for (at, with) in [
                    (32, [1, 0, 0, 9]),  // a source QP of more than 24 bits
                    (48, [0, 0, 0, 65]), // begins behind its end
                    (48, [0xff, 0xff, 0xff, 0xff]),
                    (52, [0x80, 0, 0, 1]), // more than 2^31 bytes
                    (52, [0, 0, 0, 63]),
                    (52, [0, 0, 0, 65]), // not the last, but says so
                ] {
                    send(to, &mut malformed, put(at, &with))?;
                }
                for p in [16u8, 17, 63, 64, 255] {
                    send(to, &mut path, put(16, &[p]))?;
                }
                // A number that cannot be outstanding.
                let d = spy.last();
                for add in [0x10_0000u32, 0x1000_0000, 0x7fff_0000, 0x8000_0000] {
                    let mut p = put(20, &d.sequence.wrapping_add(add).to_be_bytes());
                    p[16] = d.path;
                    send(to, &mut path, p)?;
                }
            }
            "ack" => {
                for (at, with) in [
                    (24, &[200u8][..]), // more blocks than there are
                    (25, &[200]),
                    (24, &[0]), // fewer
                    (29, &[5]), // more words than four
                    (29, &[255]),
                    (56, &[0x04]), // bits of a stream block that mean nothing
                    (60, &[9]),    // an unknown status
                    (83, &[0]),    // no fault
                    (83, &[4]),
                ] {
                    send(to, &mut malformed, put(at, with))?;
                }
                for p in [16u8, 64, 255] {
                    send(to, &mut path, put(28, &[p]))?;
                }
            }
            "query" => {
                for (at, with) in
                    [(16, &[0u8][..]), (16, &[2]), (16, &[41]), (16, &[255]), (20, &[2]), (20, &[255])]
                {
                    send(to, &mut malformed, put(at, with))?;
                }
            }
            "read request" | "atomic" | "atomic response" => {
                // Whole messages: not the last packet, or one that begins behind the first byte.
                send(to, &mut malformed, put(1, &[0]))?;
                send(to, &mut malformed, put(48, &[0, 0, 0, 1]))?;
                send(to, &mut malformed, put(52, &[0x80, 0, 0, 1]))?;
                send(to, &mut malformed, put(32, &[1]))?;
                if name != "read request" {
                    send(to, &mut malformed, put(52, &[0, 0, 0, 4]))?;
                    send(to, &mut malformed, put(52, &[0, 0, 0, 16]))?;
                }
            }
            "probe" => {
                // Another padding than it says.
                for with in [[0, 0, 0, 0], [0, 0, 0, 31], [0, 0, 0, 33], [0xff; 4]] {
                    send(to, &mut malformed, put(36, &with))?;
                }
                for p in [16u8, 64, 255] {
                    send(to, &mut path, put(16, &[p]))?;
                }
            }
            "probe reply" => {
                for (at, with) in [(48, 200u8), (49, 200), (48, 0), (53, 5), (53, 255), (84, 9)] {
                    send(to, &mut malformed, put(at, &[with]))?;
                }
            }
            "planes" => {
                for (at, with) in [
                    (16, &[0u8, 0, 0, 0][..]), // planes without a number
                    (26, &[0]),                // fewer, more, too many
                    (26, &[2]),
                    (26, &[9]),
                    (26, &[255]),
                    (27, &[1]),
                    (28, &[8]), // too great an id
                    (28, &[255]),
                    (29, &[2]), // flags that mean nothing
                    (30, &[1]),
                    (31, &[1]),
                    (44, &[0]), // addresses of no host, or of many
                    (44, &[127]),
                    (44, &[224]),
                    (44, &[255]),
                    (32, &[0xff]),
                    (42, &[0, 0]),
                ] {
                    send(to, &mut malformed, put(at, with))?;
                }
            }
            "close" => send(to, &mut malformed, put(16, &[0, 0, 0, 3]))?,
            "init" | "cookie" | "accept" => {
                send(to, &mut malformed, put(48, &[64]))?;
                send(to, &mut malformed, put(51, &[0]))?;
                send(to, &mut malformed, put(51, &[65]))?;
                send(to, &mut malformed, put(49, &[9, 1]))?;
                send(to, &mut malformed, put(15, &[1]))?;
            }
            "refuse" => {
                send(to, &mut malformed, put(49, &[2]))?;
                send(to, &mut malformed, put(48, &[64]))?;
            }
            _ => {}
        }
    }
    Ok(vec![("drop_malformed", malformed), ("drop_version", version), ("drop_path", path)])
}

/// Each bit of each kind flipped, with the CRC of before.
pub fn damaged(spy: &Spy, to: &mut Sender) -> Outcome<Expected> {
    let route = spy.route.ok_or("nothing was seen")?;
    let before = to.packets;
    for (_, header, payload) in templates(spy, spy.to) {
        let mut good = with_payload(&header, payload);
        seal(&mut good);
        // Those of the CRC itself, the id and the payload: the others may make it malformed.
        for at in (4..8).chain(header.0.len()..good.len()) {
            let mut p = good.clone();
            p[at] ^= 1 << to.rng.below(8);
            to.send(&route, &p)?;
        }
    }
    Ok(vec![("drop_crc", to.packets - before)])
}

/// Everything that needs an id, with ids that are guessed, from the peer's own address.
pub fn guessed_ids(spy: &Spy, to: &mut Sender) -> Outcome<Expected> {
    let route = spy.route.ok_or("nothing was seen")?;
    let before = to.packets;
    for round in 0..200u64 {
        for (_, header, payload) in templates(spy, spy.to).into_iter().take(WITH_ID) {
            let id = match round % 4 {
                0 => to.rng.bits() | 1,
                // The place in the table is easy to guess, the rest is not.
                1 => to.rng.bits() << 24 | spy.to & 0xff_ffff,
                2 => spy.to ^ 1 << (24 + to.rng.below(40)),
                _ => spy.from,
            };
            let p = with_payload(&header, payload);
            let p = Packet(p).put(8, &id.to_be_bytes()).sealed();
            to.send(&route, &p)?;
        }
    }
    // What is longer than 59 bytes is answered by Unknown instead of being counted.
    let sent = to.packets - before;
    Ok(vec![("drop_no_conn", sent / 5)])
}

/// Packets of the handshake from the peer's own address, with nonces and cookies guessed.
pub fn guessed_handshakes(spy: &Spy, to: &mut Sender) -> Outcome<Expected> {
    let route = spy.route.ok_or("nothing was seen")?;
    let mut state = 0;
    for _ in 0..300 {
        let (id, nonce, cookie) = (to.rng.bits(), to.rng.bits(), to.rng.bits());
        let h = Handshake { cookie, ..handshake(spy, id, nonce) };
        for p in [
            h.packet(kind::COOKIE),
            h.packet(kind::ACCEPT),
            Handshake { lowest: 3, ..h }.packet(kind::ACCEPT),
            refuse(&h, 0),
            refuse(&h, 1),
            unknown(&h, id),
        ] {
            to.send(&route, &p.sealed())?;
            state += 1;
        }
        to.send(&route, &h.packet(kind::INIT).sealed())?;
        to.send(&route, &Handshake { lowest: 3, ..h }.packet(kind::INIT).sealed())?;
        // Even one who knows the id can only make it ask.
        to.send(&route, &unknown(&h, spy.from).sealed())?;
    }
    Ok(vec![("drop_state", state)])
}

/// Packets of the handshake that name the peer but come from elsewhere.
pub fn other_source(spy: &Spy, to: &mut Sender) -> Outcome<Expected> {
    let route = spy.route.ok_or("nothing was seen")?;
    let before = to.packets;
    for i in 0..200 {
        let from = stranger(spy, u32::from(i));
        let route = Route { from, from_port: 1024 + i, ..route };
        let (id, nonce) = (to.rng.bits(), to.rng.bits());
        let h = handshake(spy, id, nonce);
        for p in [h.packet(kind::INIT), h.packet(kind::COOKIE), h.packet(kind::ACCEPT), refuse(&h, 1)] {
            to.send(&route, &p.sealed())?;
        }
    }
    Ok(vec![("drop_malformed", to.packets - before)])
}

/// What was true once, again: data, READ requests, atomics, acknowledgements, handshakes.
pub fn replayed(spy: &Spy, to: &mut Sender) -> Outcome<Expected> {
    let route = spy.route.ok_or("nothing was seen")?;
    let mut data = 0;
    for times in 0..3 {
        for (port, p) in &spy.kept {
            let route = Route { from_port: *port, ..route };
            to.send(&route, p)?;
            data += u64::from(times == 0 && p[0] & 0xf == kind::DATA);
        }
    }
    // An old number is a duplicate, a very old one none that can be outstanding.
    Ok(vec![("drop_duplicate+drop_path", data)])
}

/// Well-formed packets of somebody who knows the connection's id and numbers, and lies.
pub fn lies(spy: &Spy, to: &mut Sender) -> Outcome<Expected> {
    let route = spy.route.ok_or("nothing was seen")?;
    let id = spy.to;
    let d = spy.last();
    for i in 0..100u32 {
        // Acknowledges what was never sent.
        let Some(own) = spy.theirs.values().max_by_key(|d| d.time) else {
            return Err("the victim has sent nothing".into());
        };
        let far = own.sequence.wrapping_add(1000 + i * 100_000);
        let ack = Packet::new(kind::ACK, 0, id)
            .u32(0x4000_0000)
            .u32(0)
            .u8(1)
            .u8(0)
            .u8(0)
            .u8(0)
            .u8(own.path)
            .u8(4)
            .u16(own.epoch)
            .u32(far)
            .u32(0)
            .bytes(&[0; 8])
            .bytes(&[0xff; 32])
            .header();
        to.send(&route, &ack.sealed())?;
        // For streams that are not there, in numbers that have been used: nothing new.
        for op in [1u8, 6, 7, 9, 10] {
            let lie =
                Data { dst: 0x55_5555, src: 0x66_6666, total: 8, sequence: d.sequence.wrapping_sub(i), ..d };
            let p = match op {
                1 => with_payload(&lie.packet(id, 2, op).u64(4096).u32(9).header(), 8),
                6 => lie.packet(id, 2, op).u64(4096).u32(9).u32(0).header().0,
                7 => lie.packet(id, 2, op).u64(4096).u32(9).u32(0).u64(1).u64(2).header().0,
                9 => with_payload(&lie.packet(id, 2, op).header(), 8),
                _ => lie.packet(id, 2, op).u64(5).header().0,
            };
            to.send(&route, &Packet(p).sealed())?;
        }
    }
    Ok(vec![("drop_path", 100)])
}

/// Packets of a connection as they pass, changed in a few places, with the right CRC.
pub fn mutated(spy: &mut Spy, to: &mut Sender, packets: u64) -> Outcome {
    for _ in 0..packets {
        // The newest ones are most like what is expected.
        spy.look(Duration::ZERO)?;
        let route = spy.route.ok_or("nothing was seen")?;
        let n = spy.kept.len() as u64;
        let back = if to.rng.one_in(4) { to.rng.below(n) } else { to.rng.below(n.min(32)) };
        let (port, good) = &spy.kept[(n - 1 - back) as usize];
        let (_, other) = &spy.kept[to.rng.below(n) as usize];
        let mut p = mutant(&mut to.rng, good, other);
        if !to.rng.one_in(16) {
            seal(&mut p);
        }
        to.send(&Route { from_port: *port, ..route }, &p)?;
    }
    Ok(())
}

/// One to four changes of a packet; parts of `other` come in.
fn mutant(rng: &mut Rng, good: &[u8], other: &[u8]) -> Vec<u8> {
    let mut p = good.to_vec();
    for _ in 0..1 + rng.below(4) {
        let header = p.get(2..4).map_or(0, |b| usize::from(b[0]) << 8 | usize::from(b[1]));
        // Mostly in the header, and behind what has to be right for anything to be read.
        let low = if rng.one_in(8) { 0 } else { 16 };
        let end = if rng.one_in(8) { p.len() } else { header.min(p.len()) };
        if end <= low {
            return p;
        }
        let at = low + rng.below((end - low) as u64) as usize;
        match rng.below(8) {
            0 => p[at] ^= 1 << rng.below(8),
            1 => p[at] = rng.bits() as u8,
            2 | 3 => {
                // A little more or less, in a field of 32 bits.
                let at = at & !3;
                if let Some(field) = p.get_mut(at..at + 4) {
                    let old = u32::from_be_bytes([field[0], field[1], field[2], field[3]]);
                    let new = match rng.below(6) {
                        0 => old.wrapping_add(1),
                        1 => old.wrapping_sub(1),
                        2 => old.wrapping_add(1 << rng.below(32)),
                        3 => *rng.pick(&[0, 1, 0x7fff_ffff, 0x8000_0000, u32::MAX]),
                        4 => old.wrapping_sub(rng.below(5000) as u32),
                        _ => old.swap_bytes(),
                    };
                    field.copy_from_slice(&new.to_be_bytes());
                }
            }
            4 => {
                // The rest is that of another one.
                if let Some(rest) = other.get(at..) {
                    p.truncate(at);
                    p.extend_from_slice(rest);
                }
            }
            5 => p.truncate(at),
            6 => p.extend(std::iter::repeat_n(0, 1 + rng.below(40) as usize)),
            _ => {
                // The header ends elsewhere, and says so.
                let len = (16 + rng.below(112)).min(p.len() as u64) as u16;
                if let Some(field) = p.get_mut(2..4) {
                    field.copy_from_slice(&len.to_be_bytes());
                }
            }
        }
    }
    p.truncate(good.len().max(other.len()));
    p
}

/// Addresses of the hostile host that have proven nothing (main.rs adds them).
pub const STRANGERS: u32 = 32;

/// One of them.
pub fn stranger(spy: &Spy, i: u32) -> [u8; 4] {
    [spy.own[0], spy.own[1], spy.own[2], 100 + (i % STRANGERS) as u8]
}

/// Many addresses that nobody has proven ask for answers of all kinds. Compared is what came
/// back to each.
pub fn unproven(spy: &mut Spy, to: &mut Sender) -> Outcome {
    let route = spy.route.ok_or("nothing was seen")?;
    for i in 0..2000u32 {
        // The traffic would fill what the answers have to go through.
        spy.look(Duration::ZERO)?;
        let from = stranger(spy, i);
        let route = Route { from, from_port: 2000 + (i / 32) as u16, ..route };
        let (id, nonce) = (to.rng.bits() | 1, to.rng.bits());
        let h = Handshake { source: gid(from), ..handshake(spy, id, nonce) };
        let p = match i % 8 {
            0..=2 => h.packet(kind::INIT).sealed(),
            3 => Handshake { cookie: nonce, ..h }.packet(kind::INIT).sealed(),
            4 => Handshake { lowest: 7, ..h }.packet(kind::INIT).sealed(),
            n => {
                let all = templates(spy, id);
                let (_, header, payload) = &all[(n as usize * 7 + i as usize) % WITH_ID];
                Packet(with_payload(header, *payload)).put(8, &id.to_be_bytes()).sealed()
            }
        };
        to.send(&route, &p)?;
    }
    Ok(())
}

/// Frames for a flood: all kinds, from many addresses; to the victim, or to nobody: what
/// sending alone costs.
pub fn flood_frames(spy: &Spy, to: &mut Sender, victim: bool) -> Outcome<Vec<Vec<u8>>> {
    let mut route = spy.route.ok_or("nothing was seen")?;
    if !victim {
        route.to_mac = [2, 0, 0, 0, 0, 99];
    }
    let mut frames = Vec::new();
    for i in 0..1024u32 {
        let from = [spy.own[0], spy.own[1], to.rng.below(4) as u8, 3 + to.rng.below(250) as u8];
        let route = Route { from, from_port: to.rng.bits() as u16, ..route };
        let (id, nonce) = (to.rng.bits() | 1, to.rng.bits());
        let all = templates(spy, id);
        let (_, header, payload) = &all[i as usize % all.len()];
        let p = match i % 5 {
            0 => {
                // Half of them in the name of the peer, from its address.
                let mine = i % 2 == 0;
                let from = if mine { spy.own } else { from };
                let p =
                    Handshake { source: gid(from), ..handshake(spy, id, nonce) }.packet(kind::INIT).sealed();
                frames.push(Route { from, ..route }.frame(&p));
                continue;
            }
            1 => (0..1 + to.rng.below(1400)).map(|_| to.rng.bits() as u8).collect(),
            2 => Packet(with_payload(header, *payload)).sealed(),
            3 => {
                let data = Data { total: 1400, ..Data::default() };
                with_payload(&data.packet(id, 2, 1).u64(0).u32(0).header(), 1400)
            }
            // The right id, and a wrong CRC.
            _ if header.0[0] < 8 => Packet(with_payload(header, *payload)).put(8, &spy.to.to_be_bytes()).0,
            _ => with_payload(header, *payload),
        };
        frames.push(route.frame(&p));
    }
    Ok(frames)
}

impl Sender {
    /// Sends `frames` in turn, as fast as it can, until `end`. Gives how many.
    pub fn flood(&self, frames: &[Vec<u8>], end: Instant) -> Outcome<u64> {
        let mut n = 0;
        while Instant::now() < end {
            for frame in frames.iter().cycle().skip(n as usize % frames.len()).take(64) {
                match self.frames.send(frame) {
                    Ok(()) => n += 1,
                    Err(e) if e.raw_os_error() == Some(105) => {}
                    Err(e) => return Err(format!("sending a frame: {e}").into()),
                }
            }
        }
        Ok(n)
    }
}
