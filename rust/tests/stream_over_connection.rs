// SPDX-License-Identifier: GPL-2.0

//! Random work on several QPs of one connection, over links that lose, reorder, duplicate
//! and corrupt, checked against a model. SEED=n runs one seed, SEEDS=n that many.

mod stream_common;

use metaroce::proto::api::*;
use metaroce_sim::{Link, QpSetup, Sim, MS, S, US};
use stream_common::{seeds, Rng};

/// Bytes that Writes and READs of one QP and direction use; counters are behind them.
const DATA: u64 = 64 * 1024;
const COUNTERS: u64 = 8;
const AREA: usize = (DATA + 8 * COUNTERS) as usize;
const BASE: u64 = 0x7000_0000_0000;

struct Op {
    wr: SendWr,
    data: Vec<u8>,
    /// Memory that a READ may see, when all earlier ones are done.
    snapshot: Vec<u8>,
    original: u64,
}

/// What one end of a QP does to the other one.
struct Side {
    host: usize,
    qp: usize,
    peer_qp: usize,
    rkey: u32,
    ops: Vec<Op>,
    posted: usize,
    checked: usize,
    memory: Vec<u8>,
    receives: Vec<usize>,
}

fn takes_receive(op: &WrOp) -> bool {
    matches!(
        op,
        WrOp::WriteImm { .. } | WrOp::Send | WrOp::SendImm { .. } | WrOp::SendInv { .. }
    )
}

fn le(b: &[u8]) -> u64 {
    u64::from_le_bytes(b[..8].try_into().expect("eight bytes"))
}

fn random_ops(rng: &mut Rng, rkey: u32, count: usize) -> (Vec<Op>, Vec<u8>) {
    let longest = rng.pick(&[64, 5_000, 20_000]);
    let spread = rng.pick(&[1_000, DATA]);
    let mut memory = vec![0u8; AREA];
    let ops = (0..count)
        .map(|_| {
            let length = rng.below(longest + 1);
            let va = BASE + rng.below(spread.min(DATA - length));
            let counter = BASE + DATA + 8 * rng.below(COUNTERS);
            let op = match rng.below(12) {
                0 => WrOp::Send,
                1 => WrOp::SendImm {
                    imm: rng.next() as u32,
                },
                2 => WrOp::WriteImm {
                    va,
                    rkey,
                    imm: rng.next() as u32,
                },
                3 | 4 => WrOp::Read { va, rkey },
                5 => WrOp::FetchAdd {
                    va: counter,
                    rkey,
                    add: rng.next(),
                },
                6 => WrOp::CompareSwap {
                    va: counter,
                    rkey,
                    compare: le(&memory[(counter - BASE) as usize..]),
                    swap: rng.next(),
                },
                7 => WrOp::Local,
                _ => WrOp::Write { va, rkey },
            };
            let length = match op {
                WrOp::Local => 0,
                WrOp::FetchAdd { .. } | WrOp::CompareSwap { .. } => 8,
                _ => length as u32,
            };
            let wr = SendWr {
                op,
                fence: rng.percent(10),
                solicited: false,
                signaled: rng.percent(50),
                length,
                error: None,
            };
            let reads = matches!(op, WrOp::Read { .. });
            let data: Vec<u8> = (0..length)
                .map(|_| if reads { 0 } else { rng.next() as u8 | 1 })
                .collect();
            let mut out = Op {
                wr,
                data,
                snapshot: Vec::new(),
                original: 0,
            };
            let at = |va: u64| (va - BASE) as usize;
            match op {
                WrOp::Write { va, .. } | WrOp::WriteImm { va, .. } => {
                    memory[at(va)..][..out.data.len()].copy_from_slice(&out.data);
                }
                WrOp::Read { va, .. } => {
                    out.snapshot = memory[at(va)..][..length as usize].to_vec();
                }
                WrOp::FetchAdd { va, add, .. } => {
                    out.original = le(&memory[at(va)..]);
                    let new = out.original.wrapping_add(add);
                    memory[at(va)..][..8].copy_from_slice(&new.to_le_bytes());
                }
                WrOp::CompareSwap {
                    va, compare, swap, ..
                } => {
                    out.original = le(&memory[at(va)..]);
                    if out.original == compare {
                        memory[at(va)..][..8].copy_from_slice(&swap.to_le_bytes());
                    }
                }
                _ => {}
            }
            out
        })
        .collect();
    (ops, memory)
}

fn random_link(rng: &mut Rng) -> Link {
    let mut link = Link::new(
        rng.pick(&[0, 400_000, 10_000_000]),
        rng.pick(&[0, 10, 100]) * US,
    );
    link.loss = rng.pick(&[0, 1_000, 10_000, 100_000]);
    link.duplicate = rng.pick(&[0, 0, 20_000]);
    link.corrupt = rng.pick(&[0, 0, 5_000]);
    link.reorder = rng.pick(&[0, 0, 50_000]);
    link.reorder_by = 200 * US;
    link
}

fn run(seed: u64) {
    let mut rng = Rng(seed);
    let mut sim = Sim::new(seed);
    let (a, b) = (sim.add_host(), sim.add_host());
    let link = random_link(&mut rng);
    println!(
        "rate {} delay {} loss {} duplicate {} corrupt {} reorder {}",
        link.rate, link.delay, link.loss, link.duplicate, link.corrupt, link.reorder
    );
    match rng.below(2) {
        0 => sim.fabric.direct(a, b, &link),
        _ => sim.fabric.spines(a, b, 4, &link),
    }
    sim.copy_time = rng.pick(&[1, 20, 300]) * US;
    sim.batch_time = rng.pick(&[0, 50]) * US;
    let hold = rng.pick(&[256, 256, 20, 2]);
    let scarce = rng.percent(30);
    let setup = QpSetup {
        max_send_wr: 32,
        rd_atomic: rng.pick(&[1, 4, 16]),
        timeout: S,
        window: rng.pick(&[64, 4096]),
        ..QpSetup::default()
    };
    println!(
        "copy {} batch {} hold {hold} scarce {scarce} {setup:?}",
        sim.copy_time, sim.batch_time
    );
    let mut sides = Vec::new();
    for pair in 0..1 + rng.below(4) {
        let (qa, qb) = sim.connect(a, b, &setup);
        for (host, qp, peer_qp) in [(a, qa, qb), (b, qb, qa)] {
            let rkey = 0x100 + 2 * pair as u32 + host as u32;
            let count = 30 + rng.below(150) as usize;
            let (ops, memory) = random_ops(&mut rng, rkey, count);
            sim.hosts[1 - host].register(rkey, BASE, AREA);
            let receives = ops
                .iter()
                .filter(|op| takes_receive(&op.wr.op))
                .map(|op| op.wr.length as usize + rng.below(10) as usize)
                .collect();
            sides.push(Side {
                host,
                qp,
                peer_qp,
                rkey,
                ops,
                posted: 0,
                checked: 0,
                memory,
                receives,
            });
        }
    }
    sim.hosts[a].hold_limit = hold;
    sim.hosts[b].hold_limit = hold;
    let begin = sim.now;
    let mut given = vec![0; sides.len()];
    while sides.iter().any(|s| s.checked < s.ops.len()) {
        for (s, given) in sides.iter_mut().zip(&mut given) {
            let count = if scarce {
                rng.below(2) as usize
            } else {
                usize::MAX
            };
            while *given < s.receives.len() && (count == usize::MAX || rng.below(2) < count as u64)
            {
                sim.hosts[1 - s.host].post_receive(sim.now, s.peer_qp, s.receives[*given]);
                *given += 1;
            }
            while let Some(op) = s.ops.get(s.posted) {
                match sim.hosts[s.host].post(sim.now, s.qp, op.wr, op.data.clone()) {
                    Ok(n) => assert_eq!(n as usize, s.posted),
                    Err(_) => break,
                }
                s.posted += 1;
            }
        }
        sim.pump(a);
        sim.pump(b);
        sim.run_for(50 * US);
        for s in &mut sides {
            check(&sim, s);
        }
        if sim.now > begin + 300 * S {
            for s in &sides {
                let op = s.ops.get(s.checked).map(|op| op.wr);
                println!(
                    "host {} QP {}: {} of {} {op:?}",
                    s.host,
                    s.qp,
                    s.checked,
                    s.ops.len()
                );
            }
            panic!("no end in sight");
        }
    }
    println!("took {} ms", (sim.now - begin) / MS);
    sim.run_for(S);
    for s in &sides {
        let peer = &sim.hosts[1 - s.host];
        let seen = &peer.memory[&s.rkey].data;
        assert!(*seen == s.memory, "memory of key {:#x}", s.rkey);
        let received = &peer.qps[s.peer_qp].received;
        let sent: Vec<_> = s.ops.iter().filter(|op| takes_receive(&op.wr.op)).collect();
        assert_eq!(received.len(), sent.len());
        for (n, (event, op)) in received.iter().zip(sent).enumerate() {
            let Event::RecvDone {
                rmsn,
                length,
                imm,
                status,
                opcode,
                ..
            } = *event
            else {
                panic!("{event:?}");
            };
            assert_eq!(
                (rmsn as usize, length, status),
                (n, op.wr.length, Status::Success)
            );
            let wanted = match op.wr.op {
                WrOp::SendImm { imm } | WrOp::WriteImm { imm, .. } => imm,
                _ => 0,
            };
            assert_eq!(imm, wanted);
            if opcode != Opcode::WriteImm {
                let data = &peer.qps[s.peer_qp].receives[n].data;
                assert!(data[..length as usize] == op.data[..], "receive {n}");
            }
        }
        assert_eq!(peer.qps[s.peer_qp].error, None);
    }
}

/// What has completed since the last time.
fn check(sim: &Sim, s: &mut Side) {
    let qp = &sim.hosts[s.host].qps[s.qp];
    while let Some(c) = qp.completions.get(s.checked) {
        assert_eq!(c.wr as usize, s.checked, "completion order");
        assert_eq!(c.status, Status::Success, "{:?}", s.ops[s.checked].wr);
        let op = &s.ops[s.checked];
        let result = &qp.sends[&c.wr].1;
        match op.wr.op {
            WrOp::FetchAdd { .. } | WrOp::CompareSwap { .. } => {
                assert_eq!(le(result), op.original);
            }
            WrOp::Read { va, .. } => {
                for (i, (got, wanted)) in result.iter().zip(&op.snapshot).enumerate() {
                    let at = va + i as u64;
                    let is_later = || {
                        s.ops[s.checked + 1..s.posted]
                            .iter()
                            .any(|op| match op.wr.op {
                                WrOp::Write { va, .. } | WrOp::WriteImm { va, .. } => {
                                    at >= va
                                        && at < va + u64::from(op.wr.length)
                                        && op.data[(at - va) as usize] == *got
                                }
                                _ => false,
                            })
                    };
                    assert!(got == wanted || is_later(), "byte {i} of a READ");
                }
            }
            _ => {}
        }
        s.checked += 1;
    }
}

#[test]
fn random_lists_over_lossy_links() {
    for seed in seeds(25) {
        run(seed);
    }
}

/// A program that polls a flag which is written after the data, under everything that a
/// network does, looks after each step of the simulation.
#[test]
fn flag_after_data() {
    for seed in seeds(6) {
        let mut rng = Rng(seed);
        let mut sim = Sim::new(seed);
        let (a, b) = (sim.add_host(), sim.add_host());
        let mut link = Link::new(0, 20 * US);
        link.loss = rng.pick(&[0, 10_000, 100_000]);
        link.reorder = 100_000;
        link.reorder_by = 100 * US;
        link.duplicate = 10_000;
        sim.fabric.spines(a, b, 4, &link);
        sim.copy_time = 50 * US;
        let rkey = 9;
        // Data in eight places in turn; the flag behind them.
        const SIZE: u64 = 10_000;
        const PLACES: u64 = 8;
        sim.hosts[b].register(rkey, BASE, (SIZE * PLACES + 8) as usize);
        let (qa, _) = sim.connect(a, b, &QpSetup::default());
        sim.run_for(20 * MS);
        let (mut posted, mut seen) = (0u64, 0u64);
        let end = sim.now + 100 * S;
        while seen < 300 {
            // A place is written again only when its flag was seen.
            while posted < 300 && posted < seen + PLACES {
                posted += 1;
                let pattern = posted.wrapping_mul(0x9e37_79b9).to_le_bytes()[0] | 1;
                let va = BASE + posted % PLACES * SIZE;
                for (va, data) in [
                    (va, vec![pattern; SIZE as usize]),
                    (BASE + PLACES * SIZE, posted.to_le_bytes().to_vec()),
                ] {
                    let wr = metaroce_sim::write(va, rkey, data.len());
                    let now = sim.now;
                    sim.hosts[a].post(now, qa, wr, data).expect("posted");
                }
                sim.pump(a);
            }
            assert!(sim.step(end), "no end in sight");
            let memory = &sim.hosts[b].memory[&rkey].data;
            let flag = le(&memory[(PLACES * SIZE) as usize..]);
            assert!(flag >= seen, "the flag went back");
            for n in seen + 1..=flag {
                let at = (n % PLACES * SIZE) as usize;
                let pattern = n.wrapping_mul(0x9e37_79b9).to_le_bytes()[0] | 1;
                let data = &memory[at..at + SIZE as usize];
                assert!(
                    data.iter().all(|b| *b == pattern),
                    "flag {n} before its data"
                );
            }
            seen = flag;
        }
    }
}

/// Accidents of some QPs do not touch the others of their connection.
#[test]
fn accidents_stay_with_their_qp() {
    for seed in seeds(25) {
        accidents(seed);
    }
}

fn statuses(sim: &Sim, s: &Side) -> Vec<Status> {
    let done = &sim.hosts[s.host].qps[s.qp].completions;
    for (n, c) in done.iter().enumerate() {
        assert_eq!(c.wr as usize, n, "completion order");
    }
    done.iter().map(|c| c.status).collect()
}

fn accidents(seed: u64) {
    let mut rng = Rng(seed);
    let mut sim = Sim::new(seed);
    let (a, b) = (sim.add_host(), sim.add_host());
    let mut link = random_link(&mut rng);
    link.loss = link.loss.min(20_000);
    sim.fabric.spines(a, b, 2, &link);
    sim.copy_time = rng.pick(&[1, 100]) * US;
    let setup = QpSetup {
        timeout: 50 * MS,
        retry_cnt: 3,
        rnr_retry: 2,
        min_rnr_timer_us: 500,
        max_send_wr: 256,
        ..QpSetup::default()
    };
    // 0 is sound, 1 has a bad key, 2 loses its peer, 3 has a short receive, 4 none at all,
    // 5 is moved to ERR, 6 goes when the last acknowledgement may be on its way.
    let mut sides = Vec::new();
    for n in 0..7u32 {
        let (qp, peer_qp) = sim.connect(a, b, &setup);
        let rkey = 0x100 + n;
        sim.hosts[b].register(rkey, BASE, AREA);
        let (mut ops, mut memory) = random_ops(&mut rng, rkey, 100);
        if n == 6 {
            // An answer that is under way would be lost with its QP.
            memory = vec![0; AREA];
            for op in &mut ops {
                op.wr.op = WrOp::Send;
                op.wr.length = op.data.len() as u32;
            }
        }
        let at = 30 + rng.below(40) as usize;
        match n {
            1 => {
                ops[at].wr.op = WrOp::Write {
                    va: BASE,
                    rkey: 0xbad,
                };
                ops[at].wr.length = 5000;
                ops[at].data = vec![1; 5000];
            }
            3 | 4 => {
                ops[at].wr.op = WrOp::Send;
                ops[at].wr.length = 3000;
                ops[at].data = vec![1; 3000];
            }
            _ => {}
        }
        let mut receives: Vec<usize> = Vec::new();
        for (i, op) in ops.iter().enumerate() {
            if takes_receive(&op.wr.op) && !(n == 4 && i >= at) {
                let length = op.wr.length as usize;
                receives.push(if n == 3 && i == at {
                    length - 1
                } else {
                    length
                });
            }
        }
        for r in &receives {
            sim.hosts[b].post_receive(sim.now, peer_qp, *r);
        }
        for op in &ops {
            sim.hosts[a]
                .post(sim.now, qp, op.wr, op.data.clone())
                .expect("posted");
        }
        sides.push(Side {
            host: a,
            qp,
            peer_qp,
            rkey,
            ops,
            posted: 100,
            checked: at,
            memory,
            receives,
        });
    }
    sim.pump(a);
    sim.pump(b);
    sim.run_for((1 + rng.below(3000)) * US);
    sim.hosts[b].destroy(sim.now, sides[2].peer_qp);
    sim.pump(b);
    if let Some((_, id)) = sim.hosts[a].qps[sides[5].qp].place {
        let now = sim.now;
        sim.hosts[a].connection(sides[5].qp).set_state(
            now,
            id,
            metaroce::proto::stream::State::Err,
        );
    }
    sim.pump(a);
    let end = sim.now + 60 * S;
    let mut gone = false;
    loop {
        sim.run_for(20 * US);
        let done = sides.iter().all(|s| statuses(&sim, s).len() == s.ops.len());
        if done && gone {
            break;
        }
        // The responder of 6 has everything: its program goes away at once.
        let s = &sides[6];
        if !gone && sim.hosts[b].qps[s.peer_qp].received.len() == s.ops.len() {
            gone = true;
            sim.hosts[b].destroy(sim.now, s.peer_qp);
            sim.pump(b);
        }
        if sim.now > end {
            for s in &sides {
                println!("{}: {:?} of {}", s.qp, statuses(&sim, s), s.ops.len());
            }
            panic!("no end in sight");
        }
    }
    for (n, s) in sides.iter().enumerate() {
        let all = statuses(&sim, s);
        let good = all.iter().take_while(|s| **s == Status::Success).count();
        let first = all.get(good).copied();
        assert!(all.iter().skip(good + 1).all(|s| *s == Status::Flushed));
        let error = sim.hosts[b].qps[s.peer_qp].error;
        println!("QP {n}: {good}, then {first:?}; responder {error:?}");
        match n {
            0 | 6 => {
                assert_eq!(first, None);
                assert!(sim.hosts[b].memory[&s.rkey].data == s.memory);
            }
            1 => {
                assert_eq!((good, first), (s.checked, Some(Status::RemoteAccess)));
                assert_eq!(error, Some(Some(Fault::Access)));
            }
            2 => assert!(matches!(first, None | Some(Status::RetryExceeded))),
            3 => {
                assert_eq!(
                    (good, first),
                    (s.checked, Some(Status::RemoteInvalidRequest))
                );
                assert_eq!(error, Some(Some(Fault::InvalidRequest)));
            }
            4 => assert_eq!((good, first), (s.checked, Some(Status::RnrRetryExceeded))),
            _ => assert!(matches!(first, None | Some(Status::Flushed))),
        }
        for (c, op) in sim.hosts[a].qps[s.qp].completions[..good]
            .iter()
            .zip(&s.ops)
        {
            if let WrOp::FetchAdd { .. } | WrOp::CompareSwap { .. } = op.wr.op {
                if n != 1 && n != 3 && n != 4 {
                    assert_eq!(le(&sim.hosts[a].qps[s.qp].sends[&c.wr].1), op.original);
                }
            }
        }
    }
}
