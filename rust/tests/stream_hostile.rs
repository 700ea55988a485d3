// SPDX-License-Identifier: GPL-2.0

//! A peer that sends anything, with numbers that are nearly right: no panic, no placement
//! outside of what it may reach, nothing twice. SEED=n runs one seed, SEEDS=n that many.

mod stream_common;

use metaroce::proto::api::*;
use metaroce::proto::stream::{BlockStatus, State, Stream, StreamBlock};
use std::collections::{HashMap, HashSet};
use stream_common::*;

fn near(rng: &mut Rng, n: u32) -> u32 {
    match rng.below(20) {
        0 => rng.next() as u32,
        1 => n.wrapping_sub(rng.below(5000) as u32),
        2 => n.wrapping_add(rng.below(5000) as u32),
        _ => n.wrapping_add(rng.below(12) as u32).wrapping_sub(3),
    }
}

struct Room {
    rooms: HashMap<u32, u64>,
    left: u64,
}

impl Host for Room {
    fn bind_receive(&mut self, _stream: StreamId, rmsn: u32) -> Option<u64> {
        assert_eq!(rmsn as usize, self.rooms.len());
        if self.left == 0 {
            return None;
        }
        self.left -= 1;
        self.rooms.insert(rmsn, 700);
        Some(700)
    }

    fn receives_posted(&mut self, _stream: StreamId) -> Option<u32> {
        Some(self.left as u32)
    }

    fn may_hold(&mut self, bytes: u32) -> bool {
        bytes % 7 != 0
    }
}

/// The other end, which is honest; what it sends is changed on the way.
fn honest(rng: &mut Rng, p: &mut Pair, bag: &mut Vec<Packet>) {
    let n = p.streams[0].attr().max_rd_atomic;
    p.hosts[0].receives.resize(20, 700);
    let length = rng.pick(&[0, 1, 8, 300, 600]);
    let va = rng.below(2000);
    let op = match rng.below(12) {
        0 => send(length),
        1 => wr(WrOp::SendInv { rkey: 3 }, length),
        2 => wr(
            WrOp::WriteImm {
                va,
                rkey: 1,
                imm: 1,
            },
            length,
        ),
        3 if n != 0 => read(va, length),
        4 if n != 0 => fetch_add(8, 1),
        5 => wr(WrOp::Local, 0),
        _ => write(va, length),
    };
    let _ = p.streams[0].post(p.now, op);
    bag.extend(p.packets(0));
    p.streams[0].on_timeout(p.now);
    for e in p.events(0) {
        let (s, now) = (&mut p.streams[0], p.now);
        match e {
            Event::Read { request, .. } => s.read_ready(now, request, Ok(())),
            Event::Atomic { request, .. } => s.atomic_done(now, request, Ok(4)),
            Event::Invalidate { .. } => s.invalidated(now, Ok(())),
            Event::Local { wr, .. } => s.local_done(now, wr, Status::Success),
            Event::Release(x) => s.placed(now, x.token, Placed::Ok, &mut p.hosts[0]),
            _ => {}
        }
    }
}

fn change(rng: &mut Rng, h: &mut StreamHeader, len: &mut u32) {
    let bit = 1u32 << rng.below(32);
    match rng.below(16) {
        0 => h.sseq ^= bit,
        1 => h.msn ^= bit,
        2 => h.rmsn ^= bit,
        3 => h.offset ^= bit,
        4 => h.total ^= bit,
        5 => h.last = !h.last,
        6 => h.request ^= bit,
        7 => h.oldest ^= bit,
        8 => h.round ^= bit as u8,
        9 => h.after = Some(h.sseq ^ bit),
        10 => h.src_qpn ^= bit,
        11 => *len ^= bit & 0x3ff,
        12 => h.sseq = h.sseq.wrapping_add(rng.below(4) as u32),
        13 => h.rmsn = h.rmsn.wrapping_add(rng.below(4) as u32),
        14 => h.request = h.request.wrapping_add(rng.below(4) as u32),
        _ => {
            h.opcode = rng.pick(&[
                Opcode::Write,
                Opcode::WriteImm,
                Opcode::SendInv,
                Opcode::ReadRequest,
                Opcode::FetchAdd,
                Opcode::ReadResponse,
                Opcode::AtomicResponse,
                Opcode::Void,
            ]);
        }
    }
}

fn make_up(rng: &mut Rng, s: &Stream, known: u32, received: u32) -> (StreamHeader, u32) {
    if rng.percent(20) {
        let block = s.block(Direction::Response);
        let h = StreamHeader {
            opcode: rng.pick(&[Opcode::ReadResponse, Opcode::AtomicResponse]),
            last: rng.percent(50),
            dst_qpn: 2,
            src_qpn: 1,
            sseq: near(rng, block.cumulative),
            msn: rng.next() as u32,
            offset: rng.pick(&[0, 0, 256, 8]),
            total: rng.pick(&[8, 300, 300]),
            request: near(rng, block.msn_done),
            round: rng.below(3) as u8,
            ..StreamHeader::default()
        };
        return (h, rng.pick(&[0, 8, 256, 44]));
    }
    let block = s.block(Direction::Request);
    let opcode = rng.pick(&[
        Opcode::Void,
        Opcode::Write,
        Opcode::Write,
        Opcode::WriteImm,
        Opcode::Send,
        Opcode::SendImm,
        Opcode::SendInv,
        Opcode::ReadRequest,
        Opcode::CompareSwap,
        Opcode::FetchAdd,
    ]);
    let request = matches!(
        opcode,
        Opcode::ReadRequest | Opcode::CompareSwap | Opcode::FetchAdd
    );
    let total = match rng.below(100) {
        0 => 701,
        1 => 1 << 31,
        _ => rng.pick(&[0, 8, 8, 100, 500]),
    };
    let mut offset = 256 * rng.below(2) as u32;
    offset = if offset < total { offset } else { 0 };
    let mut len = (total - offset).min(256);
    let mut last = offset + len == total;
    if request {
        (offset, len, last) = (0, 0, true);
    }
    match rng.below(40) {
        0 => last = !last,
        1 => len = rng.below(300) as u32,
        2 => offset = rng.next() as u32,
        _ => {}
    }
    let sseq = near(rng, block.cumulative);
    let h = StreamHeader {
        opcode,
        last,
        solicited: rng.percent(50),
        dst_qpn: 2,
        src_qpn: 1,
        sseq,
        msn: match rng.below(3) {
            0 => near(rng, block.msn_done),
            _ => block.msn_done.wrapping_add(
                rng.below(1 + u64::from(sseq.wrapping_sub(block.cumulative) % 64)) as u32,
            ),
        },
        rmsn: match rng.below(4) {
            0 => near(rng, received),
            _ => received + rng.below(4) as u32,
        },
        offset,
        total,
        va: rng.next(),
        rkey: rng.next() as u32,
        imm: 5,
        after: rng
            .percent(30)
            .then(|| sseq.wrapping_sub(rng.below(10) as u32)),
        request: match rng.below(50) {
            0 => near(rng, known),
            _ => known,
        },
        oldest: match rng.below(50) {
            0 => near(rng, known),
            _ => known.saturating_sub(2),
        },
        round: rng.below(4) as u8,
        compare_add: 1,
        swap: 2,
    };
    (h, len)
}

fn run(seed: u64) {
    let mut rng = Rng(seed);
    let mut p = Pair::with(|a| a.window = 64);
    let mut bag: Vec<Packet> = Vec::new();
    // How many packets in a thousand are changed, how many are made up.
    let changed = rng.pick(&[0, 1, 5, 50]);
    let made_up = rng.pick(&[0, 0, 5, 300]);
    let mut host = Room {
        rooms: HashMap::new(),
        left: 10,
    };
    let mut header = StreamHeader::default();
    // What was placed and not reported, and all that was ever placed.
    let mut copies: Vec<Placement> = Vec::new();
    let mut placed: HashSet<(bool, u32)> = HashSet::new();
    let mut held: HashMap<u32, Placement> = HashMap::new();
    let (mut done, mut received, mut posted) = (0u32, 0u32, 0u32);
    let (mut msn, mut requests) = (0u32, 0u32);
    let mut asked: Vec<(bool, u32)> = Vec::new();
    let mut invalidations = 0;
    let mut local = None;
    for _ in 0..4000 {
        p.now += rng.below(50_000);
        honest(&mut rng, &mut p, &mut bag);
        let s = &mut p.streams[1];
        // What a block makes the stream give up is dropped before it can come again.
        let mut drain = false;
        match rng.below(12) {
            0..=5 => {
                let (h, len) = if rng.below(1000) < made_up {
                    make_up(&mut rng, s, requests + asked.len() as u32, received)
                } else {
                    if bag.is_empty() {
                        continue;
                    }
                    let x = bag[rng.below(bag.len().min(10) as u64) as usize];
                    if rng.percent(70) {
                        bag.retain(|y| y.header.sseq != x.header.sseq);
                        p.streams[0].released(p.now, x.packet);
                    }
                    let (mut h, mut len) = (x.header, x.len);
                    if rng.below(1000) < changed {
                        change(&mut rng, &mut h, &mut len);
                    }
                    (h, len)
                };
                let s = &mut p.streams[1];
                let result = s.receive(p.now, &h, len, &mut host);
                if let Ok(Receive::Place(x) | Receive::Hold(x)) = result {
                    let answer = x.token.direction == Direction::Response;
                    assert!(placed.insert((answer, x.token.sseq)), "twice: {h:?}");
                    assert!(u64::from(x.offset) + u64::from(x.len) <= u64::from(x.total));
                    if let Target::Request { wr } = x.target {
                        assert!(wr >= done && wr < posted, "{wr} is not outstanding");
                    }
                    if let Target::Receive { rmsn } = x.target {
                        assert!(rmsn >= received);
                        assert!(u64::from(x.total) <= host.rooms[&rmsn]);
                    }
                    match result {
                        Ok(Receive::Hold(_)) => drop(held.insert(x.token.sseq, x)),
                        _ => copies.push(x),
                    }
                }
            }
            6 if rng.below(1000) >= made_up => {
                // Both hear of each other.
                for from in [0, 1] {
                    for dir in [Direction::Request, Direction::Response] {
                        let mut block = p.streams[from].block(dir);
                        if from == 0 && rng.below(1000) < changed {
                            block.cumulative ^= 1 << rng.below(32);
                        }
                        p.streams[1 - from].on_block(p.now, &block);
                    }
                }
                drain = true;
            }
            6 => {
                let dir = rng.pick(&[Direction::Request, Direction::Response]);
                let round = rng.below(4) as u8;
                let fault = rng.pick(&[Fault::Access, Fault::InvalidRequest, Fault::Operation]);
                let block = StreamBlock {
                    dst_qpn: 2,
                    src_qpn: 1,
                    dir,
                    cumulative: near(&mut rng, 500 + posted),
                    msn_done: rng.next() as u32,
                    receive_limit: rng.percent(50).then(|| near(&mut rng, posted)),
                    status: match rng.below(30) {
                        0 => BlockStatus::Rnr {
                            rmsn: rng.next() as u32,
                            timer_us: rng.below(0x100_0000) as u32,
                            round,
                        },
                        1 => BlockStatus::NotReady { round },
                        2 => BlockStatus::NoRoom { round },
                        3 if rng.percent(2) => BlockStatus::Fatal {
                            msn: near(&mut rng, msn),
                            fault,
                        },
                        _ => BlockStatus::Ok,
                    },
                };
                s.on_block(p.now, &block);
                drain = true;
            }
            7 => {
                if !copies.is_empty() {
                    let i = rng.below(copies.len() as u64) as usize;
                    let x = copies.swap_remove(i);
                    let result = match rng.below(500) {
                        0 => Placed::Fault(Fault::Access),
                        _ => Placed::Ok,
                    };
                    s.placed(p.now, x.token, result, &mut host);
                }
            }
            8 => {
                let op = match rng.below(5) {
                    0 => read(5, 300),
                    1 => fetch_add(8, 1),
                    2 => send(600),
                    3 if rng.percent(2) => wr(WrOp::Local, 0),
                    _ => write(rng.below(1000), rng.below(2000) as u32),
                };
                if let Ok(n) = s.post(p.now, op) {
                    assert_eq!(n, posted);
                    posted += 1;
                }
                host.left += rng.below(2);
                s.receives_changed(p.now, Some(host.left as u32));
            }
            9 => {
                while let Some(x) = p.streams[1].next_packet(p.now, 256, &mut header) {
                    p.streams[1].sent(x);
                    msn = msn.max(header.msn);
                    if rng.percent(50) {
                        p.streams[1].released(p.now, x);
                    }
                    let _ = (
                        p.streams[1].payload(x),
                        p.streams[1].rebuild(x, &mut header),
                    );
                    let len = u32::from(x.len);
                    let r = p.streams[0].receive(p.now, &header, len, &mut p.hosts[0]);
                    if let Ok(Receive::Place(y)) = r {
                        p.streams[0].placed(p.now, y.token, Placed::Ok, &mut p.hosts[0]);
                    }
                }
                let s = &mut p.streams[1];
                s.on_timeout(p.now);
                let _ = (s.poll_timeout(), s.wants_query(), s.take_dirty());
            }
            10 => {
                if let Some((atomic, request)) = asked.pop() {
                    if atomic {
                        s.atomic_done(p.now, request, Ok(1));
                    } else {
                        s.read_ready(p.now, request, Ok(()));
                    }
                }
                if invalidations != 0 {
                    invalidations -= 1;
                    s.invalidated(p.now, Ok(()));
                }
                if let Some(wr) = local.take() {
                    s.local_done(p.now, wr, Status::Success);
                }
            }
            _ => drain = true,
        }
        while let Some(e) = drain.then(|| p.streams[1].poll_event()).flatten() {
            match e {
                Event::SendDone { wr, status, .. } => {
                    assert_eq!(wr, done);
                    done += 1;
                    if status != Status::Success {
                        let busy = |x: &Placement| x.target == Target::Request { wr };
                        assert!(!copies.iter().any(busy));
                    }
                }
                Event::RecvDone { rmsn, .. } => {
                    assert_eq!(rmsn, received);
                    received += 1;
                    let busy = |x: &Placement| x.target == Target::Receive { rmsn };
                    assert!(!copies.iter().any(busy), "still being written");
                }
                Event::Read { request, .. } => {
                    asked.push((false, request));
                    requests = request + 1;
                }
                Event::Atomic { request, .. } => {
                    asked.push((true, request));
                    requests = request + 1;
                }
                Event::Invalidate { .. } => invalidations += 1,
                Event::Local { wr, .. } => local = Some(wr),
                Event::Release(x) => {
                    let old = held.remove(&x.token.sseq);
                    assert_eq!(old, Some(x));
                    copies.push(x);
                }
                Event::Discard(token) => {
                    let old = held.remove(&token.sseq).map(|x| x.token);
                    assert_eq!(old, Some(token));
                    // It may come again.
                    placed.remove(&(false, token.sseq));
                }
                Event::StreamError { .. } => {
                    let receives = |x: &Placement| !matches!(x.target, Target::Remote { .. });
                    assert!(!copies.iter().any(receives));
                }
                _ => {}
            }
        }
        if p.streams.iter().any(|s| s.state() == State::Err) && rng.percent(3) {
            break;
        }
    }
}

#[test]
fn anything_may_come() {
    for seed in seeds(300) {
        println!("seed {seed}");
        run(seed);
    }
}
